"""The detector that decides about limits: who had a place, from when to when."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from threading import Event
from typing import Any

from django_durable_jobs.instants import from_microseconds
from django_durable_jobs.models import Job, JobAttempt

from ..transitions.live import database_now
from ..worker.support import Background


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """``key`` of a job, ``None`` for no limit; ``numbers`` of workers, by a part of their names."""

    number: int
    key: Callable[[Job], Hashable | None]
    numbers: Mapping[str, int] = field(default_factory=dict)

    @property
    def most(self) -> int:
        return max(self.number, *self.numbers.values(), 0)

    def of(self, worker: str) -> int:
        return next((n for part, n in self.numbers.items() if part in worker), self.number)


def of_handler(job: Job) -> Hashable:
    return ""


def of_scope(job: Job) -> Hashable:
    return job.scope


def of_payload(job: Job) -> Hashable | None:
    return json.loads(job.payload)["key"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """An attempt under a limit, which had its place from ``start`` until just before ``end``."""

    who: str
    key: Hashable
    limit: int
    start: Any
    end: Any


def overshoots(stays: Iterable[Stay]) -> list[str]:
    """Name each that began where as many as its limit allows were already."""
    there: dict[Hashable, list[Any]] = defaultdict(list)
    found = []
    for one in sorted(stays, key=lambda stay: (stay.start, stay.end)):
        ends = there[one.key]
        while ends and ends[0] <= one.start:
            heappop(ends)
        if len(ends) >= one.limit:
            found.append(f"{one.who} began beside {len(ends)} of {one.key}, {one.limit} allowed")
        heappush(ends, one.end)
    return found


def stays(limits: Mapping[str, Limit]) -> list[Stay]:
    """Read what the attempts say; one that is open has its place now."""
    now = from_microseconds(database_now() + 1)
    attempts = JobAttempt.objects.filter(job__handler__in=limits).select_related("job")
    found = []
    for one in attempts:
        limit = limits[one.job.handler]
        if (key := limit.key(one.job)) is not None:
            stay = Stay(
                who=f"attempt {one.number} of job {one.job_id} by {one.worker}",
                key=(one.job.handler, key),
                limit=limit.of(one.worker),
                start=one.started_at,
                end=one.finished_at or now,
            )
            found.append(stay)
    return found


def running(limits: Mapping[str, Limit]) -> Counter[tuple[str, Hashable]]:
    """Count the running jobs of each key in one snapshot."""
    jobs = Job.objects.filter(status="running", handler__in=limits)
    keys = ((one.handler, limits[one.handler].key(one)) for one in jobs)
    return Counter(key for key in keys if key[1] is not None)


@contextmanager
def watched(limits: Mapping[str, Limit]) -> Iterator[Counter[tuple[str, Hashable]]]:
    """Look at the running rows again and again; give the most that were seen of each key.

    What is not yet committed as ended still has its place, whatever its attempt will say.
    """
    seen: Counter[tuple[str, Hashable]] = Counter()
    over = Event()

    def look() -> None:
        while not over.is_set():
            for key, count in running(limits).items():
                seen[key] = max(seen[key], count)
            time.sleep(0.01)

    looking = Background(look)
    try:
        yield seen
    finally:
        over.set()
        looking.ends()
    assert all(most <= limits[key[0]].most for key, most in seen.items()), seen
