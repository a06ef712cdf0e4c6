"""A hundred shutdowns of workers that are busy, each at an instant of its own (CONTRACT 4.7)."""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import pytest
from django.db import connection, connections

from django_durable_jobs import JobSubmission
from django_durable_jobs.models import Job, JobAttempt

from ..soak.history import effects_in, violations
from ..testapp import jobs
from ..testapp.models import Business
from ..transitions.live import check_rows
from .conftest import StartWorker
from .support import QUICK, Process, until

ROUNDS, AT_ONCE = 100, 4
BACKLOG = 60
# Some handlers run for longer than the first, none for as long as both.
SETTINGS = {**QUICK, "SHUTDOWN_SECONDS": 0.2, "TIMEOUT_GRACE_SECONDS": 20}
PROCESSES = 2 if connection.vendor == "postgresql" else 0


class Load:
    """Jobs of every kind, so many that no worker runs out of them; none may be tried twice."""

    def __init__(self, draw: random.Random, effects: Path) -> None:
        self._draw, self._effects = draw, effects
        self._account = Business.objects.create(name="account").pk
        self._lock = Lock()
        self.top_up()

    def top_up(self) -> None:
        with self._lock:
            missing = BACKLOG - Job.objects.filter(status="queued").count()
            Job.objects.submit_many([self._one() for _ in range(missing)])

    def _one(self) -> JobSubmission:
        kind = self._draw.randrange(10)
        if kind < 2:
            deposit = (jobs.deposit, jobs.deposit_at_the_end)[kind]
            return JobSubmission.create(deposit, 1, scope=str(self._account), max_attempts=1)
        payload = jobs.Work(
            effects=str(self._effects),
            seconds=self._draw.choice([0, 0, 0, 0.01, 0.01, 0.05, 0.3, 1.5]),
            obedient=self._draw.random() < 0.8,
            failures=0,
        )
        return JobSubmission.create(jobs.work, payload, max_attempts=1)

    def judge(self) -> None:
        """Every job was done, and none would have been if a shutdown had used up its execution."""
        assert not Job.objects.exclude(status="succeeded").exists()
        check_rows()
        work = Job.objects.filter(handler=jobs.work.name)
        attempts = JobAttempt.objects.filter(job__in=work).order_by("job_id", "number")
        done = work.values_list("job_id", flat=True)
        assert violations(done, [], work, attempts, effects_in(self._effects)) == []
        deposits = Job.objects.exclude(handler=jobs.work.name).count()
        assert Business.objects.get(pk=self._account).value == deposits > 0


def signal_it(worker: Process, draw: random.Random) -> None:
    send = draw.choice([worker.send, worker.send_group])
    send(draw.choice([signal.SIGTERM, signal.SIGINT]))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.django_db(transaction=True)
def test_busy_workers_leave_nothing_behind_whenever_they_are_told_to_end(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    seed = os.environ.get("SHUTDOWNS_SEED", str(random.randrange(10**6)))
    logging.warning("SHUTDOWNS_SEED=%s", seed)
    load = Load(random.Random(seed), tmp_path / "effects")

    def shut_down(number: int) -> bool:
        """Start a worker and end it; tell whether it had begun a job."""
        draw = random.Random(f"{seed} {number}")
        name = f"round-{number:03}"
        worker = start_worker(
            *(f"--processes={PROCESSES}", "--threads=4", f"--name={name}"), durable_jobs=SETTINGS
        )
        mine = JobAttempt.objects.filter(worker__startswith=name)
        try:
            load.top_up()
            until(lambda: f"Worker {name} on" in worker.output(), "a start")
            # While it starts, around its first claim, or in the midst of work.
            if number % 4:
                until(lambda: load.top_up() or mine.exists(), "a claim")
            delay = draw.uniform(0, 0.1 if number % 4 < 2 else 1)
            time.sleep(delay)
            signal_it(worker, draw)
            said = f"{name} after {delay:.3f} s:\n"
            assert worker.ends(60) == 0, said + worker.output()
            for bad in ("Traceback", " ERROR ", "Warning"):
                assert bad not in worker.output(), said + worker.output()
            left = mine.exclude(status="succeeded").exclude(outcome="stopped")
            assert list(left.values_list("job", "status", "outcome")) == [], said + worker.output()
            return mine.exists()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        begun = list(pool.map(shut_down, range(ROUNDS)))
    assert not Job.objects.exclude(status__in=["queued", "succeeded"]).exists()
    last = start_worker("--drain", "--threads=8", durable_jobs=QUICK)
    assert last.ends(60) == 0, last.output()
    load.judge()
    # Nothing of this was shown by workers that had nothing to do.
    assert begun.count(True) >= ROUNDS / 2
    assert JobAttempt.objects.filter(outcome="stopped").count() > 0
