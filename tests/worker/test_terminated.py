"""A backend that is terminated in the very statement of each stage (CONTRACT 4.8, FAULTS 10).

Each waits for a lock, so that its backend is known. The handler's own statement, ``on_finish``,
and all connections at once: ``test_resilience.py`` and ``test_on_finish_errors.py``.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

from django_durable_jobs import JobContext, job, schedule
from django_durable_jobs.dialects.base import ATTEMPTS, CURSORS, JOBS
from django_durable_jobs.handlers import Handler, Registry
from django_durable_jobs.models import Job, JobAttempt, ScheduleCursor
from django_durable_jobs.schedules.declaration import registry as schedules
from django_durable_jobs.testing import run_schedules

from ..racing import observer
from .support import PATIENCE, Serving, attempts, fresh, until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor == "sqlite", reason="a file has no backends"),
]


class Stages:
    """A handler that waits for the test, and what brings a worker to each stage."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

        @job("terminated.waits")
        def waits(ctx: JobContext) -> int:
            self.begun.set()
            assert self.go.wait(PATIENCE)
            return ctx.attempt

        self.handler: Handler[..., Any] = waits
        self.serving: list[Serving] = []

    def serve(self) -> Serving:
        self.serving.append(Serving(threads=1))
        return self.serving[-1]

    def run(self) -> Serving:
        serving = self.serve()
        assert self.begun.wait(PATIENCE)
        return serving

    def expire(self) -> None:
        one = self.handler.submit()
        Job.objects.filter(pk=one.pk).update(
            status="running", lease_token="t" * 32, lease_expires_at=1, attempt_count=1
        )
        JobAttempt.objects.create(job=one, number=1, token="t" * 32, status="running", started_at=1)

    def owe(self) -> None:
        schedule("terminated", "* * * * *", self.handler)
        run_schedules()
        row = ScheduleCursor.objects.get()
        ScheduleCursor.objects.update(
            last_minute=row.last_minute - timedelta(minutes=1), next_minute=row.last_minute
        )


@pytest.fixture
def stages(handlers: Registry, durable_jobs: Callable[..., None]) -> Iterator[Stages]:
    # So long a wait for the lock that the statement is found in it.
    durable_jobs(POLL_SECONDS=0.05, LOCK_TIMEOUT_SECONDS=30, LEASE_SECONDS=60)
    with schedules.temporary():
        for known in schedules.all():
            schedules.remove(known.name)
        made = Stages()
        yield made
        made.go.set()
        for serving in made.serving:
            serving.stop()


@contextmanager
def writers_wait(table: str) -> Iterator[Any]:
    """Let everybody read a table, and lock its rows, and nobody write it."""
    with observer() as cursor:
        cursor.execute(f"BEGIN; LOCK TABLE {table} IN SHARE MODE")
        yield cursor
        cursor.execute("ROLLBACK")


def terminate(cursor: Any, statement: str) -> None:
    """Wait until somebody waits in a statement with that text, and terminate that backend."""

    def rows(sql: str, *params: Any) -> list[Any]:
        # What a transaction has seen of the activity it sees again.
        cursor.execute("SELECT pg_stat_clear_snapshot()")
        cursor.execute(sql, params)
        return list(cursor.fetchall())

    waiting = (
        "SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event_type"
        " = 'Lock' AND datname = current_database() AND position(%s in query) > 0"
    )
    ((pid, signalled),) = until(lambda: rows(waiting, statement), f"a wait in {statement}")
    assert signalled
    until(lambda: not rows("SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid), "its end")


@pytest.mark.parametrize(
    ("stage", "table", "statement", "told"),
    [
        ("claim", JOBS, "picked AS MATERIALIZED", "the claim loop"),
        ("renew", JOBS, "given(id, token, lease, ord)", "renewal"),
        ("finish", JOBS, "final_status", "the finisher"),
        ("recover", ATTEMPTS, f"UPDATE {ATTEMPTS} SET status = 'interrupted'", "chores"),
        ("schedule", CURSORS, f'UPDATE "{CURSORS}"', "schedule terminated"),
    ],
)
def test_the_worker_goes_on_and_nothing_is_lost(
    renewed_often: None,
    stages: Stages,
    caplog: pytest.LogCaptureFixture,
    stage: str,
    table: str,
    statement: str,
    told: str,
) -> None:
    prepare = {"recover": stages.expire, "schedule": stages.owe}
    prepare.get(stage, stages.handler.submit)()
    serving = stages.run() if stage in ("renew", "finish") else None
    with writers_wait(table) as cursor:
        if serving is None:
            serving = stages.serve()
        elif stage == "finish":
            stages.go.set()
        terminate(cursor, statement)
    stages.go.set()
    one = until(Job.objects.first, "the job")
    until(lambda: fresh(one).status == "succeeded")
    assert serving.stop() == 0
    assert [a.outcome for a in attempts(one)] == ["lost"] * (stage == "recover") + ["returned"]
    assert re.search(f"{told} waits.*: OperationalError", caplog.text)
    if stage == "schedule":
        assert Job.objects.filter(scheduled_for=one.scheduled_for).count() == 1
