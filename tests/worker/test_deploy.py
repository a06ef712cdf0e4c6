"""A rolling deploy with real old and new workers: no operator, no ping-pong (FAULTS 8)."""

from __future__ import annotations

import time
from typing import Any

import pytest

from django_durable_jobs.handlers import Handler, registry
from django_durable_jobs.models import Job, JobAttempt, LiveWorker
from tests.release.jobs import Bill, BillInCents, Ship, ShipV1, new, old

from ..testapp import jobs
from .conftest import StartWorker
from .support import QUICK, Gate, Process, until

pytestmark = pytest.mark.django_db(transaction=True)


def submit(handlers: dict[str, Handler[..., Any]], name: str, payload: Any = None) -> Job:
    """Submit as a web process of that release does."""
    with registry.temporary():
        for handler in handlers.values():
            registry.unregister(*handler.key)
            registry.register(handler)
        return handlers[name].submit(payload)


@pytest.fixture
def releases() -> tuple[dict[str, Handler[..., Any]], dict[str, Handler[..., Any]]]:
    with registry.temporary():
        first = old()
    with registry.temporary():
        return first, new()


def state(one: Job) -> tuple[str, str | None, int]:
    return Job.objects.values_list("status", "blocked_reason", "attempt_count").get(pk=one.pk)


def blocked(one: Job) -> str | None:
    status, reason, attempts = state(one)
    return reason if status == "blocked" and attempts == 0 else None


def test_old_and_new_workers_side_by_side(
    start_worker: StartWorker, gate: Gate, releases: Any
) -> None:
    before, after = releases

    def start(name: str) -> Process:
        worker = start_worker(
            "--processes=0",
            "--threads=1",
            f"--name={name}",
            f"--queues=default,{name}-only",
            durable_jobs=QUICK,
            variables={"TEST_RELEASE": name},
        )
        until(lambda: LiveWorker.objects.filter(name=name).exists())
        return worker

    # Only the old workers are there, and a web process is new already.
    first = start("old")
    ours = [submit(before, "ship", ShipV1(1)), submit(before, "bill", Bill(2))]
    early = {
        "unknown_handler": [submit(after, "ship", Ship(3)), submit(after, "thank")],
        "schema_mismatch": [submit(after, "bill", BillInCents(4, 100))],
    }
    foreign = [one for jobs_of_reason in early.values() for one in jobs_of_reason]
    until(lambda: all(state(one)[0] == "succeeded" for one in ours))
    reasons = {one.pk: reason for reason, of_reason in early.items() for one in of_reason}
    until(lambda: {one.pk: blocked(one) for one in foreign} == reasons)
    assert not JobAttempt.objects.filter(job__in=foreign).exists(), "no attempt is spent"

    # The new worker takes up by itself what the old one has blocked.
    second = start("new")
    until(lambda: all(state(one)[0] == "succeeded" for one in foreign))
    assert {state(one)[1:] for one in [*ours, *foreign]} == {(None, 1)}

    # While it is busy its jobs wait: the old one leaves them alone, for many of its passes.
    busy = jobs.gated.submit(jobs.Gate(**gate.payload("busy")), queue="new-only")
    gate.begun("busy")
    said = first.output().count("blocked")
    waiting = [submit(after, name, payload) for name, payload in KINDS * 5]
    end = time.monotonic() + 20 * QUICK["POLL_SECONDS"]
    while time.monotonic() < end:
        assert {state(one) for one in waiting} == {("queued", None, 0)}
        # The old one is at work meanwhile.
        mine = submit(before, "bill", Bill(5))
        until(lambda one=mine: state(one)[0] == "succeeded")
    gate.open("busy")
    until(lambda: all(state(one)[0] == "succeeded" for one in [busy, *waiting]))
    assert {state(one)[1:] for one in waiting} == {(None, 1)}
    assert first.output().count("blocked") == said

    # The old worker goes; a web process is still old.
    first.send()
    assert first.ends() == 0
    late = submit(before, "ship", ShipV1(6))
    until(lambda: state(late)[0] == "succeeded")
    assert Job.objects.get(pk=late.pk).result == "new: Ship(order=6, carrier='post')"
    second.send()
    assert second.ends() == 0
    by_worker = JobAttempt.objects.filter(job__handler__startswith="release.")
    ran = {(one.job.result[:3], one.worker) for one in by_worker.select_related("job")}
    assert ran == {("old", "old"), ("new", "new")}
    assert Job.objects.exclude(status="succeeded", attempt_count=1).count() == 0


KINDS: list[tuple[str, Any]] = [("ship", Ship(7)), ("bill", BillInCents(8, 9)), ("thank", None)]
