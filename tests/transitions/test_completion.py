"""``ctx.fence()`` and ``ctx.complete()``: the end commits with the domain writes (CONTRACT 3.8)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import DatabaseError, connection, connections, transaction
from django.test import override_settings

from django_durable_jobs import (
    InvalidTransition,
    JobCancelled,
    JobContext,
    JobTimeout,
    LeaseLost,
    LockTimeout,
    TransactionRequired,
    job,
)
from django_durable_jobs.handlers import registry
from django_durable_jobs.models import Job, JobAttempt
from django_durable_jobs.testing import drain
from django_durable_jobs.worker import execution
from django_durable_jobs.worker.loop import Worker
from django_durable_jobs.worker.options import build_options
from tests.racing import another_alias
from tests.testapp.models import Business

Body = Callable[[JobContext], Any]
Ended = tuple[Job, JobAttempt]
IN_A_TEST_CASE = pytest.mark.django_db
COMMITTED = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    with registry.temporary():
        yield


class Run:
    """Run a handler once, sync or async, by a worker or by the kit; give its job and attempt."""

    def __init__(self, by: str, kind: str) -> None:
        self._by, self._kind = by, kind

    def __call__(self, body: Body, *, max_jobs: int | None = 1, **options: Any) -> Ended:
        options = {"backoff": 60, **options}
        stored = job("completion.handler", **options)(self._handler(body)).submit()
        if self._by == "worker":
            Worker(build_options(processes=0, threads=1, drain=True, max_jobs=max_jobs)).run()
        else:
            drain(max_jobs=1)
        stored.refresh_from_db()
        return stored, stored.attempts.get(number=1)

    def _handler(self, body: Body) -> Callable[..., Any]:
        if self._kind == "sync":
            return lambda ctx: body(ctx)

        async def handler(ctx: JobContext) -> Any:
            return await sync_to_async(body)(ctx)

        return handler


@pytest.fixture(
    params=[
        pytest.param(("test case", "sync"), marks=IN_A_TEST_CASE),
        pytest.param(("test case", "async"), marks=IN_A_TEST_CASE),
        pytest.param(("worker", "sync"), marks=COMMITTED),
        pytest.param(("worker", "async"), marks=COMMITTED),
    ],
    ids=" ".join,
)
def run(request: pytest.FixtureRequest) -> Run:
    return Run(*request.param)


@pytest.fixture(params=["sync", "async"])
def serve(request: pytest.FixtureRequest, transactional_db: None) -> Run:
    """As ``run``, for what a TestCase or the kit does not have: commits, timeouts, databases."""
    return Run("worker", request.param)


def names() -> list[str]:
    return sorted(Business.objects.values_list("name", flat=True))


# What stands -------------------------------------------------------------------------------------


def test_rows_result_and_end_commit_together(run: Run) -> None:
    def both(ctx: JobContext) -> str:
        with transaction.atomic():
            ctx.fence()
            Business.objects.create(name="written")
            ctx.complete({"made": 1})
        return "ignored: the job has ended"

    ended, attempt = run(both)
    assert (ended.status, ended.result, ended.progress) == ("succeeded", {"made": 1}, 1.0)
    assert (attempt.status, attempt.outcome, attempt.progress) == ("succeeded", "returned", 1.0)
    assert (ended.lease_token, ended.lease_expires_at) == (None, None)
    assert ended.finished_at == attempt.finished_at is not None
    assert names() == ["written"]


@pytest.mark.parametrize(
    "error", [RuntimeError("too late"), SystemExit(1), LeaseLost("refused meanwhile")]
)
def test_an_error_after_the_commit_is_logged_and_changes_nothing(
    run: Run, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def late(ctx: JobContext) -> None:
        with transaction.atomic():
            ctx.complete("kept")
        raise error

    ended, attempt = run(late)
    assert (ended.status, ended.result, attempt.outcome) == ("succeeded", "kept", "returned")
    assert (ended.error_category, attempt.error_category) == (None, None)
    assert "completion.handler" in caplog.text


def test_a_commit_whose_answer_was_lost_stands(serve: Run) -> None:
    """The handler is told that its commit failed; the rows say that it did not."""

    def lost(ctx: JobContext) -> None:
        wrapper = connections["default"]
        commit = wrapper._commit

        def commit_and_fail() -> None:
            del wrapper._commit
            commit()
            raise DatabaseError("server closed the connection unexpectedly")

        with transaction.atomic():
            ctx.complete("kept")
            wrapper._commit = commit_and_fail

    ended, _ = serve(lost)
    assert (ended.status, ended.result, ended.attempt_count) == ("succeeded", "kept", 1)


def test_rows_that_cannot_be_read_at_once_are_read_later(
    serve: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The database is away right after the commit (FAULTS 10)."""
    errors: list[BaseException] = [LockTimeout("busy"), LockTimeout("busy")]
    read = execution.completion_stands

    def away(alias: str, token: str) -> bool:
        if errors:
            raise errors.pop()
        return read(alias, token)

    def completes(ctx: JobContext) -> None:
        with transaction.atomic():
            ctx.complete("kept")

    monkeypatch.setattr(execution, "completion_stands", away)
    ended, _ = serve(completes)
    assert (ended.status, ended.result) == ("succeeded", "kept")
    assert caplog.text.count("a completion waits for the database") == 2
    assert "slot failed" not in caplog.text


