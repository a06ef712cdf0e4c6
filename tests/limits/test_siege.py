"""Workers under siege and under limits: never too many, and in the end nobody waits (FAULTS 20)."""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from django_durable_jobs import JobSubmission, states
from django_durable_jobs.models import Job, JobAttempt

from ..soak.history import effects_in, violations
from ..testapp import jobs
from ..transitions.live import check_rows
from ..worker.conftest import StartWorker
from ..worker.support import SHORT, Process, is_buried, until
from .overlap import Limit, Stay, of_payload, of_scope, overshoots, stays, watched

SECONDS = 25
BACKLOG = 60
LIMITS = {
    jobs.keyed.name: Limit(number=2, key=of_payload),
    jobs.scoped.name: Limit(number=1, key=of_scope),
}
SETTINGS = {**SHORT, "SHUTDOWN_SECONDS": 0.2, "RETRY_BASE_SECONDS": 0.1, "RETRY_MAX_SECONDS": 0.5}
COMMANDS = (["--processes=0"], ["--processes=0"], ["--processes=2"])


class Siege:
    """Three commands, four worker processes; jobs for them, and what befalls them."""

    def __init__(self, start: StartWorker, effects: Path, draw: random.Random) -> None:
        self._start, self._effects, self._draw = start, effects, draw
        self._workers = [self._begin(number) for number in range(len(COMMANDS))]
        self.cancelled: set[str] = set()

    def _begin(self, number: int) -> Process:
        return self._start(*COMMANDS[number], "--threads=4", durable_jobs=SETTINGS)

    def run(self) -> None:
        """For a time, and until a kill has met a job that ran and the job was recovered."""
        end = time.monotonic() + SECONDS
        lost = JobAttempt.objects.filter(outcome="lost")
        while time.monotonic() < end or not lost.exists():
            self._top_up()
            self._cancel()
            self._draw.choice([self._kill, self._restart])()
            time.sleep(self._draw.uniform(0.1, 0.8))

    def _top_up(self) -> None:
        missing = BACKLOG - Job.objects.filter(status__in=states.LIVE).count()
        Job.objects.submit_many([self._one() for _ in range(missing)])

    def _one(self) -> JobSubmission:
        draw = self._draw
        values = {
            "effects": str(self._effects),
            "seconds": draw.choice([0, 0.01, 0.05, 0.2]),
            "obedient": draw.random() < 0.8,
            "failures": 0.1,
        }
        options = {"scope": draw.choice("xyz"), "priority": draw.randint(0, 1)}
        if draw.random() < 0.3:
            return JobSubmission.create(jobs.scoped, jobs.Work(**values), **options)
        key = draw.choice(["a", "b", "c", None])
        return JobSubmission.create(jobs.keyed, jobs.Keyed(**values, key=key), **options)

    def _cancel(self) -> None:
        live = Job.objects.filter(status__in=states.LIVE).values_list("pk", flat=True)
        if live:
            job = Job.objects.get(pk=self._draw.choice(list(live)))
            self.cancelled.add(job.job_id)
            job.request_cancel()

    def _kill(self) -> None:
        """SIGKILL to a worker or to one of a supervisor's children."""
        number = self._draw.randrange(len(COMMANDS))
        worker = self._workers[number]
        victim = self._draw.choice([worker.pid, *worker.children()])
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        if victim == worker.pid:
            # The children of a supervisor that is gone end by themselves.
            worker.ends()
            self._workers[number] = self._begin(number)
        else:
            # One that it finds dead while it stops would count as not ended in order.
            until(lambda: is_buried(victim), "its supervisor to bury it")

    def _restart(self) -> None:
        number = self._draw.randrange(len(COMMANDS))
        self._workers[number].send()
        code = self._workers[number].ends()
        # Its Python may not have come to our handlers of signals.
        assert code in (0, -signal.SIGTERM), self._workers[number].output()
        self._workers[number] = self._begin(number)


def heard(effects: Path) -> list[Stay]:
    """Read from the handlers' own notes when they ran, of those whose end was written."""
    ended = JobAttempt.objects.filter(outcome="returned").select_related("job")
    of_token = {one.token: one for one in ended}
    begun: dict[str, float] = {}
    found = []
    for effect in effects_in(effects):
        attempt = of_token.get(effect.token)
        if effect.what == "begin":
            begun[effect.token] = effect.at
        elif attempt is not None:
            limit = LIMITS[attempt.job.handler]
            if (key := limit.key(attempt.job)) is not None:
                found.append(
                    Stay(
                        who=effect.job,
                        key=(attempt.job.handler, key),
                        limit=limit.number,
                        start=begun[effect.token],
                        end=effect.at,
                    )
                )
    return found


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.django_db(transaction=True)
def test_a_siege(
    start_worker: StartWorker, durable_jobs: Callable[..., None], tmp_path: Path
) -> None:
    durable_jobs(**SHORT)
    seed = os.environ.get("LIMITS_SEED", str(random.randrange(10**6)))
    logging.warning("LIMITS_SEED=%s", seed)
    effects = tmp_path / "effects"
    siege = Siege(start_worker, effects, random.Random(seed))
    with watched(LIMITS) as seen:
        siege.run()
        live = Job.objects.filter(status__in=states.LIVE)
        # By the workers' own passes alone.
        until(lambda: not live.exists(), "those who wait")
    assert overshoots(stays(LIMITS)) == []
    assert overshoots(heard(effects)) == []
    check_rows()
    names = Job.objects.values_list("job_id", flat=True)
    attempts = JobAttempt.objects.order_by("job_id", "number")
    found = violations(names, siege.cancelled, Job.objects.all(), attempts, effects_in(effects))
    assert found == []
    assert {"returned", "lost"} <= set(attempts.values_list("outcome", flat=True))
    assert max(seen.values()) == 2, "nobody was beside anybody"
