"""FakeClock and drain(): the production code in a test, without sleeping."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection, transaction
from django.utils import timezone

from django_durable_jobs import JobCancelled, LeaseLost, TransactionActive, job
from django_durable_jobs.handlers import registry
from django_durable_jobs.models import Job, LiveWorker
from django_durable_jobs.testing import FakeClock, context, drain
from tests.testapp.models import Business

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


@pytest.fixture(autouse=True)
def own_handlers():
    with registry.temporary():
        yield


@pytest.fixture
def add():
    @job("testing.add", backoff=60)
    def add(ctx, payload: dict[str, int]) -> int:
        if payload.get("fail_until", 0) >= ctx.attempt:
            raise ValueError("not yet")
        return payload["a"] + payload["b"]

    return add


@pytest.mark.django_db
def test_drain_runs_what_is_due_and_gives_the_attempts(add):
    staged = add.submit({"a": 1, "b": 2})
    later = add.submit({"a": 1, "b": 2}, run_at=timedelta(hours=1))

    attempts = drain()

    assert [(one.job_id, one.status, one.outcome) for one in attempts] == [
        (staged.pk, "succeeded", "returned")
    ]
    staged.refresh_from_db()
    later.refresh_from_db()
    assert (staged.status, staged.result, staged.progress) == ("succeeded", 3, 1.0)
    assert later.status == "scheduled"


@pytest.mark.django_db
def test_the_clock_makes_a_backoff_due(add):
    with FakeClock(START) as clock:
        staged = add.submit({"a": 1, "b": 1, "fail_until": 1})
        assert [one.status for one in drain()] == ["failed"]
        staged.refresh_from_db()
        assert staged.status == "scheduled"
        assert staged.created_at == START
        assert staged.run_at == START + timedelta(seconds=60)
        clock.advance(59.999999)
        assert drain() == []
        clock.advance(timedelta(microseconds=1))
        (attempt,) = drain()
        assert (attempt.status, attempt.started_at) == ("succeeded", clock.now)


@pytest.mark.django_db
def test_drain_refuses_inside_the_tests_own_transaction(add):
    with transaction.atomic(), pytest.raises(TransactionActive):
        drain()


@pytest.mark.django_db(transaction=True)
def test_drain_works_in_a_transaction_test_case(add):
    add.submit({"a": 2, "b": 2})
    assert [one.status for one in drain()] == ["succeeded"]


@pytest.mark.django_db
def test_an_async_handler_runs_in_this_thread():
    @job("testing.async")
    async def later(ctx) -> str:
        await ctx.aprogress(0.5, "half")
        return "done"

    staged = later.submit()
    assert [one.status for one in drain()] == ["succeeded"]
    staged.refresh_from_db()
    assert (staged.result, staged.progress_message) == ("done", "half")


@pytest.mark.django_db
def test_drain_blocks_what_nobody_runs_and_releases_what_it_runs_again(add):
    staged = add.submit({"a": 1, "b": 2})
    Job.objects.filter(pk=staged.pk).update(handler_version=2)
    assert drain() == []
    staged.refresh_from_db()
    assert (staged.status, staged.blocked_reason, staged.attempt_count) == (
        "blocked",
        "unknown_handler",
        0,
    )
    Job.objects.filter(pk=staged.pk).update(handler_version=1)
    assert [one.status for one in drain()] == ["succeeded"]


@pytest.mark.django_db
def test_a_job_that_another_live_worker_runs_is_left_to_it(add):
    staged = add.submit({"a": 1, "b": 2})
    Job.objects.filter(pk=staged.pk).update(fingerprint="0" * 32)
    with FakeClock(START) as clock:
        LiveWorker.objects.create(
            name="newer",
            host="h",
            pid=1,
            capabilities=[["testing.add", 1, "0" * 32]],
            started_at=clock.now,
            last_seen_at=clock.now,
        )
        Job.objects.filter(pk=staged.pk).update(run_at=clock.now)
        drain()
        staged.refresh_from_db()
        assert staged.status == "queued"
        clock.advance(21)
        drain()
        staged.refresh_from_db()
        assert (staged.status, staged.blocked_reason) == ("blocked", "schema_mismatch")


@pytest.mark.django_db
def test_jobs_that_stage_each_other_come_to_an_end():
    @job("testing.again")
    def again(ctx) -> None:
        again.submit()

    again.submit()
    assert len(drain(max_jobs=7)) == 7


def test_one_fake_clock_at_a_time():
    with FakeClock(START), pytest.raises(RuntimeError), FakeClock(START):
        pass


def test_a_handler_is_called_plainly_with_a_context_that_records():
    @job("testing.plain")
    def plain(ctx, payload: dict[str, int]) -> int:
        ctx.check()
        ctx.progress(0.5, "half")
        ctx.checkpoint({"row": ctx.checkpoint_value + payload["n"]})
        ctx.complete(None)
        ctx.complete("done")
        return ctx.attempt

    ctx = context(attempt=2, checkpoint_value=40)
    assert plain(ctx, {"n": 2}) == 2
    assert ctx.reported.progress == [(0.5, "half")]
    assert ctx.reported.checkpoints == [{"row": 42}]
    assert ctx.reported.completed == [None, "done"]
    with pytest.raises(JobCancelled):
        plain(context(cancelled=True), {"n": 2})
    with pytest.raises(ValueError, match="number from 0 to 1"):
        context().progress(2)


def break_by_a_duplicate():
    Business.objects.create(pk=1)
    Business.objects.create(pk=1)


def break_by_raw_sql():
    with connection.cursor() as cursor:
        cursor.execute("SELECT no_such_column")


def leave_a_transaction_open():
    transaction.atomic().__enter__()
    Business.objects.create(name="half done")


@pytest.mark.django_db
@pytest.mark.parametrize("harm", [break_by_a_duplicate, break_by_raw_sql, leave_a_transaction_open])
def test_a_handler_that_breaks_its_transaction_leaves_the_test_case_usable(harm):
    @job("testing.harm", max_attempts=1)
    def harmful(ctx) -> None:
        harm()

    @job("testing.healthy")
    def healthy(ctx) -> int:
        return Business.objects.count()

    Business.objects.create(name="of the test")
    broken = harmful.submit(priority=1)
    after = healthy.submit()
    drain()
    broken.refresh_from_db()
    after.refresh_from_db()
    ends_well = harm is leave_a_transaction_open
    assert broken.status == ("succeeded" if ends_well else "failed")
    assert (after.status, after.result) == ("succeeded", 1)
    assert Business.objects.get().name == "of the test"


@pytest.mark.django_db
def test_a_lease_lost_that_the_handler_made_up_is_its_error():
    @job("testing.false_loss", max_attempts=1)
    def false_loss(ctx) -> None:
        raise LeaseLost("no")

    staged = false_loss.submit()
    assert [one.status for one in drain()] == ["failed"]
    staged.refresh_from_db()
    assert (staged.status, staged.error_category) == ("failed", "handler_error")


@pytest.mark.django_db
def test_the_deadline_is_by_the_clock_of_all_instants():
    seen = []

    @job("testing.deadline", timeout=30)
    def deadline(ctx) -> None:
        seen.append(ctx.deadline)

    with FakeClock(START):
        deadline.submit()
        drain()
    assert seen == [START + timedelta(seconds=30)]


@pytest.mark.django_db(transaction=True)
def test_with_autocommit_off_moves_join_what_is_open(add):
    staged = add.submit({"a": 1, "b": 2}, run_at=timezone.now() + timedelta(hours=1))
    transaction.set_autocommit(False)
    try:
        assert staged.request_cancel() == "cancelled"
        transaction.rollback()
    finally:
        transaction.set_autocommit(True)
    staged.refresh_from_db()
    assert staged.status == "scheduled"