def test_what_on_commit_says_is_not_asked(serve: Run) -> None:
    """Its hooks run only where Django commits; a completion by other means stands as well."""

    def by_hand(ctx: JobContext) -> None:
        with transaction.atomic():
            ctx.complete("kept")
            with connection.cursor() as cursor:
                cursor.execute("COMMIT")
            raise RuntimeError("so Django rolls back, and nothing is there to roll back")

    ended, _ = serve(by_hand)
    assert (ended.status, ended.result) == ("succeeded", "kept")


# What does not -----------------------------------------------------------------------------------


def test_a_completion_that_rolled_back_is_a_failure_by_that_name(run: Run) -> None:
    def rolled_back(ctx: JobContext) -> str:
        with transaction.atomic():
            Business.objects.create(name="never")
            ctx.complete()
            transaction.set_rollback(True)
        return "as if it had completed"

    ended, attempt = run(rolled_back)
    assert (ended.status, ended.error_category) == ("scheduled", "completion_rolled_back")
    assert (ended.result, ended.progress) == (None, 0)
    assert (ended.run_at - attempt.finished_at).total_seconds() == 60, "retried by policy"
    assert (attempt.status, attempt.outcome) == ("failed", "returned")
    assert attempt.error_category == "completion_rolled_back"
    # The place is the handler's, which the fixture makes.
    told = rf"CompletionRolledBack at {__name__}:\S+:\d+: the transaction of ctx\.complete\(\) was"
    assert re.search(told, attempt.error_summary)
    assert names() == []


def test_the_last_one_that_rolled_back_fails_the_job(run: Run) -> None:
    def rolled_back(ctx: JobContext) -> None:
        with transaction.atomic():
            ctx.complete()
            transaction.set_rollback(True)

    ended, attempt = run(rolled_back, max_attempts=1)
    assert (ended.status, ended.error_category) == ("failed", "completion_rolled_back")


def test_an_error_that_rolls_the_completion_back_is_the_error(run: Run) -> None:
    def error(ctx: JobContext) -> None:
        with transaction.atomic():
            ctx.complete("never")
            raise RuntimeError("inside")

    ended, attempt = run(error, max_attempts=1)
    assert (ended.status, ended.result) == ("failed", None)
    assert (attempt.outcome, attempt.error_category) == ("raised", "handler_error")


@pytest.mark.parametrize("again", [False, True])
def test_a_savepoint_around_it_that_rolls_back_takes_it_back(run: Run, again: bool) -> None:
    """The rest of the transaction commits; there it may complete anew."""

    def nested(ctx: JobContext) -> None:
        with transaction.atomic():
            Business.objects.create(name="outside")
            try:
                with transaction.atomic():
                    Business.objects.create(name="inside")
                    ctx.complete("first")
                    raise RuntimeError("only the savepoint")
            except RuntimeError:
                pass
            if again:
                ctx.fence()
                ctx.complete("second")

    ended, attempt = run(nested)
    assert names() == ["outside"]
    if again:
        assert (ended.status, ended.result) == ("succeeded", "second")
    else:
        assert (ended.status, attempt.error_category) == ("scheduled", "completion_rolled_back")


