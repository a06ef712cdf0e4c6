"""Jobs with pytest-django and the fixtures of the package."""

from datetime import UTC, datetime, timedelta

import pytest
from django.core.mail import send_mail
from django.db import connection

from django_durable_jobs import job
from django_durable_jobs.testing import assert_staged, crash_points, refute_staged
from orders.jobs import Confirm, confirm, remind
from orders.services import place_order


def test_a_reminder_is_due_a_week_later(durable_drain, durable_clock):
    place_order("A-1", "ada@example.com")
    assert_staged(remind, run_at=timedelta(days=7))
    assert [one.job.handler for one in durable_drain()] == ["orders.confirm"]
    durable_clock.advance(timedelta(days=7))
    assert [one.job.handler for one in durable_drain()] == ["orders.remind"]


def test_a_failed_mail_is_tried_again(durable_drain, durable_clock, monkeypatch, mailoutbox):
    def refused(*arguments):
        raise ConnectionError

    place_order("A-1", "ada@example.com")
    with monkeypatch.context() as patch:
        patch.setattr("orders.jobs.send_mail", refused)
        assert [one.status for one in durable_drain()] == ["failed"]
    durable_clock.advance(60)
    assert [one.status for one in durable_drain()] == ["succeeded"]
    assert len(mailoutbox) == 1


@pytest.mark.parametrize("durable_clock_start", [datetime(2026, 3, 1, 9, tzinfo=UTC)])
def test_the_clock_starts_where_the_test_says(durable_clock, durable_clock_start, durable_drain):
    place_order("A-1", "ada@example.com")
    assert assert_staged(confirm).created_at == durable_clock_start


def test_the_clock_needs_no_database(durable_clock):
    assert durable_clock.advance(1) == durable_clock.now


def test_it_drains_in_the_transaction_of_the_test(durable_drain):
    assert connection.in_atomic_block
    place_order("A-1", "ada@example.com")
    assert len(durable_drain()) == 1


def test_it_drains_committed_rows_with_the_transactional_database(transactional_db, durable_drain):
    assert not connection.in_atomic_block
    place_order("A-1", "ada@example.com")
    assert len(durable_drain()) == 1


@pytest.mark.django_db(transaction=True)
def test_it_drains_committed_rows_under_the_mark(durable_drain):
    assert not connection.in_atomic_block
    place_order("A-1", "ada@example.com")
    assert len(durable_drain()) == 1


def declare_and_run(drain):
    @job("orders.declared_in_a_test")
    def handler(ctx):
        pass

    handler.submit()
    return [one.status for one in drain()]


def test_handlers_of_a_test_are_forgotten(durable_drain, durable_handlers):
    assert declare_and_run(durable_drain) == ["succeeded"]


def test_so_the_next_test_may_declare_the_same(durable_drain, durable_handlers):
    assert durable_handlers.get("orders.declared_in_a_test", 1) is None
    assert declare_and_run(durable_drain) == ["succeeded"]


@pytest.mark.django_db
def test_the_rows_of_the_tests_before_are_gone():
    refute_staged(confirm, Confirm(reference="A-1"))


@pytest.mark.django_db
def test_a_mail_is_sent_at_most_once(durable_handlers, mailoutbox):
    @job("orders.news", retry_on_interrupt=False)
    def send_news(ctx) -> None:
        send_mail("News", "None so far.", None, ["ada@example.com"])

    def stage():
        mailoutbox.clear()
        return send_news.submit()

    sent = []
    points = crash_points(stage, lambda job: sent.append((job.status, len(mailoutbox))))
    assert set(sent) == {("interrupted", 1), ("succeeded", 1)}
    assert len(sent) == len(points) + 2
