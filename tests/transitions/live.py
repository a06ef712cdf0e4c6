"""Jobs that are really claimed, on the real clock, and what must hold of all rows at any time."""

from __future__ import annotations

import time
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from django.db import connection, connections

from django_durable_jobs import states
from django_durable_jobs.dialects import dialect_for
from django_durable_jobs.dialects.base import ATTEMPTS, JOBS, Lane
from django_durable_jobs.instants import from_microseconds
from django_durable_jobs.models import Job, JobAttempt
from django_durable_jobs.transitions import claims
from django_durable_jobs.transitions.claims import ClaimedJob
from django_durable_jobs.transitions.outcomes import Outcome
from tests._rows import job_row

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
HANDLER = "tests.live"
LANE = Lane(queue="default", handler=HANDLER, version=1, fingerprint="f" * 64)
WORKER = "the same name for all"
# Longer than a test takes on the slowest machine.
LEASE = 600.0


def queued(count: int = 1, *, alias: str = "default", **changes: Any) -> list[Job]:
    """Store jobs that are due; a timeout that any lease can hold."""
    values = {"handler": HANDLER, "run_at": LONG_AGO, "created_at": LONG_AGO, "timeout": 0.01}
    rows = [job_row(**(values | changes)) for _ in range(count)]
    return Job.objects.using(alias).bulk_create(rows)


def claim(limit: int = 1, *, lease: float = LEASE, alias: str = "default") -> list[ClaimedJob]:
    """Claim what is due."""
    return claims.claim(alias, [LANE], limit=limit, worker=WORKER, lease_seconds=lease)


def claimed(count: int = 1, *, lease: float = LEASE, **changes: Any) -> list[ClaimedJob]:
    """Store jobs and claim exactly these."""
    jobs = queued(count, **changes)
    held = claim(count, lease=lease)
    assert {one.id for one in held} == {job.pk for job in jobs}
    return held


def expired(count: int = 1, **changes: Any) -> list[ClaimedJob]:
    """Store jobs, claim them, and let their leases have expired a second ago."""
    held = claimed(count, **changes)
    expire(held)
    return held


def expire(held: list[ClaimedJob]) -> None:
    ago = from_microseconds(database_now() - 1_000_000)
    Job.objects.filter(pk__in=[one.id for one in held]).update(lease_expires_at=ago)


def holders(held: list[ClaimedJob]) -> list[tuple[int, str]]:
    return [(one.id, one.token) for one in held]


def done(one: ClaimedJob, **changes: Any) -> Outcome:
    """Give the outcome of a handler that returned."""
    values: dict[str, Any] = {
        "job": one.id,
        "token": one.token,
        "status": states.SUCCEEDED,
        "outcome": states.RETURNED,
        "final_status": states.SUCCEEDED,
    }
    return Outcome(**(values | changes))


def lock(pk: int, alias: str = "default") -> None:
    """Lock a job's row in the open transaction, as a stranger does; change nothing."""
    with connections[alias].cursor() as cursor:
        if connections[alias].vendor == "postgresql":
            cursor.execute(f"SELECT 1 FROM {JOBS} WHERE id = %s FOR UPDATE", [pk])
        else:
            cursor.execute(f"UPDATE {JOBS} SET id = id WHERE id = %s", [pk])


def lock_attempt(token: str) -> None:
    """Lock the row of a token's attempt in the open transaction."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(f"SELECT 1 FROM {ATTEMPTS} WHERE token = %s FOR UPDATE", [token])
        else:
            cursor.execute(f"UPDATE {ATTEMPTS} SET id = id WHERE token = %s", [token])


def database_now(alias: str = "default") -> int:
    """Read the clock that decides, in microseconds."""
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SELECT {dialect_for(alias).now()}")
        return int(cursor.fetchone()[0])


def lease_of(pk: int) -> int | None:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT lease_expires_at FROM {JOBS} WHERE id = %s", [pk])
        return cursor.fetchone()[0]


def sleep_past(instant: int) -> None:
    """Wait for the end of a lease by the clock that decides."""
    while (left := instant - database_now()) >= 0:
        time.sleep(left / 1e6 + 0.002)


def check_rows() -> None:
    """Check of every job what holds after every transaction, whoever raced whom."""
    by_job: dict[int, list[JobAttempt]] = {}
    for attempt in JobAttempt.objects.order_by("job_id", "number"):
        by_job.setdefault(attempt.job_id, []).append(attempt)
    for job in Job.objects.all():
        attempts = by_job.get(job.pk, [])
        open_ = [one.token for one in attempts if one.status == states.RUNNING]
        assert open_ == ([job.lease_token] if job.status == states.RUNNING else []), job
        assert [one.number for one in attempts] == list(range(1, job.attempt_count + 1)), job
        assert (job.lease_expires_at is not None) == (job.status == states.RUNNING), job
        assert (job.finished_at is not None) == job.is_terminal, job
        assert job.attempt_count <= job.max_attempts + job.granted_attempts, job
        ended = Counter(one.status for one in attempts)
        assert ended[states.SUCCEEDED] == (job.status == states.SUCCEEDED), job
        assert job.result is None or job.status == states.SUCCEEDED, job
