"""What schedules cost a worker: its start, a pass with nothing due, one in which all are due."""

from __future__ import annotations

import time
from typing import Any

from django.db import connection
from django.test.utils import CaptureQueriesContext
from django_durable_jobs import schedule
from django_durable_jobs.models import ScheduleCursor
from django_durable_jobs.schedules import cursors
from django_durable_jobs.schedules.declaration import registry
from django_durable_jobs.schedules.passes import Scheduler

from copies import settle
from timing import summary

from .jobs import noop

__all__ = ["schedules"]


def schedules(*, count: int, passes: int) -> dict[str, Any]:
    """Declare ``count`` schedules and time the passes of one worker, in milliseconds."""
    for number in range(count):
        schedule(f"bench {number}", "0 0 1 1 *", noop, number)
    first = _took(lambda: cursors.activate("default", registry.all()))
    settle()
    again = _took(lambda: cursors.activate("default", registry.all()))
    scheduler = Scheduler("default")
    idle = [_took(lambda: _fires(scheduler, 0)) for _ in range(passes)]
    with CaptureQueriesContext(connection) as caught:
        scheduler.run()
    ScheduleCursor.objects.update(next_minute=0)
    due = _took(lambda: _fires(scheduler, count))
    return {
        "first": first * 1000,
        "again": again * 1000,
        "idle": summary(idle),
        "queries": len(caught),
        "due": due * 1000,
    }


def _took(work: Any) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _fires(scheduler: Scheduler, count: int) -> None:
    fired = scheduler.run().jobs
    if len(fired) != count:
        raise AssertionError(f"{len(fired)} jobs were fired instead of {count}")
