"""Signals: finish, stop, give back, end at once (CONTRACT 4.7)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import transaction

from django_durable_jobs.exceptions import LockTimeout
from django_durable_jobs.models import Job
from django_durable_jobs.worker import shutdown
from django_durable_jobs.worker.loop import Worker
from django_durable_jobs.worker.options import build_options
from django_durable_jobs.worker.slots import Slots

from ..testapp import jobs
from .conftest import StartWorker
from .support import (
    PATIENCE,
    QUICK,
    Background,
    Gate,
    Process,
    attempts,
    change,
    drain,
    fresh,
    is_alive,
    only_attempt,
    until,
)

pytestmark = pytest.mark.django_db(transaction=True)

IMPATIENT = {**QUICK, "SHUTDOWN_SECONDS": 0.3, "TIMEOUT_GRACE_SECONDS": 60}
HARSH_LIMITS = {"SHUTDOWN_SECONDS": 0.2, "TIMEOUT_GRACE_SECONDS": 0.2}
HARSH = {**QUICK, **HARSH_LIMITS}

ALONE = "--processes=0"
SUPERVISED = "--processes=2"
both_ways = pytest.mark.parametrize("processes", [ALONE, SUPERVISED])


def submit(handler: Any, gate: Gate, name: str = "work", **options: object) -> Job:
    return handler.submit(jobs.Gate(**gate.payload(name)), **options)


def assert_requeued(job: Job, *, granted: int = 1) -> None:
    waiting = fresh(job)
    assert waiting.status == "queued"
    assert (waiting.attempt_count, waiting.granted_attempts) == (1, granted)
    assert (waiting.lease_token, waiting.lease_expires_at) == (None, None)
    assert waiting.run_at == only_attempt(job).finished_at
    attempt = only_attempt(job)
    assert (attempt.status, attempt.outcome) == ("interrupted", "stopped")
    assert attempt.error_category == "stopped"


def sees_the_signal(worker: Process, lines: int = 1) -> None:
    until(lambda: worker.output().count("stopping") >= lines, "the signal to be seen")


@pytest.mark.parametrize(
    ("processes", "number"), [(ALONE, signal.SIGTERM), (SUPERVISED, signal.SIGINT)]
)
def test_a_running_job_finishes_and_nothing_is_claimed_any_more(
    start_worker: StartWorker, gate: Gate, processes: str, number: int
) -> None:
    job = submit(jobs.gated, gate)
    worker = start_worker(processes)
    gate.begun("work")
    worker.send(number)
    sees_the_signal(worker, 1 if processes == ALONE else 3)
    late = submit(jobs.gated, gate, "late", run_at=None)
    gate.open("work")
    assert worker.ends() == 0, worker.output()
    assert fresh(job).status == "succeeded"
    assert [attempt.outcome for attempt in attempts(job)] == ["returned"]
    assert fresh(late).status == "queued"
    assert attempts(late) == []


def test_handlers_that_check_are_stopped_and_their_jobs_requeued(
    start_worker: StartWorker, gate: Gate
) -> None:
    # One looks, one swallows every Exception, one is async, one must not be repeated.
    names = ["obedient", "swallowing", "asleep", "uninterruptible"]
    stopped = {name: submit(getattr(jobs, name), gate, name) for name in names}
    worker = start_worker(ALONE, durable_jobs=IMPATIENT)
    for name in names:
        gate.begun(name)
    worker.send()
    assert worker.ends() == 0, worker.output()
    for name in names[:3]:
        assert_requeued(stopped[name])
    ended = fresh(stopped["uninterruptible"])
    assert (ended.status, ended.granted_attempts) == ("interrupted", 0)
    assert ended.error_category == "stopped"
    assert only_attempt(ended).outcome == "stopped"


def test_restarts_alone_never_exhaust_a_job(start_worker: StartWorker, gate: Gate) -> None:
    job = submit(jobs.obedient, gate, max_attempts=1)
    worker = start_worker(ALONE, durable_jobs=IMPATIENT)
    gate.begun("work")
    worker.send()
    assert worker.ends() == 0
    assert_requeued(job)
    gate.open("work")
    assert start_worker("--drain").ends() == 0
    done = fresh(job)
    assert (done.status, done.attempt_count, done.granted_attempts) == ("succeeded", 2, 1)
    assert done.result == {"attempt": 2}


@pytest.mark.parametrize(
    ("processes", "mode"),
    [(ALONE, "serve"), (SUPERVISED, "serve"), (ALONE, "once"), (ALONE, "drain")],
)
def test_a_handler_that_never_ends_is_left_behind_with_its_job_requeued(
    start_worker: StartWorker, gate: Gate, processes: str, mode: str
) -> None:
    job = submit(jobs.gated, gate)
    extra = [] if mode == "serve" else [f"--{mode}"]
    worker = start_worker(processes, *extra, durable_jobs=HARSH)
    pid = int(gate.begun("work").split()[0])
    worker.send()
    assert worker.ends() == 4, worker.output()
    assert not is_alive(pid)
    assert_requeued(job)


def test_a_handler_stuck_in_a_transaction_that_holds_its_row_is_left_to_its_lease(
    start_worker: StartWorker, gate: Gate
) -> None:
    """Idle in transaction: its end cannot be written, its process ends, its lock goes with it."""
    job = submit(jobs.fencing, gate)
    worker = start_worker("--processes=1", durable_jobs={**QUICK, **HARSH_LIMITS})
    pid = int(gate.begun("work").split()[0])
    began = time.monotonic()
    worker.send()
    assert worker.ends() == 4, worker.output()
    assert time.monotonic() - began < PATIENCE / 2
    assert not is_alive(pid)
    left = fresh(job)
    assert (left.status, only_attempt(job).status) == ("running", "running")
    change(job, lease_expires_at=1)
    gate.open("work")
    drain()
    assert [one.outcome for one in attempts(job)] == ["lost", "returned"]


@pytest.mark.parametrize("mode", ["once", "drain", "max-jobs"])
def test_a_bounded_run_obeys_the_first_signal_too(
    start_worker: StartWorker, gate: Gate, mode: str
) -> None:
    job = submit(jobs.obedient, gate)
    extra = {"max-jobs": "--max-jobs=1"}.get(mode, f"--{mode}")
    worker = start_worker(ALONE, extra, durable_jobs=IMPATIENT)
    gate.begun("work")
    worker.send()
    assert worker.ends() == 0, worker.output()
    assert_requeued(job)


@both_ways
def test_a_second_signal_ends_everything_now(
    start_worker: StartWorker, gate: Gate, processes: str
) -> None:
    job = submit(jobs.gated, gate)
    worker = start_worker(processes)
    pid = int(gate.begun("work").split()[0])
    worker.send()
    sees_the_signal(worker)
    worker.send()
    assert worker.ends() == 5, worker.output()
    until(lambda: not is_alive(pid), "the child to be gone")
    running = fresh(job)
    assert (running.status, running.attempt_count) == ("running", 1)
    assert [attempt.status for attempt in attempts(job)] == ["running"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_to_the_whole_process_group_is_one_signal(
    start_worker: StartWorker, gate: Gate, number: int
) -> None:
    job = submit(jobs.gated, gate)
    worker = start_worker(SUPERVISED)
    gate.begun("work")
    worker.send_group(number)
    sees_the_signal(worker, 3)
    gate.open("work")
    assert worker.ends() == 0, worker.output()
    assert fresh(job).status == "succeeded"
    assert len(attempts(job)) == 1


def test_a_signal_right_after_the_start_drains_as_well(start_worker: StartWorker) -> None:
    worker = start_worker(SUPERVISED)
    until(worker.children, "the children")
    worker.send()
    assert worker.ends() == 0, worker.output()


def test_children_of_a_killed_supervisor_finish_their_jobs_and_end(
    start_worker: StartWorker, gate: Gate
) -> None:
    job = submit(jobs.gated, gate)
    worker = start_worker("--processes=1")
    pid = int(gate.begun("work").split()[0])
    os.kill(worker.pid, signal.SIGKILL)
    worker.ends()
    sees_the_signal(worker)
    late = submit(jobs.gated, gate, "late")
    gate.open("work")
    until(lambda: not is_alive(pid), "the orphan to end")
    assert fresh(job).status == "succeeded"
    assert fresh(late).status == "queued"


class Unbegun:
    """A worker in this process that claims and whose slots never begin."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Slots, "give", lambda slots, held: None)
        self.worker = Worker(build_options(threads=4, processes=0))
        self.running = Background(self.worker.run)

    def stop(self) -> int:
        self.worker.stop()
        return self.running.ends()