def test_inside_a_savepoint_it_commits_with_the_outermost_block(run: Run) -> None:
    def nested(ctx: JobContext) -> None:
        with transaction.atomic():
            with transaction.atomic():
                ctx.fence()
                with transaction.atomic():
                    ctx.complete("deep")
            Business.objects.create(name="after")

    ended, _ = run(nested)
    assert (ended.status, ended.result, names()) == ("succeeded", "deep", ["after"])


def left_open(ctx: JobContext) -> None:
    transaction.atomic().__enter__()
    Business.objects.create(name="never")
    ctx.complete()


def left_open_in_a_savepoint(ctx: JobContext) -> None:
    transaction.atomic().__enter__()
    left_open(ctx)


def left_in_a_raw_savepoint(ctx: JobContext) -> None:
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SAVEPOINT by_hand")
        Business.objects.create(name="never")
        ctx.complete()
        cursor.execute("ROLLBACK TO SAVEPOINT by_hand")


def closed(ctx: JobContext) -> None:
    with transaction.atomic():
        Business.objects.create(name="never")
        ctx.complete()
        connection.close()


def broken(ctx: JobContext) -> None:
    with transaction.atomic():
        Business.objects.create(name="never")
        ctx.complete()
        connections["default"].connection.close()


@pytest.mark.parametrize(
    "leaves", [left_open, left_open_in_a_savepoint, left_in_a_raw_savepoint, closed, broken]
)
def test_a_completion_that_was_left_behind_did_not_stand_and_the_slot_is_clean(
    serve: Run, leaves: Body
) -> None:
    """FAULTS 16: the row is free again at once, and the next job of the slot is well."""

    def first_leaves_then_is_well(ctx: JobContext) -> str:
        if ctx.attempt == 1:
            leaves(ctx)
            return "as if it had completed"
        with transaction.atomic():
            ctx.fence()
            Business.objects.create(name="well")
            ctx.complete("well")
        return "ignored"

    ended, first = serve(first_leaves_then_is_well, backoff=0, max_jobs=None)
    assert first.status == "failed"
    told = "handler_error" if leaves is broken else "completion_rolled_back"
    assert (first.error_category, ended.attempt_count) == (told, 2)
    assert (ended.status, ended.result, names()) == ("succeeded", "well", ["well"])


# What is refused ---------------------------------------------------------------------------------

BOTH = pytest.mark.parametrize("call", ["fence", "complete"])


@BOTH
def test_both_need_the_handlers_own_transaction(run: Run, call: str) -> None:
    def alone(ctx: JobContext) -> str:
        with pytest.raises(TransactionRequired, match=r'transaction\.atomic\(using="default"\)'):
            getattr(ctx, call)()
        return "went on"

    ended, _ = run(alone)
    assert (ended.status, ended.result) == ("succeeded", "went on")


@BOTH
def test_a_transaction_on_another_database_is_none(serve: Run, call: str) -> None:
    def elsewhere(ctx: JobContext) -> str:
        with (
            transaction.atomic(using="other"),
            pytest.raises(TransactionRequired, match='using="default"'),
        ):
            getattr(ctx, call)()
        return "went on"

    with another_alias("other"):
        ended, _ = serve(elsewhere)
    assert (ended.status, ended.result) == ("succeeded", "went on")


@COMMITTED
@BOTH
def test_code_of_the_event_loop_has_no_transaction(call: str) -> None:
    @job("completion.on_the_loop")
    async def on_the_loop(ctx: JobContext) -> str:
        with pytest.raises(TransactionRequired):
            getattr(ctx, call)()
        return "went on"

    one = on_the_loop.submit()
    Worker(build_options(processes=0, threads=1, drain=True)).run()
    one.refresh_from_db()
    assert (one.status, one.result) == ("succeeded", "went on")


