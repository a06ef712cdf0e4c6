"""Progress and checkpoint: what a handler says about its work while it runs (CONTRACT 3.9).

The contexts are a worker's own, of attempts that nobody runs (``testing.claim``): each write is
the test's, and each transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.db.transaction import TransactionManagementError
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from django_durable_jobs import JobContext, JobTimeout, LeaseLost, LockTimeout, job
from django_durable_jobs.dialects.base import ATTEMPTS, JOBS
from django_durable_jobs.exceptions import InvalidTransition, JobCancelled
from django_durable_jobs.handlers import Handler, registry
from django_durable_jobs.models import Job
from django_durable_jobs.testing import HeldAttempt, expire_lease, run_attempt
from django_durable_jobs.testing import claim as hold
from django_durable_jobs.transitions import outcomes, recovery
from django_durable_jobs.worker.execution import context_for
from django_durable_jobs.worker.heartbeat import BUSY_WAIT_SECONDS, Heartbeat
from django_durable_jobs.worker.held import Held, HeldJobs
from tests.racing import PATIENT, another_alias, held, observer, racing
from tests.testapp.models import Business

from .live import check_rows, claimed, done
from .moves import snapshot

pytestmark = pytest.mark.django_db(transaction=True)
POSTGRES = connection.vendor == "postgresql"

Write = Callable[[JobContext], None]
WRITES: dict[str, Write] = {
    "progress": lambda ctx: ctx.progress(0.5, "half"),
    "checkpoint": lambda ctx: ctx.checkpoint({"page": 5}),
}
each_write = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
# Where a write is made: outside a transaction, or in the handler's own.
PLACES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "outside": nullcontext,
    "inside": transaction.atomic,
}
each_place = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)


@pytest.fixture(autouse=True)
def reports() -> Iterator[Handler[..., Any]]:
    with registry.temporary():

        @job("reports.job", max_attempts=9, backoff=0)
        def handler(ctx: JobContext) -> None:
            raise ValueError

        yield handler


@pytest.fixture
def one(reports: Handler[..., Any]) -> HeldAttempt:
    return hold(reports.submit())


def stored() -> dict[str, Any]:
    """Read what is committed, past the handler's own connection."""
    with observer() as cursor:
        cursor.execute(
            "SELECT j.progress, a.progress, j.progress_message, j.checkpoint"
            f" FROM {JOBS} j JOIN {ATTEMPTS} a ON a.job_id = j.id"
            " ORDER BY a.number DESC LIMIT 1"
        )
        of_job, of_attempt, message, checkpoint = cursor.fetchone()
    assert of_job == of_attempt, "the rows of job and attempt move together"
    return {"progress": of_job, "message": message, "checkpoint": checkpoint}


NOTHING = {"progress": 0, "message": "", "checkpoint": None}


# What may be said --------------------------------------------------------------------------------


def test_a_checkpoint_has_so_many_bytes_at_most(one: HeldAttempt) -> None:
    with override_settings(DURABLE_JOBS={"MAX_RESULT_BYTES": 10}):
        one.ctx.checkpoint("é" * 4)  # ten bytes with its quotes
        for too_long in ("é" * 4 + "x", [1, 2, 3, 4, 5]):
            with pytest.raises(ValueError, match="JSON"):
                one.ctx.checkpoint(too_long)
    assert stored() == NOTHING | {"checkpoint": '"éééé"'}
    one.ctx.checkpoint(None)
    assert stored()["checkpoint"] == "null" and Job.objects.get().checkpoint is None


def test_progress_never_goes_back_and_a_refusal_leaves_no_trace(one: HeldAttempt) -> None:
    for fraction in (0, -0.0, 5e-324, 0.1 + 0.2, 0.1 + 0.2, 1 - 1e-16, 1, 1.0):
        one.ctx.progress(fraction, str(fraction))
        assert stored() == NOTHING | {"progress": fraction, "message": str(fraction)}
    with pytest.raises(InvalidTransition, match="forward only.*reported 1 already"):
        one.ctx.progress(1 - 1e-16, "back")
    with pytest.raises(ValueError, match="from 0 to 1"):
        one.ctx.progress(1.0000000000000002, "too much")
    assert stored() == NOTHING | {"progress": 1, "message": "1.0"}