@pytest.fixture
def unbegun(
    monkeypatch: pytest.MonkeyPatch, durable_jobs: Callable[..., None], gate: Gate
) -> Iterator[tuple[Unbegun, list[Job]]]:
    """Three jobs that are claimed and whose handlers have not begun."""
    durable_jobs(POLL_SECONDS=0.05)
    waiting = [submit(jobs.gated, gate, str(number)) for number in range(3)]
    worker = Unbegun(monkeypatch)
    until(lambda: all(fresh(job).status == "running" for job in waiting))
    yield worker, waiting
    worker.stop()


def assert_never_claimed(job: Job) -> None:
    waiting = fresh(job)
    assert (waiting.status, waiting.attempt_count, waiting.granted_attempts) == ("queued", 0, 0)
    assert (waiting.lease_token, waiting.lease_expires_at) == (None, None)
    assert attempts(job) == []


def test_claims_whose_handlers_never_began_are_given_back(
    unbegun: tuple[Unbegun, list[Job]],
) -> None:
    worker, waiting = unbegun
    assert waiting[1].request_cancel() == "requested"
    assert worker.stop() == 0
    assert_never_claimed(waiting[0])
    assert_never_claimed(waiting[2])
    # The cancel came first: it is what the claim gives way to.
    assert fresh(waiting[1]).status == "cancelled"
    assert (fresh(waiting[1]).attempt_count, attempts(waiting[1])) == (0, [])


def test_a_claim_whose_row_is_locked_is_given_back_after_the_others(
    unbegun: tuple[Unbegun, list[Job]], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, waiting = unbegun
    tries: list[bool] = []
    give_back = shutdown.give_back

    def counted(*arguments: Any, wait: bool) -> Any:
        tries.append(wait)
        return give_back(*arguments, wait=wait)

    monkeypatch.setattr(shutdown, "give_back", counted)
    with transaction.atomic():
        Job.objects.filter(pk=waiting[1].pk).update(priority=7)
        worker.worker.stop()
        until(lambda: tries)
    assert worker.stop() == 0
    for job in waiting:
        assert_never_claimed(job)
    assert fresh(waiting[1]).priority == 7


def test_a_giving_back_that_the_database_refuses_once_is_tried_again(
    unbegun: tuple[Unbegun, list[Job]], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, waiting = unbegun
    give_back = shutdown.give_back
    errors: list[Exception] = [LockTimeout("locked"), RuntimeError("a fault of ours")]

    def refused(*arguments: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return give_back(*arguments, **options)

    monkeypatch.setattr(shutdown, "give_back", refused)
    assert worker.stop() == 0
    for job in waiting:
        assert_never_claimed(job)
