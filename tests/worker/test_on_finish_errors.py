"""``on_finish`` that fails: the end is never half written (CONTRACT 3.8, FAULTS 10, 16)."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.db import DatabaseError, connection, transaction

from django_durable_jobs import (
    FinishEvent,
    IdentityConflict,
    JobContext,
    job,
)
from django_durable_jobs.handlers import Registry
from django_durable_jobs.models import Job

from ..racing import Signal, held, observer, racing
from ..testapp import jobs
from ..testapp.models import Business
from .support import (
    PATIENCE,
    QUICK,
    Gate,
    Recorder,
    Serving,
    attempts,
    change,
    drain,
    fresh,
    only_attempt,
    only_where_rows_are_locked,
    until,
)

pytestmark = pytest.mark.django_db(transaction=True)


# Errors ------------------------------------------------------------------------------------------


def left_open(event: FinishEvent) -> None:
    transaction.atomic().__enter__()


def doomed(event: FinishEvent) -> None:
    transaction.set_rollback(True)


def closed(event: FinishEvent) -> None:
    connection.close()


def closed_and_used(event: FinishEvent) -> None:
    connection.close()
    Business.objects.count()


def rolled_back(event: FinishEvent) -> None:
    with connection.cursor() as cursor:
        cursor.execute("ROLLBACK")


def swallowed(event: FinishEvent) -> None:
    """On PostgreSQL the transaction is lost; on SQLite the statement alone."""
    with suppress(DatabaseError), connection.cursor() as cursor:
        cursor.execute("SELECT no_such_column")
    if connection.vendor != "postgresql":
        transaction.set_rollback(True)


def conflicting(event: FinishEvent) -> None:
    """A swallowed ``IdentityConflict`` dooms this transaction as any caller's."""
    with suppress(IdentityConflict):
        Job.objects.stage("on_finish.healthy", job_id=event.job_id)


def without_autocommit(event: FinishEvent) -> None:
    transaction.set_autocommit(False)


def raising(error: BaseException) -> Callable[[FinishEvent], None]:
    def raise_(event: FinishEvent) -> None:
        raise error

    raise_.__name__ = type(error).__name__
    return raise_


FAILING = [
    raising(ValueError("the payload: 4711")),
    raising(SystemExit(3)),
    raising(KeyboardInterrupt()),
    raising(GeneratorExit()),
    raising(asyncio.CancelledError()),
    left_open,
    doomed,
    closed,
    closed_and_used,
    rolled_back,
    swallowed,
    conflicting,
    without_autocommit,
]


def test_whatever_else_it_does_the_job_is_not_half_finished(
    handlers: Registry, caplog: pytest.LogCaptureFixture, durable_jobs: Callable[..., None]
) -> None:
    """Rolled back, logged, left to its lease; the slot is clean for the next job (FAULTS 16)."""
    durable_jobs(LEASE_SECONDS=600)

    def spoil(event: FinishEvent) -> None:
        Business.objects.create(name=f"half of {event.job_id}")
        FAILING[int(event.job_id)](event)

    @job("on_finish.spoilt", on_finish=spoil)
    def spoilt(ctx: JobContext) -> int:
        return 1

    @job("on_finish.healthy", backoff=100)
    def healthy(ctx: JobContext) -> None:
        with transaction.atomic():
            Business.objects.create(name=f"healthy after {ctx.job_id}")
            ctx.complete()

    broken, well = [], []
    for number in range(len(FAILING)):
        broken.append(spoilt.submit(job_id=str(number)))
        well.append(healthy.submit(job_id=f"{number}+"))
    drain()
    names = set(Business.objects.values_list("name", flat=True))
    for number, (one, other) in enumerate(zip(broken, well, strict=True)):
        kind = FAILING[number].__name__
        assert (fresh(one).status, fresh(one).ownership) == ("running", "current"), kind
        assert (fresh(one).result, only_attempt(one).status) == (None, "running"), kind
        assert f"half of {number}" not in names, kind
        assert (fresh(other).status, fresh(other).attempt_count) == ("succeeded", 1), kind
        assert f"job {number} (attempt 1 of handler on_finish.spoilt)" in caplog.text, kind
    assert "the payload: 4711" in caplog.text and "in raise_" in caplog.text, "logged whole"


