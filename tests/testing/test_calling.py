"""What a handler does to its connection costs the test nothing: in a TestCase or outside of one."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress

import pytest
from django.db import IntegrityError, close_old_connections, connection, connections, transaction
from django.db.utils import ConnectionHandler

from django_durable_jobs import job
from django_durable_jobs.testing import drain
from django_durable_jobs.worker import connections as worker_connections
from tests.testapp.models import Business

from .support import in_either_case


def break_by_a_duplicate():
    Business.objects.create(pk=1000)
    Business.objects.create(pk=1000)


def break_by_raw_sql():
    with connection.cursor() as cursor:
        cursor.execute("SELECT no_such_column")


def leave_a_transaction_open():
    with transaction.atomic():
        Business.objects.create(name="committed")
    transaction.atomic().__enter__()
    Business.objects.create(name="half done")
    transaction.atomic().__enter__()
    transaction.on_commit(lambda: Business.objects.create(name="never"))


def close_the_connection():
    Business.objects.create(name="committed")
    close_old_connections()
    connection.close()
    connections.close_all()
    Business.objects.create(name="after")


def run_beside_a_healthy_one(harm):
    """Give the harmful job's status, and the names that a healthy job finds after it."""

    @job("testing.harm", max_attempts=1)
    def harmful(ctx) -> None:
        harm()

    @job("testing.healthy")
    def healthy(ctx) -> list[str]:
        return sorted(Business.objects.values_list("name", flat=True))

    Business.objects.create(name="of the test")
    broken = harmful.submit(priority=1)
    after = healthy.submit()
    drain()
    broken.refresh_from_db()
    after.refresh_from_db()
    assert after.status == "succeeded"
    assert sorted(Business.objects.values_list("name", flat=True)) == after.result
    return broken.status, after.result


@in_either_case
@pytest.mark.parametrize(
    ("harm", "status", "names"),
    [
        (break_by_raw_sql, "failed", ["of the test"]),
        (leave_a_transaction_open, "succeeded", ["committed", "of the test"]),
        (close_the_connection, "succeeded", ["after", "committed", "of the test"]),
    ],
)
def test_a_handlers_harm_ends_with_it(harm, status, names, case):
    assert run_beside_a_healthy_one(harm) == (status, names)


@pytest.mark.django_db
def test_in_a_test_case_a_database_error_outside_atomic_costs_what_the_handler_wrote():
    assert run_beside_a_healthy_one(break_by_a_duplicate) == ("failed", ["of the test"])


@pytest.mark.django_db
def test_in_a_test_case_an_open_block_without_a_savepoint_costs_what_the_handler_wrote(caplog):
    def leave_open():
        Business.objects.create(name="lost too")
        transaction.atomic(savepoint=False).__enter__()
        Business.objects.create(name="half done")

    assert run_beside_a_healthy_one(leave_open) == ("failed", ["of the test"])
    assert "atomic(savepoint=False)" in caplog.text


@pytest.mark.django_db
def test_callbacks_of_what_was_lost_are_not_left_to_the_test(django_capture_on_commit_callbacks):
    def harm():
        transaction.on_commit(lambda: 1 / 0)
        break_by_a_duplicate()

    with django_capture_on_commit_callbacks() as left:
        assert run_beside_a_healthy_one(harm)[0] == "failed"
    assert left == []


@in_either_case
def test_going_on_after_a_database_error_needs_an_atomic_in_a_test_case(case, caplog):
    def careless():
        with suppress(IntegrityError):
            break_by_a_duplicate()

    status, names = run_beside_a_healthy_one(careless)
    if case == "TransactionTestCase":
        assert (status, names) == ("succeeded", ["", "of the test"])
    else:
        assert (status, names) == ("failed", ["of the test"]), "never a success without its rows"
        assert "TransactionTestCase" in caplog.text


@in_either_case
def test_callbacks_of_a_handlers_commits_are_called_and_no_others(case):
    calls = []

    @job("testing.callbacks", max_attempts=1)
    def callbacks(ctx, payload: bool) -> None:
        transaction.on_commit(lambda: calls.append("outside"))
        with transaction.atomic():
            transaction.on_commit(lambda: calls.append("inside"))
            transaction.on_commit(lambda: nested.submit())
        with transaction.atomic():
            transaction.on_commit(lambda: calls.append("rolled back"))
            transaction.set_rollback(True)
        if payload:
            raise ValueError

    @job("testing.nested")
    def nested(ctx) -> None:
        calls.append("nested")

    with transaction.atomic():
        transaction.on_commit(lambda: calls.append("of the test"))
    calls.clear()
    callbacks.submit(False)
    drain()
    assert calls == ["outside", "inside", "nested"]
    calls.clear()
    callbacks.submit(True)
    drain()
    assert calls == ["outside", "inside", "nested"]


@in_either_case
def test_a_callback_that_raises_fails_the_handler_unless_it_is_robust(case):
    @job("testing.robust", max_attempts=1)
    def callback(ctx, payload: bool) -> None:
        transaction.on_commit(lambda: 1 / 0, robust=payload)

    for robust, status in ((True, "succeeded"), (False, "failed")):
        callback.submit(robust)
        assert [one.status for one in drain()] == [status]


@in_either_case
def test_a_forked_child_that_comes_back_never_reaches_the_test(case):
    @job("testing.forks")
    def forks(ctx) -> int:
        with warnings.catch_warnings():
            # Python 3.12 warns of a fork beside threads, and rightly so.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            return -1
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    staged = forks.submit()
    drain()
    staged.refresh_from_db()
    assert (staged.status, staged.result) == ("succeeded", 1)


@pytest.mark.django_db
def test_a_database_in_memory_outlives_what_was_left_open():
    """Unlike any other it goes with its connection; so that is rolled back, and kept."""
    memory = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    connection = ConnectionHandler({"default": memory})["default"]
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE kept (number integer)")
        connection.set_autocommit(False)
        cursor.execute("INSERT INTO kept VALUES (1)")
        worker_connections.forget(connection)
        assert connection.get_autocommit()
        cursor.execute("INSERT INTO kept VALUES (2)")
        connection.rollback()
        assert cursor.execute("SELECT number FROM kept").fetchall() == [(2,)]
    connection.connection.close()
    worker_connections.forget(connection)
    assert connection.connection is None, "closed under Django's feet"
