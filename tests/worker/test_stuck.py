"""What does not end, and sits in a transaction that its end would need (CONTRACT 4.5, 4.7)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.core.management import call_command
from django.db import transaction
from django.db.models import F

from django_durable_jobs import FinishEvent, JobContext, job
from django_durable_jobs.handlers import Handler, Registry
from django_durable_jobs.models import Job, JobAttempt
from django_durable_jobs.worker import shutdown

from ..testapp.models import Business
from .support import (
    PATIENCE,
    Background,
    Serving,
    attempts,
    fresh,
    only_where_rows_are_locked,
    until,
)

pytestmark = pytest.mark.django_db(transaction=True)

IN_TIME = PATIENCE / 2  # what is stuck stays longer


class Stuck:
    """Handlers that stay until the test lets them go, each in another place."""

    def __init__(self, timeout: float) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.stop_requested, self.behind = threading.Event(), threading.Event()
        self.tries = 0
        options: dict[str, Any] = {"timeout": timeout, "max_attempts": 1, "backoff": 0}
        # What comes too late to its place, after the timeout, comes again.
        again = {**options, "max_attempts": 99}

        @job("stuck.on_finish", on_finish=self.told, **again)
        def on_finish(ctx: JobContext) -> None: ...

        @job("stuck.completing", on_finish=self.told, **again)
        def completing(ctx: JobContext) -> None:
            with transaction.atomic():
                ctx.complete()

        @job("stuck.twice", on_finish=self.told, **options)
        def twice(ctx: JobContext) -> None:
            self.stay()

        @job("stuck.fenced", **again)
        def fenced(ctx: JobContext) -> None:
            """It locks its row as ``ctx.fence()`` does, also where that is too late to be let."""
            with transaction.atomic():
                assert Job.objects.filter(lease_token=ctx.token).update(priority=F("priority"))
                self.stay()

        @job("stuck.attempt", **again)
        def attempt(ctx: JobContext) -> None:
            """It locks what its end needs and a renewal does not."""
            with transaction.atomic():
                assert JobAttempt.objects.filter(token=ctx.token, status="running").update(
                    progress=0
                )
                self.stay()

        @job("stuck.holder", **options)
        def holder(ctx: JobContext) -> None:
            with transaction.atomic():
                Business.objects.create(pk=1)
                self.stay()

        @job("stuck.behind", on_finish=self.waits_behind, **options)
        def behind(ctx: JobContext) -> None:
            assert self.begun.wait(PATIENCE)

        @job("stuck.plain", **options)
        def plain(ctx: JobContext) -> None:
            until(lambda: ctx.stop_requested)
            self.stop_requested.set()
            self.stay()

        @job("stuck.well", **again)
        def well(ctx: JobContext) -> None: ...

        every = (on_finish, completing, twice, fenced, attempt, holder, behind, plain, well)
        self.handlers: dict[str, Handler[..., Any]] = {
            one.name.partition(".")[2]: one for one in every
        }

    def told(self, event: FinishEvent) -> None:
        Business.objects.create(name="beside")
        self.stay()

    def waits_behind(self, event: FinishEvent) -> None:
        """For the row that the holder has inserted, each time that it is called."""
        self.behind.set()
        self.tries += 1
        Business.objects.create(pk=1)

    def stay(self) -> None:
        self.begun.set()
        assert self.go.wait(PATIENCE)
        raise RuntimeError("let go")


StuckFor = Callable[[float], Stuck]


@pytest.fixture
def stuck_for(
    handlers: Registry,
    durable_jobs: Callable[..., None],
    limited_from: Callable[[threading.Event], None],
) -> Iterator[StuckFor]:
    """Handlers with that timeout (seconds); all of them are let go when the test is over."""
    durable_jobs(
        LEASE_SECONDS=1.5,
        TIMEOUT_SECONDS=1,
        TIMEOUT_GRACE_SECONDS=0.1,
        SHUTDOWN_SECONDS=0.1,
        LOCK_TIMEOUT_SECONDS=0.2,
        POLL_SECONDS=0.02,
    )
    before = set(threading.enumerate())
    made: list[Stuck] = []

    def make(timeout: float) -> Stuck:
        made.append(Stuck(timeout))
        limited_from(made[-1].begun)
        return made[-1]

    yield make
    for one in made:
        one.go.set()
    until(lambda: set(threading.enumerate()) <= before, "its threads to end")


def run(mode: str, threads: int) -> None:
    call_command("runjobs", f"--{mode}", f"--threads={threads}", verbosity=0)


def code_of(work: Callable[[], Any]) -> Any:
    """Run it in a thread and give its exit code; what is stuck is never waited for."""
    began = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        Background(work).ends()
    assert time.monotonic() - began < IN_TIME
    return ended.value.code


def assert_left_to_its_lease(one: Job) -> None:
    assert fresh(one).status == "running"
    assert attempts(one)[-1].outcome is None
    assert Business.objects.count() == 0


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("on_finish", "drain"),
        ("completing", "drain"),
        ("twice", "drain"),
        ("fenced", "drain"),
        ("fenced", "once"),
        ("attempt", "drain"),
    ],
)
def test_a_bounded_run_ends_with_4(
    stuck_for: StuckFor, durable_jobs: Callable[..., None], kind: str, mode: str
) -> None:
    if kind == "twice":
        # Nothing renews it once it is overdue, and its end is to come to its place in time.
        durable_jobs(LEASE_SECONDS=60)
    stuck = stuck_for(0.1)
    one = stuck.handlers[kind].submit()
    assert code_of(lambda: run(mode, threads=1)) == 4
    assert stuck.begun.is_set()
    assert_left_to_its_lease(one)


@only_where_rows_are_locked
@pytest.mark.parametrize("mode", ["drain", "shutdown"])
def test_an_on_finish_that_waits_for_it_is_not_waited_for(
    stuck_for: StuckFor,
    durable_jobs: Callable[..., None],
    limited_from: Callable[[threading.Event], None],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    """It ends by the lock's time limit, again and again, and each time its lease is renewed."""
    monkeypatch.setattr(shutdown, "RESULTS_SECONDS", 1.0)
    durable_jobs(LEASE_SECONDS=60, TIMEOUT_SECONDS=30)
    stuck = stuck_for(0.1 if mode == "drain" else 20)
    limited_from(stuck.behind)
    holder, behind = (stuck.handlers[kind].submit() for kind in ("holder", "behind"))
    if mode == "drain":
        assert code_of(lambda: run("drain", threads=2)) == 4
    else:
        worker = Serving(owns_process=True)
        until(lambda: stuck.tries > 1)
        assert worker.stop() == 4
    assert stuck.tries
    # The holder's own end needs nothing that it holds.
    assert fresh(holder).status == ("failed" if mode == "drain" else "queued")
    assert_left_to_its_lease(behind)


