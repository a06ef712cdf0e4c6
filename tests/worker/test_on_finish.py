"""``on_finish``: called in the transaction that ends the job, on the worker that ran it (3.8)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.backends.signals import connection_created

from django_durable_jobs import (
    FinishEvent,
    JobContext,
    PermanentError,
    RetryLater,
    TransactionActive,
    job,
)
from django_durable_jobs.handlers import Registry
from django_durable_jobs.models import Job
from django_durable_jobs.worker.finisher import Finisher

from ..racing import observer
from ..testapp.models import Business
from .support import (
    PATIENCE,
    Recorder,
    Serving,
    attempts,
    drain,
    fresh,
    only_attempt,
    only_where_rows_are_locked,
    until,
)

pytestmark = pytest.mark.django_db(transaction=True)


# Which ends --------------------------------------------------------------------------------------


def returns(ctx: JobContext) -> Any:
    return {"pages": (1, 2)}


def raises(ctx: JobContext) -> Any:
    raise ValueError("on purpose")


def raises_for_good(ctx: JobContext) -> Any:
    raise PermanentError("no")


def returns_what_is_not_json(ctx: JobContext) -> Any:
    return object()


def passes_its_deadline(ctx: JobContext) -> Any:
    while True:
        ctx.check()
        time.sleep(0.005)


def returns_after_a_cancel(ctx: JobContext) -> Any:
    Job.objects.get(job_id=ctx.job_id).request_cancel()
    return "never stored"


def raises_after_a_cancel(ctx: JobContext) -> Any:
    Job.objects.get(job_id=ctx.job_id).request_cancel()
    raise ValueError("never the job's")


def obeys_a_cancel(ctx: JobContext) -> Any:
    Job.objects.get(job_id=ctx.job_id).request_cancel()
    passes_its_deadline(ctx)


async def returns_from_the_event_loop(ctx: JobContext) -> Any:
    await asyncio.sleep(0)
    return [1]


def completes(ctx: JobContext) -> Any:
    with transaction.atomic():
        ctx.complete({"pages": (1, 2)})


ENDS: dict[Callable[..., Any], tuple[str, str, Any, str | None]] = {
    returns: ("succeeded", "returned", {"pages": [1, 2]}, None),
    raises: ("failed", "raised", None, "handler_error"),
    raises_for_good: ("failed", "raised", None, "permanent"),
    returns_what_is_not_json: ("failed", "returned", None, "invalid_result"),
    passes_its_deadline: ("failed", "stopped", None, "timeout"),
    returns_after_a_cancel: ("cancelled", "returned", None, None),
    raises_after_a_cancel: ("cancelled", "raised", None, None),
    obeys_a_cancel: ("cancelled", "stopped", None, None),
    returns_from_the_event_loop: ("succeeded", "returned", [1], None),
    completes: ("succeeded", "returned", {"pages": [1, 2]}, None),
}


def test_every_end_that_makes_the_job_terminal_is_told_once(
    handlers: Registry, recorder: Recorder, durable_jobs: Callable[..., None]
) -> None:
    durable_jobs(POLL_SECONDS=0.02, LOCK_TIMEOUT_SECONDS=60)
    declared = [
        job(
            f"on_finish.{run.__name__}",
            max_attempts=1,
            timeout=0.3 if run is passes_its_deadline else 50,
            on_finish=recorder,
        )(run)
        for run in ENDS
    ]
    stored = [handler.submit(scope="a tenant") for handler in declared]
    drain(threads=4)
    events = {event.job_id: event for event in recorder.events}
    assert len(recorder.events) == len(ENDS)
    for run, one in zip(ENDS, stored, strict=True):
        status, outcome, result, category = ENDS[run]
        assert events[one.job_id] == FinishEvent(
            job_id=one.job_id,
            scope="a tenant",
            handler=f"on_finish.{run.__name__}",
            attempt=1,
            status=status,
            outcome=outcome,
            result=result,
            error_category=category,
        )
        # As the rows say, and what it wrote is there.
        row = fresh(one)
        assert (row.status, row.result, row.error_category) == (status, result, category)
        assert only_attempt(one).outcome == outcome
        assert Business.objects.filter(name=f"{one.job_id}: {status}").count() == 1
    with pytest.raises(AttributeError):
        recorder.events[0].status = "changed"  # type: ignore[misc]


def test_an_end_that_a_retry_follows_is_not_told(handlers: Registry, recorder: Recorder) -> None:
    @job("on_finish.third", max_attempts=3, backoff=0, on_finish=recorder)
    def third(ctx: JobContext) -> str:
        if ctx.attempt == 1:
            raise ValueError("once")
        if ctx.attempt == 2:
            raise RetryLater(0)
        return "at last"

    one = third.submit()
    drain()
    assert [(event.attempt, event.result) for event in recorder.events] == [(3, "at last")]
    assert [attempt.status for attempt in attempts(one)] == ["failed", "failed", "succeeded"]


def test_where_no_worker_ran_it_nothing_is_told(handlers: Registry, recorder: Recorder) -> None:
    """A cancel before the start, and an attempt whose worker died."""

    @job("on_finish.unseen", retry_on_interrupt=False, on_finish=recorder)
    def unseen(ctx: JobContext) -> None:
        held_job = Job.objects.get(job_id=ctx.job_id)
        held_job.recover(ctx.token)  # as after the death of this worker

    cancelled, lost = unseen.submit(), unseen.submit()
    assert cancelled.request_cancel() == "cancelled"
    drain()
    assert (fresh(cancelled).status, fresh(lost).status) == ("cancelled", "interrupted")
    assert recorder.events == []


@pytest.mark.parametrize(
    ("again", "obeys"),
    [(False, True), (True, True), (False, False), (True, False)],
)
def test_what_a_shutdown_ends(
    handlers: Registry,
    recorder: Recorder,
    durable_jobs: Callable[..., None],
    again: bool,
    obeys: bool,
) -> None:
    """A handler that stops, and one that is ended by the last write of its process."""
    durable_jobs(POLL_SECONDS=0.02, SHUTDOWN_SECONDS=0, TIMEOUT_GRACE_SECONDS=60 if obeys else 0)
    begun, go = threading.Event(), threading.Event()

    @job("on_finish.stopped", retry_on_interrupt=again, on_finish=recorder)
    def stopped(ctx: JobContext) -> None:
        begun.set()
        while not go.is_set():
            if obeys:
                ctx.check()
            time.sleep(0.005)

    one = stopped.submit()
    worker = Serving(owns_process=True)
    assert begun.wait(PATIENCE)
    try:
        assert worker.stop() == (0 if obeys else 4)
        assert fresh(one).status == ("queued" if again else "interrupted")
        told = [(event.status, event.outcome, event.error_category) for event in recorder.events]
        assert told == ([] if again else [("interrupted", "stopped", "stopped")])
        assert Business.objects.count() == len(told)
    finally:
        go.set()


@pytest.mark.parametrize("last", [True, False])
def test_the_hard_limit_tells_too(
    handlers: Registry, recorder: Recorder, durable_jobs: Callable[..., None], last: bool
) -> None:
    durable_jobs(POLL_SECONDS=0.02, TIMEOUT_GRACE_SECONDS=0.1)
    go, left = threading.Event(), threading.Event()
    attempts_ = 1 if last else 2

    @job("on_finish.stuck", timeout=0.1, max_attempts=attempts_, backoff=100, on_finish=recorder)
    def stuck(ctx: JobContext) -> str:
        assert go.wait(PATIENCE)
        left.set()
        return "too late"

    one = stuck.submit()
    with pytest.raises(SystemExit) as ended:
        drain()
    assert ended.value.code == 4
    assert fresh(one).status == ("failed" if last else "scheduled")
    told = [(event.status, event.outcome, event.error_category) for event in recorder.events]
    assert told == ([("failed", "stopped", "timeout")] if last else [])
    go.set()
    assert left.wait(PATIENCE)
    assert len(recorder.events) == len(told) == Business.objects.count()


# In the finishing transaction --------------------------------------------------------------------


@pytest.mark.parametrize("how", [returns, completes])
def test_it_commits_with_the_end_and_not_before(
    handlers: Registry, how: Callable[..., Any]
) -> None:
    seen: list[Any] = []

    def look(event: FinishEvent) -> None:
        assert not connection.get_autocommit() or connection.vendor == "sqlite"
        Business.objects.create(name="beside")
        mine = Job.objects.get(job_id=event.job_id)
        with observer() as cursor:
            cursor.execute("SELECT status FROM django_durable_jobs_job")
            other = cursor.fetchone()[0]
            cursor.execute("SELECT count(*) FROM testapp_business")
            seen.append((mine.status, other, cursor.fetchone()[0]))

    one = job("on_finish.looks", on_finish=look)(how).submit()
    drain()
    assert seen == [("succeeded", "running", 0)]
    assert (fresh(one).status, Business.objects.count()) == ("succeeded", 1)


@pytest.mark.parametrize("how", [returns, completes])
def test_it_may_stage_a_job(handlers: Registry, how: Callable[..., Any]) -> None:
    refused: list[BaseException] = []

    @job("on_finish.next")
    def next_(ctx: JobContext) -> str:
        return "ran"

    def stage(event: FinishEvent) -> None:
        next_.stage(job_id="staged")
        next_.enqueue(job_id="joined")
        with transaction.atomic():
            next_.stage(job_id="nested")
        try:
            next_.submit()
        except TransactionActive as error:
            refused.append(error)

    one = job("on_finish.stages", on_finish=stage)(how).submit()
    drain()
    assert fresh(one).status == "succeeded"
    found = Job.objects.filter(handler="on_finish.next").order_by("job_id")
    assert [(row.job_id, row.result) for row in found] == [
        ("joined", "ran"),
        ("nested", "ran"),
        ("staged", "ran"),
    ]
    assert len(refused) == 1


def test_hooks_of_its_commit_run_and_their_errors_cost_nothing(
    handlers: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[str] = []

    def fail() -> None:
        ran.append("failing")
        raise SystemExit("a hook")

    def hooks(event: FinishEvent) -> None:
        transaction.on_commit(lambda: ran.append(Job.objects.get().status))
        transaction.on_commit(lambda: follow.submit(job_id="after the commit"))
        transaction.on_commit(fail)

    @job("on_finish.follow")
    def follow(ctx: JobContext) -> None: ...

    @job("on_finish.hooks", on_finish=hooks)
    def hooked(ctx: JobContext) -> int:
        return 1

    one = hooked.submit()
    drain()
    assert ran == ["succeeded", "failing"]
    assert (fresh(one).result, len(attempts(one))) == (1, 1)
    assert Job.objects.get(job_id="after the commit").status == "succeeded"
    assert "a hook" in caplog.text


# Beside the others -------------------------------------------------------------------------------


def test_jobs_without_it_are_finished_in_groups_as_ever(
    handlers: Registry, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped: list[int] = []
    put = Finisher.put
    monkeypatch.setattr(
        Finisher, "put", lambda self, outcome: (grouped.append(outcome.job), put(self, outcome))
    )

    @job("on_finish.without")
    def without(ctx: JobContext) -> int:
        return 1

    @job("on_finish.with", on_finish=recorder)
    def with_(ctx: JobContext) -> int:
        return 1

    plain = [without.submit().pk for _ in range(5)]
    told = [with_.submit().job_id for _ in range(5)]
    drain(threads=4)
    assert sorted(grouped) == plain
    assert sorted(event.job_id for event in recorder.events) == sorted(told)


@pytest.mark.parametrize("how", [returns, completes])
def test_handler_end_and_rows_are_of_one_connection(
    handlers: Registry, recorder: Recorder, how: Callable[..., Any]
) -> None:
    """One for each job (``CONN_MAX_AGE`` is 0 here), however often its rows are looked at."""
    opened: list[str] = []

    def note(**kwargs: Any) -> None:
        opened.append(threading.current_thread().name)

    def counts(ctx: JobContext) -> Any:
        Business.objects.count()
        return how(ctx)

    handler = job("on_finish.connected", on_finish=recorder)(counts)
    for _ in range(3):
        handler.submit()
    connection_created.connect(note)
    try:
        drain()
    finally:
        connection_created.disconnect(note)
    assert len(recorder.events) == opened.count("durable-slot-1") == 3


@only_where_rows_are_locked
def test_a_slow_one_holds_up_nobody_else(handlers: Registry) -> None:
    others = threading.Event()

    def slow(event: FinishEvent) -> None:
        if event.job_id == "slow":
            assert others.wait(PATIENCE), "the others' ends wait for this one"

    @job("on_finish.slow", on_finish=slow)
    def told(ctx: JobContext) -> None: ...

    @job("on_finish.plain")
    def plain(ctx: JobContext) -> None: ...

    one = told.submit(job_id="slow")
    more = [told.submit(), plain.submit(), plain.submit()]
    worker = Serving()
    until(lambda: all(fresh(other).status == "succeeded" for other in more))
    assert fresh(one).status == "running"
    others.set()
    until(lambda: fresh(one).status == "succeeded")
    assert worker.stop() == 0


def test_one_that_does_not_end_costs_its_slot_and_its_process(
    handlers: Registry,
    durable_jobs: Callable[..., None],
    limited_from: Callable[[threading.Event], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As a handler that does not end (CONTRACT 4.5); its job is recovered once that is over."""
    durable_jobs(POLL_SECONDS=0.02, TIMEOUT_GRACE_SECONDS=0.1, LOCK_TIMEOUT_SECONDS=0.2)
    begun, go = threading.Event(), threading.Event()
    limited_from(begun)

    def hang(event: FinishEvent) -> None:
        begun.set()
        assert go.wait(PATIENCE)
        raise ValueError("after all")

    @job("on_finish.hangs", timeout=0.1, max_attempts=1, on_finish=hang)
    def hangs(ctx: JobContext) -> None: ...

    one = hangs.submit()
    before = set(threading.enumerate())
    try:
        with pytest.raises(SystemExit) as ended:
            drain()
        assert ended.value.code == 4
        assert "the on_finish of job" in caplog.text and "does not end" in caplog.text
        assert fresh(one).status == "running"
    finally:
        go.set()
    until(lambda: set(threading.enumerate()) <= before, "its threads to end")
    assert fresh(one).status == "running"


def test_a_drain_waits_for_it(handlers: Registry, durable_jobs: Callable[..., None]) -> None:
    """SIGTERM, a drain and the last slot: what has ended is written before the worker ends."""
    began = threading.Event()

    def slow(event: FinishEvent) -> None:
        began.set()
        time.sleep(0.3)

    @job("on_finish.drained", on_finish=slow)
    def drained(ctx: JobContext) -> int:
        return 1

    one = drained.submit()
    worker = Serving()
    assert began.wait(PATIENCE)
    assert worker.stop() == 0
    assert fresh(one).status == "succeeded"


def test_the_event_has_what_the_contract_says_and_takes_no_more() -> None:
    event = FinishEvent(
        job_id="a",
        scope="",
        handler="b",
        attempt=1,
        status="failed",
        outcome="raised",
        result=None,
        error_category="permanent",
    )
    assert replace(event, status="succeeded") != event
    with pytest.raises(TypeError):
        FinishEvent("a")  # type: ignore[misc, call-arg]
