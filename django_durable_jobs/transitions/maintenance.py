"""The bounded passes beside recovery: promote, exhaust, block, release.

Each goes page by page in short transactions and passes over rows that somebody has locked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from django.db import connections

from .. import states
from ..dialects import dialect_for
from ..dialects.base import JOBS, Lane
from ..instants import seconds_to_microseconds
from ._lanes import lanes

PAGE = 1000

_EXHAUSTED = "j.attempt_count >= (j.max_attempts + j.granted_attempts)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Which passes have something to do."""

    promote: bool
    recover: bool
    exhaust: bool
    release: bool


def waiting(alias: str) -> Waiting:
    """Ask, in one indexed query without a lock, which passes have work."""
    now = dialect_for(alias).now()
    sql = (
        f"SELECT EXISTS(SELECT 1 FROM {JOBS} WHERE status = '{states.SCHEDULED}'"
        f" AND run_at <= {now}),"
        f" EXISTS(SELECT 1 FROM {JOBS} WHERE status = '{states.RUNNING}'"
        f" AND lease_token IS NOT NULL AND lease_expires_at <= {now}),"
        f" EXISTS(SELECT 1 FROM {JOBS} j WHERE j.status = '{states.QUEUED}' AND {_EXHAUSTED}),"
        f" EXISTS(SELECT 1 FROM {JOBS} j WHERE j.status = '{states.BLOCKED}')"
    )
    with connections[alias].cursor() as cursor:
        cursor.execute(sql)
        promote, recover, exhaust, release = cursor.fetchone()
    return Waiting(
        promote=bool(promote), recover=bool(recover), exhaust=bool(exhaust), release=bool(release)
    )


def promote_due(alias: str) -> int:
    """Queue scheduled jobs that are due, page by page; give how many."""
    dialect = dialect_for(alias)
    promoted = 0
    while True:
        with dialect.own(alias):
            condition = f"j.status = '{states.SCHEDULED}' AND j.run_at <= {dialect.now()}"
            page = dialect.lock_jobs(alias, condition, order="j.run_at, j.id", limit=PAGE)
            moved = _move(alias, page, f"status = '{states.QUEUED}'", states.SCHEDULED)
        promoted += moved
        if len(page) < PAGE or not moved:
            return promoted


def exhaust(alias: str) -> int:
    """Fail waiting jobs without executions left (imported, damaged); give how many (3.1)."""
    dialect = dialect_for(alias)
    ended = 0
    while True:
        with dialect.own(alias):
            condition = f"j.status = '{states.QUEUED}' AND {_EXHAUSTED}"
            page = dialect.lock_jobs(alias, condition, limit=PAGE)
            now = max((row[1] for row in page), default=0)
            moved = _move(
                alias,
                page,
                f"status = '{states.FAILED}', finished_at = {now}, limit_waiting = false,"
                f" error_category = '{states.EXHAUSTED}', error_summary = NULL",
                states.QUEUED,
            )
        ended += moved
        if len(page) < PAGE or not moved:
            return ended


_IN_LANE = "j.queue = %s AND j.handler = %s AND j.handler_version = %s AND j.fingerprint = %s"
_CLAIM_ORDER = "j.priority DESC, j.run_at, j.id"


def block_lane(alias: str, lane: Lane, reason: str, *, patience: float) -> int:
    """Block the queued jobs of a lane that no live worker can run (CONTRACT 2.3).

    Only those that have been due for ``patience`` seconds. Gives how many.
    """
    delay = seconds_to_microseconds(patience)
    condition = (
        f"{_IN_LANE} AND j.status = '{states.QUEUED}' AND NOT j.limit_waiting"
        f" AND j.run_at <= {dialect_for(alias).now()} - {delay}"
    )
    blocked = 0
    while (moved := _block(alias, lane, condition, reason)) == PAGE:
        blocked += moved
    return blocked + moved


def block_unholdable(alias: str, lanes_: Sequence[Lane]) -> int:
    """Block jobs at the head of a lane whose timeout the lease cannot hold (CONTRACT 4.6)."""
    holds = dialect_for(alias).longest_timeout()
    if holds is None:
        return 0
    condition = (
        "j.id IN (SELECT h.id FROM (SELECT j.id, j.timeout FROM"
        f" {JOBS} j WHERE {_IN_LANE} AND j.status = '{states.QUEUED}' AND NOT j.limit_waiting"
        f" ORDER BY {_CLAIM_ORDER} LIMIT {PAGE}) AS h WHERE h.timeout >= {holds})"
    )
    return sum(_block(alias, lane, condition, states.INVALID_POLICY) for lane in lanes_)


def _block(alias: str, lane: Lane, condition: str, reason: str) -> int:
    if reason not in states.BLOCKED_REASONS:
        raise ValueError(f"{reason!r} is no reason to block a job")
    dialect = dialect_for(alias)
    with dialect.own(alias):
        params = [lane.queue, lane.handler, lane.version, lane.fingerprint]
        page = dialect.lock_jobs(alias, condition, params, limit=PAGE, order=_CLAIM_ORDER)
        return _move(
            alias, page, f"status = '{states.BLOCKED}', blocked_reason = '{reason}'", states.QUEUED
        )


def blocked_lanes(alias: str) -> list[Lane]:
    """Give the lanes that hold blocked jobs; takes no lock."""
    return lanes(alias, f"n.status = '{states.BLOCKED}'")


def release_lane(alias: str, lane: Lane) -> int:
    """Release the blocked jobs of a lane that this worker can run; give how many.

    Not those of a corrupt payload, nor of a policy that still cannot hold here.
    """
    dialect = dialect_for(alias)
    holds = dialect.longest_timeout()
    fits = "1 = 1" if holds is None else f"j.timeout < {holds}"
    released = after = 0
    while True:
        with dialect.own(alias):
            condition = (
                f"{_IN_LANE} AND j.status = '{states.BLOCKED}' AND j.id > {after}"
                f" AND j.blocked_reason <> '{states.CORRUPT_PAYLOAD}' AND {fits}"
            )
            params = [lane.queue, lane.handler, lane.version, lane.fingerprint]
            page = dialect.lock_jobs(alias, condition, params, limit=PAGE)
            now = max((row[1] for row in page), default=0)
            status = (
                f"CASE WHEN run_at <= {now} THEN '{states.QUEUED}' ELSE '{states.SCHEDULED}' END"
            )
            released += _move(
                alias, page, f"status = {status}, blocked_reason = NULL", states.BLOCKED
            )
        if len(page) < PAGE:
            return released
        after = page[-1][0]


def _move(alias: str, page: list[tuple[int, int]], assignments: str, source: str) -> int:
    if not page:
        return 0
    given, params = dialect_for(alias).rows({"id": "bigint"}, [(row[0],) for row in page])
    with connections[alias].cursor() as cursor:
        cursor.execute(
            f"UPDATE {JOBS} SET {assignments}"
            f" WHERE status = '{source}' AND id IN (SELECT g.id FROM ({given}) AS g)",
            params,
        )
        return int(cursor.rowcount)
