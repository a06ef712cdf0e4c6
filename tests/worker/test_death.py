"""Dead workers, live leases, and late writes of a token that is not current any more."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from django_durable_jobs.exceptions import LeaseLost
from django_durable_jobs.models import Job
from django_durable_jobs.transitions.claims import block_claimed, give_back
from django_durable_jobs.transitions.leases import renew
from django_durable_jobs.transitions.outcomes import (
    Outcome,
    finish,
    record_checkpoint,
    record_progress,
)

from ..testapp import jobs
from .conftest import StartWorker
from .support import PATIENCE, QUICK, Gate, attempts, change, fresh, is_alive, row, until

pytestmark = pytest.mark.django_db(transaction=True)

# A lease that no test waits for: where it must be over, that is done by hand.
LONG = {**QUICK, "LEASE_SECONDS": PATIENCE + 1, "TIMEOUT_SECONDS": PATIENCE}


@pytest.fixture(autouse=True)
def lasting(durable_jobs: Callable[..., None]) -> None:
    """A job keeps the timeout of its submitter, and on SQLite a lease must be longer."""
    durable_jobs(**LONG)


def outcome_of(job: int, token: str) -> Outcome:
    return Outcome(
        job=job, token=token, status="succeeded", outcome="returned", final_status="succeeded"
    )


def lose(write: Callable[[], None]) -> None:
    with pytest.raises(LeaseLost):
        write()


def test_another_worker_runs_the_job_of_a_killed_one_and_late_writes_are_refused(
    start_worker: StartWorker, gate: Gate
) -> None:
    job = jobs.gated.submit(jobs.Gate(**gate.payload("work")))
    first = start_worker("--processes=0", "--name=first", durable_jobs=LONG)
    _, old = gate.begun("work", 1).split()
    first.send(signal.SIGKILL)
    assert first.ends() == -signal.SIGKILL
    assert fresh(job).status == "running"
    change(job, lease_expires_at=1)

    second = start_worker("--processes=0", "--name=second", durable_jobs=LONG)
    _, new = gate.begun("work", 2).split()
    running = fresh(job)
    assert (running.status, running.lease_token) == ("running", new)
    assert Job.objects.execution_status(old) == "ended"

    # The newer attempt is running while every write of the older one comes in. Its lease is
    # renewed meanwhile, so that is left out of what must not have moved.
    def unmoved() -> object:
        (of_job,), of_attempts = row(job)
        names = [field.attname for field in Job._meta.concrete_fields]
        kept = {k: v for k, v in zip(names, of_job, strict=True) if k != "lease_expires_at"}
        return kept, of_attempts

    before = unmoved()
    lose(lambda: record_progress("default", job.pk, old, 0.5, "late"))
    lose(lambda: record_checkpoint("default", job.pk, old, '"late"'))
    assert renew("default", [(job.pk, old)], lease_seconds=600) == set()
    report = finish("default", [outcome_of(job.pk, old)])
    assert (report.written, report.busy, report.damaged) == ({}, [], [])
    assert [one.token for one in report.lost] == [old]
    assert give_back("default", [(job.pk, old)]) == {}
    assert block_claimed("default", [(job.pk, old, "corrupt_payload")]) == {}
    assert unmoved() == before

    gate.open("work")
    until(lambda: fresh(job).status == "succeeded")
    second.send()
    assert second.ends() == 0
    done = fresh(job)
    assert (done.result, done.attempt_count) == ({"attempt": 2}, 2)
    lost, won = attempts(job)
    assert (lost.status, lost.outcome, lost.error_category) == ("interrupted", "lost", "lost")
    assert (lost.token, lost.worker) == (old, "first")
    assert (won.status, won.outcome, won.worker) == ("succeeded", "returned", "second")
    assert lost.finished_at <= won.started_at


@pytest.mark.long
def test_a_handler_four_times_longer_than_the_lease_is_started_once(
    start_worker: StartWorker, gate: Gate, is_postgres: bool
) -> None:
    if not is_postgres:
        pytest.skip("on SQLite every attempt ends before its lease does")
    job = jobs.gated.submit(jobs.Gate(**gate.payload("long")))
    lease = 6
    settings = {**QUICK, "LEASE_SECONDS": lease}
    workers = [start_worker("--processes=0", durable_jobs=settings) for _ in range(2)]
    gate.begun("long")
    change(job, max_attempts=100)
    expiries: dict[str, list[Any]] = {}

    def is_renewed() -> bool:
        running = fresh(job)
        if running.lease_token is None:
            return False
        seen = expiries.setdefault(running.lease_token, [])
        seen.append(running.lease_expires_at)
        return (seen[-1] - seen[0]).total_seconds() > 4 * lease

    until(is_renewed, "one attempt's lease to be renewed for so long")
    gate.open("long")
    until(lambda: fresh(job).status == "succeeded")
    for worker in workers:
        worker.send()
    assert [worker.ends() for worker in workers] == [0, 0]
    # Once, unless all of a worker stood still for a lease: another start comes after its expiry.
    *lost, won = attempts(job)
    assert (won.status, {one.outcome for one in lost} <= {"lost"}) == ("succeeded", True)
    for earlier, later in pairwise(attempts(job)):
        assert later.started_at >= max(expiries.get(earlier.token, [earlier.started_at]))


def test_a_handler_that_ends_its_process_runs_out_of_executions(
    start_worker: StartWorker, gate: Gate
) -> None:
    job = jobs.suicidal.submit(jobs.Gate(**gate.payload("crash")))
    worker = start_worker("--processes=1", durable_jobs=LONG)
    for number in (1, 2):
        ended = int(gate.begun("crash", number).split()[0])
        until(lambda pid=ended: not is_alive(pid), "its process to end")
        change(job, lease_expires_at=1)
    until(lambda: fresh(job).is_terminal, "the job to end")
    worker.send()
    assert worker.ends() == 0, worker.output()
    ended = fresh(job)
    assert (ended.status, ended.error_category, ended.attempt_count) == ("interrupted", "lost", 2)
    assert [attempt.outcome for attempt in attempts(job)] == ["lost", "lost"]
    assert gate.has_begun("crash", 2)


def test_the_supervisor_replaces_a_killed_child_and_drains_all_on_sigterm(
    start_worker: StartWorker, gate: Gate
) -> None:
    # The lease of the killed one is made to expire by hand; the other one runs on meanwhile.
    names = ["one", "two"]
    held = [jobs.gated.submit(jobs.Gate(**gate.payload(name))) for name in names]
    worker = start_worker("--processes=2", "--threads=1", "--name=twin", durable_jobs=LONG)
    pids = {name: int(gate.begun(name).split()[0]) for name in names}
    # One thread each: the two jobs run in the two children.
    assert set(pids.values()) == set(worker.children())
    os.kill(pids["one"], signal.SIGKILL)
    until(lambda: not is_alive(pids["one"]))
    change(held[0], lease_expires_at=1)
    successor = int(gate.begun("one", 2).split()[0])
    assert successor not in pids.values()
    assert set(worker.children()) == {successor, pids["two"]}

    worker.send()
    for name in names:
        gate.open(name)
    assert worker.ends() == 0, worker.output()
    assert [fresh(job).status for job in held] == ["succeeded", "succeeded"]
    assert [attempt.outcome for attempt in attempts(held[0])] == ["lost", "returned"]
    assert [attempt.outcome for attempt in attempts(held[1])] == ["returned"]
    workers = {attempt.worker for job in held for attempt in attempts(job)}
    assert workers == {"twin/1", "twin/2"}


def test_a_stopped_child_is_killed_after_a_lease_and_its_job_runs_elsewhere(
    start_worker: StartWorker, gate: Gate, durable_jobs: Callable[..., None]
) -> None:
    # Its successor must not stand still for so long.
    settings = {**QUICK, "LEASE_SECONDS": 8, "TIMEOUT_SECONDS": 7.5}
    durable_jobs(**settings)
    job = jobs.hanging.submit(jobs.Gate(**gate.payload("work")))
    worker = start_worker("--processes=1", durable_jobs=settings)
    hung = int(gate.begun("work", 1).split()[0])
    successor = int(gate.begun("work", 2).split()[0])
    assert hung != successor
    assert not is_alive(hung)
    assert f"worker process {hung} has been silent" in worker.output()
    until(lambda: fresh(job).status == "succeeded")
    worker.send()
    assert worker.ends() == 0, worker.output()
    assert [attempt.outcome for attempt in attempts(job)] == ["lost", "returned"]
