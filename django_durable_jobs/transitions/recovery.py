"""Recover: end attempts whose holder is dead, and let their jobs go on or end (CONTRACT 3.7)."""

from __future__ import annotations

from collections.abc import Sequence

from django.db import connections
from django.db.models import F

from .. import states
from ..dialects import dialect_for
from ..dialects.base import ATTEMPTS, JOBS
from ..exceptions import InvalidTransition
from ..instants import to_microseconds
from ..models import Job, JobAttempt
from .control import alias_of, operator_move

PAGE = 500


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
    recovered, after = 0, 0
    dialect = dialect_for(alias)
    while True:
        with dialect.own(alias):
            condition = (
                f"j.status = '{states.RUNNING}' AND j.lease_token IS NOT NULL"
                f" AND j.lease_expires_at <= {dialect.now()} AND j.id > {after}"
            )
            page = dialect.lock_jobs(alias, condition, limit=PAGE)
            if page:
                now = max(row[1] for row in page)
                recovered += len(_recover_locked(alias, [row[0] for row in page], now))
        if len(page) < PAGE:
            return recovered
        after = page[-1][0]


def _recover_locked(alias: str, ids: Sequence[int], now: int) -> list[int]:
    """End the open attempts of the locked jobs, and move exactly those jobs."""
    dialect = dialect_for(alias)
    given, params = dialect.rows({"id": "bigint"}, [(one,) for one in ids])
    with connections[alias].cursor() as cursor:
        cursor.execute(
            f"UPDATE {ATTEMPTS} AS a SET status = '{states.INTERRUPTED}',"
            f" outcome = '{states.LOST}', finished_at = {now},"
            f" error_category = '{states.LOST_CATEGORY}',"
            " cancel_requested_at = j.cancel_requested_at"
            f" FROM {JOBS} AS j WHERE a.job_id = j.id AND a.token = j.lease_token"
            f" AND a.status = '{states.RUNNING}' AND j.status = '{states.RUNNING}'"
            f" AND j.lease_expires_at <= {now} AND j.id IN (SELECT g.id FROM ({given}) AS g)"
            " RETURNING job_id",
            params,
        )
        ended = [row[0] for row in cursor.fetchall()]
        if ended:
            given, params = dialect.rows({"id": "bigint"}, [(one,) for one in ended])
            cursor.execute(
                f"UPDATE {JOBS} SET {_after_loss(now)}"
                f" WHERE status = '{states.RUNNING}' AND id IN (SELECT g.id FROM ({given}) AS g)",
                params,
            )
    return ended


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
    return status
