"""Handlers that do not end: the hard limit, and what it costs (CONTRACT 4.5, FAULTS 15)."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from django_durable_jobs import JobContext, job
from django_durable_jobs.handlers import Handler, Registry
from django_durable_jobs.models import Job
from django_durable_jobs.worker import stalls
from django_durable_jobs.worker.execution import context_for
from django_durable_jobs.worker.loop import Worker
from django_durable_jobs.worker.options import build_options

from ..testapp import jobs
from .conftest import StartWorker
from .support import (
    PATIENCE,
    QUICK,
    Background,
    Gate,
    attempts,
    drain,
    fresh,
    is_buried,
    only_attempt,
    until,
)

pytestmark = pytest.mark.django_db(transaction=True)

LIMITED = {**QUICK, "TIMEOUT_SECONDS": 0.2, "TIMEOUT_GRACE_SECONDS": 0.1}


class Stuck:
    """A handler that stays until the test lets it go, and one that is well."""

    def __init__(self, kind: str) -> None:
        self.go, self.left = threading.Event(), threading.Event()

        def wait() -> str:
            assert self.go.wait(PATIENCE)
            self.left.set()
            return "too late"

        if kind == "sync":

            @job("overdue.stuck", timeout=0.1, backoff=100)
            def stuck(ctx: JobContext) -> str:
                return wait()

        else:

            @job("overdue.stuck", timeout=0.1, backoff=100)
            async def stuck(ctx: JobContext) -> str:
                while not self.go.is_set():
                    try:
                        await asyncio.sleep(0.01)
                    except asyncio.CancelledError:
                        continue
                return wait()

        @job("overdue.well", timeout=50)
        def well(ctx: JobContext) -> int:
            return 1

        self.handler: Handler[..., Any] = stuck
        self.well: Handler[..., Any] = well


@pytest.fixture(params=["sync", "async"])
def stuck(
    request: pytest.FixtureRequest, handlers: Registry, durable_jobs: Callable[..., None]
) -> Iterator[Stuck]:
    durable_jobs(POLL_SECONDS=0.02, TIMEOUT_GRACE_SECONDS=0.1, SHUTDOWN_SECONDS=5)
    one = Stuck(request.param)
    yield one
    one.go.set()


def assert_timed_out(one: Job) -> None:
    waiting, attempt = fresh(one), only_attempt(one)
    assert (waiting.status, waiting.error_category) == ("scheduled", "timeout")
    assert (attempt.status, attempt.outcome) == ("timed_out", "stopped")
    assert (waiting.run_at - attempt.finished_at).total_seconds() == 100


def test_a_drain_loses_the_slot_runs_the_others_and_ends_with_4(stuck: Stuck) -> None:
    one = stuck.handler.submit(priority=1)
    others = [stuck.well.submit() for _ in range(4)]
    before = set(threading.enumerate())
    with pytest.raises(SystemExit) as ended:
        drain(threads=2)
    assert ended.value.code == 4
    assert_timed_out(one)
    assert [fresh(other).status for other in others] == ["succeeded"] * 4
    # Its late result is refused.
    stuck.go.set()
    assert stuck.left.wait(PATIENCE)
    until(lambda: set(threading.enumerate()) <= before, "its threads to end")
    assert_timed_out(one)


def test_a_drain_whose_slots_are_all_lost_ends(stuck: Stuck) -> None:
    one = stuck.handler.submit(priority=1)
    other = stuck.well.submit()
    with pytest.raises(SystemExit) as ended:
        drain(threads=1)
    assert ended.value.code == 4
    assert_timed_out(one)
    assert fresh(other).status == "queued"


def test_a_slot_that_comes_back_is_free_again(
    stuck: Stuck, caplog: pytest.LogCaptureFixture
) -> None:
    barrier = threading.Barrier(2, timeout=PATIENCE)

    @job("overdue.meets", timeout=50)
    def meets(ctx: JobContext) -> None:
        barrier.wait()

    worker = Worker(build_options(threads=2, processes=0))
    running = Background(worker.run)
    one = stuck.handler.submit()
    until(lambda: fresh(one).status == "scheduled")
    assert worker._hard_limit.lost_slots == 1
    stuck.go.set()
    until(lambda: worker._hard_limit.lost_slots == 0)
    # Both slots are needed at once.
    both = [meets.submit() for _ in range(2)]
    until(lambda: all(fresh(other).status == "succeeded" for other in both))
    worker.stop()
    assert running.ends() == 0
    assert_timed_out(one)
    # Each once, also now that its thread has ended.
    words = ("passed its timeout", "does not end")
    assert [line for line in caplog.messages if any(word in line for word in words)] == [
        f"job {one.job_id} (attempt 1 of handler overdue.stuck) passed its timeout",
        f"handler overdue.stuck of job {one.job_id} does not end; its attempt is ended and its"
        " slot lost",
    ]


@pytest.fixture
def bad_filter() -> Iterator[list[str]]:
    """The project's logging raises; what it should have written is noted."""
    refused: list[str] = []

    def refuse(record: logging.LogRecord) -> bool:
        words = ("passed its timeout", "the connection is cut")
        if any(word in record.getMessage() for word in words):
            refused.append(record.getMessage())
            raise AttributeError("request")
        return True

    logger = logging.getLogger("django_durable_jobs.worker")
    logger.addFilter(refuse)
    yield refused
    logger.removeFilter(refuse)


