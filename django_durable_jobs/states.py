"""Statuses, outcomes and the table of legal moves, as data.

The code of ``transitions``, the state-matrix test and the diagram in
``docs/lifecycle.md`` all read this one table.
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEDULED = "scheduled"
QUEUED = "queued"
RUNNING = "running"
BLOCKED = "blocked"
SUCCEEDED = "succeeded"
FAILED = "failed"
CANCELLED = "cancelled"
INTERRUPTED = "interrupted"
TIMED_OUT = "timed_out"

WAITING = (SCHEDULED, QUEUED, BLOCKED)
LIVE = (SCHEDULED, QUEUED, RUNNING, BLOCKED)
TERMINAL = (SUCCEEDED, FAILED, CANCELLED, INTERRUPTED)
JOB_STATUSES = LIVE + TERMINAL
# What needs nobody's attention.
ORDINARY = (SCHEDULED, QUEUED, RUNNING, SUCCEEDED)
ATTEMPT_STATUSES = (RUNNING, SUCCEEDED, FAILED, TIMED_OUT, CANCELLED, INTERRUPTED)

# What the handler itself did, kept on the attempt beside its status (CONTRACT 3.3).
RETURNED = "returned"
RAISED = "raised"
STOPPED = "stopped"
LOST = "lost"
OUTCOMES = (RETURNED, RAISED, STOPPED, LOST)

UNKNOWN_HANDLER = "unknown_handler"
SCHEMA_MISMATCH = "schema_mismatch"
CORRUPT_PAYLOAD = "corrupt_payload"
INVALID_POLICY = "invalid_policy"
BLOCKED_REASONS = (UNKNOWN_HANDLER, SCHEMA_MISMATCH, CORRUPT_PAYLOAD, INVALID_POLICY)

HANDLER_ERROR = "handler_error"
PERMANENT = "permanent"
TIMEOUT = "timeout"
INVALID_RESULT = "invalid_result"
COMPLETION_ROLLED_BACK = "completion_rolled_back"
LOST_CATEGORY = "lost"
STOPPED_CATEGORY = "stopped"
EXHAUSTED = "exhausted"
ERROR_CATEGORIES = (
    HANDLER_ERROR,
    PERMANENT,
    TIMEOUT,
    INVALID_RESULT,
    COMPLETION_ROLLED_BACK,
    LOST_CATEGORY,
    STOPPED_CATEGORY,
    EXHAUSTED,
    *BLOCKED_REASONS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One legal move: the statuses it starts from and those it may end in.

    ``fenced`` moves belong to the holder of the token and need an unexpired lease.
    """

    name: str
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    fenced: bool = False
    by: str = "worker"


MOVES: tuple[Move, ...] = (
    Move(name="promote", sources=(SCHEDULED,), targets=(QUEUED,)),
    Move(name="claim", sources=(QUEUED,), targets=(RUNNING,)),
    Move(name="renew", sources=(RUNNING,), targets=(RUNNING,), fenced=True),
    Move(name="progress", sources=(RUNNING,), targets=(RUNNING,), fenced=True),
    Move(name="checkpoint", sources=(RUNNING,), targets=(RUNNING,), fenced=True),
    Move(
        name="finish",
        sources=(RUNNING,),
        targets=(SUCCEEDED, FAILED, SCHEDULED, QUEUED, CANCELLED, INTERRUPTED),
        fenced=True,
    ),
    Move(name="complete", sources=(RUNNING,), targets=(SUCCEEDED,), fenced=True),
    Move(name="give_back", sources=(RUNNING,), targets=(QUEUED, CANCELLED), fenced=True),
    Move(name="block_claimed", sources=(RUNNING,), targets=(BLOCKED, CANCELLED), fenced=True),
    Move(name="block", sources=(QUEUED,), targets=(BLOCKED,)),
    Move(
        name="release",
        sources=(BLOCKED,),
        targets=(QUEUED, SCHEDULED),
        by="operator or worker",
    ),
    Move(
        name="recover",
        sources=(RUNNING,),
        targets=(QUEUED, INTERRUPTED, CANCELLED),
        by="operator or worker",
    ),
    Move(name="exhaust", sources=(QUEUED,), targets=(FAILED,)),
    Move(
        name="cancel",
        sources=(SCHEDULED, QUEUED, BLOCKED),
        targets=(CANCELLED,),
        by="operator",
    ),
    Move(name="request_cancel", sources=(RUNNING,), targets=(RUNNING,), by="operator"),
    Move(
        name="retry",
        sources=(FAILED, CANCELLED, INTERRUPTED),
        targets=(QUEUED,),
        by="operator",
    ),
)
TRANSITIONS: dict[str, Move] = {move.name: move for move in MOVES}
