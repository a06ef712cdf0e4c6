"""A server that is away for a minute in the midst of work (CONTRACT 4.8)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import environ
import pytest
from django.core.management import call_command
from django.db import connection, connections

from django_durable_jobs import JobSubmission
from django_durable_jobs.models import Job, JobAttempt

from .._postgres import Server, running
from ..racing import another_alias
from ..soak.history import effects_in, violations
from ..testapp import jobs
from ..testapp.models import Business
from .conftest import StartWorker
from .support import Gate, Process, processor_seconds, until

AWAY = "away"
OUTAGE = 60.0
# So many that the outage comes in their midst, also where the test stands still before it.
HASTY = 2000
# By queue: one lease outlasts the outage, the other does not.
LEASES = {"patient": 180, "hasty": 8}
# Each says that a loop has waited: a handful of them in each process, up to five seconds each.
LINES = 1000
# Of one processor, for each process; a busy loop takes all that it gets.
SHARE = 0.1
PATIENCE = 90.0

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor == "sqlite", reason="a file has no server to stop"),
]


@pytest.fixture
def server() -> Iterator[Server]:
    """A server that is this test's alone; its database has the alias ``AWAY``."""
    with running() as one, another_alias(AWAY, **environ.Env.db_url_config(one.url)):
        call_command("migrate", database=AWAY, run_syncdb=True, verbosity=0)
        yield one


class Workers:
    """For each queue a supervisor with two processes."""

    def __init__(self, start: StartWorker, url: str) -> None:
        self._of_queue: dict[str, Process] = {
            queue: start(
                *("--processes=2", "--threads=4", f"--queues={queue}"),
                durable_jobs={"LEASE_SECONDS": lease, "POLL_SECONDS": 0.2},
                variables={"DATABASE_URL": url, "TEST_DATABASE_NAME": "postgres"},
            )
            for queue, lease in LEASES.items()
        }

    def pids(self) -> list[int]:
        return [pid for one in self._of_queue.values() for pid in (one.pid, *one.children())]

    def computed(self) -> list[float]:
        return [processor_seconds(pid) for pid in self.pids()]

    def lines(self) -> int:
        return sum(one.output().count("\n") for one in self._of_queue.values())

    def output(self, queue: str) -> str:
        return self._of_queue[queue].output()

    def end(self) -> None:
        for one in self._of_queue.values():
            one.send()
            assert one.ends() == 0, one.output()


class Load:
    """What the workers have to do, and how it came out."""

    def __init__(self, gate: Gate, effects: Path) -> None:
        self._gate, self._effects = gate, effects
        self._account = Business.objects.using(AWAY).create(name="account").pk
        self.jobs = Job.objects.using(AWAY)

    def gated(self, handler: Any, queue: str, names: str) -> None:
        """One job for each letter, before all others of the queue."""
        payloads = [(name, jobs.Gate(**self._gate.payload(name))) for name in names]
        self._submit(
            self._one(handler, payload, queue, job_id=name, priority=1)
            for name, payload in payloads
        )

    def brief(self, queue: str, count: int) -> None:
        """Some have an effect in the database, some outside of it."""
        work = jobs.Work(effects=str(self._effects), seconds=0.05, obedient=False, failures=0)
        pairs = ((jobs.work, work), (jobs.deposit, 1))
        self._submit(self._one(*pairs[number % 2], queue) for number in range(count))

    def _one(self, handler: Any, payload: Any, queue: str, **options: Any) -> JobSubmission:
        scope = str(self._account)
        return JobSubmission.create(handler, payload, queue=queue, scope=scope, **options)

    def _submit(self, submissions: Iterator[JobSubmission]) -> None:
        Job.objects.submit_many(submissions, using=AWAY)

    def done(self, queue: str) -> int:
        return self.jobs.filter(queue=queue, status="succeeded").count()

    def outcomes(self, **which: Any) -> set[tuple[str, ...]]:
        """Give what became of the attempts of each such job, each history once."""
        found: dict[int, tuple[str, ...]] = {}
        for one in JobAttempt.objects.using(AWAY).filter(**which).order_by("job_id", "number"):
            found[one.job_id] = (*found.get(one.job_id, ()), one.outcome)
        return set(found.values())

    def judge(self) -> None:
        """Each job is done, and has had its effect once."""
        assert not self.jobs.exclude(status="succeeded").exists()
        deposits = [jobs.deposit.name, jobs.gated_deposit.name]
        balance = Business.objects.using(AWAY).get(pk=self._account).value
        assert balance == self.jobs.filter(handler__in=deposits).count()
        work = self.jobs.filter(handler=jobs.work.name)
        attempts = JobAttempt.objects.using(AWAY).filter(job__in=work)
        assert (
            violations(
                work.values_list("job_id", flat=True),
                [],
                work,
                attempts.order_by("job_id", "number"),
                effects_in(self._effects),
            )
            == []
        )


def test_no_end_and_no_effect_is_lost_while_the_server_is_away_for_a_minute(
    server: Server,
    start_worker: StartWorker,
    gate: Gate,
    durable_jobs: Callable[..., None],
    tmp_path: Path,
) -> None:
    durable_jobs(TIMEOUT_SECONDS=250)
    load = Load(gate, tmp_path / "effects")
    # All slots of the patient, so that no claim of theirs is under way when the server goes.
    load.gated(jobs.gated, "patient", "abcdef")
    load.gated(jobs.gated_deposit, "patient", "gh")
    load.brief("patient", 100)
    load.gated(jobs.obedient, "hasty", "yz")
    workers = Workers(start_worker, server.url)
    for name in "abcdefghyz":
        gate.begun(name)
    load.brief("hasty", HASTY)
    until(lambda: load.done("hasty") > 50, "the midst of the work", PATIENCE)
    pids = workers.pids()

    connections[AWAY].close()
    server.stop()
    for name in "abcg":
        gate.open(name)
    time.sleep(5)
    computed, lines = workers.computed(), workers.lines()
    time.sleep(OUTAGE / 2)
    for name in "defh":
        gate.open(name)
    time.sleep(OUTAGE / 2 - 5)
    computed = [now - then for now, then in zip(workers.computed(), computed, strict=True)]
    lines = workers.lines() - lines
    server.start()

    assert 0 < load.done("hasty") < HASTY, "it was in the midst of the work"
    for name in "yz":
        gate.begun(name, attempt=2)
        gate.open(name)
    until(lambda: not load.jobs.exclude(status="succeeded").exists(), "the rest", PATIENCE)
    load.judge()
    assert load.outcomes(job__queue="patient") == {("returned",)}
    for outcomes in load.outcomes(job__job_id__in=["y", "z"]):
        # On a slow machine a later attempt may outlast its lease, too.
        *lost, last = outcomes
        assert set(lost) == {"lost"} and last == "returned", outcomes
    assert max(computed) < SHARE * OUTAGE
    assert lines < LINES
    assert workers.pids() == pids
    workers.end()
    assert "Traceback" not in workers.output("patient")
