"""Failures: when a job is tried again, and a slot that is clean for the next one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, connections, transaction

from django_durable_jobs import JobContext, PermanentError, RetryLater, job
from django_durable_jobs.exceptions import JobCancelled, JobTimeout, WorkerStopping
from django_durable_jobs.handlers import Registry
from django_durable_jobs.models import Job

from ..testapp import jobs
from ..testapp.models import Business
from .conftest import StartWorker
from .support import Gate, attempts, change, drain, fresh, only_attempt

pytestmark = pytest.mark.django_db(transaction=True)


def delay_of(failed: Job) -> float:
    """Give the seconds between the end of the last attempt and the next due time."""
    return (fresh(failed).run_at - attempts(failed)[-1].finished_at).total_seconds()


def fail(failed: Job) -> float:
    """Run a job that is due or in backoff; give the delay that it waits then."""
    change(failed, run_at=1)
    drain()
    assert fresh(failed).status == "scheduled"
    assert (fresh(failed).error_category, attempts(failed)[-1].outcome) == (
        "handler_error",
        "raised",
    )
    return delay_of(failed)


def test_backoff_doubles_up_to_its_cap_and_draws_from_the_upper_half(
    handlers: Registry, durable_jobs: Callable[..., None]
) -> None:
    durable_jobs(RETRY_BASE_SECONDS=80, RETRY_MAX_SECONDS=200)

    @job("failures.always", max_attempts=5)
    def always(ctx: JobContext) -> None:
        raise ValueError

    failed = always.submit()
    for full in (80, 160, 200, 200):
        assert full / 2 <= fail(failed) <= full
    change(failed, run_at=1)
    drain()
    ended = fresh(failed)
    assert (ended.status, ended.error_category, ended.attempt_count) == (
        "failed",
        "handler_error",
        5,
    )
    assert [attempt.status for attempt in attempts(failed)] == ["failed"] * 5


@pytest.mark.parametrize(
    ("backoff", "delays"),
    [
        (70, [70, 70, 70]),
        (timedelta(minutes=1), [60, 60]),
        ([30, 50], [30, 50, 50]),
        (lambda error, attempt: attempt * 50 if type(error) is KeyError else 1, [50, 100]),
    ],
)
def test_a_backoff_of_ones_own(handlers: Registry, backoff: Any, delays: list[float]) -> None:
    @job("failures.own", max_attempts=9, backoff=backoff)
    def own(ctx: JobContext) -> None:
        raise KeyError("x")

    failed = own.submit()
    assert [fail(failed) for _ in delays] == delays


def test_a_backoff_function_may_refuse_the_retry(handlers: Registry) -> None:
    @job("failures.refuses", backoff=lambda error, attempt: None)
    def refuses(ctx: JobContext) -> None:
        raise KeyError("x")

    failed = refuses.submit()
    drain()
    assert (fresh(failed).status, fresh(failed).attempt_count) == ("failed", 1)


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_backoff_function_that_raises_costs_no_outcome(
    handlers: Registry, durable_jobs: Callable[..., None], error: type[BaseException]
) -> None:
    durable_jobs(RETRY_BASE_SECONDS=100)

    def backoff(exception: BaseException, attempt: int) -> float:
        raise error

    @job("failures.bad_backoff", backoff=backoff)
    def bad_backoff(ctx: JobContext) -> None:
        raise KeyError("x")

    failed = bad_backoff.submit()
    assert 50 <= fail(failed) <= 100


@pytest.mark.parametrize("delay", [42, timedelta(seconds=42)])
def test_retry_later_says_when_and_why(
    handlers: Registry, delay: Any, caplog: pytest.LogCaptureFixture
) -> None:
    @job("failures.later", max_attempts=2, backoff=7)
    def later(ctx: JobContext) -> None:
        raise RetryLater(delay, "the printer is\nout of paper")

    failed = later.submit()
    assert fail(failed) == 42
    assert "the printer is\nout of paper" in fresh(failed).error_summary
    change(failed, run_at=1)
    drain()
    assert (fresh(failed).status, fresh(failed).attempt_count) == ("failed", 2)
    first, second = (one for one in caplog.messages if "on purpose" in one)
    told = r"raised RetryLater on purpose: the printer is\nout of paper"
    assert first.endswith(f"{told}; again in 42 s")
    assert second.endswith(told)


def test_a_retry_later_without_a_usable_delay_falls_back_to_the_backoff(
    handlers: Registry,
) -> None:
    class Careless(RetryLater):
        def __init__(self) -> None:
            pass

    @job("failures.careless", backoff=70)
    def careless(ctx: JobContext) -> None:
        raise Careless

    failed = careless.submit()
    assert fail(failed) == 70


def test_a_permanent_error_ends_the_job(
    handlers: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    @job("failures.permanent")
    def permanent(ctx: JobContext) -> None:
        raise PermanentError("no such customer")

    failed = permanent.submit()
    drain()
    ended = fresh(failed)
    assert (ended.status, ended.error_category, ended.attempt_count) == ("failed", "permanent", 1)
    assert ended.error_summary.endswith(": no such customer")
    assert "permanent" in ended.error_summary
    assert caplog.messages[0].endswith("raised PermanentError on purpose: no such customer")
    attempt = only_attempt(failed)
    assert (attempt.status, attempt.outcome) == ("failed", "raised")
    assert attempt.error_summary == ended.error_summary


# Whatever a handler raises -------------------------------------------------------------------


class Unusual(BaseException):
    """Derives from no Exception."""


KINDS = [
    ValueError,
    SystemExit,
    KeyboardInterrupt,
    GeneratorExit,
    StopIteration,
    asyncio.CancelledError,
    RecursionError,
    MemoryError,
    Unusual,
    JobCancelled,
    JobTimeout,
    WorkerStopping,
]


def is_in_transaction(one: Any) -> bool:
    one.ensure_connection()
    raw = one.connection
    return raw.in_transaction if one.vendor == "sqlite" else raw.info.transaction_status != 0


def write_on_a_clean_connection(name: str) -> None:
    one = connections["default"]
    assert not one.in_atomic_block
    assert one.get_autocommit()
    assert not is_in_transaction(one)
    Business.objects.create(name=name)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_whatever_a_handler_raises_ends_its_attempt_alone(
    handlers: Registry, is_async: bool
) -> None:
    def end(ctx: JobContext) -> None:
        number, _, role = ctx.job_id.partition("/")
        if role == "raises":
            raise KINDS[int(number)]
        write_on_a_clean_connection(ctx.job_id)

    if is_async:

        @job("failures.raises", backoff=100)
        async def handler(ctx: JobContext) -> None:
            await asyncio.sleep(0)
            if ctx.job_id.endswith("raises"):
                end(ctx)
            await sync_to_async(end)(ctx)
    else:

        @job("failures.raises", backoff=100)
        def handler(ctx: JobContext) -> None:
            end(ctx)

    # In the one slot a healthy job follows each.
    failed, healthy = [], []
    for number in range(len(KINDS)):
        failed.append(handler.submit(job_id=f"{number}/raises"))
        healthy.append(handler.submit(job_id=f"{number}/healthy"))
    drain()
    for kind, one in zip(KINDS, failed, strict=True):
        waiting, attempt = fresh(one), only_attempt(one)
        assert (waiting.status, waiting.error_category) == ("scheduled", "handler_error"), kind
        assert (attempt.status, attempt.outcome) == ("failed", "raised"), kind
    for kind, one in zip(KINDS, healthy, strict=True):
        assert (fresh(one).status, fresh(one).attempt_count) == ("succeeded", 1), kind
    assert Business.objects.count() == len(KINDS)


# Whatever a handler leaves behind ------------------------------------------------------------


def left_in_atomic() -> None:
    transaction.atomic().__enter__()
    Business.objects.create(name="never committed")


def left_in_a_nested_atomic() -> None:
    transaction.atomic().__enter__()
    transaction.atomic().__enter__()
    Business.objects.create(name="never committed")


def left_doomed() -> None:
    transaction.atomic().__enter__()
    transaction.set_rollback(True)


def left_without_autocommit() -> None:
    transaction.set_autocommit(False)
    Business.objects.create(name="never committed")


def left_in_a_raw_transaction() -> None:
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")
    Business.objects.create(name="never committed")


def left_in_a_failed_raw_transaction() -> None:
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute("SELECT no_such_column")


def left_closed() -> None:
    Business.objects.count()
    connection.close()


def left_closed_under_django() -> None:
    Business.objects.count()
    connection.connection.close()


def left_closed_inside_atomic() -> None:
    transaction.atomic().__enter__()
    Business.objects.create(name="never committed")
    connection.close()


LEAVES = [
    left_in_atomic,
    left_in_a_nested_atomic,
    left_doomed,
    left_without_autocommit,
    left_in_a_raw_transaction,
    left_in_a_failed_raw_transaction,
    left_closed,
    left_closed_under_django,
    left_closed_inside_atomic,
]


@pytest.mark.parametrize("age", [0, None], ids=["closed after each job", "persistent"])
def test_whatever_a_handler_leaves_behind_the_slot_is_clean(
    handlers: Registry, monkeypatch: pytest.MonkeyPatch, age: int | None
) -> None:
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", age)

    @job("failures.leaves", max_attempts=1)
    def leaves(ctx: JobContext) -> None:
        number, _, role = ctx.job_id.partition("/")
        if role == "leaves":
            LEAVES[int(number)]()
        else:
            write_on_a_clean_connection(LEAVES[int(number)].__name__)

    left, healthy = [], []
    for number in range(len(LEAVES)):
        left.append(leaves.submit(job_id=f"{number}/leaves"))
        healthy.append(leaves.submit(job_id=f"{number}/healthy"))
    drain()
    for leave, one in zip(LEAVES, left, strict=True):
        raised = leave is left_in_a_failed_raw_transaction
        assert fresh(one).status == ("failed" if raised else "succeeded"), leave
    for leave, one in zip(LEAVES, healthy, strict=True):
        assert fresh(one).status == "succeeded", (leave, fresh(one).error_summary)
    # And nothing of what was left open was committed.
    names = [leave.__name__ for leave in LEAVES]
    assert list(Business.objects.order_by("id").values_list("name", flat=True)) == names


def test_an_async_handler_leaves_nothing_behind_either(
    handlers: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", None)

    @job("failures.async_leaves")
    async def async_leaves(ctx: JobContext) -> None:
        await sync_to_async(left_without_autocommit)()

    @job("failures.async_writes", backoff=100)
    async def async_writes(ctx: JobContext) -> None:
        await Business.objects.acreate(name="kept")

    async_leaves.submit()
    written = async_writes.submit(priority=-1)
    drain()
    assert fresh(written).status == "succeeded"
    assert list(Business.objects.values_list("name", flat=True)) == ["kept"]


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_forked_child_that_comes_back_owns_no_job(start_worker: StartWorker, gate: Gate) -> None:
    forked = jobs.forking.submit(jobs.Gate(**gate.payload("fork")))
    worker = start_worker("--drain")
    assert worker.ends() == 0, worker.output()
    assert gate.begun("fork")
    done = fresh(forked)
    # The child ended by itself, without a word to the database.
    assert (done.status, done.result, done.attempt_count) == ("succeeded", {"child": 1}, 1)
    assert only_attempt(forked).outcome == "returned"
