"""The plans of the hot statements, as the database ran them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from django.db import connection
from django_durable_jobs import states
from django_durable_jobs.transitions.claims import claim, queued_lanes
from django_durable_jobs.transitions.leases import renew
from django_durable_jobs.transitions.maintenance import promote_due, waiting
from django_durable_jobs.transitions.outcomes import Outcome, finish
from django_durable_jobs.transitions.recovery import recover_expired

from .jobs import noop

ALIAS = "default"
LIMIT = 16
STATEMENTS = ("SELECT", "WITH", "INSERT", "UPDATE", "DELETE")


def plans(*, count: int) -> dict[str, list[str]]:
    """Make jobs, take one of each step, and give the plans of each."""
    noop.submit_many(range(count))
    noop.submit_many(range(count), run_at=timedelta(milliseconds=100))
    _claim(lease_seconds=0.1)
    time.sleep(0.2)
    _claim()
    steps: dict[str, Callable[[], Any]] = {
        "waiting": lambda: waiting(ALIAS),
        "promote": lambda: promote_due(ALIAS),
        "lanes": lambda: queued_lanes(ALIAS),
        "claim": _claim,
        "renew": lambda: renew(ALIAS, _holders(), lease_seconds=60),
        "finish": _finish,
        "recover": lambda: recover_expired(ALIAS),
    }
    watch = _notices if connection.vendor == "postgresql" else _queries
    with watch() as seen:
        found = {}
        for name, step in steps.items():
            seen.clear()
            step()
            found[name] = list(seen)
    return found


_claimed: list[Any] = []


def _claim(lease_seconds: float = 60) -> None:
    _claimed[:] = claim(
        ALIAS, queued_lanes(ALIAS), limit=LIMIT, worker="bench", lease_seconds=lease_seconds
    )


def _holders() -> list[tuple[int, str]]:
    return [(job.id, job.token) for job in _claimed]


def _finish() -> None:
    done = {
        "status": states.SUCCEEDED,
        "outcome": states.RETURNED,
        "final_status": states.SUCCEEDED,
    }
    finish(ALIAS, [Outcome(job=job, token=token, **done) for job, token in _holders()])


@contextmanager
def _notices() -> Iterator[list[str]]:
    """Let PostgreSQL tell EXPLAIN (ANALYZE, BUFFERS) of whatever it runs."""
    seen: list[str] = []
    settings = {"log_min_duration": "0", "log_analyze": "on", "log_buffers": "on"}
    with connection.cursor() as cursor:
        cursor.execute("LOAD 'auto_explain'")
        for name, value in {**settings, "log_level": "notice"}.items():
            cursor.execute(f"SET auto_explain.{name} = {value}")
    connection.connection.add_notice_handler(lambda notice: _keep(seen, notice.message_primary))
    yield seen


def _keep(seen: list[str], plan: str) -> None:
    # The check of the attempt's foreign key comes once for each row.
    if "SELECT 1 FROM ONLY" not in plan:
        seen.append(plan)


@contextmanager
def _queries() -> Iterator[list[str]]:
    """Ask SQLite for the query plan of whatever it is given."""
    seen: list[str] = []

    def explain(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.lstrip().startswith(STATEMENTS):
            rows = context["cursor"].connection.execute(
                "EXPLAIN QUERY PLAN " + sql.replace("%s", "?").replace("%%", "%"), params or ()
            )
            steps = "\n".join(f"  {row[3]}" for row in rows)
            seen.append(f"{sql}\n{steps}")
        return execute(sql, params, many, context)

    with connection.execute_wrapper(explain):
        yield seen
