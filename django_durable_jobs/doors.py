"""The doors: ``stage``, ``submit``, ``enqueue``, one by one and in bulk (CONTRACT 1.4, 1.5).

No door decides by looking first: it inserts, then sees what came back.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from asgiref.sync import sync_to_async
from django.db import IntegrityError, connections

from . import states
from .announcements import announce
from .conf import settings
from .dialects import dialect_for
from .dialects.base import JOBS, Place, refuse_open_transaction
from .exceptions import IdentityConflict, InvalidSubmission, TransactionRequired
from .fields import columns_of
from .instants import from_microseconds, to_microseconds
from .models import Job
from .submission import JobSubmission, make_submission
from .transactions import doom, in_callers_transaction

# How often an insert is tried again whose rival was gone when we looked for it.
ROUNDS = 20

_COLUMNS: dict[str, str] = {
    "scope": "text",
    "scope_hash": "text",
    "job_id": "text",
    "handler": "text",
    "handler_version": "integer",
    "payload": "text",
    "payload_sha256": "text",
    "fingerprint": "text",
    "submitted_queue": "text",
    "submitted_priority": "smallint",
    "dedupe_key": "text",
    "concurrency_key": "text",
    "schedule": "text",
    "scheduled_for": "bigint",
    "initial_run_at": "bigint",
    "max_attempts": "integer",
    "timeout": "double precision",
    "retry_on_interrupt": "boolean",
    "queue": "text",
    "priority": "smallint",
}


def stage(handler: Any, payload: Any = None, *, using: str | None = None, **options: Any) -> Job:
    """Insert a job inside the caller's ``atomic()``: it exists if and only if that commits.

    Raises ``InvalidSubmission``, ``TransactionRequired``, and ``IdentityConflict``, which
    dooms the caller's whole transaction.
    """
    alias = _alias(using)
    return _staged(alias, [_submission(handler, payload, options)])[0]


def submit(handler: Any, payload: Any = None, *, using: str | None = None, **options: Any) -> Job:
    """Insert a job in a short transaction of its own.

    Raises ``InvalidSubmission``, ``TransactionActive``, ``IdentityConflict``, ``LockTimeout``.
    """
    alias = _alias(using)
    return _submitted_one(alias, _submission(handler, payload, options))


def enqueue(handler: Any, payload: Any = None, *, using: str | None = None, **options: Any) -> Job:
    """Join the open transaction as ``stage``; where none is open, ``submit``."""
    alias = _alias(using)
    submission = _submission(handler, payload, options)
    if in_callers_transaction(connections[alias]):
        return _staged(alias, [submission])[0]
    return _submitted_one(alias, submission)


def stage_many(submissions: Iterable[JobSubmission], *, using: str | None = None) -> list[Job]:
    """Stage many, in order, in a number of queries that does not grow with them."""
    alias = _alias(using)
    return _staged(alias, _all_submissions(submissions))


def submit_many(submissions: Iterable[JobSubmission], *, using: str | None = None) -> list[Job]:
    """Submit many, in order, in one transaction; one conflict raises and stores nothing."""
    alias = _alias(using)
    return _submitted(alias, _all_submissions(submissions))


def enqueue_many(submissions: Iterable[JobSubmission], *, using: str | None = None) -> list[Job]:
    """``stage_many`` inside an open transaction, else ``submit_many``."""
    alias = _alias(using)
    given = _all_submissions(submissions)
    if in_callers_transaction(connections[alias]):
        return _staged(alias, given)
    return _submitted(alias, given)


def insert_new(alias: str, submissions: Sequence[JobSubmission]) -> list[Job]:
    """Insert in the open transaction; give the new jobs, in order.

    What a constraint refuses is passed over, such as an occurrence that is there (5.2).
    """
    if not submissions:
        return []
    jobs = _insert(alias, submissions, _places(alias, submissions), own=False)
    return _announced(alias, [jobs[one.identity] for one in submissions if one.identity in jobs])


asubmit = sync_to_async(submit, thread_sensitive=True)
aenqueue = sync_to_async(enqueue, thread_sensitive=True)
asubmit_many = sync_to_async(submit_many, thread_sensitive=True)
aenqueue_many = sync_to_async(enqueue_many, thread_sensitive=True)


def _alias(using: str | None) -> str:
    return settings.DATABASE if using is None else using


def _submission(handler: Any, payload: Any, options: dict[str, Any]) -> JobSubmission:
    if not isinstance(handler, JobSubmission):
        return make_submission(handler, payload, options)
    if payload is not None or options:
        raise InvalidSubmission(
            "a JobSubmission is complete: give payload and options to JobSubmission.create()."
        )
    return handler


def _all_submissions(submissions: Iterable[JobSubmission]) -> list[JobSubmission]:
    if not isinstance(submissions, Iterable):
        raise InvalidSubmission(
            f"give an iterable of submissions, not {type(submissions).__name__}."
        )
    given = list(submissions)
    for number, one in enumerate(given):
        if not isinstance(one, JobSubmission):
            raise InvalidSubmission(
                f"entry {number} is a {type(one).__name__}: make each by JobSubmission.create()."
            )
    return given


def _staged(alias: str, submissions: list[JobSubmission]) -> list[Job]:
    connection = connections[alias]
    if not in_callers_transaction(connection):
        raise TransactionRequired(
            f'stage() belongs inside transaction.atomic(using="{alias}"), beside the rows that'
            " it must commit with; use submit() for a transaction of its own."
        )
    try:
        return _announced(alias, _stored(alias, submissions))
    except IdentityConflict:
        doom(connection)
        raise


def _submitted(alias: str, submissions: list[JobSubmission]) -> list[Job]:
    dialect = dialect_for(alias)
    refuse_open_transaction(alias)
    if not submissions:
        return []

    def work() -> list[Job]:
        with dialect.own(alias):
            return _stored(alias, submissions)

    return _announced(alias, dialect.retried(work))


def _submitted_one(alias: str, submission: JobSubmission) -> Job:
    """The same, the insert in a transaction of its own: one round trip if the job is new."""
    refuse_open_transaction(alias)
    job = _settled(alias, [submission], own=True)[submission.identity]
    return _announced(alias, [job])[0]


def _announced(alias: str, jobs: list[Job]) -> list[Job]:
    announce(
        alias, {job.queue for job in jobs if job.newly_created and job.status == states.QUEUED}
    )
    return jobs


def _stored(alias: str, submissions: list[JobSubmission]) -> list[Job]:
    """Answer each submission in order; the repeats within the call answer as existing."""
    first: dict[tuple[str, str], JobSubmission] = {}
    for one in submissions:
        known = first.setdefault(one.identity, one)
        if known is not one and not known.same_as(one):
            raise IdentityConflict(
                f'job id "{one.job_id}" is given twice in this call, for different requests:'
                " use another job_id for one of them."
            )
    jobs = _settled(alias, list(first.values()), own=False) if first else {}
    answered: set[tuple[str, str]] = set()
    answers = []
    for one in submissions:
        job = jobs[one.identity]
        if one.identity in answered:
            job = copy.copy(job)
            job.newly_created = False
        answered.add(one.identity)
        answers.append(job)
    return answers


def _settled(
    alias: str, submissions: Sequence[JobSubmission], *, own: bool
) -> dict[tuple[str, str], Job]:
    """Insert, then look who was there: identity first, the live key second (1.5).

    A rival that is gone when we look has ended between the two; then insert again. With
    ``own``, for a single one, the insert and the look are a transaction of ours each: READ
    COMMITTED, its waits bounded.
    """
    # Drawn before any round, so that a later round does not change the order of claims.
    places = _places(alias, submissions)
    jobs: dict[tuple[str, str], Job] = {}
    open_ = list(submissions)
    for _ in range(ROUNDS):
        jobs |= _insert(alias, _first_of_each_key(open_), places, own=own)
        open_ = [one for one in open_ if one.identity not in jobs]
        if not open_:
            return jobs
        with dialect_for(alias).own(alias) if own else nullcontext():
            jobs |= _existing(alias, open_)
        open_ = [one for one in open_ if one.identity not in jobs]
        if not open_:
            return jobs
    raise IntegrityError(
        f"the insert of {len(open_)} job(s) was refused {ROUNDS} times by rows that were gone"
        " when they were looked for; try again"
    )


def _places(alias: str, submissions: Sequence[JobSubmission]) -> dict[tuple[str, str], Place]:
    """Draw the places of many in the order given; a single one gets its place by the insert."""
    if len(submissions) < 2:
        return {}
    drawn = dialect_for(alias).draw_places(alias, len(submissions))
    return {one.identity: place for one, place in zip(submissions, drawn, strict=True)}


def _first_of_each_key(submissions: Sequence[JobSubmission]) -> list[JobSubmission]:
    """The first asker of a key goes before the others, whatever order a dialect inserts in."""
    seen: set[tuple[str, str, str]] = set()
    chosen = []
    for one in submissions:
        if one.key is None or one.key not in seen:
            chosen.append(one)
        if one.key is not None:
            seen.add(one.key)
    return chosen


def _insert(
    alias: str,
    submissions: Sequence[JobSubmission],
    places: Mapping[tuple[str, str], Place],
    *,
    own: bool,
) -> dict[tuple[str, str], Job]:
    dialect = dialect_for(alias)
    values = [_values(one) for one in submissions]
    if places:
        at = [places[one.identity] for one in submissions]
        rows = dialect.insert_jobs(alias, _COLUMNS, values, at)
    else:
        rows = dialect.insert_job(alias, _COLUMNS, values[0], own=own)
    inserted = {(row[1], row[2]): row for row in rows}
    return {
        one.identity: _new_job(alias, one, inserted[one.identity])
        for one in submissions
        if one.identity in inserted
    }


def _values(one: JobSubmission) -> tuple[Any, ...]:
    return (
        one.scope,
        one.scope_hash,
        one.job_id,
        one.handler,
        one.handler_version,
        one.payload,
        one.payload_sha256,
        one.fingerprint,
        one.queue,
        one.priority,
        one.dedupe_key,
        one.concurrency_key,
        one.schedule,
        None if one.scheduled_for is None else to_microseconds(one.scheduled_for),
        None if one.run_at is None else to_microseconds(one.run_at),
        one.max_attempts,
        one.timeout,
        one.retry_on_interrupt,
        one.queue,
        one.priority,
    )


def _new_job(alias: str, one: JobSubmission, row: tuple[Any, ...]) -> Job:
    job = Job(
        id=row[0],
        scope=one.scope,
        scope_hash=one.scope_hash,
        job_id=one.job_id,
        handler=one.handler,
        handler_version=one.handler_version,
        payload=one.payload,
        payload_sha256=one.payload_sha256,
        fingerprint=one.fingerprint,
        submitted_queue=one.queue,
        submitted_priority=one.priority,
        dedupe_key=one.dedupe_key,
        concurrency_key=one.concurrency_key,
        schedule=one.schedule,
        scheduled_for=one.scheduled_for,
        initial_run_at=one.run_at,
        max_attempts=one.max_attempts,
        timeout=one.timeout,
        retry_on_interrupt=one.retry_on_interrupt,
        queue=one.queue,
        priority=one.priority,
        created_at=from_microseconds(row[3]),
        run_at=from_microseconds(row[4]),
        status=row[5],
    )
    job._state.db = alias
    job._state.adding = False
    job.newly_created = True
    return job


def _existing(alias: str, submissions: Sequence[JobSubmission]) -> dict[tuple[str, str], Job]:
    jobs = _same_identity(alias, submissions)
    return jobs | _same_key(alias, [one for one in submissions if one.identity not in jobs])


def _same_identity(alias: str, submissions: Sequence[JobSubmission]) -> dict[tuple[str, str], Job]:
    """The jobs that have the identities; ``IdentityConflict`` where one is another request."""
    columns = {"scope_hash": "text", "job_id": "text"}
    found = _joined(alias, columns, [one.identity for one in submissions], "")
    jobs = {(job.scope_hash, job.job_id): job for job in found}
    for one in submissions:
        if one.identity in jobs and not one.same_request(jobs[one.identity]):
            raise _conflict(one)
    return jobs


def _same_key(alias: str, submissions: Sequence[JobSubmission]) -> dict[tuple[str, str], Job]:
    """The live holders of the keys, each under the identity of the one that asked.

    A holder that has this identity itself came after we looked for identities: it is left
    to the next round, which compares the requests.
    """
    keyed = [one for one in submissions if one.key is not None]
    if not keyed:
        return {}
    columns = {"scope_hash": "text", "handler": "text", "dedupe_key": "text"}
    found = _joined(alias, columns, [one.key or () for one in keyed], HOLDS_KEY)
    holders: dict[Any, Job] = {(job.scope_hash, job.handler, job.dedupe_key): job for job in found}
    return {
        one.identity: copy.copy(holder)
        for one in keyed
        if (holder := holders.get(one.key)) and (holder.scope_hash, holder.job_id) != one.identity
    }


HOLDS_KEY = (
    f" AND j.dedupe_key IS NOT NULL AND (j.status IN ('{states.SCHEDULED}', '{states.QUEUED}',"
    f" '{states.RUNNING}') OR (j.status = '{states.BLOCKED}'"
    f" AND NOT (j.blocked_reason = '{states.CORRUPT_PAYLOAD}' AND j.blocked_reason IS NOT NULL)))"
)


def _joined(
    alias: str, columns: dict[str, str], values: Sequence[Sequence[Any]], condition: str
) -> Iterable[Job]:
    given, params = dialect_for(alias).rows(columns, list(dict.fromkeys(map(tuple, values))))
    match = " AND ".join(f"j.{name} = g.{name}" for name in columns)
    columns_read = columns_of(Job._meta.concrete_fields, "j", alias)
    sql = f"SELECT {columns_read} FROM {JOBS} j JOIN ({given}) AS g ON {match}{condition}"
    found: Iterable[Job] = Job.objects.using(alias).raw(sql, params)
    return found


def _conflict(one: JobSubmission) -> IdentityConflict:
    return IdentityConflict(
        f'job id "{one.job_id}" is taken in scope "{one.scope}" by a different request:'
        " use another job_id, or repeat exactly what was submitted first."
    )
