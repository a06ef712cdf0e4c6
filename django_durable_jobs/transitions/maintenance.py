"""The bounded passes beside recovery: what has something to do, promote, exhaust."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .. import states
from ..dialects import dialect_for
from ..dialects.base import JOBS
from ._lanes import Lanes, queued_lanes_sql, read_lanes
from ._let_in import pass_on
from ._pages import each_page, move
from .limits import waits_sql

_EXHAUSTED = (
    f"j.status = '{states.QUEUED}' AND j.attempt_count >= (j.max_attempts + j.granted_attempts)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Which passes have something to do, and which lanes hold queued jobs."""

    promote: bool
    recover: bool
    exhaust: bool
    release: bool
    let_in: bool
    queued: Lanes


def waiting(alias: str, *, recover: bool = True) -> Waiting:
    """Ask for all of it in one indexed query without a lock: all that an idle worker asks."""
    now = dialect_for(alias).now()
    expired = (
        f"EXISTS(SELECT 1 FROM {JOBS} WHERE status = '{states.RUNNING}'"
        f" AND lease_token IS NOT NULL AND lease_expires_at <= {now})"
        if recover
        else "1 = 0"
    )
    sql = (
        "SELECT w.*, x.* FROM (SELECT"
        # The first of the order, not EXISTS: with nothing due that would read what is due later.
        f" (SELECT j.run_at FROM {JOBS} j WHERE j.status = '{states.SCHEDULED}'"
        f" ORDER BY j.run_at, j.id LIMIT 1) <= {now} AS promote,"
        f" {expired} AS recover,"
        f" EXISTS(SELECT 1 FROM {JOBS} j WHERE {_EXHAUSTED}) AS exhaust,"
        # Likewise: beside many of them EXISTS would read the table until it meets one.
        f" (SELECT j.id FROM {JOBS} j WHERE j.status = '{states.BLOCKED}' ORDER BY j.queue,"
        " j.handler, j.handler_version, j.fingerprint, j.id LIMIT 1) IS NOT NULL AS release,"
        f" {waits_sql()} AS let_in) AS w"
        f" LEFT JOIN ({queued_lanes_sql(alias)}) AS x ON 1 = 1"
    )
    rows = dialect_for(alias).fetch(alias, sql)
    promote, dead, exhaust, release, let_in = map(bool, rows[0][:5])
    return Waiting(
        promote=promote,
        recover=dead,
        exhaust=exhaust,
        release=release,
        let_in=let_in,
        queued=read_lanes(row[5:] for row in rows if row[5] is not None),
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
        moved = move(alias, ids, assignments, states.QUEUED)
        pass_on(alias, moved)
        return moved

    return each_page(alias, _EXHAUSTED, (), end)
