"""Finish, progress, checkpoint: what a handler did, written as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import states
from ..dialects import dialect_for
from ..dialects.base import FencedMove
from ..exceptions import InvalidTransition
from ._fence import (
    GONE,
    ID_AND_TOKEN,
    NO_LEASE,
    fenced_by_handler,
    refuse_cancelled,
    standings,
)
from ._let_in import fenced_and_let_in, pass_on


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one attempt ended. ``retry_delay`` (microseconds) asks for another execution.

    ``stopped_by_worker`` is the shutdown's end: requeued at once with one execution granted,
    where ``retry_on_interrupt`` allows (CONTRACT 4.7). ``is_keyed``: the job has a concurrency
    key, so that its end frees a place for the next (3.12).
    """

    job: int
    token: str
    status: str
    outcome: str
    final_status: str
    result: str | None = None
    retry_delay: int | None = None
    stopped_by_worker: bool = False
    is_keyed: bool = False
    error_category: str | None = None
    error_summary: str | None = None
    error_traceback: str | None = None


_CANCELLED = "o.cancel_requested_at IS NOT NULL"
_REQUEUED = "(o.stopped_by_worker AND o.retry_on_interrupt)"
_RETRIED = "(o.retry_delay IS NOT NULL AND o.attempt_count < o.max_attempts + o.granted_attempts)"
_SUCCEEDED = f"o.final_status = '{states.SUCCEEDED}'"
_GOES_ON = f"NOT ({_CANCELLED}) AND ({_REQUEUED} OR {_RETRIED})"
_UNLESS_CANCELLED = f"CASE WHEN {_CANCELLED} THEN NULL ELSE"