def test_the_other_slots_go_on_unless_it_locks_everything(
    stuck_for: StuckFor, is_postgres: bool
) -> None:
    stuck = stuck_for(0.1)
    one = stuck.handlers["fenced"].submit(priority=1)
    others = [stuck.handlers["well"].submit() for _ in range(4)]
    assert code_of(lambda: run("drain", threads=2)) == 4
    assert_left_to_its_lease(one)
    done = [fresh(other).status for other in others].count("succeeded")
    # On SQLite nothing can be claimed beside it, once it has the lock.
    assert done == 4 or not is_postgres


@pytest.mark.parametrize(
    ("kind", "overdue"),
    [
        ("on_finish", False),
        ("completing", False),
        ("completing", True),
        ("fenced", False),
        ("fenced", True),
    ],
)
def test_a_shutdown_does_not_wait_for_it(
    stuck_for: StuckFor, durable_jobs: Callable[..., None], kind: str, overdue: bool
) -> None:
    """Neither for one that the hard limit has ended, whose lease holds for long."""
    durable_jobs(LEASE_SECONDS=60, TIMEOUT_SECONDS=30)
    stuck = stuck_for(0.1 if overdue else 20)
    one = stuck.handlers[kind].submit()
    worker = Serving(owns_process=True)
    assert stuck.begun.wait(PATIENCE)
    if overdue:
        until(lambda: worker.worker._hard_limit.lost_slots == 1)
    began = time.monotonic()
    assert worker.stop() == 4
    assert time.monotonic() - began < IN_TIME
    assert_left_to_its_lease(one)


def test_a_result_that_waits_for_a_lock_is_written_before_what_does_not_end(
    stuck_for: StuckFor, durable_jobs: Callable[..., None]
) -> None:
    durable_jobs(LEASE_SECONDS=60, TIMEOUT_SECONDS=30)
    stuck = stuck_for(20)
    go = threading.Event()

    @job("stuck.result")
    def result(ctx: JobContext) -> str:
        assert go.wait(PATIENCE)
        return "kept"

    one, other = result.submit(), stuck.handlers["plain"].submit()
    worker = Serving(owns_process=True)
    until(lambda: [held.begun for held in worker.worker._held.all()] == [True, True])
    with transaction.atomic():
        Job.objects.filter(pk=one.pk).update(priority=7)
        go.set()
        until(lambda: any(held.ended for held in worker.worker._held.all()))
        ending = Background(worker.stop)
        assert stuck.stop_requested.wait(PATIENCE)
        # Longer than what does not end is waited for.
        time.sleep(1)
        assert ending.is_alive
    assert ending.ends() == 4
    assert (fresh(one).status, fresh(one).result) == ("succeeded", "kept")
    assert fresh(other).status == "queued"
