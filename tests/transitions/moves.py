"""Every move of ``states.MOVES`` as a call, and jobs built in every status, for the matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import transaction

from django_durable_jobs import states
from django_durable_jobs.dialects.base import Lane
from django_durable_jobs.exceptions import DurableJobsError, JobInterrupt
from django_durable_jobs.models import Job, JobAttempt
from django_durable_jobs.transitions import (
    blocking,
    claims,
    completion,
    leases,
    maintenance,
    outcomes,
    recovery,
)
from tests._rows import attempt_row, job_row

NOW = datetime(2026, 3, 14, 12, 0, tzinfo=UTC)
LEASE = timedelta(seconds=60)
HANDLER, VERSION, FINGERPRINT = "tests.matrix", 1, "a" * 32
LANE = Lane(queue="default", handler=HANDLER, version=VERSION, fingerprint=FINGERPRINT)
OLD, CURRENT, WRONG = "0" * 32, "1" * 32, "e" * 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One cell: a status, a move, which token is shown, and how a running job's rows look.

    ``attempt`` is the row of the current attempt: ``open``, ``closed`` or ``missing``.
    """

    status: str
    move: str
    token: str
    lease: str = "valid"
    attempt: str = "open"

    def __str__(self) -> str:
        return f"{self.status}-{self.move}-{self.token}-{self.lease}-{self.attempt}"


TOKENS = {"right": CURRENT, "wrong": WRONG, "older": OLD, "none": None}


def build(case: Case) -> Job:
    """Store the job of a case: one lost attempt before, and where it runs, a newer one."""
    running = case.status == states.RUNNING
    terminal = case.status in states.TERMINAL
    future = case.status == states.SCHEDULED and case.move != "promote"
    expires = NOW + LEASE if case.lease == "valid" else NOW
    job = job_row(
        handler=HANDLER,
        handler_version=VERSION,
        fingerprint=FINGERPRINT,
        status=case.status,
        run_at=NOW + LEASE if future else NOW,
        created_at=NOW - LEASE,
        attempt_count=2 if running else 1,
        max_attempts=1 if case.move == "exhaust" else 3,
        blocked_reason=states.UNKNOWN_HANDLER if case.status == states.BLOCKED else None,
        lease_token=CURRENT if running else None,
        lease_expires_at=expires if running else None,
        finished_at=NOW - LEASE if terminal else None,
        progress=0.25,
        result="kept" if case.status == states.SUCCEEDED else None,
    )
    job.save(force_insert=True)
    ended = {"status": "interrupted", "outcome": "lost", "finished_at": NOW - LEASE}
    attempt_row(job, number=1, token=OLD, started_at=NOW - 2 * LEASE, **ended).save()
    if running and case.attempt != "missing":
        shape = ended if case.attempt == "closed" else {}
        current = {"number": 2, "token": CURRENT, "started_at": NOW - LEASE, "progress": 0.25}
        attempt_row(job, **current, **shape).save()
    # A neighbour in each move's sight, which nothing here may touch.
    neighbour = {"run_at": NOW + LEASE, "status": states.SCHEDULED, "max_attempts": 9}
    job_row(handler="tests.neighbour", **neighbour).save(force_insert=True)
    return job


def outcome(job: Job, token: str, **changes: Any) -> outcomes.Outcome:
    values: dict[str, Any] = {
        "job": job.pk,
        "token": token,
        "status": states.SUCCEEDED,
        "outcome": states.RETURNED,
        "final_status": states.SUCCEEDED,
    }
    return outcomes.Outcome(**(values | changes))


Call = Callable[[Job, str], object]

CALLS: dict[str, Call] = {
    "promote": lambda job, token: maintenance.promote_due("default"),
    "claim": lambda job, token: claims.claim(
        "default",
        claims.queued_lanes("default"),
        limit=10,
        worker="w",
        lease_seconds=LEASE.total_seconds(),
    ),
    "renew": lambda job, token: leases.renew("default", [(job.pk, token)], lease_seconds=99),
    "progress": lambda job, token: outcomes.record_progress("default", job.pk, token, 0.5, "half"),
    "checkpoint": lambda job, token: outcomes.record_checkpoint("default", job.pk, token, '"c"'),
    "finish": lambda job, token: outcomes.finish("default", [outcome(job, token)]),
    "give_back": lambda job, token: claims.give_back("default", [(job.pk, token)]),
    "block_claimed": lambda job, token: claims.block_claimed(
        "default", [(job.pk, token, states.CORRUPT_PAYLOAD)]
    ),
    "block": lambda job, token: blocking.block_lane(
        "default", LANE, states.UNKNOWN_HANDLER, patience=0
    ),
    "release": lambda job, token: job.release(),
    "recover": lambda job, token: job.recover(token),
    "recover_expired": lambda job, token: recovery.recover_expired("default"),
    "exhaust": lambda job, token: maintenance.exhaust("default"),
    "cancel": lambda job, token: job.request_cancel(),
    "request_cancel": lambda job, token: job.request_cancel(),
    "retry": lambda job, token: job.retry(),
}
# The pass over expired leases is the worker's form of the operator's move.
MOVE_OF = {"recover_expired": "recover"}


def complete(job: Job, token: str) -> None:
    with transaction.atomic():
        completion.complete("default", job.pk, token, '"done"')


CALLS["complete"] = complete


def fence(job: Job, token: str) -> None:
    """Not a move: it changes nothing, and holds the row."""
    with transaction.atomic():
        completion.fence("default", job.pk, token)


def make(case: Case, job: Job) -> BaseException | None:
    """Make the move of a case; give what it raised of our own errors."""
    try:
        CALLS[case.move](job, TOKENS[case.token])  # type: ignore[arg-type]
    except (DurableJobsError, JobInterrupt) as error:
        return error
    return None


def snapshot() -> dict[str, list[tuple[Any, ...]]]:
    """Read every column of both tables."""
    return {
        model.__name__: list(model.objects.order_by("pk").values_list())
        for model in (Job, JobAttempt)
    }
