"""The bounded passes beside recovery: what has something to do, promote, exhaust."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from django.db import connections

from .. import states
from ..dialects import dialect_for
from ..dialects.base import JOBS
from ._pages import each_page, move

_EXHAUSTED = (
    f"j.status = '{states.QUEUED}' AND j.attempt_count >= (j.max_attempts + j.granted_attempts)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Which passes have something to do."""

    promote: bool
    recover: bool
    exhaust: bool
    release: bool


def waiting(alias: str, *, recover: bool = True) -> Waiting:
    """Ask, in one indexed query without a lock, which passes have work."""
    now = dialect_for(alias).now()
    expired = (
        f"EXISTS(SELECT 1 FROM {JOBS} WHERE status = '{states.RUNNING}'"
        f" AND lease_token IS NOT NULL AND lease_expires_at <= {now})"
        if recover
        else "1 = 0"
    )
    sql = (
        # The first of the order, not EXISTS: with nothing due that would read what is due later.
        f"SELECT (SELECT j.run_at FROM {JOBS} j WHERE j.status = '{states.SCHEDULED}'"
        f" ORDER BY j.run_at, j.id LIMIT 1) <= {now},"
        f" {expired},"
        f" EXISTS(SELECT 1 FROM {JOBS} j WHERE {_EXHAUSTED}),"
        f" EXISTS(SELECT 1 FROM {JOBS} j WHERE j.status = '{states.BLOCKED}')"
    )
    with connections[alias].cursor() as cursor:
        cursor.execute(sql)
        promote, dead, exhaust, release = cursor.fetchone()
    return Waiting(
        promote=bool(promote), recover=bool(dead), exhaust=bool(exhaust), release=bool(release)
    )


def promote_due(alias: str) -> int:
    """Queue scheduled jobs that are due; give how many."""
    return each_page(
        alias,
        # A subquery, read once: a volatile function cannot bound an index scan.
        f"j.status = '{states.SCHEDULED}' AND j.run_at <= (SELECT {dialect_for(alias).now()})",
        (),
        lambda ids, now: move(alias, ids, f"status = '{states.QUEUED}'", states.SCHEDULED),
        order="j.run_at, j.id",
    )


def exhaust(alias: str) -> int:
    """Fail waiting jobs without executions left (imported, damaged); give how many (3.1)."""

    def end(ids: Sequence[int], now: int) -> list[int]:
        assignments = (
            f"status = '{states.FAILED}', finished_at = {now}, limit_waiting = false,"
            f" error_category = '{states.EXHAUSTED}', error_summary = NULL, error_traceback = NULL"
        )
        return move(alias, ids, assignments, states.QUEUED)

    return each_page(alias, _EXHAUSTED, (), end)