# The next attempt --------------------------------------------------------------------------------


def recover_by_the_pass(held_: HeldAttempt, row: Job) -> None:
    expire_lease(row)
    assert recovery.recover_expired("default") == 1


def end(held_: HeldAttempt, row: Job, **changes: Any) -> None:
    outcome = done(held_._claimed, status="failed", outcome="raised", final_status="failed")
    values = {name: getattr(outcome, name) for name in outcome.__slots__}
    outcomes.finish("default", [outcomes.Outcome(**(values | changes))])
    row.refresh_from_db()


def fail_and_retry(held_: HeldAttempt, row: Job) -> None:
    end(held_, row)
    row.retry()


def cancel_and_retry(held_: HeldAttempt, row: Job) -> None:
    row.request_cancel()
    end(held_, row)
    assert row.status == "cancelled"
    row.retry()


def interrupt_and_retry(held_: HeldAttempt, row: Job) -> None:
    assert row.recover(held_.token, requeue=False) == "interrupted"
    row.retry()


NEXT: dict[str, Callable[[HeldAttempt, Job], Any]] = {
    "recovered by the pass": recover_by_the_pass,
    "recovered by hand": lambda held_, row: row.recover(held_.token),
    "failed, retried by policy": lambda held_, row: held_.run(),
    "failed, retried by hand": fail_and_retry,
    "cancelled, retried by hand": cancel_and_retry,
    "interrupted, retried by hand": interrupt_and_retry,
    "stopped by the worker": lambda held_, row: end(held_, row, stopped_by_worker=True),
}


@pytest.mark.parametrize("how", NEXT.values(), ids=NEXT)
def test_a_checkpoint_reaches_the_next_attempt_and_progress_begins_anew(
    one: HeldAttempt, how: Callable[[HeldAttempt, Job], Any]
) -> None:
    row = Job.objects.get()
    one.ctx.progress(0.75, "most")
    one.ctx.checkpoint({"page": (1, 2)})
    how(one, row)
    following = hold(Job.objects.get())
    assert following.ctx.checkpoint_value == {"page": [1, 2]}
    assert one.ctx.checkpoint_value is None, "that of the attempts before"
    assert stored() == NOTHING | {"checkpoint": '{"page":[1,2]}'}
    following.ctx.progress(0.25, "again")
    assert (one.row.progress, following.row.progress) == (0.75, 0.25)
    check_rows()


def test_a_checkpoint_that_cannot_be_read_is_none_and_logged(
    one: HeldAttempt, caplog: pytest.LogCaptureFixture
) -> None:
    """A row that was changed by hand stops no attempt (CONTRACT 3.14)."""
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE {JOBS} SET checkpoint = '{{\"page\": '")
    recover_by_the_pass(one, Job.objects.get())
    following = hold(Job.objects.get())
    assert following.ctx.checkpoint_value is None
    assert "Stored JSON cannot be read" in caplog.text and "page" not in caplog.text
    following.ctx.checkpoint({"page": 1})
    assert Job.objects.get().checkpoint == {"page": 1}


# Transactions ------------------------------------------------------------------------------------


def test_after_a_rollback_the_last_progress_is_the_rows(one: HeldAttempt) -> None:
    one.ctx.progress(0.2, "kept")
    with transaction.atomic():
        one.ctx.progress(0.9, "undone")
        transaction.set_rollback(True)
    one.ctx.progress(0.3, "outside")
    with transaction.atomic():
        one.ctx.progress(0.4, "before")
        with transaction.atomic():
            one.ctx.progress(0.8, "undone with its savepoint")
            one.ctx.checkpoint("undone with its savepoint")
            transaction.set_rollback(True)
        with pytest.raises(InvalidTransition, match=r"reported 0\.4"):
            one.ctx.progress(0.35, "back")
        # Refused, and the transaction goes on.
        one.ctx.progress(0.5, "after")
        assert stored() == NOTHING | {"progress": 0.3, "message": "outside"}
    assert stored() == NOTHING | {"progress": 0.5, "message": "after"}


