"""Claim, give back, block at dispatch: how a worker takes jobs and returns those it never began."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from .. import states
from ..dialects import dialect_for
from ..dialects.base import PAUSES, FencedMove, Lane
from ..instants import seconds_to_microseconds
from ._fence import ID_AND_TOKEN, NO_LEASE, fenced
from ._lanes import lanes


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
    "priority",
    "run_at",
)


def queued_lanes(alias: str) -> list[Lane]:
    """Give the lanes that hold queued jobs now, paused queues left out; takes no lock."""
    return lanes(
        alias,
        f"n.status = '{states.QUEUED}' AND NOT n.limit_waiting",
        f"x.queue NOT IN (SELECT p.queue FROM {PAUSES} p)",
    )


def claim(
    alias: str, wanted: Sequence[Lane], *, limit: int, worker: str, lease_seconds: float
) -> list[ClaimedJob]:
    """Claim up to ``limit`` jobs in the order of CONTRACT 4.1, all or nothing (3.1).

    Each gets a new random token, its attempt row and a lease; one execution is used up.
    """
    if limit < 1 or not wanted:
        return []
    rows = dialect_for(alias).claim(
        alias,
        wanted,
        limit=limit,
        worker=worker,
        lease=seconds_to_microseconds(lease_seconds),
        columns=_COLUMNS,
    )
    return [ClaimedJob(*row) for row in rows]


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
    return fenced(alias, GIVE_BACK, list(holders), wait=wait) if holders else {}


def block_claimed(
    alias: str, jobs: Collection[tuple[int, str, str]], *, wait: bool = False
) -> dict[int, Any]:
    """Undo claims of jobs that cannot be dispatched and block them, with the reason (2.3)."""
    return fenced(alias, BLOCK_CLAIMED, list(jobs), wait=wait) if jobs else {}
