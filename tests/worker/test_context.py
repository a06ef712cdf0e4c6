"""What a handler is given: its facts, progress, checkpoint, its time (CONTRACT 3.9, 4.5)."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connection, connections, transaction

from django_durable_jobs import JobContext, job
from django_durable_jobs.exceptions import (
    InvalidTransition,
    JobCancelled,
    JobTimeout,
    LeaseLost,
)
from django_durable_jobs.handlers import Handler, Registry
from django_durable_jobs.models import Job, JobAttempt

from ..testapp.models import Business
from .support import PATIENCE, attempts, change, drain, fresh, only_attempt, until

pytestmark = pytest.mark.django_db(transaction=True)


FACTS = [
    "job_id",
    "scope",
    "scheduled_for",
    "attempt",
    "max_attempts",
    "token",
    "queue",
    "deadline",
    "checkpoint_value",
    "cancel_requested",
    "stop_requested",
]


def test_the_context_says_what_is_run(handlers: Registry) -> None:
    seen: dict[str, Any] = {}

    @job("context.facts", queue="facts", max_attempts=4, timeout=50)
    def facts(ctx: JobContext) -> None:
        for name in FACTS:
            seen[name] = getattr(ctx, name)
        seen["running"] = Job.objects.execution_status(ctx.token)

    done = facts.submit(job_id="the id", scope="tenant")
    drain()
    token, deadline = seen.pop("token"), seen.pop("deadline")
    assert seen == {
        "job_id": "the id",
        "scope": "tenant",
        "scheduled_for": None,
        "attempt": 1,
        "max_attempts": 4,
        "queue": "facts",
        "checkpoint_value": None,
        "cancel_requested": False,
        "stop_requested": False,
        "running": "running",
    }
    assert token == only_attempt(done).token
    assert deadline.tzinfo is not None
    assert deadline - datetime.now(UTC) < timedelta(seconds=50)
    assert Job.objects.execution_status(token) == "ended"


def progress_of(ctx: JobContext) -> tuple[float, float, str]:
    """Read what is committed, from another connection than the handler's."""
    found: list[Any] = []

    def read() -> None:
        of_attempt = JobAttempt.objects.get(token=ctx.token).progress
        of_job = Job.objects.values_list("progress", "progress_message").get(job_id=ctx.job_id)
        found.append((of_attempt, *of_job))
        connections.close_all()

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    return found[0]


def test_progress_commits_at_once_and_only_goes_forward(handlers: Registry) -> None:
    @job("context.progress")
    def progress(ctx: JobContext) -> None:
        assert progress_of(ctx) == (0, 0, "")
        ctx.progress(0.25, "a quarter")
        assert progress_of(ctx) == (0.25, 0.25, "a quarter")
        ctx.progress(0.25)
        assert progress_of(ctx) == (0.25, 0.25, "")
        with pytest.raises(InvalidTransition, match=r"0\.25"):
            ctx.progress(0.2, "back")
        assert progress_of(ctx) == (0.25, 0.25, "")
        ctx.progress(1, "all")
        assert progress_of(ctx) == (1, 1, "all")

    done = progress.submit()
    drain()
    assert (fresh(done).status, fresh(done).progress) == ("succeeded", 1)


def test_progress_takes_a_finite_number_from_0_to_1(handlers: Registry) -> None:
    wrong = [-0.001, 1.001, math.nan, math.inf, -math.inf, 10**400, True, "0.5", None]

    @job("context.wrong")
    def goes_on(ctx: JobContext) -> int:
        for fraction in wrong:
            with pytest.raises(ValueError, match="from 0 to 1, not "):
                ctx.progress(fraction)
        ctx.progress(0)
        return len(wrong)

    done = goes_on.submit()
    drain()
    assert (fresh(done).status, fresh(done).result) == ("succeeded", len(wrong))


def test_success_sets_progress_to_1_and_failure_leaves_it(handlers: Registry) -> None:
    @job("context.halfway", max_attempts=1)
    def halfway(ctx: JobContext) -> None:
        ctx.progress(0.5)
        if ctx.scope == "fails":
            raise ValueError

    done, failed = halfway.submit(), halfway.submit(scope="fails")
    drain()
    assert (fresh(done).progress, only_attempt(done).progress) == (1, 1)
    assert (fresh(failed).progress, only_attempt(failed).progress) == (0.5, 0.5)


