"""Races of a handler's reports, progress and checkpoint, against who moves its job (CONTRACT 3.9).

As in ``test_transition_races`` the one stands right before its commit, or in an open
transaction, while the other is made and is seen waiting, or seen to pass the row over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from django.db import connection
from django.test import override_settings

from django_durable_jobs import JobContext, LeaseLost
from django_durable_jobs.exceptions import InvalidTransition, JobCancelled
from django_durable_jobs.models import Job, JobAttempt
from django_durable_jobs.testing import FakeClock
from django_durable_jobs.transitions import leases, outcomes, recovery
from django_durable_jobs.transitions.claims import ClaimedJob
from django_durable_jobs.worker.execution import context_for
from tests.racing import PATIENT, held, racing
from tests.transitions.live import (
    LEASE,
    check_rows,
    claim,
    claimed,
    done,
    expired,
    holders,
)

from .paused import passed_over, paused

pytestmark = pytest.mark.django_db(transaction=True)
POSTGRES = connection.vendor == "postgresql"
BEFORE, AFTER = {"progress": 0.25, "checkpoint": 1}, {"progress": 0.5, "checkpoint": 2}

REPORTS: dict[str, Callable[[JobContext], None]] = {
    "progress": lambda ctx: ctx.progress(AFTER["progress"]),
    "checkpoint": lambda ctx: ctx.checkpoint(AFTER["checkpoint"]),
}
each_report = pytest.mark.parametrize("name", REPORTS)


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    # Slow machines: what is tested here is who wins, not how long it may take.
    with override_settings(DURABLE_JOBS=PATIENT):
        yield
    check_rows()


class Handler:
    """One running attempt that has reported ``BEFORE`` and is about to report ``AFTER``."""

    def __init__(self, name: str, one: ClaimedJob) -> None:
        self.name = name
        self.one = one
        self.ctx = context_for("default", one, enforce_timeout=False)

    def report(self) -> None:
        REPORTS[self.name](self.ctx)

    def reported(self) -> str:
        """Tell which of the two the rows hold; both rows hold the same."""
        job = Job.objects.get(pk=self.one.id)
        attempt = JobAttempt.objects.get(token=self.one.token)
        value = attempt.progress if self.name == "progress" else job.checkpoint
        if job.lease_token == self.one.token:
            assert job.progress == attempt.progress
        return {BEFORE[self.name]: "before", AFTER[self.name]: "after"}[value]


def handler(name: str) -> Handler:
    made = Handler(name, *claimed())
    made.ctx.progress(BEFORE["progress"])
    made.ctx.checkpoint(BEFORE["checkpoint"])
    return made


def lost(name: str) -> Handler:
    """One whose lease is over, and nobody has recovered its job yet."""
    made = Handler(name, *expired())
    set_before = {"progress": BEFORE["progress"], "checkpoint": BEFORE["checkpoint"]}
    Job.objects.filter(pk=made.one.id).update(**set_before)
    JobAttempt.objects.filter(token=made.one.token).update(progress=BEFORE["progress"])
    return made


def job() -> Job:
    return Job.objects.get()


def recover_all() -> int:
    return recovery.recover_expired("default")


# The report comes first ---------------------------------------------------------------------------

# Alone, in a transaction of its own; else in the handler's, which ends so.
ENDS: dict[str, Callable[[Callable[[], None]], AbstractContextManager[Any]]] = {
    "alone": paused,
    "commit": held,
    "rollback": held,
}
each_end = pytest.mark.parametrize("how", ENDS)


def end(standing: Any, how: str) -> None:
    """Let the report commit, or its transaction roll back."""
    getattr(standing, "go_on" if how == "alone" else how)()


@each_report
@each_end
def test_a_recovery_during_a_report_comes_after_it(name: str, how: str, clock: FakeClock) -> None:
    """Begun within the lease it stands, although the lease is over before it commits."""
    one = handler(name)
    with ENDS[how](one.report) as first:
        clock.advance(LEASE + 1)
        with passed_over(recover_all, lambda: end(first, how)) as second:
            assert second.result() == (0 if POSTGRES else 1)
            end(first, how)
    assert recover_all() == (1 if POSTGRES else 0)
    expected = "before" if how == "rollback" else "after"
    assert one.reported() == expected
    [following] = claim()
    value = context_for("default", following).checkpoint_value
    assert value == (AFTER if (name, expected) == ("checkpoint", "after") else BEFORE)["checkpoint"]
    assert job().progress == 0


@each_report
@each_end
def test_a_recovery_by_hand_waits_for_a_report(name: str, how: str) -> None:
    one = handler(name)
    with ENDS[how](one.report) as first, racing(lambda: job().recover(one.one.token)) as [second]:
        second.wait_until_blocked()
        end(first, how)
        assert second.result() == "queued"
    assert one.reported() == ("before" if how == "rollback" else "after")
    with pytest.raises(LeaseLost):
        one.report()


@each_report
@each_end
def test_a_cancel_waits_for_a_report(name: str, how: str) -> None:
    one = handler(name)
    with ENDS[how](one.report) as first, racing(lambda: job().request_cancel()) as [second]:
        second.wait_until_blocked()
        end(first, how)
        assert second.result() == "requested"
    assert one.reported() == ("before" if how == "rollback" else "after")
    with pytest.raises(JobCancelled):
        one.ctx.progress(1)


# The report comes second --------------------------------------------------------------------------


@each_report
def test_a_report_after_the_recovery_is_refused(name: str) -> None:
    one = lost(name)
    with paused(recover_all) as first, racing(one.report) as [second]:
        second.wait_until_blocked()
        assert first.go_on() == 1
        assert isinstance(second.error(), LeaseLost)
    assert one.ctx.lost and one.reported() == "before"


@each_report
@pytest.mark.parametrize("commit", [True, False])
def test_a_report_during_a_recovery_by_hand_waits_for_it(name: str, commit: bool) -> None:
    """The token decides: the lease still lives while the operator's transaction is open."""
    one = handler(name)
    with held(lambda: job().recover(one.one.token)) as first, racing(one.report) as [second]:
        second.wait_until_blocked()
        first.commit() if commit else first.rollback()
        error = second.error()
    assert isinstance(error, LeaseLost) if commit else error is None
    assert one.reported() == ("before" if commit else "after")


