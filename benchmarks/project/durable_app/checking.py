"""What the checks of a small payload cost, at submission and at dispatch; no database."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django_durable_jobs import JobContext, JobSubmission, job
from django_durable_jobs.payloads import payload_sha256
from django_durable_jobs.transitions.claims import ClaimedJob
from django_durable_jobs.worker.execution import Dispatch, prepare

__all__ = ["checks"]


@dataclass
class Ship:
    order: int
    carrier: str = "post"


def checks(*, count: int, rounds: int) -> dict[str, dict[str, float]]:
    """Give least and median of the processor's time for each, in microseconds."""

    @job("bench.checked")
    def checked(ctx: JobContext, payload: Ship) -> None: ...

    payload = Ship(order=5, carrier="rail")
    claimed = _claimed(JobSubmission.create(checked, payload))
    if not isinstance(prepare(claimed), Dispatch):
        raise AssertionError("the payload would not be dispatched")

    def submission() -> None:
        payload_sha256(checked.codec.encode(payload))

    def both() -> None:
        submission()
        prepare(claimed)

    ways = {
        "submission": submission,
        "dispatch": lambda: prepare(claimed),
        "both": both,
        "the whole JobSubmission": lambda: JobSubmission.create(checked, payload),
    }
    return {name: _timed(way, count, rounds) for name, way in ways.items()}


def _claimed(submission: JobSubmission) -> ClaimedJob:
    given = {
        name: getattr(submission, name)
        for name in ClaimedJob.__dataclass_fields__
        if name in JobSubmission.__dataclass_fields__
    }
    left: dict[str, Any] = dict.fromkeys(ClaimedJob.__dataclass_fields__, 1)
    return ClaimedJob(**(left | given))


def _timed(way: Callable[[], Any], count: int, rounds: int) -> dict[str, float]:
    spent = []
    for _ in range(rounds + 1):
        begin = time.process_time()
        for _ in range(count):
            way()
        spent.append((time.process_time() - begin) / count * 1e6)
    return {"min": min(spent[1:]), "median": statistics.median(spent[1:])}
