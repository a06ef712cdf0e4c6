"""The soak's judge finds every promise that it is to watch over broken, and none where none is."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from django_durable_jobs.models import Job, JobAttempt
from tests._marks import no_database

from .._rows import NOW, attempt_row, job_row
from .history import Effect, violations

pytestmark = no_database


class History:
    """One job that was lost once, stopped once, and then succeeded."""

    def __init__(self) -> None:
        tokens = ["a" * 32, "b" * 32, "c" * 32]
        self.job: Job = job_row(
            id=1,
            job_id="j",
            status="succeeded",
            attempt_count=3,
            granted_attempts=1,
            finished_at=NOW,
            result=tokens[2],
        )
        ends = [("interrupted", "lost"), ("interrupted", "stopped"), ("succeeded", "returned")]
        self.attempts: list[JobAttempt] = [
            attempt_row(
                self.job,
                number=number,
                token=tokens[number - 1],
                status=status,
                outcome=outcome,
                started_at=NOW + timedelta(seconds=10 * number),
                finished_at=NOW + timedelta(seconds=10 * number + 9),
            )
            for number, (status, outcome) in enumerate(ends, start=1)
        ]
        # The one that lost its lease ends unheard, in the middle of the last.
        self.effects = [
            Effect(what=what, job="j", token=tokens[attempt - 1], at=at)
            for what, attempt, at in (
                ("begin", 1, 10.0),
                ("begin", 2, 20.0),
                ("begin", 3, 30.0),
                ("end", 1, 31.0),
                ("end", 3, 32.0),
            )
        ]
        self.submitted = ["j"]
        self.cancelled: set[str] = set()

    def judged(self) -> list[str]:
        return violations(self.submitted, self.cancelled, [self.job], self.attempts, self.effects)


def set_job(**columns: object) -> Callable[[History], None]:
    return lambda one: [setattr(one.job, name, value) for name, value in columns.items()][0]


def set_attempt(number: int, **columns: object) -> Callable[[History], None]:
    return lambda one: [
        setattr(one.attempts[number - 1], name, value) for name, value in columns.items()
    ][0]


def early_begin(one: History) -> None:
    one.attempts[0].status, one.attempts[0].outcome = "failed", "raised"


BROKEN = {
    "the job is lost": lambda one: one.submitted.append("gone"),
    "it is queued at the end": set_job(status="queued"),
    "nobody asked for it": set_job(status="cancelled"),
    "the rows are others": lambda one: one.attempts.pop(0),
    "executed more often than allowed": set_job(max_attempts=1),
    "1 attempts were stopped, and 0 granted": set_job(granted_attempts=0),
    "these attempts succeeded": set_job(result="a" * 32),
    "attempt 3 is still open": set_attempt(3, status="running"),
    "attempt 1 ran twice": lambda one: one.effects.append(one.effects[0]),
    "attempt 3 is said to have returned": lambda one: one.effects.pop(),
    "attempts 1 and 2 overlap": set_attempt(2, started_at=NOW + timedelta(seconds=18)),
    "attempt 2 began while 1 ran under its lease": early_begin,
}


def test_a_sound_history_is_judged_so() -> None:
    assert History().judged() == []
    cancelled = History()
    cancelled.job.status, cancelled.job.result = "cancelled", None
    cancelled.attempts[2].status = "cancelled"
    cancelled.cancelled.add("j")
    assert cancelled.judged() == []


@pytest.mark.parametrize("said", BROKEN)
def test_each_broken_promise_is_named(said: str) -> None:
    one = History()
    BROKEN[said](one)
    assert any(said in found for found in one.judged()), one.judged()