@pytest.mark.parametrize("commits", [True, False])
def test_in_the_handlers_transaction_reports_go_with_it(handlers: Registry, commits: bool) -> None:
    class Away(Exception):
        pass

    @job("context.inside", max_attempts=1)
    def inside(ctx: JobContext) -> None:
        ctx.progress(0.1, "before")
        ctx.checkpoint("before")
        try:
            with transaction.atomic():
                Business.objects.create(name="inside")
                ctx.progress(0.5, "inside")
                ctx.checkpoint("inside")
                assert connection.in_atomic_block
                assert progress_of(ctx) == (0.1, 0.1, "before")
                if not commits:
                    raise Away
        except Away:
            pass
        expected = (0.5, 0.5, "inside") if commits else (0.1, 0.1, "before")
        assert progress_of(ctx) == expected
        raise ValueError("so that progress stays")

    ended = inside.submit()
    drain()
    kept = fresh(ended)
    assert kept.status == "failed", kept.error_summary
    assert kept.checkpoint == ("inside" if commits else "before")
    assert kept.progress == (0.5 if commits else 0.1)
    assert Business.objects.exists() is commits


def test_a_checkpoint_survives_into_the_next_attempt(handlers: Registry) -> None:
    seen = []

    @job("context.keeps", backoff=0)
    def keeps(ctx: JobContext) -> None:
        seen.append((ctx.attempt, ctx.checkpoint_value))
        ctx.checkpoint({"page": ctx.attempt})
        if ctx.attempt < 3:
            raise ValueError

    done = keeps.submit()
    drain()
    assert seen == [(1, None), (2, {"page": 1}), (3, {"page": 2})]
    assert fresh(done).status == "succeeded"


@pytest.mark.parametrize("write", ["progress", "checkpoint"])
@pytest.mark.parametrize("in_transaction", [False, True])
def test_a_lost_lease_is_told_and_nothing_is_written(
    handlers: Registry, write: str, in_transaction: bool
) -> None:
    told = []

    @job("context.loses", retry_on_interrupt=False)
    def loses(ctx: JobContext) -> None:
        Job.objects.filter(job_id=ctx.job_id).update(lease_expires_at=1)
        try:
            if in_transaction:
                with transaction.atomic():
                    Business.objects.create(name="never")
                    getattr(ctx, write)(0.5)
            else:
                getattr(ctx, write)(0.5)
        except LeaseLost:
            told.append(True)
            raise

    lost = loses.submit()
    drain()
    drain()
    assert told == [True]
    ended = fresh(lost)
    assert (ended.status, ended.progress, ended.checkpoint) == ("interrupted", 0, None)
    assert only_attempt(lost).outcome == "lost"
    assert not Business.objects.exists()


# Time ----------------------------------------------------------------------------------------


def assert_timed_out(one: Job) -> None:
    waiting, attempt = fresh(one), only_attempt(one)
    assert (waiting.status, waiting.result) == ("scheduled", None)
    assert waiting.error_category == "timeout"
    assert (attempt.status, attempt.outcome) == ("timed_out", "stopped")
    assert attempt.error_category == "timeout"
    assert waiting.run_at > attempt.finished_at


@pytest.mark.parametrize("how", ["check", "progress", "checkpoint"])
def test_after_the_deadline_every_call_stops_the_handler(handlers: Registry, how: str) -> None:
    @job("context.late", timeout=0.1, backoff=50)
    def late(ctx: JobContext) -> str:
        while True:
            try:
                ctx.check()
                time.sleep(0.005)
            except JobTimeout:
                {"check": ctx.check, "progress": lambda: ctx.progress(1)}.get(
                    how, lambda: ctx.checkpoint(1)
                )()
                return "not reached"

    stopped = late.submit()
    drain()
    assert_timed_out(stopped)
    assert (fresh(stopped).progress, fresh(stopped).checkpoint) == (0, None)
    assert fresh(stopped).run_at - only_attempt(stopped).finished_at == timedelta(seconds=50)


