"""The one writer of a token's holder: fenced moves, and what it means if a row was missed.

The fence itself is the dialect's ``fenced``: this job, this token, ``running``, and a lease
that has not expired at an instant read after the row's lock is held (CONTRACT 3.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import connections

from .. import states
from ..dialects import dialect_for
from ..dialects.base import ATTEMPTS, JOBS, FencedMove
from ..exceptions import JobCancelled, LeaseLost
from ..transactions import joins_transaction

ID_AND_TOKEN = {"id": "bigint", "token": "text"}
NO_LEASE = {"lease_token": "NULL", "lease_expires_at": "NULL"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A token and its job as they read without a lock.

    ``owns``: this token, running, lease not expired. ``attempt_open``: its attempt row is
    there, exactly as a move needs it. A row that a move missed although both hold is busy:
    somebody has it locked. ``ended``: the holder's own end is written already, which happens
    where a commit's answer was lost with the connection. ``status``: the job's.
    """

    owns: bool
    attempt_open: bool
    cancel_requested: bool
    progress: float
    ended: bool = False
    status: str = ""


GONE = Standing(owns=False, attempt_open=False, cancel_requested=False, progress=0.0)


def standings(alias: str, holders: Iterable[tuple[int, str]]) -> dict[str, Standing]:
    """Read again, without a lock, the rows that a fenced move did not change; by token.

    Not by job: a worker may hold an older attempt of a job beside the newer one.
    """
    dialect = dialect_for(alias)
    given, params = dialect.rows(ID_AND_TOKEN, list(holders))
    sql = (
        f"SELECT i.token, j.status = '{states.RUNNING}' AND j.lease_token = i.token"
        f" AND j.lease_expires_at > {dialect.now()},"
        f" a.number = j.attempt_count AND a.status = '{states.RUNNING}',"
        " j.cancel_requested_at IS NOT NULL, j.progress,"
        f" a.outcome IS NOT NULL AND a.outcome <> '{states.LOST}', j.status FROM ({given}) AS i"
        f" JOIN {JOBS} j ON j.id = i.id LEFT JOIN {ATTEMPTS} a ON a.job_id = j.id"
        " AND a.token = i.token"
    )
    return {
        row[0]: Standing(
            owns=bool(row[1]),
            attempt_open=bool(row[2]),
            cancel_requested=bool(row[3]),
            progress=row[4],
            ended=bool(row[5]),
            status=row[6],
        )
        for row in dialect.fetch(alias, sql, params)
    }


def fenced(
    alias: str,
    move: FencedMove,
    values: Sequence[Sequence[Any]],
    *,
    wait: bool = False,
    lock_timeout: float | None = None,
) -> dict[int, Any]:
    """Make a move in a transaction of our own; gives the new status of each changed job."""
    rows = dialect_for(alias).fenced(
        alias, move, values, wait=wait, own=True, lock_timeout=lock_timeout
    )
    return {row[0]: row[1] for row in rows}


def fenced_by_handler(alias: str, move: FencedMove, values: Sequence[Any]) -> Standing | None:
    """Make a handler's move on its own connection, inside its transaction if one is open.

    Waits for the row's lock. Gives None where it was made; else how the job stands, after
    ``LeaseLost`` has been raised to a handler that does not own it any more.
    """
    own = not joins_transaction(connections[alias])
    rows = dialect_for(alias).fenced(alias, move, [values], wait=True, own=own)
    if rows:
        return None
    standing = standings(alias, [(values[0], values[1])]).get(values[1], GONE)
    # (Who owns it and is refused by no condition of the move has raced: refused as well.)
    if not standing.owns or not standing.attempt_open or not move.condition:
        raise LeaseLost("this attempt does not own its job any more; nothing was written")
    return standing


def refuse_cancelled(standing: Standing) -> None:
    if standing.cancel_requested:
        raise JobCancelled("a cancel of this job was requested")
