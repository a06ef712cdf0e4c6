"""Claim, give back, block at dispatch: how a worker takes jobs and returns those it never began."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from django.db import DatabaseError, OperationalError

from .. import states
from ..dialects import dialect_for
from ..dialects.base import JOBS, FencedMove, Lane, in_lane, lane_params
from ..exceptions import LockTimeout
from ..instants import seconds_to_microseconds
from . import _lanes
from ._fence import ID_AND_TOKEN, NO_LEASE
from ._let_in import fenced_and_let_in
from ._limits import Patience, claim_within_limits, is_limited
from ._pages import PAGE, is_at_once
from ._refused import left_out, refuse

logger = logging.getLogger("django_durable_jobs")


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """What the worker needs of a job that it has claimed; instants in microseconds."""

    id: int
    handler: str
    handler_version: int
    fingerprint: str
    payload: str
    payload_sha256: str
    scope: str
    job_id: str
    queue: str
    attempt_count: int
    max_attempts: int
    granted_attempts: int
    timeout: float
    retry_on_interrupt: bool
    token: str
    checkpoint: str | None
    scheduled_for: int | None
    concurrency_key: str | None
    priority: int
    run_at: int
    claimed_at: int


_COLUMNS = (
    "id",
    "handler",
    "handler_version",
    "fingerprint",
    "payload",
    "payload_sha256",
    "scope",
    "job_id",
    "queue",
    "attempt_count",
    "max_attempts",
    "granted_attempts",
    "timeout",
    "retry_on_interrupt",
    "lease_token",
    "checkpoint",
    "scheduled_for",
    "concurrency_key",
    "priority",
    "run_at",
)


def queued_lanes(alias: str) -> list[Lane]:
    """Give the lanes that hold queued jobs now, paused queues left out; takes no lock."""
    return _lanes.queued_lanes(alias).sound


def claim(
    alias: str,
    wanted: Sequence[Lane],
    *,
    limit: int,
    worker: str,
    lease_seconds: float,
    patience: Patience | None = None,
) -> list[ClaimedJob]:
    """Claim up to ``limit`` jobs in the order of CONTRACT 4.1, all or nothing (3.1).

    Each gets a new random token, its attempt row and a lease; one execution is used up. A job
    that the database refuses to change (damaged) is passed over for a while; its error is
    raised only where nothing else could be claimed. ``patience`` bounds how long it looks
    behind jobs whose limits are full; without, it looks behind all of them.
    """
    if limit < 1 or not wanted:
        return []

    attempt = partial(
        _claim, alias, wanted, worker=worker, lease_seconds=lease_seconds, patience=patience
    )
    began = time.monotonic()
    try:
        return attempt(limit, left_out(alias))
    except (DatabaseError, LockTimeout) as error:
        if not _is_refusal(alias, error, began):
            raise
        claimed = _one_by_one(alias, wanted, limit, attempt)
        if not claimed:
            raise
        return claimed


def claim_job(
    alias: str, job: int, lane: Lane, *, worker: str, lease_seconds: float
) -> ClaimedJob | None:
    """Claim exactly this job of a lane; None where it may not be claimed now."""
    claimed = _claim(
        alias, [lane], 1, f"j.id = {int(job)}", worker=worker, lease_seconds=lease_seconds
    )
    return claimed[0] if claimed else None


def _claim(
    alias: str,
    wanted: Sequence[Lane],
    limit: int,
    among: str,
    *,
    worker: str,
    lease_seconds: float,
    patience: Patience | None = None,
) -> list[ClaimedJob]:
    take = dialect_for(alias).claim
    if any(map(is_limited, wanted)):
        take = partial(claim_within_limits, patience=patience or Patience())
    rows = take(
        alias,
        wanted,
        limit=limit,
        worker=worker,
        lease=seconds_to_microseconds(lease_seconds),
        columns=_COLUMNS,
        among=among,
    )
    return [ClaimedJob(*row) for row in rows]


# Where all are refused it is not the jobs' fault, and a log needs no thousand of them.
REFUSED_AT_ONCE = 50
# An expression has a greatest depth on SQLite.
LOOK_AT_LANES = 200


def _one_by_one(
    alias: str,
    wanted: Sequence[Lane],
    limit: int,
    attempt: Callable[[int, str], list[ClaimedJob]],
) -> list[ClaimedJob]:
    """Claim each job alone, so that those which the database refuses hold up no other."""
    claimed: list[ClaimedJob] = []
    refused = 0
    for job in _claimable(alias, wanted, limit + PAGE):
        if len(claimed) == limit or refused == REFUSED_AT_ONCE:
            break
        began = time.monotonic()
        try:
            claimed += attempt(1, f"j.id = {job}")
        except (DatabaseError, LockTimeout) as error:
            if not _is_refusal(alias, error, began):
                break
            refused += 1
            refuse(alias, job)
            logger.exception("job %d cannot be claimed and is passed over", job)
    return claimed


def _is_refusal(alias: str, error: DatabaseError | LockTimeout, began: float) -> bool:
    """Tell that the rows are at fault, not the server, the connection or a time limit."""
    if isinstance(error, OperationalError | LockTimeout):
        return is_at_once(alias, error, began)
    return not dialect_for(alias).is_transient(error)


def _claimable(alias: str, wanted: Sequence[Lane], limit: int) -> list[int]:
    """Read, without a lock, the next jobs of the claim's order."""
    dialect = dialect_for(alias)
    wanted = wanted[:LOOK_AT_LANES]
    in_lanes = " OR ".join(f"({in_lane(number)})" for number in range(len(wanted)))
    due = f"({in_lanes}) AND {dialect.claimable('j')} AND j.run_at <= {dialect.now()}"
    sql = (
        f"SELECT j.id FROM {JOBS} j WHERE {left_out(alias, due)}"
        f" ORDER BY j.priority DESC, j.run_at, j.id LIMIT {limit}"
    )
    return [row[0] for row in dialect.fetch(alias, sql, lane_params(wanted))]