def test_a_job_that_always_times_out_fails_in_the_end(
    handlers: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    @job("context.slow", timeout=0.05, backoff=0, max_attempts=2)
    def slow(ctx: JobContext) -> None:
        while True:
            ctx.check()
            time.sleep(0.005)

    failed = slow.submit()
    drain()
    assert (fresh(failed).status, fresh(failed).error_category) == ("failed", "timeout")
    assert [attempt.status for attempt in attempts(failed)] == ["timed_out", "timed_out"]
    assert [line for line in caplog.messages if "passed its" in line] == [
        f"job {failed.job_id} (attempt {number} of handler context.slow) passed its timeout"
        for number in (1, 2)
    ]


def begun_in_time(handler: Handler[..., Any], begun: list[Any]) -> Job:
    """Run jobs of growing timeouts, up to one that has begun before its time was over."""
    for timeout in (0.1, 5, 40):
        one = handler.submit()
        change(one, timeout=timeout)
        drain()
        if begun:
            return one
    raise AssertionError("no timeout was long enough to begin")


def sleep_past(ctx: JobContext, seconds: float) -> None:
    """Sleep until so many seconds after the deadline."""
    while ctx.remaining() >= -seconds:
        time.sleep(0.005)


@pytest.mark.parametrize("end", ["returns", "raises"])
def test_an_end_of_its_own_within_the_grace_stands(
    handlers: Registry, durable_jobs: Callable[..., None], end: str
) -> None:
    durable_jobs(TIMEOUT_GRACE_SECONDS=29)

    @job("context.graceful", timeout=0.05, max_attempts=1)
    def graceful(ctx: JobContext) -> str:
        # However late it has begun: its time is over soon, and its grace is not.
        ctx._deadline = time.monotonic() + 0.05
        sleep_past(ctx, 0)
        if end == "raises":
            raise KeyError("its own")
        return "its own"

    ended = graceful.submit()
    drain()
    if end == "returns":
        assert (fresh(ended).status, fresh(ended).result) == ("succeeded", "its own")
    else:
        assert (fresh(ended).status, fresh(ended).error_category) == ("failed", "handler_error")


@pytest.mark.parametrize("end", ["returns", "raises"])
def test_an_end_after_the_grace_is_a_timeout(
    handlers: Registry,
    durable_jobs: Callable[..., None],
    limited_from: Callable[[threading.Event], None],
    end: str,
) -> None:
    durable_jobs(TIMEOUT_GRACE_SECONDS=0.05)
    limited_from(threading.Event())  # never: it ends by itself

    @job("context.too_late", timeout=0.05, backoff=50)
    def too_late(ctx: JobContext) -> str:
        sleep_past(ctx, 0.05)
        if end == "raises":
            raise KeyError("its own")
        return "its own"

    stopped = too_late.submit()
    drain()
    assert_timed_out(stopped)


# Async ---------------------------------------------------------------------------------------


def test_an_async_handler_reports_and_returns(handlers: Registry) -> None:
    @job("context.async_all", backoff=0)
    async def async_all(ctx: JobContext) -> dict[str, Any]:
        ctx.check()
        await ctx.aprogress(0.5, "half")
        with pytest.raises(InvalidTransition):
            await ctx.aprogress(0.4)
        with pytest.raises(ValueError, match="JSON"):
            await ctx.acheckpoint(math.nan)
        await ctx.acheckpoint(ctx.attempt)
        await Business.objects.acreate(name="async")
        if ctx.attempt == 1:
            raise ValueError
        return {"kept": ctx.checkpoint_value}

    done = async_all.submit()
    drain()
    ended = fresh(done)
    assert (ended.status, ended.result, ended.checkpoint) == ("succeeded", {"kept": 1}, 2)
    assert [attempt.progress for attempt in attempts(done)] == [0.5, 1]
    assert ended.progress_message == "half"
    assert Business.objects.count() == 2


@pytest.mark.parametrize("why", ["cancelled", "lost", "late"])
def test_the_async_twins_stop_a_handler_as_the_others_do(handlers: Registry, why: str) -> None:
    told: list[BaseException] = []

    def move(ctx: JobContext) -> None:
        one = Job.objects.get(job_id=ctx.job_id)
        if why == "cancelled":
            one.request_cancel()
        if why == "lost":
            change(one, lease_expires_at=1)

    async def reports(ctx: JobContext) -> None:
        try:
            await ctx.aprogress(0.5)
        finally:
            await ctx.acheckpoint("a cancel leaves it")

    @job("context.async_stops", backoff=50, retry_on_interrupt=False)
    async def async_stops(ctx: JobContext) -> None:
        with pytest.raises(SynchronousOnlyOperation):
            ctx.progress(0.1)
        with pytest.raises(SynchronousOnlyOperation):
            ctx.checkpoint("sync")
        await sync_to_async(move)(ctx)
        try:
            if why == "late":
                await asyncio.sleep(3600)
            await reports(ctx)
        except asyncio.CancelledError:
            await reports(ctx)
        except BaseException as error:
            told.append(error)
            raise

    stopped = async_stops.submit()
    change(stopped, timeout=0.2 if why == "late" else 50)
    drain()
    if why == "late":
        assert_timed_out(stopped)
        return
    if why == "lost":
        drain()
    expected = {"cancelled": "cancelled", "lost": "interrupted"}[why]
    kept = "a cancel leaves it" if why == "cancelled" else None
    assert (fresh(stopped).status, fresh(stopped).checkpoint) == (expected, kept)
    assert fresh(stopped).progress == 0
    assert [type(error) for error in told] == [JobCancelled if why == "cancelled" else LeaseLost]


@pytest.mark.parametrize(
    ("why", "others", "status", "outcome"),
    [
        ("cancelled", 0, "cancelled", "stopped"),
        ("stopped", 0, "interrupted", "stopped"),
        ("lost", 0, "interrupted", "lost"),
        ("stopped", 1, "failed", "raised"),
    ],
)
def test_a_group_of_nothing_but_stops_is_a_stop(
    handlers: Registry, why: str, others: int, status: str, outcome: str
) -> None:
    def ask(ctx: JobContext) -> None:
        one = Job.objects.get(job_id=ctx.job_id)
        if why == "cancelled":
            one.request_cancel()
            ctx.mark_cancel_requested()
        elif why == "stopped":
            ctx.mark_stop_requested()
        else:
            change(one, lease_expires_at=1)
            ctx.mark_lost()

    async def part(ctx: JobContext) -> None:
        async with asyncio.TaskGroup() as inner:
            for _ in range(2):
                inner.create_task(looks(ctx))

    async def looks(ctx: JobContext) -> None:
        ctx.check()

    async def fails() -> None:
        raise ValueError

    @job("context.async_grouped", max_attempts=1, retry_on_interrupt=False)
    async def async_grouped(ctx: JobContext) -> None:
        await sync_to_async(ask)(ctx)
        async with asyncio.TaskGroup() as outer:
            outer.create_task(part(ctx))
            for _ in range(others):
                outer.create_task(fails())

    one = async_grouped.submit()
    drain()
    if why == "lost":
        drain()
    assert (fresh(one).status, only_attempt(one).outcome) == (status, outcome)


def test_the_deadline_cancels_the_task_of_an_async_handler(handlers: Registry) -> None:
    cleaned = []

    begun: list[bool] = []

    @job("context.async_slow", backoff=50)
    async def async_slow(ctx: JobContext) -> None:
        begun.append(True)
        try:
            await asyncio.sleep(3600)
        finally:
            cleaned.append(True)

    stopped = begun_in_time(async_slow, begun)
    assert_timed_out(stopped)
    assert cleaned == [True]


def test_an_async_handler_may_end_by_itself_when_it_is_cancelled(
    handlers: Registry, durable_jobs: Callable[..., None]
) -> None:
    durable_jobs(TIMEOUT_GRACE_SECONDS=29)
    begun: list[bool] = []

    @job("context.async_saves", backoff=50)
    async def async_saves(ctx: JobContext) -> str:
        begun.append(True)
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return "saved"
        return "not reached"

    done = begun_in_time(async_saves, begun)
    assert (fresh(done).status, fresh(done).result) == ("succeeded", "saved")


def test_async_handlers_run_together_on_one_loop(handlers: Registry) -> None:
    met: dict[str, Any] = {"loops": set(), "count": 0}

    @job("context.async_meets")
    async def async_meets(ctx: JobContext) -> None:
        met["loops"].add(id(asyncio.get_running_loop()))
        met["count"] += 1
        while met["count"] < 3:
            await asyncio.sleep(0.001)

    together = [async_meets.submit() for _ in range(3)]
    drain(threads=3)
    assert [fresh(one).status for one in together] == ["succeeded"] * 3
    assert len(met["loops"]) == 1


def test_a_task_that_an_async_handler_leaves_behind_ends_with_the_worker(
    handlers: Registry,
) -> None:
    left: list[asyncio.Task[Any]] = []

    @job("context.async_leaves")
    async def async_leaves(ctx: JobContext) -> None:
        left.append(asyncio.create_task(asyncio.sleep(3600)))
        await asyncio.sleep(0)

    done = async_leaves.submit()
    before = set(threading.enumerate())
    drain()
    assert fresh(done).status == "succeeded"
    until(left[0].cancelled, "the task to end")
    until(lambda: set(threading.enumerate()) <= before, "the threads to end")


async def exits() -> None:
    raise SystemExit(3)


async def gathers() -> None:
    await asyncio.gather(exits())


async def groups() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(exits())


async def leaves_behind() -> None:
    left = asyncio.ensure_future(exits())
    await asyncio.wait([left])
    assert isinstance(left.exception(), SystemExit)


async def stops_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        (gathers, "failed"),
        (groups, "failed"),
        (leaves_behind, "succeeded"),
        (stops_the_loop, "succeeded"),
    ],
)
def test_an_exit_in_a_task_of_an_async_handler_ends_no_other(
    handlers: Registry, ends: Callable[[], Awaitable[None]], status: str
) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    @job("context.async_bystander")
    async def async_bystander(ctx: JobContext) -> str:
        begun.set()
        await ended.wait()
        return "fine"

    @job("context.async_exits", max_attempts=1)
    async def async_exits(ctx: JobContext) -> None:
        await begun.wait()
        try:
            await ends()
        finally:
            ended.set()

    bystander, one = async_bystander.submit(), async_exits.submit()
    drain(threads=2)
    assert fresh(one).status == status
    assert (fresh(bystander).status, fresh(bystander).result) == ("succeeded", "fine")


