"""Handlers that the tests of submission name; ``conftest`` registers them for each test."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from django_durable_jobs import JobSubmission, job
from django_durable_jobs.handlers import registry
from django_durable_jobs.payloads import JSON


@dataclass
class Order:
    number: int
    note: str = ""
    lines: list[int] = field(default_factory=list)


with registry.temporary():

    @job("submission.ship", queue="parcels", priority=3, max_attempts=4, timeout=12.5)
    def ship(ctx, payload: Order):
        return payload.number

    @job("submission.bill")
    def bill(ctx, payload: Order):
        return payload.number

    @job("submission.bill", version=2)
    def bill_again(ctx, payload: Order):
        return payload.number

    @job("submission.sweep", retry_on_interrupt=False)
    def sweep(ctx):
        return None

    @job("submission.anything")
    def anything(ctx, payload: JSON):
        return None

    @job("submission.limited", concurrency=1, concurrency_key=lambda payload: payload.note)
    def limited(ctx, payload: Order):
        return None

    @job("submission.stranger")
    def stranger(ctx):
        return None


HANDLERS = (ship, bill, bill_again, sweep, anything, limited)


def order(job_id: str | None, number: int = 1, **options: Any) -> JobSubmission:
    """Make a submission of ``ship``."""
    return JobSubmission.create(ship, Order(number), job_id=job_id, **options)