@each_write
def test_in_a_transaction_that_has_failed_the_error_is_djangos(
    one: HeldAttempt, write: Write
) -> None:
    with transaction.atomic():
        transaction.set_rollback(True)
        with pytest.raises(TransactionManagementError):
            write(one.ctx)
    assert stored() == NOTHING
    write(one.ctx)  # nothing was lost
    assert stored() != NOTHING


@each_write
@pytest.mark.parametrize("commit", [True, False])
def test_with_autocommit_off_it_goes_with_the_handlers_transaction(
    one: HeldAttempt, write: Write, commit: bool
) -> None:
    transaction.set_autocommit(False)
    try:
        write(one.ctx)
        assert stored() == NOTHING
        transaction.commit() if commit else transaction.rollback()
        assert (stored() != NOTHING) is commit
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


@each_write
def test_a_transaction_on_another_database_is_none_of_the_jobs(
    one: HeldAttempt, write: Write
) -> None:
    with another_alias() as other, transaction.atomic(using=other):
        write(one.ctx)
        assert stored() != NOTHING, "it has committed at once"
        transaction.set_rollback(True, using=other)
    assert stored() != NOTHING


@each_write
def test_while_the_handlers_transaction_has_written_its_row_is_held(
    one: HeldAttempt, write: Write
) -> None:
    """CONTRACT 3.15: ours waits a bounded time; a caller's as long as he says."""
    row = Job.objects.get()

    def written() -> None:
        Business.objects.create(name="beside")
        write(one.ctx)

    with held(written) as handler:
        with override_settings(DURABLE_JOBS={"LOCK_TIMEOUT_SECONDS": 0.1}):
            for move in (row.request_cancel, lambda: row.recover(one.token)):
                with pytest.raises(LockTimeout):
                    move()
        with pytest.raises(OperationalError) as caught:
            in_an_impatient_transaction(row)
        assert not isinstance(caught.value, LockTimeout)
        with override_settings(DURABLE_JOBS=PATIENT), racing(row.request_cancel) as [cancelling]:
            cancelling.wait_until_blocked()
            handler.commit()
        assert cancelling.result() == "requested"
    assert stored() != NOTHING and Business.objects.exists()


def in_an_impatient_transaction(row: Job) -> None:
    """Request a cancel in a caller's transaction that waits a tenth of a second for locks."""
    options = connection.settings_dict["OPTIONS"] | ({} if POSTGRES else {"timeout": 0.1})
    with another_alias(OPTIONS=options) as other, transaction.atomic(using=other):
        if POSTGRES:
            connections[other].cursor().execute("SET LOCAL lock_timeout = 100")
        there = Job(pk=row.pk)
        there._state.db = other
        there.request_cancel()


@each_write
@pytest.mark.parametrize("commit", [True, False])
def test_a_renewal_meanwhile_is_busy_and_nothing_is_lost(
    one: HeldAttempt, write: Write, commit: bool
) -> None:
    """FAULTS 29: and once the handler's transaction has ended, the lease is renewed."""
    mine = HeldJobs()
    mine.add([Held(job=one._claimed, ctx=one.ctx)])
    beat = Heartbeat("default", mine)
    before = Job.objects.get().lease_expires_at
    with held(lambda: write(one.ctx)) as handler:
        with override_settings(DURABLE_JOBS={"LOCK_TIMEOUT_SECONDS": 0.1}):
            if POSTGRES:
                beat.renew()
                assert beat.interval() <= BUSY_WAIT_SECONDS
            else:
                with pytest.raises(LockTimeout):
                    beat.renew()
        handler.commit() if commit else handler.rollback()
    assert not one.ctx.lost
    beat.renew()
    assert Job.objects.get().lease_expires_at != before
    assert (stored() != NOTHING) is commit


