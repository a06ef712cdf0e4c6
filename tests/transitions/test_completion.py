"""``ctx.fence()`` and ``ctx.complete()``: the end commits with the domain writes (CONTRACT 3.8)."""

from __future__ import annotations

import pytest
from django.db import transaction

from django_durable_jobs import (
    InvalidTransition,
    JobCancelled,
    LeaseLost,
    TransactionRequired,
    job,
)
from django_durable_jobs.handlers import registry
from django_durable_jobs.models import Job
from django_durable_jobs.testing import drain
from tests.testapp.models import Business

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def own_handlers():
    with registry.temporary():
        yield


def run(handler):
    """Submit, drain once; give the job and its first attempt."""
    staged = handler.submit()
    drain(max_jobs=1)
    staged.refresh_from_db()
    return staged, staged.attempts.get(number=1)


def test_rows_result_and_end_commit_together():
    @job("completion.both")
    def both(ctx):
        with transaction.atomic():
            ctx.fence()
            Business.objects.create(name="written")
            ctx.complete({"made": 1})
        return "ignored: the job has ended"

    ended, attempt = run(both)
    assert (ended.status, ended.result, ended.progress) == ("succeeded", {"made": 1}, 1.0)
    assert (attempt.status, attempt.outcome) == ("succeeded", "returned")
    assert ended.lease_token is None
    assert Business.objects.filter(name="written").count() == 1


def test_a_completion_that_rolled_back_is_a_failure_by_that_name():
    @job("completion.rolled_back", backoff=60)
    def rolled_back(ctx):
        with transaction.atomic():
            Business.objects.create(name="never")
            ctx.complete()
            transaction.set_rollback(True)

    ended, attempt = run(rolled_back)
    assert (ended.status, ended.error_category) == ("scheduled", "completion_rolled_back")
    assert (attempt.status, attempt.error_category) == ("failed", "completion_rolled_back")
    assert not Business.objects.exists()


def test_an_error_after_the_commit_changes_nothing():
    @job("completion.late_error")
    def late_error(ctx):
        with transaction.atomic():
            ctx.complete("kept")
        raise RuntimeError("too late")

    ended, attempt = run(late_error)
    assert (ended.status, ended.result, attempt.outcome) == ("succeeded", "kept", "returned")


def test_an_error_that_rolls_the_completion_back_is_the_error():
    @job("completion.error", max_attempts=1)
    def error(ctx):
        with transaction.atomic():
            ctx.complete("never")
            raise RuntimeError("inside")

    ended, attempt = run(error)
    assert (ended.status, ended.result) == ("failed", None)
    assert (attempt.outcome, attempt.error_category) == ("raised", "handler_error")


@pytest.mark.parametrize("call", ["fence", "complete"])
def test_both_need_the_handlers_own_transaction(call):
    seen = []

    @job("completion.alone")
    def alone(ctx):
        try:
            getattr(ctx, call)()
        except TransactionRequired as error:
            seen.append(str(error))

    run(alone)
    assert "transaction.atomic" in seen[0]


def test_twice_is_refused():
    seen = []

    @job("completion.twice")
    def twice(ctx):
        with transaction.atomic():
            ctx.complete(1)
            try:
                ctx.complete(2)
            except InvalidTransition as error:
                seen.append(error)

    ended, _ = run(twice)
    assert len(seen) == 1
    assert ended.result == 1


@pytest.mark.parametrize("call", ["fence", "complete"])
def test_a_cancel_that_committed_first_wins(call):
    @job("completion.cancelled")
    def cancelled(ctx):
        Job.objects.get(job_id=ctx.job_id).request_cancel()
        with transaction.atomic():
            Business.objects.create(name="never")
            with pytest.raises(JobCancelled):
                getattr(ctx, call)()
            transaction.set_rollback(True)
        ctx.check()

    ended, attempt = run(cancelled)
    assert (ended.status, attempt.status, attempt.outcome) == ("cancelled", "cancelled", "stopped")
    assert not Business.objects.exists()


@pytest.mark.parametrize("call", ["fence", "complete"])
def test_an_older_attempt_is_told_while_the_newer_one_runs(call):
    @job("completion.late")
    def late(ctx):
        held = Job.objects.get(job_id=ctx.job_id)
        if ctx.attempt == 1:
            assert held.recover(ctx.token) == "queued"
            drain(max_jobs=1)
            with transaction.atomic():
                Business.objects.create(name="zombie")
                getattr(ctx, call)()
        return f"by attempt {ctx.attempt}"

    ended, _ = run(late)
    assert (ended.status, ended.result) == ("succeeded", "by attempt 2")
    assert not Business.objects.exists()
    first, second = ended.attempts.order_by("number")
    assert (first.status, first.outcome) == ("interrupted", "lost")
    assert second.status == "succeeded"


def test_a_loss_after_the_commit_is_no_loss(caplog):
    @job("completion.then_lost")
    def then_lost(ctx):
        with transaction.atomic():
            ctx.complete("kept")
        raise LeaseLost("renewal was refused meanwhile")

    ended, _ = run(then_lost)
    assert (ended.status, ended.result) == ("succeeded", "kept")


def test_a_result_that_is_not_json_is_refused_before_anything_is_written():
    @job("completion.bad", max_attempts=1)
    def bad(ctx):
        with transaction.atomic():
            with pytest.raises(ValueError, match="Not storable"):
                ctx.complete(object())
            ctx.complete("good")

    ended, _ = run(bad)
    assert ended.result == "good"