def test_an_event_loop_whose_thread_cannot_start_leaves_nothing_behind(
    handlers: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = threading.Thread.start, []

    def refuse_once(thread: threading.Thread) -> None:
        if thread.name == "durable-async" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)

    @job("context.async_begins", max_attempts=2, backoff=0)
    async def async_begins(ctx: JobContext) -> str:
        return "begun"

    one = async_begins.submit()
    drain()
    assert refused
    assert (fresh(one).result, attempts(one)[0].status) == ("begun", "failed")


def test_async_handlers_have_connections_of_their_own(handlers: Registry) -> None:
    used: set[int] = set()
    barrier = threading.Barrier(2, timeout=PATIENCE)

    def use() -> int:
        Business.objects.count()
        used.add(id(connections["default"].connection))
        # Both are inside at once: neither waits for the other's thread.
        barrier.wait()
        return 1

    @job("context.async_uses")
    async def async_uses(ctx: JobContext) -> int:
        return await sync_to_async(use)()

    together = [async_uses.submit() for _ in range(2)]
    drain(threads=2)
    assert [fresh(one).result for one in together] == [1, 1]
    assert len(used) == 2


def test_a_job_whose_time_is_over_before_it_begins_times_out(handlers: Registry) -> None:
    @job("context.async_never", backoff=50)
    async def async_never(ctx: JobContext) -> None:
        await asyncio.sleep(3600)

    stopped = async_never.submit()
    change(stopped, timeout=0)
    drain()
    assert_timed_out(stopped)