@COMMITTED
@BOTH
def test_an_attempt_that_ended_without_it_is_lost_to_it(call: str) -> None:
    """Code that a handler left running finds its attempt ended: it did not complete twice."""
    left: list[JobContext] = []

    @job("completion.leaves")
    def leaves(ctx: JobContext) -> str:
        left.append(ctx)
        return "returned"

    one = leaves.submit()
    Worker(build_options(processes=0, threads=1, drain=True)).run()
    with pytest.raises(LeaseLost), transaction.atomic():
        getattr(left[0], call)()
    one.refresh_from_db()
    assert (one.status, one.result) == ("succeeded", "returned")


def test_twice_is_refused_and_the_transaction_usable(run: Run) -> None:
    def twice(ctx: JobContext) -> None:
        with transaction.atomic():
            ctx.complete(1)
            with pytest.raises(InvalidTransition, match="completed its job already"):
                ctx.complete(2)
            with pytest.raises(InvalidTransition, match="completed its job already"):
                ctx.fence()
            Business.objects.create(name="after")
        with transaction.atomic(), pytest.raises(InvalidTransition):
            ctx.complete(3)

    ended, _ = run(twice)
    assert (ended.status, ended.result, names()) == ("succeeded", 1, ["after"])


@BOTH
def test_a_cancel_that_committed_first_wins(run: Run, call: str) -> None:
    def cancelled(ctx: JobContext) -> None:
        Job.objects.get(job_id=ctx.job_id).request_cancel()
        with transaction.atomic():
            Business.objects.create(name="never")
            with pytest.raises(JobCancelled):
                getattr(ctx, call)()
            transaction.set_rollback(True)
        ctx.check()

    ended, attempt = run(cancelled)
    assert (ended.status, attempt.status, attempt.outcome) == ("cancelled", "cancelled", "stopped")
    assert names() == []


@BOTH
def test_after_the_deadline_both_stop_the_handler(serve: Run, call: str) -> None:
    def late(ctx: JobContext) -> None:
        with transaction.atomic():
            Business.objects.create(name="never")
            while not ctx.timed_out():
                time.sleep(0.005)
            with pytest.raises(JobTimeout):
                getattr(ctx, call)()
            getattr(ctx, call)()

    with override_settings(DURABLE_JOBS={"TIMEOUT_GRACE_SECONDS": 600}):
        ended, attempt = serve(late, timeout=0.1)
    assert (ended.status, ended.error_category) == ("scheduled", "timeout")
    assert (attempt.status, attempt.outcome) == ("timed_out", "stopped")
    assert names() == []


@BOTH
def test_an_older_attempt_is_told_while_the_newer_one_runs(run: Run, call: str) -> None:
    """FAULTS 1: nothing changes, the worker is told, and what it wrote beside it rolls back."""
    seen: list[Any] = []

    def late(ctx: JobContext) -> str:
        held_job = Job.objects.get(job_id=ctx.job_id)
        if ctx.attempt == 1:
            assert held_job.recover(ctx.token) == "queued"
            stale.append(ctx)
            drain(max_jobs=1)
            seen.append(Job.objects.filter(pk=held_job.pk).values().get())
            with transaction.atomic():
                Business.objects.create(name="zombie")
                getattr(ctx, call)()
        # The newer attempt runs, and owns the job.
        with pytest.raises(LeaseLost), transaction.atomic():
            Business.objects.create(name="zombie")
            getattr(stale[0], call)()
        held_job.refresh_from_db()
        assert (held_job.status, held_job.lease_token) == ("running", ctx.token)
        return f"by attempt {ctx.attempt}"

    stale: list[JobContext] = []
    ended, first = run(late)
    assert (ended.status, ended.result) == ("succeeded", "by attempt 2")
    assert Job.objects.filter(pk=ended.pk).values().get() == seen[0]
    assert (first.status, first.outcome) == ("interrupted", "lost")
    assert ended.attempts.get(number=2).status == "succeeded"
    assert names() == []


def test_a_result_that_is_not_json_is_refused_before_anything_is_written(run: Run) -> None:
    def bad(ctx: JobContext) -> None:
        with transaction.atomic():
            with pytest.raises(ValueError, match="Not storable"):
                ctx.complete(object())
            ctx.complete("good")

    ended, _ = run(bad)
    assert (ended.status, ended.result) == ("succeeded", "good")