def test_a_job_whose_on_finish_raised_is_recovered_and_runs_again(
    handlers: Registry, durable_jobs: Callable[..., None]
) -> None:
    durable_jobs(**QUICK)
    calls: list[int] = []

    def once(event: FinishEvent) -> None:
        calls.append(event.attempt)
        Business.objects.create(name="told", value=event.attempt)
        if event.attempt == 1:
            raise ValueError("once")

    @job("on_finish.again", on_finish=once)
    def again(ctx: JobContext) -> int:
        return ctx.attempt

    one = again.submit()
    worker = Serving()
    until(lambda: calls and not worker.worker._held.all(), "the attempt to be left to its lease")
    change(one, lease_expires_at=1)
    until(lambda: fresh(one).status == "succeeded")
    assert worker.stop() == 0
    first, second = attempts(one)
    assert (first.status, first.outcome, second.status) == ("interrupted", "lost", "succeeded")
    assert calls == [1, 2]
    assert list(Business.objects.values_list("value", flat=True)) == [2]


def test_an_error_in_complete_rolls_the_handlers_transaction_back(handlers: Registry) -> None:
    """Raised to the handler; swallowed, it is a completion that was rolled back."""
    seen: list[BaseException] = []

    def fail(event: FinishEvent) -> None:
        Business.objects.create(name=f"told {event.status}")
        if event.status == "succeeded":
            raise ValueError("no")

    @job("on_finish.raised", max_attempts=1, on_finish=fail)
    def raised(ctx: JobContext) -> None:
        with transaction.atomic():
            Business.objects.create(name="never")
            ctx.complete(1)

    @job("on_finish.swallowed", max_attempts=1, on_finish=fail)
    def swallows(ctx: JobContext) -> str:
        with transaction.atomic():
            Business.objects.create(name="never")
            try:
                with transaction.atomic():
                    ctx.complete(1)
            except ValueError as error:
                seen.append(error)
        return "as if nothing had been"

    one, other = raised.submit(), swallows.submit()
    drain()
    assert (fresh(one).status, fresh(one).error_category) == ("failed", "handler_error")
    assert only_attempt(one).outcome == "raised"
    assert len(seen) == 1
    assert (fresh(other).status, fresh(other).result) == ("failed", None)
    assert fresh(other).error_category == "completion_rolled_back"
    # Both have failed for good, and that was told; of the completions nothing is left.
    assert list(Business.objects.values_list("name", flat=True)) == ["told failed"] * 2


def test_a_child_that_comes_back_from_it_commits_nothing(handlers: Registry, gate: Gate) -> None:
    def fork(event: FinishEvent) -> None:
        child = jobs.fork()
        if child:
            Business.objects.create(name=str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))

    @job("on_finish.forks", on_finish=fork)
    def forks(ctx: JobContext) -> None: ...

    one = forks.submit()
    drain()
    assert fresh(one).status == "succeeded"
    assert Business.objects.get().name == "1"


# What a database may do to it --------------------------------------------------------------------


def lost_connection(connection: Any) -> None:
    with observer() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s)", [connection.connection.info.backend_pid])
    connection.cursor().execute("SELECT 1")


