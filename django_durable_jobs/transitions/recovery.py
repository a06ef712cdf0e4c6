"""Recover: end attempts whose holder is dead, and let their jobs go on or end (CONTRACT 3.7)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from django.db import connections
from django.db.models import F

from .. import states
from ..dialects import dialect_for
from ..dialects.base import ATTEMPTS, JOBS
from ..exceptions import InvalidTransition
from ..instants import to_microseconds
from ..models import Job, JobAttempt
from ._let_in import pass_on
from ._pages import each_page, move
from .control import alias_of, operator_move


def ownership(job: Job) -> str:
    """Say whose a job is, from its fields as they were read and the deciding clock."""
    if job.status in states.TERMINAL:
        return "terminal"
    if job.status != states.RUNNING:
        return "unclaimed"
    if not job.lease_token or job.lease_expires_at is None:
        return "unknown"
    alias = alias_of(job)
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SELECT {dialect_for(alias).now()}")
        now = cursor.fetchone()[0]
    return "current" if to_microseconds(job.lease_expires_at) > now else "expired"


def recover_expired(alias: str) -> int:
    """End attempts whose lease has expired, page by page; give how many jobs were recovered.

    Rows that another transaction has locked, and rows whose attempt is missing, are passed
    over: they never hide the next.
    """
    open_attempt = (
        f"SELECT 1 FROM {ATTEMPTS} a WHERE a.job_id = j.id AND a.token = j.lease_token"
        # OFFSET keeps PostgreSQL from a join that begins with the attempts of all history.
        f" AND a.status = '{states.RUNNING}' LIMIT 1 OFFSET 0"
    )
    condition = (
        f"j.status = '{states.RUNNING}' AND j.lease_token IS NOT NULL"
        f" AND j.lease_expires_at <= {dialect_for(alias).now()} AND EXISTS ({open_attempt})"
    )
    # The index's order: a dead fleet's jobs are not sorted anew for each page.
    order = "j.handler, j.concurrency_key, j.id"
    return each_page(alias, condition, (), partial(_recover_locked, alias), order=order)


def _recover_locked(alias: str, ids: Sequence[int], now: int) -> list[int]:
    """End the open attempts of the locked jobs, and move exactly those jobs."""
    attempts = _lock_attempts(alias, ids)
    if not attempts:
        return []
    dialect = dialect_for(alias)
    given, params = dialect.rows({"id": "bigint"}, [(one,) for one in attempts])
    sql = (
        f"UPDATE {ATTEMPTS} SET status = '{states.INTERRUPTED}',"
        f" outcome = '{states.LOST}', finished_at = {now},"
        f" error_category = '{states.LOST_CATEGORY}', cancel_requested_at ="
        # A bare job_id would be the job's own, which is text.
        f" (SELECT j.cancel_requested_at FROM {JOBS} j WHERE j.id = {ATTEMPTS}.job_id)"
        f" WHERE id IN (SELECT g.id FROM ({given}) AS g) RETURNING job_id"
    )
    ended = [row[0] for row in dialect.fetch(alias, sql, params)]
    moved = move(alias, ended, _after_loss(now), states.RUNNING)
    pass_on(alias, moved)
    return moved


def _lock_attempts(alias: str, ids: Sequence[int]) -> list[int]:
    """Lock the open attempts of the jobs' tokens; those that somebody has locked are left out."""
    dialect = dialect_for(alias)
    given, params = dialect.rows({"id": "bigint"}, [(one,) for one in ids])
    lock = f"{dialect.for_update()} OF a SKIP LOCKED" if dialect.for_update() else ""
    sql = (
        f"SELECT a.id FROM {ATTEMPTS} a JOIN {JOBS} j ON j.id = a.job_id"
        f" AND j.lease_token = a.token WHERE a.status = '{states.RUNNING}'"
        f" AND j.id IN (SELECT g.id FROM ({given}) AS g) ORDER BY a.job_id{lock}"
    )
    return [row[0] for row in dialect.fetch(alias, sql, params)]


def _after_loss(now: int) -> str:
    left = "attempt_count < max_attempts + granted_attempts"
    status = (
        f"CASE WHEN cancel_requested_at IS NOT NULL THEN '{states.CANCELLED}'"
        f" WHEN retry_on_interrupt AND {left} THEN '{states.QUEUED}'"
        f" ELSE '{states.INTERRUPTED}' END"
    )
    goes_on = f"cancel_requested_at IS NULL AND retry_on_interrupt AND {left}"
    category = f"CASE WHEN cancel_requested_at IS NULL THEN '{states.LOST_CATEGORY}' END"
    return (
        f"status = {status}, run_at = CASE WHEN {goes_on} THEN {now} ELSE run_at END,"
        f" finished_at = CASE WHEN {goes_on} THEN NULL ELSE {now} END,"
        f" error_category = {category},"
        " error_summary = NULL, error_traceback = NULL, lease_token = NULL, lease_expires_at = NULL"
    )


def recover(job: Job, token: str | None, *, requeue: bool | None = None) -> str:
    """End the running attempt of a job whose holder the caller vouches is dead.

    ``token`` must be the row's current one, None for a row without one; ``requeue`` overrides
    the job's stored ``retry_on_interrupt``. Gives the new status; ``InvalidTransition`` else.
    """
    if requeue is not None and not isinstance(requeue, bool):
        raise InvalidTransition("requeue must be True, False or None.")
    return operator_move(
        job, lambda alias, row, now: _recover_by_hand(alias, row, now, token, requeue)
    )


def _recover_by_hand(
    alias: str, row: Job, now: int, token: str | None, requeue: bool | None
) -> str:
    if row.status != states.RUNNING:
        raise InvalidTransition(
            f"cannot recover job {row.job_id}: it is {row.status}, not {states.RUNNING}."
        )
    if token != row.lease_token:
        raise InvalidTransition(
            f"cannot recover job {row.job_id}: that token is not its current one."
        )
    unknown = not row.lease_token or row.lease_expires_at is None
    open_attempts = JobAttempt.objects.using(alias).filter(job=row, status=states.RUNNING)
    if not unknown:
        open_attempts = open_attempts.filter(token=token)
    ended = open_attempts.update(
        status=states.INTERRUPTED,
        outcome=states.LOST,
        finished_at=now,
        error_category=states.LOST_CATEGORY,
        cancel_requested_at=row.cancel_requested_at,
    )
    if not ended and not unknown:
        raise InvalidTransition(
            f"cannot recover job {row.job_id}: its attempt row is missing; nothing was changed."
        )
    return _end_by_hand(alias, row, now, requeue)


def _end_by_hand(alias: str, row: Job, now: int, requeue: bool | None) -> str:
    allowed = row.retry_on_interrupt if requeue is None else requeue
    left = row.attempt_count < row.max_attempts + row.granted_attempts
    if row.cancel_requested_at is not None:
        status = states.CANCELLED
    else:
        status = states.QUEUED if allowed and left else states.INTERRUPTED
    Job.objects.using(alias).filter(pk=row.pk, status=states.RUNNING).update(
        status=status,
        run_at=now if status == states.QUEUED else F("run_at"),
        finished_at=None if status == states.QUEUED else now,
        lease_token=None,
        lease_expires_at=None,
        error_category=None if status == states.CANCELLED else states.LOST_CATEGORY,
        error_summary=None,
        error_traceback=None,
    )
    pass_on(alias, [row.pk])
    return status
