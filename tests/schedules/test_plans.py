"""What the schedules ask all day is one indexed query, beside a thousand of them (FAULTS 24)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_durable_jobs import schedule
from django_durable_jobs.dialects.base import CURSORS
from django_durable_jobs.models import Job
from django_durable_jobs.schedules import cursors
from django_durable_jobs.schedules.overview import last_times
from django_durable_jobs.schedules.passes import Scheduler
from django_durable_jobs.testing import FakeClock, run_schedules
from tests._rows import job_row

from .oracle import MINUTE, utc

START = utc("2026-03-01T12:00")
SCHEDULES = 1000


@pytest.fixture
def many(tick: Any, db: None) -> None:
    """A thousand schedules, of which nothing is due before midnight."""
    for number in range(SCHEDULES):
        schedule(f"tick {number}", "0 0 * * *", tick)
    with FakeClock(START):
        run_schedules()
    with connection.cursor() as cursor:
        # Of so small a table PostgreSQL may read everything while it knows nothing of it. This
        # table alone: what is found of others would stay after the test.
        cursor.execute(f"ANALYZE {CURSORS}")


def plan_of(work: Callable[[], object]) -> str:
    with CaptureQueriesContext(connection) as caught:
        work()
    [query] = caught.captured_queries
    word = "EXPLAIN QUERY PLAN" if connection.vendor == "sqlite" else "EXPLAIN (COSTS OFF)"
    with connection.cursor() as cursor:
        cursor.execute(f"{word} {query['sql']}")
        return "\n".join(str(row[-1]) for row in cursor.fetchall())


def test_nothing_due_is_one_query_by_index(many: None) -> None:
    with FakeClock(START) as clock:
        scheduler = Scheduler("default")
        with CaptureQueriesContext(connection) as caught:
            assert scheduler.run().jobs == []
        assert len(caught) == 1
        plan = plan_of(lambda: cursors.due("default"))
        assert "durable_cursor_due" in plan and "Seq Scan" not in plan
        clock.advance(timedelta(hours=12))
        assert len(cursors.due("default")[1]) == SCHEDULES


def test_the_newest_occurrences_are_read_by_index(db: None) -> None:
    rows = (
        job_row(schedule=f"tick {n % 3}" if n % 4 else None, scheduled_for=START + n * MINUTE)
        for n in range(3000)
    )
    Job.objects.bulk_create(rows)
    names = ["tick 0", "tick 1", "nobody"]
    plan = plan_of(lambda: last_times("default", names))
    assert plan.count("durable_job_occurrence") == len(names)
    found = last_times("default", names)
    kept = [START + n * MINUTE for n in range(3000) if n % 3 == 0 and n % 4]
    assert found["tick 0"] == kept[-5:]
    assert "nobody" not in found
