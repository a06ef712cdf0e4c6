"""Rows that stand in the way: finished, future, running and queued jobs, copied from real ones."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django.core.management import call_command
from django.db import connection
from django_durable_jobs.models import Job, JobAttempt
from django_durable_jobs.transitions.claims import claim, queued_lanes

from copies import columns_of, copy_row, ordered_id, settle, token

from .jobs import limited, noop

JOBS = Job._meta.db_table
ATTEMPTS = JobAttempt._meta.db_table
# Far enough for every run: nothing becomes due, and no lease expires.
FAR = timedelta(days=30)
MICROSECONDS = 1_000_000
HIGHEST = 100


def crowd(*, finished: int, future: int, running: int) -> dict[str, int]:
    """Fill an empty database: history with its attempts, future jobs, other workers' jobs."""
    _finished(finished)
    _running(running)
    _future(future)
    settle()
    return {"rows": Job.objects.count(), "attempts": JobAttempt.objects.count()}


def queued(*, count: int, queue: str, version: int = 1, priority: int = 0) -> dict[str, int]:
    """Fill with queued jobs; of a higher version only newer code could run them."""
    origin = noop.submit(0, queue=queue, priority=priority)
    values = {"job_id": ordered_id("d"), "handler_version": str(version)}
    copy_row(JOBS, origin.pk, count - 1, values)
    Job.objects.filter(pk=origin.pk).update(handler_version=version)
    settle()
    return {"rows": Job.objects.count()}


def at_limit(*, keys: int, waiting: int) -> dict[str, int]:
    """Fill with full keys: one job of each runs, and others wait for its place, before all."""
    _running(keys, {"concurrency_key": "'full-' || g.n"}, limited)
    origin = limited.submit(-1, priority=HIGHEST)
    Job.objects.filter(pk=origin.pk).update(limit_waiting=True)
    key = f"'full-' || (1 + g.n %% {keys})"
    copy_row(JOBS, origin.pk, waiting - 1, {"job_id": ordered_id("e"), "concurrency_key": key})
    settle()
    return {"waiting": Job.objects.filter(limit_waiting=True).count()}


def _finished(count: int) -> None:
    origin = noop.submit(0)
    call_command("runjobs", drain=True, verbosity=0)
    # One finished each millisecond until then.
    ago = "(1000 * g.n)"
    values = {name: f"t.{name} - {ago}" for name in ("created_at", "run_at", "finished_at")}
    copy_row(JOBS, origin.pk, count - 1, {**values, "job_id": ordered_id("a")})
    _copy_attempts(origin.pk, {"token": token()})


def _running(count: int, changes: Mapping[str, str] | None = None, handler: Any = noop) -> None:
    origin = handler.submit(-1)
    claim("default", queued_lanes("default"), limit=1, worker="elsewhere", lease_seconds=3600)
    far = int(FAR.total_seconds()) * MICROSECONDS
    values = {"lease_token": token(), "lease_expires_at": f"t.lease_expires_at + {far}"}
    values |= {"job_id": ordered_id("b"), **(changes or {})}
    copy_row(JOBS, origin.pk, count - 1, values)
    _copy_attempts(origin.pk, {"token": "j.lease_token"})


def _future(count: int) -> None:
    origin = noop.submit(0, run_at=FAR, priority=HIGHEST)
    later = {name: f"t.{name} + 1000 * g.n" for name in ("run_at", "initial_run_at")}
    copy_row(JOBS, origin.pk, count - 1, {**later, "job_id": ordered_id("c")})


def _copy_attempts(origin: int, values: dict[str, str]) -> None:
    """Give each copy of a job the copy of its attempt."""
    values = {"job_id": "j.id", **values}
    columns = [name for name in columns_of(ATTEMPTS) if name != "id"]
    chosen = ", ".join(values.get(name, f"t.{name}") for name in columns)
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {ATTEMPTS} ({', '.join(columns)}) SELECT {chosen}"
            f" FROM {JOBS} j JOIN {ATTEMPTS} t ON t.job_id = %s WHERE j.id > %s ORDER BY j.id",
            [origin, origin],
        )
