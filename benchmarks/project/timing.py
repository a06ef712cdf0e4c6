"""How time is taken: side by side in turns, and from the finished rows of a drain."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass


def rates(ways: dict[str, Callable[[int], None]], *, count: int, rounds: int) -> dict[str, float]:
    """Give jobs per second of each way to make ``count`` jobs.

    They take turns, each a part of its jobs in a round, so that whatever else the machine
    does meanwhile falls on all of them.
    """
    spent = dict.fromkeys(ways, 0.0)
    part = max(1, count // rounds)
    for number in range(rounds):
        for name in list(ways) if number % 2 == 0 else reversed(ways):
            begin = time.perf_counter()
            ways[name](part)
            spent[name] += time.perf_counter() - begin
    return {name: part * rounds / seconds for name, seconds in spent.items()}


@dataclass(frozen=True)
class Run:
    """One execution of one job; instants in seconds."""

    worker: str
    started: float
    finished: float


def drained(runs: Iterable[Run]) -> dict[str, float]:
    """Give the rate of a drain, from the moment that its last worker began to the last finish.

    So the start of the processes does not count, nor does what the first worker did alone.
    """
    runs = list(runs)
    first: dict[str, float] = {}
    for run in runs:
        first[run.worker] = min(run.started, first.get(run.worker, run.started))
    begin = max(first.values())
    end = max(run.finished for run in runs)
    counted = sum(run.finished > begin for run in runs)
    return {
        "rate": counted / (end - begin),
        "seconds": end - begin,
        "counted": counted,
        "jobs": len(runs),
        "workers": len(first),
    }


def summary(seconds: list[float]) -> dict[str, float]:
    """Give median, 95th percentile and maximum, in milliseconds."""
    ordered = sorted(seconds)
    return {
        "median": statistics.median(ordered) * 1000,
        "p95": ordered[int(len(ordered) * 0.95)] * 1000,
        "max": ordered[-1] * 1000,
    }
