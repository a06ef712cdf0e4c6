"""An operator's moves: cancel, retry, release. They join an open transaction, else make one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from django.db import IntegrityError, connections, transaction
from django.db.models import F, Model
from django.db.models.functions import Coalesce

from .. import states
from ..announcements import announce
from ..conf import settings
from ..dialects import dialect_for
from ..dialects.base import JOBS, TRIES
from ..doors import HOLDS_KEY
from ..exceptions import AttemptsExhausted, InvalidTransition
from ..models import Job
from ..payloads import decode_text
from ._let_in import pass_on

T = TypeVar("T")
# No move decides by these, and they may be big.
_CONTENT = (
    "payload",
    "checkpoint",
    "result",
    "progress_message",
    "error_summary",
    "error_traceback",
)


def alias_of(row: Model) -> str:
    """A row stays on the database that it was read from (CONTRACT 7.5)."""
    return row._state.db or settings.DATABASE


def operator_move(job: Job, work: Callable[[str, Job, int], T]) -> T:
    """Run ``work(alias, row, now)`` with the job's row locked, and refresh the given object."""
    alias = alias_of(job)
    result = dialect_for(alias).joined(alias, lambda: _locked(alias, job, work))
    job.refresh_from_db(using=alias)
    if job.status == states.QUEUED:
        announce(alias, [job.queue])
    return result


def _locked(alias: str, job: Job, work: Callable[[str, Job, int], T]) -> T:
    row, now = lock(alias, job)
    return work(alias, row, now)


def lock(alias: str, job: Job) -> tuple[Job, int]:
    """Lock the job's row and read the clock after it; ``Job.DoesNotExist`` for a pruned one."""
    dialect = dialect_for(alias)
    with connections[alias].cursor() as cursor:
        if dialect.for_update():
            cursor.execute(f"SELECT id FROM {JOBS} WHERE id = %s{dialect.for_update()}", [job.pk])
        else:
            # One writer: a no-op update takes the lock of the whole database.
            cursor.execute(f"UPDATE {JOBS} SET id = id WHERE id = %s", [job.pk])
        cursor.execute(f"SELECT {dialect.now()}")
        now = cursor.fetchone()[0]
    return Job.objects.using(alias).defer(*_CONTENT).get(pk=job.pk), now


def request_cancel(job: Job) -> str:
    """End a waiting job at once, or ask a running one's handler to stop (CONTRACT 3.5)."""
    return operator_move(job, _cancel)


def _cancel(alias: str, row: Job, now: int) -> str:
    jobs = Job.objects.using(alias).filter(pk=row.pk)
    first = Coalesce(F("cancel_requested_at"), now)
    if row.status in states.TRANSITIONS["cancel"].sources:
        jobs.filter(status__in=states.TRANSITIONS["cancel"].sources).update(
            status=states.CANCELLED,
            blocked_reason=None,
            limit_waiting=False,
            cancel_requested_at=first,
            finished_at=now,
        )
        if row.status == states.QUEUED and not row.limit_waiting:
            # It may be the one that was let in: the next has its turn.
            pass_on(alias, [row.pk])
        return "cancelled"
    if row.status in states.TRANSITIONS["request_cancel"].sources:
        jobs.filter(status=states.RUNNING).update(cancel_requested_at=first)
        return "requested"
    return "unchanged"


def retry(job: Job, *, extra_attempts: int = 0) -> Job:
    """Queue an ended job again, due now, with ``extra_attempts`` granted (CONTRACT 3.6).

    Raises ``InvalidTransition`` (its status, or its key is held) and ``AttemptsExhausted``.
    """
    if type(extra_attempts) is not int or not 0 <= extra_attempts <= 1000:
        raise InvalidTransition("extra_attempts must be a whole number from 0 to 1000.")
    operator_move(job, lambda alias, row, now: _retry(alias, row, now, extra_attempts))
    return job


def _retry(alias: str, row: Job, now: int, extra: int) -> None:
    sources = states.TRANSITIONS["retry"].sources
    if row.status not in sources:
        raise _wrong_status("retry", row)
    if row.attempt_count >= row.max_attempts + row.granted_attempts + extra:
        raise AttemptsExhausted(
            f"job {row.job_id} has used its {row.attempt_count} executions:"
            " grant more with retry(extra_attempts=1)."
        )
    changes: dict[str, Any] = {
        "status": states.QUEUED,
        "run_at": now,
        "granted_attempts": F("granted_attempts") + extra,
        "finished_at": None,
        "cancel_requested_at": None,
        "progress": 0,
        "progress_message": "",
        "result": None,
        "error_category": None,
        "error_summary": None,
        "error_traceback": None,
    }
    jobs = Job.objects.using(alias).filter(pk=row.pk, status__in=sources)
    _take_key(alias, row, "retry", lambda: jobs.update(**changes))


def release(job: Job) -> str:
    """Let a blocked job wait for a claim again; gives its new status (CONTRACT 2.3).

    Raises ``InvalidTransition`` (its status, or its key is held).
    """
    return operator_move(job, _release)


def _release(alias: str, row: Job, now: int) -> str:
    if row.status not in states.TRANSITIONS["release"].sources:
        raise _wrong_status("release", row)
    due = Job.objects.using(alias).filter(pk=row.pk, run_at__lte=now).exists()
    status = states.QUEUED if due else states.SCHEDULED
    jobs = Job.objects.using(alias).filter(pk=row.pk, status=states.BLOCKED)
    _take_key(alias, row, "release", lambda: jobs.update(status=status, blocked_reason=None))
    return status


def _wrong_status(move: str, row: Job) -> InvalidTransition:
    sources = ", ".join(states.TRANSITIONS[move].sources)
    return InvalidTransition(
        f"cannot {move} job {row.job_id}: it is {row.status}, and {move} starts from {sources}."
    )


def _take_key(alias: str, row: Job, move: str, write: Callable[[], object]) -> None:
    """Make a write that takes the job's dedupe key again; if another holds it, name that (1.5).

    A holder that ended between the refusal and the read holds it no more: tried again.
    """
    for number in range(1, TRIES + 1):
        try:
            with transaction.atomic(using=alias):
                write()
            return
        except IntegrityError:
            holder = _holder(alias, row)
            if holder is None and number < TRIES:
                continue
            if holder is None:
                raise
            raise InvalidTransition(
                f"cannot {move} job {row.job_id}: its dedupe key is held by job {holder}."
            ) from None


def _holder(alias: str, row: Job) -> str | None:
    job_id = dialect_for(alias).undecoded("j.job_id")
    sql = (
        f"SELECT {job_id} FROM {JOBS} j WHERE j.scope_hash = %s AND j.handler = %s"
        f" AND j.dedupe_key = %s AND j.id <> %s{HOLDS_KEY}"
    )
    with connections[alias].cursor() as cursor:
        cursor.execute(sql, [row.scope_hash, row.handler, row.dedupe_key, row.pk])
        found = cursor.fetchone()
    return (decode_text(found[0]) or "unreadable") if found else None
