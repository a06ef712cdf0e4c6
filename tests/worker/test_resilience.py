"""A worker that goes on: loops that raise, a database that goes away (CONTRACT 4.3, 4.8)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from django.db import (
    DatabaseError,
    DataError,
    OperationalError,
    connection,
    connections,
    transaction,
)

from django_durable_jobs import JobContext, job
from django_durable_jobs.exceptions import JobCancelled, LeaseLost, LockTimeout
from django_durable_jobs.handlers import Handler, Registry
from django_durable_jobs.models import Job
from django_durable_jobs.transitions.claims import claim, queued_lanes
from django_durable_jobs.worker import finisher, heartbeat, loop
from django_durable_jobs.worker.execution import context_for
from django_durable_jobs.worker.finisher import Finisher
from django_durable_jobs.worker.heartbeat import Heartbeat
from django_durable_jobs.worker.held import Held, HeldJobs
from django_durable_jobs.worker.loop import Worker

from ..testapp import jobs
from ..testapp.models import Business
from .conftest import StartWorker
from .support import (
    PATIENCE,
    QUICK,
    Gate,
    Serving,
    attempts,
    change,
    drain,
    fresh,
    only_attempt,
    until,
)

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def serve(durable_jobs: Callable[..., None]) -> Iterator[Callable[..., Serving]]:
    started: list[Serving] = []

    def start(*, threads: int = 1, **keys: Any) -> Serving:
        durable_jobs(**{"POLL_SECONDS": 0.05, **keys})
        started.append(Serving(threads=threads))
        return started[-1]

    yield start
    for serving in started:
        serving.stop()


@pytest.fixture
def noop(handlers: Registry) -> Handler[..., Any]:
    @job("resilience.noop")
    def noop(ctx: JobContext) -> int:
        return 1

    return noop


class Fault:
    """Raise the given errors in turn in place of a function, then call it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
        self._real = getattr(module, name)
        self.errors: list[BaseException] = []
        self.calls = 0
        monkeypatch.setattr(module, name, self)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self._real(*arguments, **options)


# Loops that raise ----------------------------------------------------------------------------


