"""``on_finish`` in a test: the production transaction, as a savepoint where the case has one."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import DatabaseError, connection, transaction

from django_durable_jobs import job
from django_durable_jobs.models import Job
from django_durable_jobs.testing import FakeClock, drain, run_attempt
from tests._rows import NOW
from tests.testapp.models import Business

from .support import in_either_case


def names():
    return sorted(Business.objects.values_list("name", flat=True))


@in_either_case
@pytest.mark.parametrize("completes", [False, True])
def test_it_writes_and_stages_in_the_transaction_of_the_end(case, completes):
    called = []

    @job("testing.follow")
    def follow(ctx) -> None: ...

    def tell(event):
        Business.objects.create(name=f"{event.job_id} {event.status} {event.result}")
        follow.stage(job_id="follow")
        transaction.on_commit(lambda: called.append(event.outcome))

    @job("testing.told", on_finish=tell)
    def told(ctx) -> int:
        if completes:
            with transaction.atomic():
                ctx.complete(1)
        return 1

    told.submit(job_id="told")
    assert [one.status for one in drain()] == ["succeeded"] * 2
    assert names() == ["told succeeded 1"]
    assert called == ["returned"]


def raises(event):
    raise ValueError("no")


def leaves_a_block_open(event):
    transaction.atomic().__enter__()


def dooms(event):
    transaction.set_rollback(True)


@in_either_case
@pytest.mark.parametrize("harm", [raises, leaves_a_block_open, dooms])
def test_one_that_fails_leaves_the_job_to_its_lease_and_the_test_usable(case, harm, caplog):
    def fail(event):
        Business.objects.create(name="half")
        if event.attempt == 1:
            harm(event)

    @job("testing.spoilt", on_finish=fail)
    def spoilt(ctx) -> int:
        return ctx.attempt

    with FakeClock(NOW) as clock:
        one = spoilt.submit()
        assert drain() == []
        one.refresh_from_db()
        assert (one.status, names()) == ("running", [])
        assert "the on_finish of job" in caplog.text
        clock.advance(timedelta(hours=2))
        assert [(attempt.number, attempt.status) for attempt in drain()] == [(2, "succeeded")]
    assert names() == ["half"]


@in_either_case
def test_its_error_comes_out_where_asked_for(case):
    @job("testing.raises", on_finish=raises)
    def told(ctx) -> None: ...

    with pytest.raises(ValueError, match="no"):
        run_attempt(told.submit(), raises=True)
    told.submit()
    with pytest.raises(ValueError, match="no"):
        drain(raises=True)
    assert set(Job.objects.values_list("status", flat=True)) == {"running"}


@in_either_case
def test_a_database_error_that_it_swallows_is_no_end(case):
    """On PostgreSQL, where the whole transaction is lost by that; SQLite loses the statement."""

    def swallow(event):
        Business.objects.create(name="beside")
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT no_such_column")
        except DatabaseError:
            pass

    @job("testing.swallows", on_finish=swallow)
    def told(ctx) -> None: ...

    one = told.submit()
    try:
        drain()
    except DatabaseError:
        assert connection.vendor == "postgresql"
    one.refresh_from_db()
    assert (one.status, names()) == (
        ("running", []) if connection.vendor == "postgresql" else ("succeeded", ["beside"])
    )
