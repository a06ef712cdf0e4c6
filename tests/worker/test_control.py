"""An operator's moves beside a running worker: cancel, and retry by hand (CONTRACT 3.5, 3.6)."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from django_durable_jobs import JobContext, PermanentError, job
from django_durable_jobs.exceptions import AttemptsExhausted, InvalidTransition, JobCancelled
from django_durable_jobs.handlers import Handler, Registry
from django_durable_jobs.models import Job
from django_durable_jobs.worker import heartbeat

from .support import PATIENCE, Background, attempts, change, drain, fresh, only_attempt, until

pytestmark = pytest.mark.django_db(transaction=True)

POLL = 0.5


class Looks:
    """The answered looks of the watch for cancels; ``count`` are those that asked for a job."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.any = self.count = 0
        self._real = heartbeat.cancel_requests
        monkeypatch.setattr(heartbeat, "cancel_requests", self._look)

    def _look(self, alias: str, holders: Any) -> Any:
        answer = self._real(alias, holders)
        self.any += 1
        self.count += bool(holders)
        return answer


class Talk:
    """What a handler in a slot of this process and its test say to each other."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self.seen: list[Any] = []

    def waits(self) -> None:
        self.begun.set()
        assert self.go.wait(PATIENCE)


@pytest.fixture
def talk() -> Talk:
    return Talk()


@pytest.fixture
def noop(handlers: Registry) -> Handler[..., Any]:
    @job("control.noop")
    def noop(ctx: JobContext) -> int:
        return 1

    return noop


@pytest.mark.parametrize("status", ["scheduled", "queued", "blocked"])
def test_a_waiting_job_is_cancelled_at_once(noop: Handler[..., Any], status: str) -> None:
    waiting = noop.submit(run_at=timedelta(hours=1) if status == "scheduled" else None)
    if status == "blocked":
        change(waiting, status="blocked", blocked_reason="unknown_handler")
    assert waiting.request_cancel() == "cancelled"
    drain()
    ended = fresh(waiting)
    assert (ended.status, ended.attempt_count, ended.blocked_reason) == ("cancelled", 0, None)
    assert ended.finished_at == ended.cancel_requested_at
    assert attempts(waiting) == []


def test_a_handler_sees_the_cancel_within_two_polls(
    handlers: Registry,
    talk: Talk,
    durable_jobs: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Nothing else that a worker does now and then comes within the bound below.
    durable_jobs(POLL_SECONDS=POLL, LEASE_SECONDS=600)
    looks = Looks(monkeypatch)

    @job("control.checks")
    def checks(ctx: JobContext) -> None:
        talk.begun.set()
        end = time.monotonic() + PATIENCE
        try:
            while time.monotonic() < end:
                ctx.check()
                time.sleep(0.005)
        except JobCancelled:
            talk.seen += [time.monotonic(), ctx.cancel_requested]
            assert talk.go.wait(PATIENCE)
            raise

    running = checks.submit()
    worker = Background(drain)
    assert talk.begun.wait(PATIENCE)
    assert running.request_cancel() == "requested"
    asked, looks_before = time.monotonic(), looks.count
    first_time = fresh(running).cancel_requested_at
    assert running.request_cancel() == "requested"
    talk.go.set()
    worker.ends()
    # The one under way then may be too early; the next one sees it, a poll later.
    assert looks.count - looks_before <= 2
    assert talk.seen[0] - asked < 100 * POLL, "by polls, not by renewals"
    assert talk.seen[1] is True
    ended = fresh(running)
    assert (ended.status, ended.cancel_requested_at) == ("cancelled", first_time)
    assert (ended.error_category, ended.error_summary) == (None, None)
    attempt = only_attempt(running)
    assert (attempt.status, attempt.outcome) == ("cancelled", "stopped")
    assert attempt.cancel_requested_at == first_time


def test_progress_is_stopped_by_a_cancel_that_the_watch_has_not_seen(
    handlers: Registry,
    talk: Talk,
    durable_jobs: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    durable_jobs(POLL_SECONDS=3600)
    looks = Looks(monkeypatch)

    @job("control.reports")
    def reports(ctx: JobContext) -> None:
        ctx.progress(0.25)
        talk.waits()
        assert not ctx.cancel_requested
        ctx.checkpoint("kept")
        try:
            ctx.progress(0.5)
        finally:
            talk.seen.append(ctx.cancel_requested)

    running = reports.submit()
    worker = Background(drain)
    assert talk.begun.wait(PATIENCE)
    # The first look may be late; the next one is in an hour.
    until(lambda: looks.any > 0, "the first look")
    running.request_cancel()
    talk.go.set()
    worker.ends()
    assert talk.seen == [True]
    ended = fresh(running)
    assert (ended.status, ended.progress, ended.checkpoint) == ("cancelled", 0.25, "kept")
    attempt = only_attempt(running)
    assert (attempt.status, attempt.outcome) == ("cancelled", "stopped")
    assert (attempt.error_category, attempt.error_summary) == (None, None)


@pytest.mark.parametrize("end", ["returned", "raised"])
def test_a_cancel_that_committed_before_the_finish_wins(
    handlers: Registry, talk: Talk, end: str
) -> None:
    @job("control.deaf")
    def deaf(ctx: JobContext) -> str:
        talk.waits()
        if end == "raised":
            raise PermanentError("its own end")
        return "not stored"

    running = deaf.submit()
    worker = Background(drain)
    assert talk.begun.wait(PATIENCE)
    assert running.request_cancel() == "requested"
    talk.go.set()
    worker.ends()
    ended = fresh(running)
    assert (ended.status, ended.result, ended.error_category) == ("cancelled", None, None)
    attempt = only_attempt(running)
    assert (attempt.status, attempt.outcome) == ("cancelled", end)


def test_a_cancel_after_the_finish_changes_nothing(noop: Handler[..., Any]) -> None:
    done = noop.submit()
    drain()
    assert done.request_cancel() == "unchanged"
    assert (fresh(done).status, fresh(done).cancel_requested_at) == ("succeeded", None)


def test_finish_and_cancel_race_to_exactly_one_end(handlers: Registry) -> None:
    cancelling = threading.Event()

    @job("control.short")
    def short(ctx: JobContext) -> int:
        # The second half waits for the first cancel: neither side is through before the other.
        assert int(ctx.job_id) < 100 or cancelling.wait(PATIENCE)
        time.sleep(0.001)
        return 7

    racing = [short.submit(job_id=str(number)) for number in range(200)]
    worker = Background(lambda: drain(threads=4))
    until(lambda: fresh(racing[3]).status == "succeeded")
    said: Counter[str] = Counter()
    # From the other end, so that the two meet.
    for one in reversed(racing):
        answer = one.request_cancel()
        said[answer] += 1
        cancelling.set()
        if answer == "cancelled":
            assert fresh(one).attempt_count == 0
        elif answer == "unchanged":
            assert fresh(one).status == "succeeded"
        one.said = answer
    worker.ends()
    for one in racing:
        ended = fresh(one)
        statuses = [attempt.status for attempt in attempts(one)]
        if one.said == "unchanged":
            assert (ended.status, statuses, ended.result) == ("succeeded", ["succeeded"], 7)
        else:
            expected = [] if one.said == "cancelled" else ["cancelled"]
            assert (ended.status, statuses, ended.result) == ("cancelled", expected, None)
    assert said["cancelled"] > 0
    assert said["unchanged"] > 0


@pytest.mark.parametrize("status", ["failed", "cancelled", "interrupted"])
def test_a_retry_by_hand_starts_over_from_each_terminal_status(
    handlers: Registry, status: str
) -> None:
    ends = [status, "succeeded"]

    @job("control.once_more", max_attempts=2)
    def once_more(ctx: JobContext) -> str:
        if ends.pop(0) == "succeeded":
            assert ctx.checkpoint_value == {"kept": True}
            return "done"
        ctx.checkpoint({"kept": True})
        ctx.progress(0.5, "half")
        if status == "cancelled":
            Job.objects.get(job_id=ctx.job_id).request_cancel()
        elif status == "interrupted":
            mine = Job.objects.get(job_id=ctx.job_id)
            mine.recover(mine.lease_token, requeue=False)
        raise PermanentError("first")

    ended = once_more.submit()
    drain()
    assert fresh(ended).status == status
    before = only_attempt(ended)
    again = fresh(ended).retry()
    assert (again.status, again.progress, again.progress_message) == ("queued", 0, "")
    assert (again.error_category, again.error_summary, again.error_traceback) == (None, None, None)
    assert (again.cancel_requested_at, again.finished_at) == (None, None)
    assert again.checkpoint == {"kept": True}
    assert only_attempt(ended) == before

    drain()
    done = fresh(ended)
    assert (done.status, done.result, done.attempt_count) == ("succeeded", "done", 2)
    first, second = attempts(ended)
    assert (first.status, first.progress) == (status, 0.5)
    assert (second.number, second.status, second.progress) == (2, "succeeded", 1)
    with pytest.raises(InvalidTransition):
        done.retry()


def test_a_retry_needs_executions_left_or_granted(handlers: Registry) -> None:
    @job("control.fails", max_attempts=1, backoff=60)
    def fails(ctx: JobContext) -> None:
        raise ValueError

    ended = fails.submit()
    drain()
    with pytest.raises(AttemptsExhausted):
        ended.retry()
    assert fresh(ended).status == "failed"
    assert ended.retry(extra_attempts=2).granted_attempts == 2
    drain()
    waiting = fresh(ended)
    assert (waiting.status, waiting.attempt_count) == ("scheduled", 2)


def test_a_retry_of_a_live_job_is_refused(
    handlers: Registry, talk: Talk, noop: Handler[..., Any]
) -> None:
    @job("control.waits")
    def waits(ctx: JobContext) -> None:
        talk.waits()

    running = waits.submit()
    later = noop.submit(run_at=timedelta(hours=1))
    worker = Background(drain)
    assert talk.begun.wait(PATIENCE)
    for live in (running, later):
        with pytest.raises(InvalidTransition):
            live.retry()
    talk.go.set()
    worker.ends()
    assert fresh(later).status == "scheduled"
