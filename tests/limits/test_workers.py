"""Real workers under limits: killed, stopped, of old and of new code (CONTRACT 3.12, FAULTS 20)."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from django_durable_jobs import JobSubmission
from django_durable_jobs.models import Job, JobAttempt
from django_durable_jobs.testing import expire_lease

from ..soak.history import effects_in
from ..testapp import jobs
from ..worker.conftest import StartWorker
from ..worker.support import QUICK, Gate, attempts, fresh, only_attempt, until
from .overlap import Limit, of_handler, of_payload, overshoots, stays, watched

pytestmark = pytest.mark.django_db(transaction=True)

ALONE = {jobs.alone.name: Limit(number=1, key=of_handler)}
# Nothing here takes as long, and nobody waits that long either.
LONGER = {**QUICK, "LEASE_SECONDS": 600, "TIMEOUT_SECONDS": 500}
ONE_SLOT = ("--processes=0", "--threads=1")


def submit(gate: Gate, name: str, **options: object) -> Job:
    return jobs.alone.submit(jobs.Gate(**gate.payload(name)), **options)


def test_a_killed_holder_keeps_its_place_until_it_is_recovered_and_hides_nobody(
    start_worker: StartWorker, gate: Gate, durable_jobs: Callable[..., None]
) -> None:
    durable_jobs(**LONGER)
    workers = [start_worker(*ONE_SLOT, durable_jobs=LONGER) for _ in range(2)]
    holder = submit(gate, "holder")
    pid = int(gate.begun("holder").split()[0])
    # All of them before those that no limit holds back.
    waiting = [submit(gate, f"waiting-{number}", priority=1) for number in range(20)]
    others = [jobs.nothing.submit() for _ in range(3)]
    until(lambda: all(fresh(one).status == "succeeded" for one in others), "those of no limit")
    assert Job.objects.filter(limit_waiting=True).count() == len(waiting)
    [killed] = [one for one in workers if one.pid == pid]
    killed.send(signal.SIGKILL)
    killed.ends()
    for name in ("holder", *(f"waiting-{number}" for number in range(20))):
        gate.open(name)
    after = [jobs.nothing.submit() for _ in range(3)]
    until(lambda: all(fresh(one).status == "succeeded" for one in after), "later ones")
    assert fresh(holder).ownership == "current"
    assert Job.objects.filter(limit_waiting=True).count() == len(waiting)
    expire_lease(holder)
    # A worker looks for expired leases as it starts, and then every tenth of a lease.
    start_worker(*ONE_SLOT, durable_jobs=LONGER)
    until(lambda: not Job.objects.exclude(status="succeeded").exists(), "all of them")
    lost, again = attempts(holder)
    assert (lost.outcome, again.outcome) == ("lost", "returned")
    assert lost.finished_at <= min(only_attempt(one).started_at for one in waiting)
    assert overshoots(stays(ALONE)) == []


def test_a_stopped_holder_passes_its_place_on_at_once(
    start_worker: StartWorker,
    gate: Gate,
) -> None:
    impatient = {**LONGER, "SHUTDOWN_SECONDS": 0.1}
    holder = submit(gate, "holder")
    stopped = start_worker(*ONE_SLOT, durable_jobs=impatient)
    gate.begun("holder")
    waiting = submit(gate, "waiting", priority=1)
    gate.open("waiting")
    start_worker(*ONE_SLOT, durable_jobs=LONGER)
    until(lambda: fresh(waiting).limit_waiting, "the limit to be met")
    stopped.send()
    assert stopped.ends() == 0, stopped.output()
    # Long before the lease is over.
    until(lambda: fresh(waiting).status == "succeeded", "the next")
    gate.open("holder")
    until(lambda: fresh(holder).status == "succeeded", "the first again")
    assert [one.outcome for one in attempts(holder)] == ["stopped", "returned"]
    assert overshoots(stays(ALONE)) == []


@pytest.mark.long
def test_old_and_new_code_each_go_by_their_own_number(
    start_worker: StartWorker,
    tmp_path: Path,
) -> None:
    numbers = {"old": 3, "new": 1}
    limits = {jobs.keyed.name: Limit(number=0, numbers=numbers, key=of_payload)}
    work = jobs.Keyed(
        effects=str(tmp_path / "effects"), seconds=0.02, obedient=False, failures=0, key="a"
    )
    for name, number in numbers.items():
        start_worker(
            *("--processes=0", "--threads=4", f"--name={name}"),
            durable_jobs=LONGER,
            variables={"TEST_LIMIT": str(number)},
        )
    by_worker = JobAttempt.objects.values_list("worker", flat=True).distinct()

    def both_have_worked() -> bool:
        """Another job for whoever comes first, until each of them was that once."""
        until(lambda: not Job.objects.exclude(status="succeeded").exists(), "all of them")
        if set(by_worker.all()) == set(numbers):
            return True
        jobs.keyed.submit(work)
        return False

    with watched(limits):
        Job.objects.submit_many(JobSubmission.create(jobs.keyed, work) for _ in range(60))
        until(both_have_worked, "each to have had work")
    assert overshoots(stays(limits)) == []
    assert len(effects_in(tmp_path / "effects")) == 2 * Job.objects.count()