# What is refused ---------------------------------------------------------------------------------


@each_place
@each_write
def test_a_lost_lease_is_told_and_remembered(
    one: HeldAttempt, write: Write, place: Callable[[], AbstractContextManager[Any]]
) -> None:
    """FAULTS 1: the newer attempt runs while each write of the older one is refused."""
    recover_by_the_pass(one, Job.objects.get())
    newer = hold(Job.objects.get())
    before = snapshot()
    with pytest.raises(LeaseLost), place():
        Business.objects.create(name="beside")
        write(one.ctx)
    assert snapshot() == before
    assert Business.objects.exists() is (place is nullcontext), "what stood beside it goes with it"
    with CaptureQueriesContext(connection) as queries:
        for call in (*(lambda w=w: w(one.ctx) for w in WRITES.values()), one.ctx.check):
            with pytest.raises(LeaseLost):
                call()
    assert len(queries) == 0
    write(newer.ctx)


@each_place
def test_a_cancel_stops_progress_and_leaves_the_checkpoint(
    one: HeldAttempt, place: Callable[[], AbstractContextManager[Any]]
) -> None:
    one.ctx.progress(0.25, "before")
    Job.objects.get().request_cancel()
    one.ctx.check()  # nobody has told this worker yet
    with place():
        one.ctx.checkpoint("kept")
    # Above and below the last: the cancel is what is told.
    for fraction in (0.5, 0.1):
        with pytest.raises(JobCancelled), place():
            one.ctx.progress(fraction, "after")
    assert one.ctx.cancel_requested
    with pytest.raises(JobCancelled):
        one.ctx.check()
    with place():
        one.ctx.checkpoint("kept later")
    assert stored() == {"progress": 0.25, "message": "before", "checkpoint": '"kept later"'}


@each_place
@each_write
def test_after_the_deadline_nothing_is_asked_of_the_database(
    write: Write, place: Callable[[], AbstractContextManager[Any]]
) -> None:
    [late] = claimed(timeout=0.01)
    ctx = context_for("default", late)
    while not ctx.timed_out():
        pass
    with place(), CaptureQueriesContext(connection) as queries, pytest.raises(JobTimeout):
        write(ctx)
    assert len(queries) == 0
    assert stored() == NOTHING


@each_write
@pytest.mark.parametrize("caught", [True, False])
def test_after_complete_in_the_same_transaction_it_is_refused_and_the_job_is_not_lost(
    write: Write, caught: bool
) -> None:
    """The attempt has ended in this transaction. Rolled back by the error, it has not."""

    @job("reports.completes", max_attempts=1)
    def completes(ctx: JobContext) -> None:
        try:
            with transaction.atomic():
                ctx.complete("done")
                write(ctx)
        except LeaseLost:
            ctx.check()
            write(ctx)
            if not caught:
                raise

    attempt = run_attempt(completes.submit())
    assert (attempt.status, attempt.error_category) == (
        "failed",
        "completion_rolled_back" if caught else "handler_error",
    )
    assert Job.objects.get().status == "failed" and stored() != NOTHING


def test_check_touches_no_database(one: HeldAttempt) -> None:
    connection.close()
    for _ in range(3):
        one.ctx.check()
    assert (one.ctx.cancel_requested, one.ctx.stop_requested) == (False, False)
    assert connection.connection is None
    one.ctx.mark_cancel_requested()
    with pytest.raises(JobCancelled):
        one.ctx.check()
    assert connection.connection is None


def test_two_jobs_of_one_handlers_transaction_go_together() -> None:
    """Nothing is kept in the process: each token writes its own rows, whoever calls."""
    first, second = (context_for("default", one) for one in claimed(2, timeout=500))
    with transaction.atomic():
        first.progress(0.5, "first")
        second.progress(0.25, "second")
        second.checkpoint(2)
        first.checkpoint(1)
    assert list(
        Job.objects.order_by("pk").values_list("progress", "progress_message", "checkpoint")
    ) == [(0.5, "first", 1), (0.25, "second", 2)]
