"""claim(), run_attempt() and expire_lease(): one attempt by hand, and zombies on purpose."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.db import transaction

from django_durable_jobs import (
    InvalidTransition,
    JobCancelled,
    LeaseLost,
    PermanentError,
    TransactionActive,
    job,
)
from django_durable_jobs.models import Job, QueuePause
from django_durable_jobs.testing import FakeClock, claim, drain, expire_lease, run_attempt
from tests.testapp.models import Business

from .support import in_either_case

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


@pytest.fixture
def seen() -> list[tuple[str, int]]:
    """Job id and attempt of each execution of ``count``."""
    return []


@pytest.fixture
def count(seen):
    """A handler that ends as its payload says."""

    @job("testing.count", max_attempts=3, backoff=60)
    def count(ctx, payload: str) -> int:
        seen.append((ctx.job_id, ctx.attempt))
        if payload == "permanent":
            raise PermanentError("said so")
        if payload == "raise":
            raise LookupError
        ctx.progress(0.5)
        return ctx.attempt

    return count


def moved(staged: Job) -> Job:
    staged.refresh_from_db()
    return staged


# One attempt --------------------------------------------------------------------------------------


@in_either_case
def test_exactly_this_job_is_run_and_its_attempt_given(case, count, seen):
    others = [count.submit("return", priority=9), count.submit("return")]
    staged = count.submit("return", job_id="mine")
    attempt = run_attempt(staged)
    assert seen == [("mine", 1)]
    assert (attempt.job_id, attempt.number, attempt.status, attempt.outcome) == (
        staged.pk,
        1,
        "succeeded",
        "returned",
    )
    assert (staged.status, staged.result) == ("succeeded", 1), "the given object is refreshed"
    assert {moved(one).status for one in others} == {"queued"}


@in_either_case
def test_a_failed_attempt_is_retried_by_policy_one_by_one(case, count):
    with FakeClock(START) as clock:
        staged = count.submit("raise")
        for number, status in ((1, "scheduled"), (2, "scheduled"), (3, "failed")):
            attempt = run_attempt(staged)
            assert (attempt.number, attempt.status, staged.status) == (number, "failed", status)
            clock.advance(60)
        with pytest.raises(InvalidTransition, match="ended as failed"):
            run_attempt(staged)


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("payload", "error"), [("raise", LookupError), ("permanent", PermanentError)]
)
def test_what_the_handler_raised_comes_out_where_asked_for_after_its_end(count, payload, error):
    staged = count.submit(payload)
    with pytest.raises(error):
        run_attempt(staged, raises=True)
    assert staged.attempts.get().status == "failed"
    assert staged.status == ("failed" if error is PermanentError else "scheduled")


@pytest.mark.django_db
def test_a_payload_that_cannot_be_dispatched_blocks_the_job_as_in_production(count):
    staged = count.submit("return")
    Job.objects.update(payload='"other"')
    with pytest.raises(InvalidTransition, match="corrupt_payload"):
        run_attempt(staged)
    staged = moved(staged)
    assert (staged.status, staged.blocked_reason) == ("blocked", "corrupt_payload")
    assert (staged.attempt_count, staged.attempts.count()) == (0, 0)


def due_later(staged):
    Job.objects.update(status="scheduled", run_at=START + timedelta(hours=1))


def paused(staged):
    QueuePause.objects.create(queue=staged.queue, paused_at=START)


def running(staged):
    claim(Job.objects.get())


def expired(staged):
    running(staged)
    expire_lease(staged)


def unknown(staged):
    running(staged)
    Job.objects.update(lease_token=None, lease_expires_at=None)


REASONS = {
    due_later: "due later, at 2026-03-01T13:00:00",
    paused: "queue default is paused",
    running: "running already",
    expired: "its lease has expired",
    unknown: "its lease or token is missing",
    lambda staged: staged.request_cancel(): "ended as cancelled",
    lambda staged: Job.objects.update(status="blocked", blocked_reason="unknown_handler"): (
        r"blocked \(unknown_handler\)"
    ),
    lambda staged: Job.objects.update(fingerprint="0" * 32): "is registered in this process",
    lambda staged: Job.objects.update(attempt_count=3): "no executions left",
    lambda staged: Job.objects.update(cancel_requested_at=START): "damaged",
}


@pytest.mark.django_db
@pytest.mark.parametrize(("make", "says"), list(REASONS.items()))
def test_a_job_that_cannot_be_claimed_is_refused_with_the_reason(make, says, count, seen):
    with FakeClock(START):
        staged = count.submit("return", job_id="mine")
        make(staged)
        before = Job.objects.values().get(), list(staged.attempts.values())
        with pytest.raises(InvalidTransition, match=f"cannot claim job mine: .*{says}"):
            run_attempt(staged)
        assert (Job.objects.values().get(), list(staged.attempts.values())) == before
    assert seen == []


@pytest.mark.django_db
def test_one_that_has_come_due_is_promoted_first(count):
    with FakeClock(START) as clock:
        staged = count.submit("return", run_at=timedelta(hours=1))
        clock.advance(3600)
        assert run_attempt(staged).started_at == clock.now


@in_either_case
def test_inside_the_tests_own_transaction_nothing_is_claimed(case, count):
    staged = count.submit("return")
    for call in (claim, run_attempt):
        with transaction.atomic(), pytest.raises(TransactionActive):
            call(staged)
    assert moved(staged).status == "queued"


# Held attempts ------------------------------------------------------------------------------------


@in_either_case
def test_a_held_attempt_owns_its_job_until_its_end(case, count, seen):
    staged = count.submit("return")
    held = claim(staged)
    assert (staged.status, staged.lease_token, seen) == ("running", held.token, [])
    assert (held.ctx.job_id, held.ctx.attempt, held.ctx.token) == (staged.job_id, 1, held.token)
    assert (held.row.status, held.row.worker) == ("running", "testing.claim")
    assert drain() == [], "it is running already"
    held.ctx.progress(0.25, "a quarter")
    held.ctx.checkpoint({"row": 7})
    assert moved(staged).progress_message == "a quarter"
    with transaction.atomic():
        held.ctx.fence()
    assert held.run().status == "succeeded"
    assert (moved(staged).checkpoint, staged.result) == ({"row": 7}, 1)


@in_either_case
def test_a_zombie_changes_nothing_while_the_newer_attempt_runs(case, count):
    """FAULTS 1: expire, recover, claim anew; then every call of the old attempt."""
    staged = count.submit("return")
    zombie = claim(staged)
    expire_lease(staged)
    assert moved(staged).ownership == "expired"
    assert staged.recover(zombie.token) == "queued"
    newer = claim(staged)
    before = Job.objects.values().get(), list(staged.attempts.values())

    def in_transaction(call):
        with transaction.atomic():
            call()

    for call in (
        lambda: zombie.ctx.progress(0.9),
        lambda: zombie.ctx.checkpoint("late"),
        lambda: in_transaction(zombie.ctx.fence),
        lambda: in_transaction(zombie.ctx.complete),
    ):
        with pytest.raises(LeaseLost):
            call()
    late = zombie.run()
    assert (late.number, late.status, late.outcome) == (1, "interrupted", "lost")
    assert (Job.objects.values().get(), list(staged.attempts.values())) == before
    assert newer.run().status == "succeeded"


@in_either_case
@pytest.mark.parametrize("raises", [False, True])
def test_a_zombies_end_is_not_written_and_drain_runs_the_job_again(case, raises, count):
    staged = count.submit("return")
    zombie = claim(staged)
    expire_lease(staged)
    if raises:
        with pytest.raises(LeaseLost):
            zombie.run(raises=True)
    else:
        assert zombie.run().status == "running", "lost, and not recovered yet"
    assert [(one.number, one.status) for one in drain()] == [(2, "succeeded")]
    assert (zombie.row.status, zombie.row.outcome) == ("interrupted", "lost")


@pytest.mark.django_db
def test_a_handlers_writes_are_fenced_by_the_held_attempt(count):
    """The handler called as the plain function, with the context of a real attempt."""

    @job("testing.fenced")
    def fenced(ctx) -> None:
        with transaction.atomic():
            Business.objects.create(name="written")
            ctx.complete("done")

    staged = fenced.submit()
    held = claim(staged)
    expire_lease(staged)
    with pytest.raises(LeaseLost):
        fenced(held.ctx)
    assert not Business.objects.exists()
    drain()
    assert (Business.objects.count(), moved(staged).result) == (1, "done")


@pytest.mark.django_db
def test_a_cancel_requested_meanwhile_reaches_the_handler():
    @job("testing.checks")
    def checks(ctx) -> None:
        ctx.check()

    staged = checks.submit()
    held = claim(staged)
    assert staged.request_cancel() == "requested"
    assert not held.ctx.cancel_requested, "as before a worker's next look"
    with pytest.raises(JobCancelled):
        held.run(raises=True)
    assert (held.row.status, moved(staged).status) == ("cancelled", "cancelled")


@in_either_case
def test_a_lease_ends_at_the_instant_of_the_clock_in_force(case, count):
    staged = count.submit("return")
    with pytest.raises(InvalidTransition, match="it is queued and has none"):
        expire_lease(staged)
    with FakeClock(START):
        Job.objects.update(run_at=START)
        claim(staged)
        expire_lease(staged)
        assert staged.lease_expires_at == START, "the given object is refreshed"
        assert staged.ownership == "expired"
