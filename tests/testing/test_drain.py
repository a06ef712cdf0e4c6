"""drain(): the production claim, dispatch and finish in the test's own thread (CONTRACT 7.2)."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connection, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_durable_jobs import LeaseLost, TransactionActive, job
from django_durable_jobs.models import Job, LiveWorker
from django_durable_jobs.testing import FakeClock, drain, run_attempt

from .support import in_either_case

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


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


@in_either_case
def test_an_async_handler_does_its_database_work_in_this_thread(case):
    threads = []

    @job("testing.async")
    async def later(ctx) -> str:
        await ctx.aprogress(0.5, "half")
        await sync_to_async(lambda: threads.append(threading.current_thread()))()
        return f"{await Job.objects.acount()} done"

    staged = later.submit()
    assert [one.status for one in drain()] == ["succeeded"]
    staged.refresh_from_db()
    assert (staged.result, staged.progress_message) == ("1 done", "half")
    assert threads == [threading.current_thread()]


@in_either_case
def test_drain_in_an_async_test(case):
    @job("testing.async")
    async def later(ctx) -> int:
        return await Job.objects.acount()

    async def body():
        await later.asubmit()
        attempts = await sync_to_async(drain)()
        # No query, which an event loop would not let them make.
        return [(one.status, one.job.handler, one.job.result) for one in attempts]

    assert async_to_sync(body)() == [("succeeded", "testing.async", 1)]


@in_either_case
def test_an_attempt_by_hand_has_its_job_in_an_async_test(case, add):
    async def body():
        staged = await add.asubmit({"a": 1, "b": 2})
        attempt = await sync_to_async(run_attempt)(staged)
        return attempt.job.result

    assert async_to_sync(body)() == 3


@in_either_case
@pytest.mark.parametrize(
    "end", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError]
)
@pytest.mark.parametrize("is_async", [False, True])
def test_what_leaves_a_handler_ends_its_attempt_alone(end, is_async, case):
    @job("testing.sync_end", max_attempts=1)
    def sync_end(ctx) -> None:
        raise end

    @job("testing.async_end", max_attempts=1)
    async def async_end(ctx) -> None:
        raise end

    @job("testing.healthy")
    def healthy(ctx) -> None:
        pass

    (async_end if is_async else sync_end).submit(priority=1)
    healthy.submit()
    assert [one.status for one in drain()] == ["failed", "succeeded"]


@in_either_case
def test_the_handlers_own_exception_comes_out_where_asked_for(case):
    @job("testing.raises", max_attempts=1)
    def raises(ctx) -> None:
        raise LookupError("the handler's own")

    first, second = raises.submit(), raises.submit()
    with pytest.raises(LookupError, match="own") as caught:
        drain(raises=True)
    assert caught.traceback[-1].name == "raises", "with the handler's traceback"
    first.refresh_from_db()
    second.refresh_from_db()
    assert (first.status, first.error_category) == ("failed", "handler_error"), "written before"
    assert second.status == "queued", "nothing else was run"
    assert [one.status for one in drain()] == ["failed"]


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


@pytest.mark.django_db
def test_a_lease_lost_that_the_handler_made_up_is_its_error():
    @job("testing.false_loss", max_attempts=1)
    def false_loss(ctx) -> None:
        raise LeaseLost("no")

    staged = false_loss.submit()
    assert [one.status for one in drain()] == ["failed"]
    staged.refresh_from_db()
    assert (staged.status, staged.error_category) == ("failed", "handler_error")


# A TestCase's transaction stands for none, and is left alone -------------------------------------


@pytest.fixture
def a_bit_of_everything():
    @job("testing.fails", backoff=60)
    def fails(ctx) -> None:
        ctx.progress(0.5)
        ctx.checkpoint(1)
        raise ValueError

    @job("testing.completes")
    def completes(ctx) -> None:
        with transaction.atomic():
            ctx.fence()
            ctx.complete()

    def everything():
        with transaction.atomic():
            fails.stage()
        completes.submit(run_at=timedelta(microseconds=1))
        fails.submit(run_at=timedelta(hours=1)).request_cancel()
        return [one.status for one in drain()]

    return everything


@pytest.mark.django_db
def test_it_opens_no_thread_never_sleeps_and_closes_no_connection(
    a_bit_of_everything, monkeypatch, django_capture_on_commit_callbacks
):
    def never(*arguments, **options):
        raise AssertionError("not in a TestCase")

    monkeypatch.setattr(threading.Thread, "start", never)
    monkeypatch.setattr(time, "sleep", never)
    monkeypatch.setattr(BaseDatabaseWrapper, "close", never)
    monkeypatch.setattr(BaseDatabaseWrapper, "_close", never)
    monkeypatch.setattr(BaseDatabaseWrapper, "connect", never)
    with django_capture_on_commit_callbacks() as callbacks:
        assert sorted(a_bit_of_everything()) == ["failed", "succeeded"]
    assert callbacks == []


@pytest.mark.django_db
def test_it_changes_no_setting_of_the_transaction(a_bit_of_everything):
    raw = []
    if connection.vendor == "sqlite":
        connection.ensure_connection()
        connection.connection.set_trace_callback(raw.append)
    try:
        with CaptureQueriesContext(
            connection,
        ) as queries:
            a_bit_of_everything()
    finally:
        if connection.vendor == "sqlite":
            connection.connection.set_trace_callback(None)
    first_words = {sql.split()[0].upper() for sql in raw + [one["sql"] for one in queries]}
    assert first_words <= {"SELECT", "WITH", "INSERT", "UPDATE", "SAVEPOINT", "RELEASE"}


@pytest.mark.django_db
def test_every_legal_timeout_runs_under_the_longest_lease(own_handlers):
    leases = []

    @job("testing.long", timeout=3600)
    def long(ctx) -> None:
        running = Job.objects.get(job_id=ctx.job_id)
        leases.append(running.lease_expires_at - clock.now)
        clock.advance(7199.999999)

    with FakeClock(START) as clock:
        long.submit()
        # What a worker of a shorter lease has blocked, on SQLite.
        staged = long.submit()
        Job.objects.filter(pk=staged.pk).update(status="blocked", blocked_reason="invalid_policy")
        assert [one.status for one in drain()] == ["succeeded", "succeeded"]
    assert leases == [timedelta(hours=2)] * 2


@pytest.mark.django_db
@override_settings(DURABLE_JOBS={"MAX_TIMEOUT_SECONDS": 9999})
def test_a_timeout_that_no_lease_can_hold_is_still_blocked_on_sqlite():
    @job("testing.longer", timeout=7200)
    def longer(ctx) -> None:
        pass

    staged = longer.submit()
    drain()
    staged.refresh_from_db()
    sqlite = connection.vendor == "sqlite"
    assert (staged.status, staged.blocked_reason) == (
        ("blocked", "invalid_policy") if sqlite else ("succeeded", None)
    )


@pytest.mark.django_db
def test_an_attempt_that_lost_its_lease_is_recovered_and_given_once():
    @job("testing.stalls", max_attempts=2)
    def stalls(ctx) -> None:
        if ctx.attempt == 1:
            clock.advance(7200)

    with FakeClock(START) as clock:
        staged = stalls.submit()
        assert drain(max_jobs=1) == [], "it has not finished"
        assert Job.objects.get().ownership == "expired"
        assert [(one.number, one.status) for one in drain()] == [(2, "succeeded")]
    assert [one.outcome for one in staged.attempts.order_by("number")] == ["lost", "returned"]


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
