"""What is measured of django-durable-jobs inside a process."""

from __future__ import annotations

import time
from typing import Any

from django.core.management import call_command
from django.db import transaction
from django.db.models import Max
from django_durable_jobs.handlers import registry
from django_durable_jobs.instants import to_microseconds
from django_durable_jobs.models import Job, JobAttempt
from django_durable_jobs.transitions.claims import claim, queued_lanes

from copies import settle
from timing import Run, drained, rates, summary

from .bare import BareInserts
from .checking import checks
from .jobs import limited, noop
from .plans import plans
from .rows import at_limit, crowd, queued
from .scheduling import schedules

__all__ = [
    "at_limit",
    "bulk",
    "checks",
    "claims",
    "crowd",
    "enqueue",
    "fill",
    "migrate",
    "plans",
    "queued",
    "result",
    "schedules",
]

HANDLERS = {"noop": noop, "limited": limited}
WARM_UP = 50
LEASE_SECONDS = 60


def migrate() -> None:
    call_command("migrate", verbosity=0)


def enqueue(*, count: int, rounds: int = 10) -> dict[str, float]:
    """Make jobs one by one, in each of the ways; give jobs per second."""
    bare, bare_staged = BareInserts(count + WARM_UP), BareInserts(count + WARM_UP)
    ways = {
        "submit": _submit,
        "stage": _stage,
        "bare": bare.one_by_one,
        "bare_atomic": lambda number: _each_in_atomic(bare_staged, number),
    }
    for way in ways.values():
        way(WARM_UP)
    return rates(ways, count=count, rounds=rounds)


def bulk(*, count: int, rounds: int = 2) -> dict[str, float]:
    """Make ``count`` jobs in one call, ``rounds`` times; give jobs per second."""
    bare = BareInserts(count * rounds + WARM_UP)
    ways = {"submit_many": _submit_many, "bare": bare.in_bulk}
    for way in ways.values():
        way(WARM_UP)
    return rates(ways, count=count * rounds, rounds=rounds)


def fill(*, count: int) -> dict[str, int]:
    """Make the jobs of a drain; ``after`` is the highest id before them."""
    after = Job.objects.aggregate(last=Max("id"))["last"] or 0
    _submit_many(count)
    settle()
    return {"after": after}


def result(*, after: int, count: int) -> dict[str, float]:
    """Judge a drain by its attempts: one for each job, all succeeded."""
    attempts = JobAttempt.objects.filter(job_id__gt=after, status="succeeded")
    rows = list(attempts.values_list("job_id", "worker", "started_at", "finished_at"))
    if len(rows) != count or len({row[0] for row in rows}) != count:
        raise AssertionError(f"{len(rows)} attempts succeeded, for {count} jobs")
    return drained(
        Run(worker=worker, started=_seconds(started), finished=_seconds(finished))
        for _, worker, started, finished in rows
    )


def claims(*, count: int, limit: int, queue: str, handler: str = "noop") -> dict[str, Any]:
    """Time claims of a worker that serves one queue and knows the handlers of this process."""
    warm_up = max(3, count // 10)
    HANDLERS[handler].submit_many(range((count + warm_up) * limit), queue=queue)
    settle()
    looks, takes = [], []
    for _ in range(count + warm_up):
        begin = time.perf_counter()
        lanes = [lane for lane in queued_lanes("default") if lane.queue == queue and _runs(lane)]
        middle = time.perf_counter()
        jobs = claim("default", lanes, limit=limit, worker="bench", lease_seconds=LEASE_SECONDS)
        takes.append(time.perf_counter() - middle)
        looks.append(middle - begin)
        if len(jobs) != limit or any(job.queue != queue for job in jobs):
            raise AssertionError(f"claimed {len(jobs)} jobs instead of {limit} of queue {queue}")
    looks, takes = looks[warm_up:], takes[warm_up:]
    whole = [look + take for look, take in zip(looks, takes, strict=True)]
    return {"claim": summary(whole), "lanes": summary(looks), "statement": summary(takes)}


def _runs(lane: Any) -> bool:
    handler = registry.get(lane.handler, lane.version)
    return handler is not None and handler.fingerprint == lane.fingerprint


def _submit(count: int) -> None:
    for number in range(count):
        noop.submit(number)


def _stage(count: int) -> None:
    for number in range(count):
        with transaction.atomic():
            noop.stage(number)


def _each_in_atomic(bare: BareInserts, count: int) -> None:
    for _ in range(count):
        with transaction.atomic():
            bare.one_by_one(1)


def _submit_many(count: int) -> None:
    noop.submit_many(range(count))


def _seconds(instant: Any) -> float:
    return to_microseconds(instant) / 1_000_000
