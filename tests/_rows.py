"""Rows as nobody would make them through a door: unsaved, any field as one likes."""

from __future__ import annotations

import hashlib
import itertools
from datetime import UTC, datetime
from typing import Any

from django.db import connection

from django_durable_jobs.models import Job, JobAttempt

NOW = datetime(2026, 3, 14, 15, 9, 26, 535897, tzinfo=UTC)
_numbers = itertools.count(1)


def job_row(**changes: Any) -> Job:
    """Give an unsaved, storable job: queued, due at ``NOW``, with an identity of its own."""
    number = next(_numbers)
    scope = changes.get("scope", "")
    values: dict[str, Any] = {
        "scope_hash": hashlib.sha256(scope.encode()).hexdigest(),
        "job_id": f"row-{number}",
        "handler": "tests.rows",
        "payload": "null",
        "payload_sha256": hashlib.sha256(b"null").hexdigest(),
        "fingerprint": "f" * 64,
        "submitted_queue": "default",
        "submitted_priority": 0,
        "max_attempts": 3,
        "timeout": 30.0,
        "created_at": NOW,
        "queue": "default",
        "status": "queued",
        "run_at": NOW,
    }
    return Job(**(values | changes))


def attempt_row(job: Job, **changes: Any) -> JobAttempt:
    """Give an unsaved, storable attempt of a job: running since ``NOW``."""
    number = next(_numbers)
    values: dict[str, Any] = {
        "job": job,
        "number": number,
        "token": f"{number:032x}",
        "worker": "somebody",
        "status": "running",
        "started_at": NOW,
    }
    return JobAttempt(**(values | changes))


def stored_bytes(row: Any, column: str) -> bytes | None:
    """Read the exact bytes of a text column, past every decoding."""
    read = "CAST({} AS BLOB)" if connection.vendor == "sqlite" else "convert_to({}, 'UTF8')"
    table = row._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {read.format(column)} FROM {table} WHERE id = %s", [row.pk])
        found = cursor.fetchone()[0]
    return None if found is None else bytes(found)
