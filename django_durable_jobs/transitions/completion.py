"""Fence and complete: the job's end in the handler's own transaction (CONTRACT 3.8)."""

from __future__ import annotations

from django.db import connections

from .. import states
from ..dialects import dialect_for
from ..dialects.base import ATTEMPTS, FencedMove
from ..exceptions import InvalidTransition, LeaseLost, TransactionRequired
from ..transactions import in_callers_transaction
from ._fence import GONE, ID_AND_TOKEN, NO_LEASE, refuse_cancelled, standings
from ._let_in import pass_on

_NOT_CANCELLED = "o.cancel_requested_at IS NULL"

FENCE = FencedMove(name="fence", inputs=ID_AND_TOKEN, job_set={}, condition=_NOT_CANCELLED)

COMPLETE = FencedMove(
    name="complete",
    inputs={**ID_AND_TOKEN, "result": "text"},
    job_set={
        **NO_LEASE,
        "status": f"'{states.SUCCEEDED}'",
        "finished_at": "o.now",
        "progress": "1",
        "result": "o.result",
        "error_category": "NULL",
        "error_summary": "NULL",
        "error_traceback": "NULL",
    },
    attempt_set={
        "status": f"'{states.SUCCEEDED}'",
        "outcome": f"'{states.RETURNED}'",
        "finished_at": "o.now",
        "progress": "1",
    },
    condition=_NOT_CANCELLED,
)


def fence(alias: str, job: int, token: str) -> None:
    """Prove ownership and hold the job's row to the end of the handler's transaction.

    Raises ``TransactionRequired``, ``LeaseLost``, ``JobCancelled``.
    """
    _in_handlers_transaction(alias, FENCE, (job, token))


def complete(
    alias: str, job: int, token: str, result: str | None, *, is_keyed: bool = False
) -> None:
    """End the job as succeeded, if and when the handler's transaction commits.

    Where the job has a concurrency key, the next of it is let in with that (3.12).

    Raises ``TransactionRequired``, ``LeaseLost``, ``JobCancelled``, and ``InvalidTransition``
    where it was called before.
    """
    _in_handlers_transaction(alias, COMPLETE, (job, token, result))
    if is_keyed:
        pass_on(alias, [job])


def completion_stands(alias: str, token: str) -> bool:
    """Read from the rows whether the attempt has completed its job.

    Not from an ``on_commit`` hook, which a crash between the two would lose.
    """
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SELECT status FROM {ATTEMPTS} WHERE token = %s", [token])
        row = cursor.fetchone()
    return row is not None and row[0] == states.SUCCEEDED


def _in_handlers_transaction(
    alias: str, move: FencedMove, values: tuple[int, str] | tuple[int, str, str | None]
) -> None:
    if not in_callers_transaction(connections[alias]):
        raise TransactionRequired(
            f'ctx.{move.name}() belongs inside transaction.atomic(using="{alias}"), beside the'
            " rows that it must commit with."
        )
    if dialect_for(alias).fenced(alias, move, [values], wait=True, own=False):
        return
    if completion_stands(alias, values[1]):
        raise InvalidTransition("this attempt has completed its job already.")
    standing = standings(alias, [(values[0], values[1])]).get(values[1], GONE)
    if standing.owns and standing.attempt_open:
        refuse_cancelled(standing)
    raise LeaseLost("this attempt does not own its job any more; nothing was written")