@only_where_rows_are_locked
def test_a_lost_connection_is_tried_again(
    handlers: Registry, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    lost: list[int] = []

    def lose(event: FinishEvent) -> None:
        recorder(event)
        if len(recorder.events) < 3:
            lost_connection(connection)

    @job("on_finish.loses", on_finish=lose)
    def loses(ctx: JobContext) -> int:
        lost.append(ctx.attempt)
        return 1

    one = loses.submit()
    drain()
    assert (fresh(one).status, lost, len(recorder.events)) == ("succeeded", [1], 3)
    assert Business.objects.count() == 1
    assert caplog.text.count("waits for the database") == 2


@only_where_rows_are_locked
def test_a_lock_is_waited_for_under_renewal(
    renewed_often: None, handlers: Registry, recorder: Recorder, durable_jobs: Callable[..., None]
) -> None:
    """However long: rolled back, tried again, and renewed in between (FAULTS 4)."""
    durable_jobs(**QUICK)
    business = Business.objects.create(name="locked")
    tried: list[int] = []

    def add(event: FinishEvent) -> None:
        tried.append(1)
        Business.objects.filter(pk=business.pk).update(value=business.value + 1)

    @job("on_finish.waits", on_finish=add)
    def waits(ctx: JobContext) -> int:
        return 1

    @job("on_finish.plain")
    def plain(ctx: JobContext) -> int:
        return 1

    with held(lambda: Business.objects.select_for_update().get(pk=business.pk)) as stranger:
        one = waits.submit()
        worker = Serving()
        until(lambda: tried)
        expiry = fresh(one).lease_expires_at
        # The others' ends are written meanwhile.
        other = plain.submit()
        until(lambda: fresh(other).status == "succeeded")
        until(lambda: len(tried) > 2)
        until(lambda: (fresh(one).lease_expires_at - expiry).total_seconds() > 1, "renewals")
        assert (fresh(one).status, fresh(one).attempt_count) == ("running", 1)
        stranger.commit()
    until(lambda: fresh(one).status == "succeeded")
    assert worker.stop() == 0
    assert fresh(one).attempt_count == 1
    assert Business.objects.get().value == 1


@only_where_rows_are_locked
def test_a_deadlock_is_tried_again(handlers: Registry, durable_jobs: Callable[..., None]) -> None:
    """A caller locks a business row and then cancels the job whose end waits for that row."""
    durable_jobs(LEASE_SECONDS=600, LOCK_TIMEOUT_SECONDS=60)
    business = Business.objects.create(name="between")
    tries: list[str] = []
    locked, ended = Signal(), Signal()

    def update(event: FinishEvent) -> None:
        tries.append(event.status)
        if len(tries) == 1:
            ended.set()
            canceller.wait_until_blocked()  # on the row of this job
        with connection.cursor() as cursor:
            # The first to look for a deadlock is its victim.
            cursor.execute("SET LOCAL deadlock_timeout = '10ms'")
        Business.objects.filter(pk=business.pk).update(value=len(tries))

    @job("on_finish.deadlocks", on_finish=update)
    def deadlocks(ctx: JobContext) -> int:
        locked.wait()
        return 1

    one = deadlocks.submit()

    def cancel() -> str:
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("SET LOCAL deadlock_timeout = '60s'")
            Business.objects.select_for_update().get(pk=business.pk)
            locked.set()
            ended.wait()
            return fresh(one).request_cancel()

    with racing(cancel) as [canceller]:
        drain()
    assert canceller.result() == "requested"
    *rolled_back, decided = tries
    # More than once where it comes back before the other has got the row.
    assert set(rolled_back) == {"succeeded"}
    assert decided == "cancelled", "anew"
    assert fresh(one).status == "cancelled"
    assert Business.objects.get().value == len(tries)


@pytest.mark.parametrize("owned", [True, False])
def test_an_end_whose_row_is_locked_waits_for_it(
    handlers: Registry,
    recorder: Recorder,
    durable_jobs: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    owned: bool,
) -> None:
    """Within its lease the end is written once the row is free; else it is lost and not told."""
    durable_jobs(**QUICK, LOCK_TIMEOUT_SECONDS=0.1)
    begun, go = threading.Event(), threading.Event()

    @job("on_finish.locked", on_finish=recorder)
    def locked(ctx: JobContext) -> int:
        begun.set()
        assert go.wait(PATIENCE)
        return 1

    one = locked.submit()
    worker = Serving()
    assert begun.wait(PATIENCE)
    changes: dict[str, Any] = {"priority": 7} if owned else {"lease_expires_at": one.created_at}
    with held(lambda: Job.objects.filter(pk=one.pk).update(**changes)) as stranger:
        go.set()
        until(lambda: caplog.text.count("waits for the database") > 1)
        # Where a commit may meet a reader, it is not to be tried again.
        durable_jobs(LOCK_TIMEOUT_SECONDS=60)
        stranger.commit()
    until(lambda: fresh(one).is_terminal)
    assert worker.stop() == 0
    told = [(event.attempt, event.status) for event in recorder.events]
    assert told == [(1 if owned else 2, "succeeded")]
    assert Business.objects.count() == 1