_CANCELLED = "o.cancel_requested_at IS NOT NULL"
_NEVER_BEGAN: dict[str, str] = {
    **NO_LEASE,
    "attempt_count": "o.attempt_count - 1",
    "finished_at": f"CASE WHEN {_CANCELLED} THEN o.now END",
}

GIVE_BACK = FencedMove(
    name="give_back",
    inputs=ID_AND_TOKEN,
    job_set={
        **_NEVER_BEGAN,
        "status": f"CASE WHEN {_CANCELLED} THEN '{states.CANCELLED}' ELSE '{states.QUEUED}' END",
    },
    delete_attempt=True,
)

BLOCK_CLAIMED = FencedMove(
    name="block_claimed",
    inputs={**ID_AND_TOKEN, "reason": "text"},
    job_set={
        **_NEVER_BEGAN,
        "status": f"CASE WHEN {_CANCELLED} THEN '{states.CANCELLED}' ELSE '{states.BLOCKED}' END",
        "blocked_reason": f"CASE WHEN {_CANCELLED} THEN NULL ELSE o.reason END",
    },
    delete_attempt=True,
)


def give_back(
    alias: str, holders: Collection[tuple[int, str]], *, wait: bool = False
) -> dict[int, Any]:
    """Undo claims whose handlers never began: the attempt row goes, the count is restored (4.7)."""
    return _undone(alias, GIVE_BACK, holders, wait=wait)


def block_claimed(
    alias: str, jobs: Collection[tuple[int, str, str]], *, wait: bool = False
) -> dict[int, Any]:
    """Undo claims of jobs that cannot be dispatched and block them, with the reason (2.3)."""
    return _undone(alias, BLOCK_CLAIMED, jobs, wait=wait)


def _undone(
    alias: str, move: FencedMove, values: Collection[Sequence[Any]], *, wait: bool
) -> dict[int, Any]:
    if not values:
        return {}
    return {row[0]: row[1] for row in fenced_and_let_in(alias, move, list(values), wait=wait)}
