"""What the tests of scheduling passes share: a start, minutes after it, and the rows."""

from __future__ import annotations

from datetime import datetime, timedelta

from django_durable_jobs.models import Job, ScheduleCursor

from .oracle import MINUTE, utc

START = utc("2026-03-01T12:00")
HOUR = timedelta(hours=1)


def minutes(jobs: list[Job]) -> list[datetime | None]:
    return [one.scheduled_for for one in jobs]


def every(count: int, *, after: datetime = START) -> list[datetime]:
    return [after + n * MINUTE for n in range(1, count + 1)]


def cursor(name: str = "tick") -> ScheduleCursor:
    found: ScheduleCursor = ScheduleCursor.objects.get(name=name)
    return found


def stored(name: str = "tick") -> list[datetime | None]:
    return minutes(list(Job.objects.filter(schedule=name).order_by("id")))