def test_a_log_that_raises_loses_no_end_of_a_slot(
    handlers: Registry, bad_filter: list[str]
) -> None:
    @job("overdue.late", timeout=0.1, backoff=100)
    def late(ctx: JobContext) -> None:
        while True:
            ctx.check()

    one = late.submit()
    drain()
    assert len(bad_filter) == 1
    assert_timed_out(one)


def test_a_log_that_raises_loses_no_end_of_the_hard_limit(
    stuck: Stuck, bad_filter: list[str]
) -> None:
    one = stuck.handler.submit()
    with pytest.raises(SystemExit) as ended:
        drain()
    assert ended.value.code == 4
    assert len(bad_filter) == 1
    assert_timed_out(one)


def test_a_log_that_raises_makes_no_connection_count_as_cut_again(
    bad_filter: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    line, other = socket.socketpair()
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(stalls, "time", clock)
    watched = stalls.Watched("a loop", "default", longest=lambda: 5)
    with line, other, watched.waiting():
        watched._connection = SimpleNamespace(connection=line)
        now = 6.0
        watched.break_off()
        assert not watched.break_off()
    assert len(bad_filter) == 1


def test_a_stuck_handler_costs_its_process_and_not_the_service(
    start_worker: StartWorker, gate: Gate, durable_jobs: Callable[..., None]
) -> None:
    durable_jobs(TIMEOUT_SECONDS=50)
    neighbour = jobs.gated.submit(jobs.Gate(**gate.payload("neighbour")))
    durable_jobs(**LIMITED)
    one = jobs.gated.submit(jobs.Gate(**gate.payload("stuck")), max_attempts=2, priority=-1)
    settings = {**LIMITED, "RETRY_BASE_SECONDS": 0.1}
    worker = start_worker("--processes=1", "--threads=2", durable_jobs=settings)
    first = int(gate.begun("stuck", 1).split()[0])
    assert int(gate.begun("neighbour").split()[0]) == first
    # The successor begins beside the first process, which has a job to finish.
    second = int(gate.begun("stuck", 2).split()[0])
    assert first != second
    assert fresh(neighbour).status == "running"
    until(lambda: fresh(one).status == "failed")
    assert [attempt.status for attempt in attempts(one)] == ["timed_out", "timed_out"]
    # The second one too has lost a slot, and waits with retiring for the first to end.
    gate.open("neighbour")
    until(lambda: fresh(neighbour).status == "succeeded")
    assert [attempt.outcome for attempt in attempts(neighbour)] == ["returned"]
    # The third process runs what comes next.
    other = jobs.line.submit(jobs.Line(file=str(gate.folder / "lines"), number=1))
    until(lambda: fresh(other).status == "succeeded")
    # A process that lost a slot ends with 4, which counts where it ends during the stop.
    until(lambda: is_buried(first) and is_buried(second), "both to be buried")
    worker.send()
    assert worker.ends() == 0, worker.output()


def test_a_single_process_with_every_slot_lost_ends_with_4(
    start_worker: StartWorker, gate: Gate, durable_jobs: Callable[..., None]
) -> None:
    durable_jobs(**LIMITED)
    one = jobs.gated.submit(jobs.Gate(**gate.payload("stuck")))
    worker = start_worker("--processes=0", "--threads=1", durable_jobs=LIMITED)
    assert worker.ends() == 4, worker.output()
    assert [attempt.status for attempt in attempts(one)] == ["timed_out"]
    assert "does not end" in worker.output()


def test_on_sqlite_the_grace_ends_before_the_lease(
    handlers: Registry, durable_jobs: Callable[..., None], is_postgres: bool
) -> None:
    from django_durable_jobs.transitions.claims import claim, queued_lanes

    durable_jobs(LEASE_SECONDS=10, TIMEOUT_SECONDS=5, TIMEOUT_GRACE_SECONDS=30)

    @job("overdue.any", timeout=8)
    def any_(ctx: JobContext) -> None: ...

    any_.submit()
    lanes = queued_lanes("default")
    (claimed,) = claim("default", lanes, limit=1, worker="test", lease_seconds=10)
    ctx = context_for("default", claimed)
    assert ctx._grace == (30 if is_postgres else 1)