@each_report
@pytest.mark.parametrize("commit", [True, False])
def test_a_report_during_a_cancel_waits_for_it(name: str, commit: bool) -> None:
    one = handler(name)
    with held(lambda: job().request_cancel()) as first, racing(one.report) as [second]:
        second.wait_until_blocked()
        first.commit() if commit else first.rollback()
        error = second.error()
    refused = commit and name == "progress"
    assert isinstance(error, JobCancelled) if refused else error is None
    assert one.ctx.cancel_requested is refused
    assert one.reported() == ("before" if refused else "after")


@each_report
def test_a_report_during_a_renewal_waits_for_it_and_is_written(name: str) -> None:
    one = handler(name)
    with (
        paused(lambda: leases.renew("default", holders([one.one]), lease_seconds=600)) as first,
        racing(one.report) as [second],
    ):
        second.wait_until_blocked()
        assert first.go_on() == {one.one.token}
        second.result()
    assert one.reported() == "after"


@each_report
def test_a_report_after_the_end_of_its_attempt_is_refused(name: str) -> None:
    """As of a thread that runs on while its attempt is ended without it (CONTRACT 4.5)."""
    one = handler(name)
    ended = done(one.one, final_status="failed", status="timed_out", outcome="stopped")
    with (
        paused(lambda: outcomes.finish("default", [ended])) as first,
        racing(one.report) as [second],
    ):
        second.wait_until_blocked()
        assert first.go_on().written == {one.one.id: "failed"}
        assert isinstance(second.error(), LeaseLost)
    assert one.reported() == "before"


def test_two_threads_of_a_handler_move_its_progress_forward_only() -> None:
    """The later one of them judges by what the first has written, not by what it had read."""
    one = handler("progress")
    for fraction, waits_for in ((0.4, 0.5), (0.75, 0.7)):
        with (
            paused(lambda value=waits_for: one.ctx.progress(value)) as first,
            racing(lambda value=fraction: one.ctx.progress(value)) as [second],
        ):
            second.wait_until_blocked()
            first.go_on()
            error = second.error()
        assert isinstance(error, InvalidTransition) if fraction < waits_for else error is None
    assert job().progress == 0.75
