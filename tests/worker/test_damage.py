"""Held jobs whose attempt row is missing: left as they are, and no neighbour's matter (3)."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
from django.db import DataError

from django_durable_jobs import JobContext, job
from django_durable_jobs.exceptions import LeaseLost
from django_durable_jobs.handlers import Registry
from django_durable_jobs.models import Job, JobAttempt
from django_durable_jobs.transitions.claims import claim, queued_lanes
from django_durable_jobs.worker import shutdown
from django_durable_jobs.worker.execution import context_for
from django_durable_jobs.worker.heartbeat import BUSY_WAIT_SECONDS, Heartbeat
from django_durable_jobs.worker.held import Held, HeldJobs
from django_durable_jobs.worker.shutdown import give_back_unbegun

from .support import PATIENCE, change, drain, fresh, row

pytestmark = pytest.mark.django_db(transaction=True)


def held_jobs(handlers: Registry, count: int) -> list[Held]:
    """Claim new jobs as a worker does; their handlers have not begun."""

    @job("damage.held")
    def held(ctx: JobContext) -> None: ...

    for _ in range(count):
        held.submit()
    claimed = claim("default", queued_lanes("default"), limit=9, worker="w", lease_seconds=60)
    assert len(claimed) == count
    return [Held(job=one, ctx=context_for("default", one)) for one in claimed]


def without_attempt(one: Held) -> Job:
    assert JobAttempt.objects.filter(token=one.job.token).delete()[0] == 1
    return Job.objects.get(pk=one.job.id)


def test_a_damaged_job_is_not_renewed_and_lost_only_with_its_lease(
    handlers: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    """CONTRACT 4.3: neither lost, since the lease lives, nor busy, since nobody has it locked."""
    held = HeldJobs()
    damaged, whole = both = held_jobs(handlers, 2)
    held.add(both)
    beat = Heartbeat("default", held)
    broken = without_attempt(damaged)
    left, renewed = row(broken), fresh(Job(pk=whole.job.id)).lease_expires_at
    for _ in range(3):
        beat.renew()
    assert row(broken) == left
    assert fresh(Job(pk=whole.job.id)).lease_expires_at > renewed
    assert (damaged.ctx.lost, whole.ctx.lost, beat.damaged) == (False, False, 1)
    assert beat.interval() > BUSY_WAIT_SECONDS
    assert caplog.text.count("no open attempt row; its lease is not renewed") == 1
    with pytest.raises(LeaseLost):
        damaged.ctx.checkpoint("not written")

    damaged.ctx._lost = False  # what the refused checkpoint has told it
    change(broken, lease_expires_at=1)
    for _ in range(2):
        beat.renew()
    assert (damaged.ctx.lost, whole.ctx.lost, beat.damaged) == (True, False, 1)
    assert caplog.text.count("the lease is lost") == 1


def test_a_damaged_claim_is_not_given_back_and_its_neighbours_are(
    handlers: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, whole = both = held_jobs(handlers, 2)
    broken = without_attempt(damaged)
    left = row(broken)
    give_back_unbegun("default", both, until=time.monotonic() + 30)
    assert row(broken) == left
    assert fresh(Job(pk=whole.job.id)).status == "queued"
    assert f"job {broken.pk} cannot be given back" in caplog.text


def test_a_claim_whose_row_is_refused_keeps_no_neighbour_from_being_given_back(
    handlers: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, *neighbours = held = held_jobs(handlers, 4)
    give_back = shutdown.give_back

    def are_given_back() -> bool:
        return all(fresh(Job(pk=one.job.id)).status == "queued" for one in neighbours)

    def give_some_back(alias: str, holders: Any, **options: Any) -> Any:
        if refused.job.id in dict(holders) and not are_given_back():
            raise DataError("a trigger says no")
        return give_back(alias, holders, **options)

    monkeypatch.setattr(shutdown, "give_back", give_some_back)
    give_back_unbegun("default", held, until=time.monotonic() + PATIENCE)
    assert are_given_back()
    # Tried again, it is let through once the others are.
    assert fresh(Job(pk=refused.job.id)).status == "queued"


@pytest.mark.parametrize("dispatch", ["runs", "blocks"])
def test_a_worker_goes_on_beside_a_job_that_was_damaged_after_its_claim(
    handlers: Registry,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dispatch: str,
) -> None:
    from django_durable_jobs.worker import loop

    @job("damage.runs")
    def runs(ctx: JobContext) -> str:
        return "done"

    def claim_and_damage(*args: Any, **kwargs: Any) -> Any:
        claimed = claim(*args, **kwargs)
        JobAttempt.objects.filter(job=broken).delete()
        return claimed

    broken, whole = runs.submit(), runs.submit()
    if dispatch == "blocks":
        change(broken, payload_sha256="0" * 64)
    monkeypatch.setattr(loop, "claim", claim_and_damage)
    caplog.set_level(logging.WARNING)
    drain()
    kept = fresh(broken)
    assert (kept.status, kept.result, kept.blocked_reason) == ("running", None, None)
    assert kept.ownership == "current" and not kept.attempts.exists()
    assert (fresh(whole).status, fresh(whole).result) == ("succeeded", "done")
    said = "no open attempt row" if dispatch == "runs" else "cannot be blocked"
    assert f"job {broken.pk} " in caplog.text and said in caplog.text


def test_a_claim_that_is_refused_for_good_holds_up_no_shutdown(
    handlers: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Though no time is left, as with ``SHUTDOWN_SECONDS = 0``, the others are given back."""
    first, refused, last = held = held_jobs(handlers, 3)
    give_back = shutdown.give_back
    tries: list[int] = []

    def give_some_back(alias: str, holders: Any, **options: Any) -> Any:
        if refused.job.id in dict(holders):
            tries.append(len(holders))
            raise DataError("a trigger says no")
        return give_back(alias, holders, **options)

    monkeypatch.setattr(shutdown, "give_back", give_some_back)
    give_back_unbegun("default", held, until=0)
    assert tries == [3, 1]
    assert "1 claim left to their leases" in caplog.text
    tries.clear()
    give_back_unbegun("default", [refused], until=time.monotonic() + PATIENCE)
    assert tries == [1, 1]
    statuses = [fresh(Job(pk=one.job.id)).status for one in (first, refused, last)]
    assert statuses == ["queued", "running", "queued"]