def test_a_claim_that_raises_is_logged_and_the_next_one_works(
    noop: Handler[..., Any],
    serve: Callable[..., Serving],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    step = Fault(monkeypatch, loop, "claim")
    step.errors = [RuntimeError("a fault of ours"), LockTimeout("locked")]
    one = noop.submit()
    serving = serve()
    until(lambda: fresh(one).status == "succeeded")
    assert serving.stop() == 0
    assert fresh(one).attempt_count == 1
    assert "a fault of ours" in caplog.text
    assert "LockTimeout" in caplog.text


@pytest.mark.parametrize(
    ("module", "function", "name"),
    [
        (heartbeat, "renew", "renewal"),
        (heartbeat, "cancel_requests", "cancel watch"),
        (loop, "run_passes", "chores"),
    ],
)
def test_a_loop_that_raises_is_logged_counted_and_goes_on(
    renewed_often: None,
    handlers: Registry,
    serve: Callable[..., Serving],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    module: Any,
    function: str,
    name: str,
) -> None:
    begun, go = threading.Event(), threading.Event()

    @job("resilience.waits")
    def waits(ctx: JobContext) -> None:
        begun.set()
        assert go.wait(PATIENCE)

    step = Fault(monkeypatch, module, function)
    serving = serve(**QUICK, LOCK_TIMEOUT_SECONDS=60)
    one = waits.submit()
    assert begun.wait(PATIENCE)
    step.errors = [RuntimeError("a fault of ours"), LockTimeout("locked")]
    until(lambda: not step.errors)
    calls = step.calls
    until(lambda: step.calls > calls + 1, "the loop to go on")
    supervised = serving.loop(name)
    assert supervised.failures == 2
    until(lambda: time.monotonic() - supervised.last_success < PATIENCE / 2)
    go.set()
    assert serving.stop() == 0
    assert f"{name} failed and goes on" in caplog.text
    assert "a fault of ours" in caplog.text
    assert (fresh(one).status, fresh(one).attempt_count) == ("succeeded", 1)


def test_a_renewal_that_meets_a_lock_looks_for_its_row_only_where_rows_are_locked(
    noop: Handler[..., Any], monkeypatch: pytest.MonkeyPatch, is_postgres: bool
) -> None:
    """On SQLite it is the whole database's: no wait for each job, and no traceback for each."""
    noop.submit_many([None] * 3)
    held = HeldJobs()
    claimed = claim("default", queued_lanes("default"), limit=3, worker="a", lease_seconds=60)
    held.add([Held(job=one, ctx=context_for("default", one)) for one in claimed])
    step = Fault(monkeypatch, heartbeat, "renew")
    step.errors = [LockTimeout("locked")]
    before = Job.objects.values_list("lease_expires_at").latest("lease_expires_at")
    beat = Heartbeat("default", held)
    if is_postgres:
        beat.renew()
        assert step.calls == 3, "all, and its halves"
        assert Job.objects.filter(lease_expires_at__gt=before[0]).count() == 3
    else:
        with pytest.raises(LockTimeout):
            beat.renew()
        assert step.calls == 1


@pytest.mark.parametrize(
    "errors",
    [
        [LockTimeout("locked")],
        [RuntimeError("a fault of ours")],
        # Alone, the outcome meets a database that is away: its content is kept for later.
        [DataError("refused"), LockTimeout("locked")],
    ],
    ids=["locked", "fault", "refused, then locked"],
)
def test_a_result_survives_a_finish_that_fails(
    noop: Handler[..., Any], monkeypatch: pytest.MonkeyPatch, errors: list[BaseException]
) -> None:
    finish = Fault(monkeypatch, finisher, "finish")
    finish.errors = list(errors)
    one = noop.submit()
    drain()
    assert finish.errors == []
    assert (fresh(one).status, fresh(one).result) == ("succeeded", 1)
    assert fresh(one).attempt_count == 1


def test_an_outcome_that_the_database_refuses_is_written_without_its_content(
    handlers: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @job("resilience.gives")
    def gives(ctx: JobContext) -> str:
        return ctx.job_id

    finish = finisher.finish

    def refuses(alias: str, outcomes: Any, **options: Any) -> Any:
        if any(outcome.result == '"bad"' for outcome in outcomes):
            raise DataError("refused")
        return finish(alias, outcomes, **options)

    monkeypatch.setattr(finisher, "finish", refuses)
    bad = gives.submit(job_id="bad")
    others = [gives.submit() for _ in range(4)]
    drain(threads=5)
    assert (fresh(bad).status, fresh(bad).result) == ("succeeded", None)
    assert all(fresh(one).result == one.job_id for one in others)
    assert "could not be written" in caplog.text


def test_the_finisher_survives_a_fault_of_its_own(
    noop: Handler[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    serve: Callable[..., Serving],
) -> None:
    settled = Fault(monkeypatch, Worker, "_settle")
    # A Fault in a class is no method: give it the worker.
    monkeypatch.setattr(Worker, "_settle", lambda *arguments: settled(*arguments))
    settled.errors = [RuntimeError("a fault of ours")]
    serve()
    first = noop.submit()
    until(lambda: fresh(first).status == "succeeded")
    second = noop.submit()
    until(lambda: fresh(second).status == "succeeded")


def test_a_finisher_that_is_slow_to_end_is_not_left_behind(
    noop: Handler[..., Any], serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is stuck the exit code is 0, however short waits for locks are (4.7)."""
    write_all = Finisher._write_all

    def write_all_slowly(self: Finisher) -> None:
        write_all(self)
        time.sleep(1)

    monkeypatch.setattr(Finisher, "_write_all", write_all_slowly)
    serving = serve(LOCK_TIMEOUT_SECONDS=0.1)
    one = noop.submit()
    until(lambda: fresh(one).status == "succeeded")
    assert serving.stop() == 0


# Two attempts of one job in one process ------------------------------------------------------


def test_an_older_attempt_in_the_same_process_is_told_while_the_newer_one_is_renewed(
    renewed_often: None, handlers: Registry, serve: Callable[..., Serving]
) -> None:
    begun = [threading.Event(), threading.Event()]
    told, go = threading.Event(), threading.Event()

    @job("resilience.twice")
    def twice(ctx: JobContext) -> int:
        begun[ctx.attempt - 1].set()
        if ctx.attempt == 2:
            assert go.wait(PATIENCE)
            return 2
        # Only once the newer attempt runs: from here on this worker renews both.
        assert begun[1].wait(PATIENCE)
        end = time.monotonic() + PATIENCE
        try:
            while time.monotonic() < end:
                ctx.check()
                time.sleep(0.01)
        except LeaseLost:
            told.set()
            raise
        raise AssertionError("it was not told")

    serving = serve(threads=2, **QUICK)
    one = twice.submit()
    assert begun[0].wait(PATIENCE)
    change(one, lease_expires_at=1)
    assert begun[1].wait(PATIENCE)
    assert told.wait(PATIENCE), "the older attempt was not told"
    assert fresh(one).status == "running"
    go.set()
    until(lambda: fresh(one).status == "succeeded")
    assert serving.stop() == 0
    assert fresh(one).result == 2
    assert [attempt.outcome for attempt in attempts(one)] == ["lost", "returned"]


def test_ends_of_two_attempts_of_one_job_in_one_group(noop: Handler[..., Any]) -> None:
    from django_durable_jobs.transitions.outcomes import Outcome, finish
    from django_durable_jobs.transitions.recovery import recover_expired

    def claimed() -> Any:
        lanes = queued_lanes("default")
        (one,) = claim("default", lanes, limit=1, worker="test", lease_seconds=60)
        return one

    def end(claim: Any, result: str) -> Outcome:
        return Outcome(
            job=claim.id,
            token=claim.token,
            status="succeeded",
            outcome="returned",
            final_status="succeeded",
            result=result,
        )

    for stale_first in (True, False):
        one = noop.submit()
        old = claimed()
        change(one, lease_expires_at=1)
        assert recover_expired("default") == 1
        new = claimed()
        group = [end(old, '"old"'), end(new, '"new"')]
        report = finish("default", group if stale_first else group[::-1])
        assert report.written == {one.pk: "succeeded"}
        assert [outcome.token for outcome in report.lost] == [old.token]
        assert report.busy == report.damaged == []
        assert fresh(one).result == "new"


# A database that goes away -------------------------------------------------------------------


def terminate_others() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


@pytest.mark.parametrize("handler", ["gated", "asleep"])
def test_a_worker_outlives_all_its_connections(
    start_worker: StartWorker, gate: Gate, handler: str, is_postgres: bool
) -> None:
    if not is_postgres:
        pytest.skip("SQLite has no connection to lose")
    one = getattr(jobs, handler).submit(jobs.Gate(**gate.payload("first")))
    worker = start_worker("--processes=0", "--threads=2")
    gate.begun("first")
    terminate_others()
    gate.open("first")
    until(lambda: fresh(one).status == "succeeded")
    terminate_others()
    # Claimed, run and finished on new connections.
    two = getattr(jobs, handler).submit(jobs.Gate(**gate.payload("second")))
    gate.begun("second")
    terminate_others()
    gate.open("second")
    until(lambda: fresh(two).status == "succeeded")
    worker.send()
    assert worker.ends() == 0
    for done in (one, two):
        assert [attempt.outcome for attempt in attempts(done)] == ["returned"]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_connection_that_broke_in_a_handler_is_not_the_next_ones(
    handlers: Registry, monkeypatch: pytest.MonkeyPatch, is_async: bool, is_postgres: bool
) -> None:
    if not is_postgres:
        pytest.skip("SQLite has no connection to lose")
    from django.db import connections

    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", None)
    ends = [1, 2]

    def cut_off() -> int:
        Business.objects.count()
        with connections["default"].cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        raise AssertionError("not reached")

    if is_async:
        from asgiref.sync import sync_to_async

        @job("resilience.cut_off", backoff=0)
        async def handler(ctx: JobContext) -> int:
            return ends[1] if ctx.attempt == 2 else await sync_to_async(cut_off)()

        @job("resilience.writes", backoff=100)
        async def writes(ctx: JobContext) -> None:
            await Business.objects.acreate(name="written")
    else:

        @job("resilience.cut_off", backoff=0)
        def handler(ctx: JobContext) -> int:
            return ends[1] if ctx.attempt == 2 else cut_off()

        @job("resilience.writes", backoff=100)
        def writes(ctx: JobContext) -> None:
            Business.objects.create(name="written")

    broken = handler.submit()
    after = writes.submit(priority=-1)
    drain()
    assert (fresh(broken).status, fresh(broken).attempt_count) == ("succeeded", 2)
    assert (fresh(after).status, fresh(after).attempt_count) == ("succeeded", 1)


def test_a_connection_with_an_error_behind_it_is_closed_and_asked_nothing(
    handlers: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Any] = []
    asked: list[Any] = []

    def is_usable(self: Any) -> bool:
        asked.append(self)
        return True

    monkeypatch.setattr(type(connections["default"]), "is_usable", is_usable)

    @job("resilience.hides")
    def hides(ctx: JobContext) -> None:
        with suppress(DatabaseError), connection.cursor() as cursor:
            used.append(connection.connection)
            cursor.execute("SELECT * FROM none_such")

    both = [hides.submit() for _ in range(2)]
    drain()
    assert [fresh(one).status for one in both] == ["succeeded"] * 2
    assert used[0] is not used[1]
    assert asked == []


def test_a_finish_waits_for_a_row_that_somebody_has_locked(
    handlers: Registry, serve: Callable[..., Serving]
) -> None:
    begun, go = threading.Event(), threading.Event()

    @job("resilience.held_up")
    def held_up(ctx: JobContext) -> str:
        begun.set()
        assert go.wait(PATIENCE)
        return "kept"

    # SQLite: waits for the writer end after 0.1 s and are tried again.
    serving = serve(LOCK_TIMEOUT_SECONDS=0.1)
    one = held_up.submit()
    assert begun.wait(PATIENCE)
    with transaction.atomic():
        Job.objects.filter(pk=one.pk).update(priority=9)
        go.set()
        # The finisher tries, and tries again.
        until(lambda: serving.worker._held.all()[0].ended)
        time.sleep(0.5)
        assert fresh(one).status == "running"
    until(lambda: fresh(one).status == "succeeded")
    assert (fresh(one).result, fresh(one).attempt_count) == ("kept", 1)
    assert only_attempt(one).outcome == "returned"


def test_a_result_that_waits_for_its_row_is_written_by_the_shutdown(
    handlers: Registry, serve: Callable[..., Serving]
) -> None:
    begun, go = threading.Event(), threading.Event()

    @job("resilience.held_up")
    def held_up(ctx: JobContext) -> str:
        begun.set()
        assert go.wait(PATIENCE)
        return "kept"

    serving = serve(SHUTDOWN_SECONDS=0.1, TIMEOUT_GRACE_SECONDS=0.1, LOCK_TIMEOUT_SECONDS=0.1)
    one = held_up.submit()
    assert begun.wait(PATIENCE)
    with transaction.atomic():
        Job.objects.filter(pk=one.pk).update(priority=9)
        go.set()
        until(lambda: serving.worker._held.all()[0].ended)
        serving.worker.stop()
        time.sleep(0.4)
    # Its handler has ended: that end is written, not a stop.
    assert serving.stop() == 0
    assert (fresh(one).status, fresh(one).result) == ("succeeded", "kept")


def test_a_handler_that_fences_while_its_lease_is_renewed_is_not_told_that_it_lost_it(
    renewed_often: None,
    handlers: Registry,
    serve: Callable[..., Serving],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FAULTS 29: renewals find the row held by the handler itself (on SQLite, the writer)."""
    renewals = Fault(monkeypatch, heartbeat, "renew")
    met: list[int] = []

    def has_met_the_fence(before: int) -> bool:
        if connection.vendor == "sqlite":
            return serving.loop("renewal").failures > 0
        return renewals.calls > before + 1

    @job("resilience.fences", timeout=50)
    def fences(ctx: JobContext) -> str:
        with transaction.atomic():
            ctx.fence()
            before = renewals.calls
            until(lambda: has_met_the_fence(before))
            met.append(renewals.calls)
            ctx.check()
            ctx.complete("kept")
        return "ignored"

    serving = serve(**QUICK, LOCK_TIMEOUT_SECONDS=0.5)
    one = fences.submit()
    until(lambda: fresh(one).is_terminal)
    assert serving.stop() == 0
    assert (fresh(one).status, fresh(one).result, len(attempts(one))) == ("succeeded", "kept", 1)
    assert len(met) == 1


def test_a_stopping_handler_is_told_although_the_database_is_locked(
    handlers: Registry, serve: Callable[..., Serving], durable_jobs: Callable[..., None]
) -> None:
    begun = threading.Event()
    told: list[type[BaseException]] = []

    @job("resilience.checks")
    def checks(ctx: JobContext) -> None:
        begun.set()
        try:
            while True:
                ctx.check()
                time.sleep(0.01)
        except BaseException as error:
            told.append(type(error))
            raise

    serving = serve(LOCK_TIMEOUT_SECONDS=60)
    one = checks.submit()
    assert begun.wait(PATIENCE)
    one.request_cancel()
    durable_jobs(LOCK_TIMEOUT_SECONDS=0.1)
    with transaction.atomic():
        Job.objects.filter(pk=one.pk).update(priority=9)
        until(lambda: told)
    assert told == [JobCancelled]
    until(lambda: fresh(one).status == "cancelled")
    assert serving.stop() == 0


def test_what_is_transient_is_told_by_codes(is_postgres: bool) -> None:
    from django_durable_jobs.worker.supervised import is_transient

    assert is_transient("default", LockTimeout("x"))
    assert not is_transient("default", RuntimeError("database is locked"))
    assert not is_transient("default", DataError("database is locked"))
    # Without a SQLSTATE a connection was refused or broke; SQLite has codes for all it means.
    assert is_transient("default", OperationalError("gone")) is is_postgres


def test_a_short_backoff_does_not_wait_for_the_poll(
    serve: Callable[..., Serving], handlers: Registry
) -> None:
    """The promotion comes when the job is due, not at the next of the long poll intervals."""

    @job("tests.short_backoff", backoff=0.05, max_attempts=4)
    def short_backoff(ctx: JobContext) -> int:
        if ctx.attempt < 4:
            raise ValueError("not yet")
        return ctx.attempt

    staged = short_backoff.submit()
    began = time.monotonic()
    serve(POLL_SECONDS=100)
    until(lambda: fresh(staged).status == "succeeded", "the job")
    assert time.monotonic() - began < 60
    assert fresh(staged).attempt_count == 4


@pytest.mark.parametrize("first", [0, 1, 2])
def test_neither_of_several_short_backoffs_waits_for_the_poll(
    serve: Callable[..., Serving], handlers: Registry, first: int
) -> None:
    def fails_once(ctx: JobContext) -> None:
        if ctx.attempt == 1:
            raise ValueError("not yet")

    backoffs = [0.2, 1, 2]
    three = [
        job(f"tests.backoff_{number}", backoff=seconds, max_attempts=2)(fails_once)
        for number, seconds in enumerate(backoffs)
    ]
    # One of them ends first, the others together or one after another.
    staged = [one.submit() for one in (*three[first:], *three[:first])]
    began = time.monotonic()
    serve(POLL_SECONDS=100)
    until(lambda: {fresh(one).status for one in staged} == {"succeeded"}, "the jobs")
    assert time.monotonic() - began < 60
    assert {fresh(one).attempt_count for one in staged} == {2}