# One statement decides between the outcome and a cancel request that committed earlier (3.3).
FINISH = FencedMove(
    name="finish",
    inputs={
        **ID_AND_TOKEN,
        "attempt_status": "text",
        "outcome": "text",
        "final_status": "text",
        "result": "text",
        "retry_delay": "bigint",
        "stopped_by_worker": "boolean",
        "error_category": "text",
        "error_summary": "text",
        "error_traceback": "text",
    },
    job_set={
        **NO_LEASE,
        "status": (
            f"CASE WHEN {_CANCELLED} THEN '{states.CANCELLED}'"
            f" WHEN {_REQUEUED} THEN '{states.QUEUED}'"
            f" WHEN {_RETRIED} THEN '{states.SCHEDULED}' ELSE o.final_status END"
        ),
        "run_at": (
            f"CASE WHEN {_CANCELLED} THEN o.run_at WHEN {_REQUEUED} THEN o.now"
            f" WHEN {_RETRIED} THEN o.now + o.retry_delay ELSE o.run_at END"
        ),
        "finished_at": f"CASE WHEN {_GOES_ON} THEN NULL ELSE o.now END",
        "granted_attempts": (
            f"o.granted_attempts + CASE WHEN NOT ({_CANCELLED}) AND {_REQUEUED} THEN 1 ELSE 0 END"
        ),
        "progress": f"CASE WHEN NOT ({_CANCELLED}) AND {_SUCCEEDED} THEN 1 ELSE o.progress END",
        "result": f"{_UNLESS_CANCELLED} o.result END",
        "error_category": f"{_UNLESS_CANCELLED} o.error_category END",
        "error_summary": f"{_UNLESS_CANCELLED} o.error_summary END",
        "error_traceback": f"{_UNLESS_CANCELLED} o.error_traceback END",
    },
    attempt_set={
        "status": f"CASE WHEN {_CANCELLED} THEN '{states.CANCELLED}' ELSE o.attempt_status END",
        "outcome": "o.outcome",
        "finished_at": "o.now",
        "progress": f"CASE WHEN NOT ({_CANCELLED}) AND {_SUCCEEDED} THEN 1 ELSE o.progress END",
        "cancel_requested_at": "o.cancel_requested_at",
        "error_category": "o.error_category",
        "error_summary": "o.error_summary",
        "error_traceback": "o.error_traceback",
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishReport:
    """What became of a group: each job stands or falls alone (CONTRACT 3.3).

    ``busy`` jobs are owned but locked by somebody: try again. ``lost`` ones belong to nobody
    or another. ``damaged`` ones have no open attempt row; they were left unchanged.
    """

    written: dict[int, str] = field(default_factory=dict)
    busy: list[Outcome] = field(default_factory=list)
    lost: list[Outcome] = field(default_factory=list)
    damaged: list[Outcome] = field(default_factory=list)

    def add(self, other: FinishReport) -> None:
        self.written.update(other.written)
        self.busy.extend(other.busy)
        self.lost.extend(other.lost)
        self.damaged.extend(other.damaged)


def finish(
    alias: str,
    outcomes: Sequence[Outcome],
    *,
    wait: bool = False,
    lock_timeout: float | None = None,
) -> FinishReport:
    """Write the ends of many attempts in one statement; say which rows were not written.

    ``lock_timeout`` (seconds) bounds what the statement waits for in its triggers, too.
    """
    report = FinishReport()
    left = outcomes
    while left:
        # Of two attempts of one job one is stale: apart, so that an answer names one of them.
        group = {outcome.job: outcome for outcome in left}
        report.add(_finish_group(alias, list(group.values()), wait, lock_timeout))
        left = [one for one in left if group[one.job] is not one] if len(group) < len(left) else []
    return report


def _finish_group(
    alias: str, outcomes: Sequence[Outcome], wait: bool, lock_timeout: float | None
) -> FinishReport:
    values = [_row(outcome) for outcome in outcomes]
    if any(outcome.is_keyed for outcome in outcomes):
        rows = fenced_and_let_in(alias, FINISH, values, wait=wait, lock_timeout=lock_timeout)
    else:
        rows = dialect_for(alias).fenced(
            alias, FINISH, values, wait=wait, own=True, lock_timeout=lock_timeout
        )
    return _report(alias, outcomes, dict(rows))


def finish_beside(
    alias: str,
    outcome: Outcome,
    ended: Callable[[str], None],
    *,
    lock_timeout: float | None = None,
) -> FinishReport:
    """Write one end in a transaction of its own; it waits for the job's row.

    Where the job is terminal by it, ``ended`` is called with the new status in that
    transaction. What it raises rolls the end back and is raised (CONTRACT 3.8).
    """
    dialect = dialect_for(alias)
    with dialect.own(alias, lock_timeout=lock_timeout):
        rows = dialect.fenced(alias, FINISH, [_row(outcome)], wait=True, own=False)
        if outcome.is_keyed:
            # Before what the project adds, which may leave nothing that could be written to.
            pass_on(alias, [row[0] for row in rows])
        for _, status in rows:
            if status in states.TERMINAL:
                ended(status)
    return _report(alias, [outcome], dict(rows))


def found(alias: str, outcome: Outcome) -> FinishReport:
    """Read, without a lock, what became of an end whose writing has failed."""
    return _report(alias, [outcome], {})


def _report(alias: str, outcomes: Sequence[Outcome], written: dict[int, str]) -> FinishReport:
    """Say what became of each: what was not written is read again, without a lock."""
    missed = [outcome for outcome in outcomes if outcome.job not in written]
    if not missed:
        return FinishReport(written=written)
    found = standings(alias, [(outcome.job, outcome.token) for outcome in missed])
    report = FinishReport(written=written)
    for outcome in missed:
        standing = found.get(outcome.token, GONE)
        if standing.owns:
            (report.busy if standing.attempt_open else report.damaged).append(outcome)
        elif standing.ended:
            # Not what was asked for: a cancel or a retry may have come of it.
            report.written[outcome.job] = standing.status
        else:
            report.lost.append(outcome)
    return report


def _row(outcome: Outcome) -> tuple[Any, ...]:
    return (
        outcome.job,
        outcome.token,
        outcome.status,
        outcome.outcome,
        outcome.final_status,
        outcome.result,
        outcome.retry_delay,
        outcome.stopped_by_worker,
        outcome.error_category,
        outcome.error_summary,
        outcome.error_traceback,
    )


PROGRESS = FencedMove(
    name="progress",
    inputs={**ID_AND_TOKEN, "fraction": "double precision", "message": "text"},
    job_set={"progress": "o.fraction", "progress_message": "o.message"},
    attempt_set={"progress": "o.fraction"},
    condition="o.cancel_requested_at IS NULL AND o.fraction >= o.progress",
)

CHECKPOINT = FencedMove(
    name="checkpoint",
    inputs={**ID_AND_TOKEN, "value": "text"},
    job_set={"checkpoint": "o.value"},
)


def record_progress(alias: str, job: int, token: str, fraction: float, message: str) -> None:
    """Move the job's and the attempt's progress together (CONTRACT 3.9).

    Raises ``LeaseLost``, ``JobCancelled``, and ``InvalidTransition`` for a step back.
    """
    standing = fenced_by_handler(alias, PROGRESS, (job, token, fraction, message))
    if standing is None:
        return
    refuse_cancelled(standing)
    raise InvalidTransition(
        f"progress goes forward only: this attempt has reported {standing.progress:g} already."
    )


def record_checkpoint(alias: str, job: int, token: str, value: str) -> None:
    """Keep a value for the next attempt, also while a cancel is requested (CONTRACT 3.9)."""
    fenced_by_handler(alias, CHECKPOINT, (job, token, value))
