"""Races of ``fence()``, ``complete()`` and ``on_finish`` (CONTRACT 3.2, 3.8; FAULTS 1, 13, 29, 30).

As in ``test_transition_races``: one side stands in an open transaction or right before its
commit while the other is made, and the other is seen to wait, or to pass the locked row over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import override_settings

from django_durable_jobs import FinishEvent, JobContext
from django_durable_jobs import job as declared
from django_durable_jobs.exceptions import InvalidTransition, JobCancelled, LeaseLost
from django_durable_jobs.handlers import registry
from django_durable_jobs.models import Job, JobAttempt
from django_durable_jobs.testing import FakeClock
from django_durable_jobs.transitions import leases, recovery
from django_durable_jobs.transitions._fence import standings
from django_durable_jobs.transitions.claims import ClaimedJob
from django_durable_jobs.worker.execution import context_for
from django_durable_jobs.worker.heartbeat import Heartbeat
from django_durable_jobs.worker.held import Held, HeldJobs
from django_durable_jobs.worker.on_finish import finish_announced
from tests.racing import PATIENT, Signal, barrier, held, racing
from tests.testapp.models import Business
from tests.transitions.live import (
    HANDLER,
    LEASE,
    check_rows,
    claimed,
    done,
    expired,
    holders,
)

from .paused import paused

pytestmark = pytest.mark.django_db(transaction=True)
POSTGRES = connection.vendor == "postgresql"


def tell(event: FinishEvent) -> None:
    Business.objects.create(name=f"told {event.status}", value=event.attempt)


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    # Slow machines: what is tested here is who wins, not how long it may take.
    lasting = {**PATIENT, "LEASE_SECONDS": 2 * LEASE}
    with registry.temporary(), override_settings(DURABLE_JOBS=lasting):
        declared(HANDLER, on_finish=tell)(lambda ctx: None)
        yield
    check_rows()


def context(one: ClaimedJob) -> JobContext:
    return context_for("default", one, enforce_timeout=False)


def fence(one: ClaimedJob) -> Callable[[], None]:
    """In an open transaction; a race closes it."""
    return context(one).fence


def completes(one: ClaimedJob) -> Callable[[], None]:
    """In an open transaction: a domain row, then the end, and what ``on_finish`` adds."""

    def complete() -> None:
        Business.objects.create(name="domain")
        context(one).complete("done")

    return complete


def alone(work: Callable[[], None]) -> Callable[[], None]:
    """In a transaction of its own."""

    def inside() -> None:
        with transaction.atomic():
            work()

    return inside


def job() -> Job:
    return Job.objects.get()


def cancel() -> str:
    return job().request_cancel()


def recover_all() -> int:
    return recovery.recover_expired("default")


def renew(one: ClaimedJob, *, lease: float = LEASE) -> Callable[[], set[str]]:
    return lambda: leases.renew("default", holders([one]), lease_seconds=lease)


def names() -> list[str]:
    return sorted(Business.objects.values_list("name", flat=True))


STOOD = ["domain", "told succeeded"]
commits = pytest.mark.parametrize("commits", [True, False])


# Complete and recover ----------------------------------------------------------------------------


@commits
def test_a_recovery_during_a_completion(commits: bool, clock: FakeClock) -> None:
    """It came in time and stands, although its lease is over before it commits."""
    [one] = claimed()
    with held(completes(one)) as first:
        clock.advance(LEASE + 1)
        with racing(recover_all) as [second]:
            if POSTGRES:
                assert second.result() == 0, "the row is passed over while it is held"
            else:
                second.wait_until_blocked()
            first.commit() if commits else first.rollback()
        if POSTGRES:
            assert recover_all() == (0 if commits else 1)
        else:
            assert second.result() == (0 if commits else 1)
    assert job().status == ("succeeded" if commits else "queued")
    assert names() == (STOOD if commits else [])


@commits
def test_a_recovery_by_hand_during_a_completion(commits: bool) -> None:
    [one] = claimed()
    with (
        held(completes(one)) as first,
        racing(lambda: job().recover(one.token)) as [second],
    ):
        second.wait_until_blocked()
        first.commit() if commits else first.rollback()
        if commits:
            assert isinstance(second.error(), InvalidTransition)
        else:
            assert second.result() == "queued"
    assert (job().status, names()) == (("succeeded", STOOD) if commits else ("queued", []))


@pytest.mark.parametrize("write", [fence, completes])
@pytest.mark.parametrize("by_hand", [True, False])
def test_a_completion_after_the_recovery_is_refused(
    write: Callable[[ClaimedJob], Callable[[], None]], by_hand: bool
) -> None:
    """By hand the lease still lives: the token decides."""
    [one] = claimed() if by_hand else expired()
    recover: Callable[[], Any] = (lambda: job().recover(one.token)) if by_hand else recover_all
    with paused(recover) as first:
        with racing(alone(write(one))) as [second]:
            second.wait_until_blocked()
            assert first.go_on() == ("queued" if by_hand else 1)
        assert isinstance(second.error(), LeaseLost)
    assert (job().status, JobAttempt.objects.get().outcome, names()) == ("queued", "lost", [])


@pytest.mark.parametrize("write", [fence, completes])
def test_a_recovery_that_was_rolled_back_costs_nothing(
    write: Callable[[ClaimedJob], Callable[[], None]],
) -> None:
    [one] = claimed()
    with (
        held(lambda: job().recover(one.token)) as first,
        racing(alone(write(one))) as [second],
    ):
        second.wait_until_blocked()
        first.rollback()
        second.result()
    assert job().status == ("succeeded" if write is completes else "running")


# Complete and cancel -----------------------------------------------------------------------------


@commits
def test_a_cancel_during_a_completion(commits: bool) -> None:
    [one] = claimed()
    with held(completes(one)) as first, racing(cancel) as [second]:
        second.wait_until_blocked()
        first.commit() if commits else first.rollback()
        assert second.result() == ("unchanged" if commits else "requested")
    assert (job().cancel_requested_at is None) == commits
    assert (job().status, names()) == (("succeeded", STOOD) if commits else ("running", []))


@pytest.mark.parametrize("write", [fence, completes])
def test_after_a_cancel_both_are_told(
    write: Callable[[ClaimedJob], Callable[[], None]],
) -> None:
    [one] = claimed()
    with paused(cancel) as first, racing(alone(write(one))) as [second]:
        second.wait_until_blocked()
        assert first.go_on() == "requested"
        assert isinstance(second.error(), JobCancelled)
    assert (job().status, names()) == ("running", [])


@pytest.mark.parametrize("write", [fence, completes])
def test_a_cancel_that_was_rolled_back_stops_neither(
    write: Callable[[ClaimedJob], Callable[[], None]],
) -> None:
    [one] = claimed()
    with held(cancel) as first, racing(alone(write(one))) as [second]:
        second.wait_until_blocked()
        first.rollback()
        second.result()
    assert names() == (STOOD if write is completes else [])


def test_a_cancel_that_waits_for_a_fence_comes_after_what_follows_it() -> None:
    """Fence, then complete in the same transaction: the cancel in between has to wait."""
    [one] = claimed()
    fenced, go_on = Signal(), Signal()

    def fence_and_complete() -> None:
        with transaction.atomic():
            fence(one)()
            fenced.set()
            go_on.wait()
            completes(one)()

    with racing(fence_and_complete) as [first]:
        fenced.wait()
        with racing(cancel) as [second]:
            second.wait_until_blocked()
            go_on.set()
        first.result()
        assert second.result() == "unchanged"
    assert (job().status, names()) == ("succeeded", STOOD)


def test_a_cancel_during_a_fence_is_a_request() -> None:
    [one] = claimed()
    with held(fence(one)) as first, racing(cancel) as [second]:
        second.wait_until_blocked()
        first.commit()
        assert second.result() == "requested"
    with pytest.raises(JobCancelled):
        alone(completes(one))()


def ends(one: ClaimedJob) -> str:
    """End a job by the worker, beside its ``on_finish``; give its status."""
    return str(finish_announced("default", one, done(one, result="1"), tell).written[one.id])


def ends_by_itself(one: ClaimedJob) -> str:
    """End a job by its handler, or by the worker once a cancel has been requested."""
    try:
        alone(completes(one))()
    except JobCancelled:
        return ends(one)
    return "succeeded"


@pytest.mark.parametrize("end", [ends, ends_by_itself])
def test_hundreds_of_pairs_of_cancel_and_end(end: Callable[[ClaimedJob], str]) -> None:
    """FAULTS 13: exactly one end each, ``on_finish`` once, the domain row with it."""
    ones = claimed(200, lease=600)
    line = barrier(2)
    ended: dict[int, str] = {}
    answers: dict[int, str] = {}
    is_ended, is_asked = ({one.id: Signal() for one in ones} for _ in range(2))

    def in_step(
        work: Callable[[ClaimedJob], None],
        mine: dict[int, Signal],
        theirs: dict[int, Signal],
        by: int,
    ) -> Callable[[], None]:
        """Ten at a time from the line, in opposite orders: both sides meet in the middle.

        The last of each ten waits for the other side, whose first it is: so each order occurs.
        """

        def run() -> None:
            for at in range(0, len(ones), 10):
                line.wait()
                ten = ones[at : at + 10][::by]
                for one in ten:
                    if one is ten[-1]:
                        theirs[one.id].wait()
                    work(one)
                    mine[one.id].set()

        return run

    def end_it(one: ClaimedJob) -> None:
        ended[one.id] = end(one)

    def request(one: ClaimedJob) -> None:
        answers[one.id] = Job.objects.get(pk=one.id).request_cancel()

    with racing(
        in_step(end_it, is_ended, is_asked, by=1), in_step(request, is_asked, is_ended, by=-1)
    ) as racers:
        pass
    for racer in racers:
        racer.result()
    counts = Counter((ended[one.id], answers[one.id]) for one in ones)
    assert set(counts) == {("succeeded", "unchanged"), ("cancelled", "requested")}
    assert min(counts.values()) >= 20, f"both orders took place: {counts}"
    assert dict(Job.objects.values_list("pk", "status")) == ended
    told = Counter(Business.objects.values_list("name", flat=True))
    assert told["told succeeded"] == counts["succeeded", "unchanged"]
    assert told["told cancelled"] == counts["cancelled", "requested"]
    assert told["domain"] == (told["told succeeded"] if end is ends_by_itself else 0)


# Renew -------------------------------------------------------------------------------------------


@commits
@pytest.mark.parametrize("write", [fence, completes])
def test_a_renewal_during_both_is_busy_and_not_lost(
    write: Callable[[ClaimedJob], Callable[[], None]], commits: bool
) -> None:
    """FAULTS 29."""
    [one] = claimed()
    ended = write is completes and commits
    with held(write(one)) as first:
        with racing(renew(one)) as [second]:
            if POSTGRES:
                assert second.result() == set(), "passed over"
                assert standings("default", holders([one]))[one.token].owns, "busy, not lost"
            else:
                second.wait_until_blocked()
            first.commit() if commits else first.rollback()
        renewed = renew(one)() if POSTGRES else second.result()
    assert renewed == (set() if ended else {one.token})
    assert standings("default", holders([one]))[one.token].ended == ended


@pytest.mark.parametrize("write", [fence, completes])
def test_after_a_renewal_both_go_on(write: Callable[[ClaimedJob], Callable[[], None]]) -> None:
    """Also where the lease that they began under is over by then (FAULTS 30)."""
    [one] = expired()
    with ExitStack() as stack:
        # A clock that is behind takes the lease for one that lives, however slow we are.
        with FakeClock(datetime.now(UTC) - timedelta(hours=1)):
            first = stack.enter_context(paused(renew(one, lease=7200)))
        with racing(alone(write(one))) as [second]:
            second.wait_until_blocked()
            assert first.go_on() == {one.token}
            second.result()
    assert job().status == ("succeeded" if write is completes else "running")


def heartbeat_of(one: ClaimedJob) -> tuple[Heartbeat, Held]:
    mine, all_ = Held(job=one, ctx=context(one), begun=True), HeldJobs()
    all_.add([mine])
    return Heartbeat("default", all_), mine


@pytest.mark.parametrize("write", [fence, completes])
def test_a_handler_inside_its_own_fence_is_not_told_that_it_lost_its_lease(
    write: Callable[[ClaimedJob], Callable[[], None]],
) -> None:
    [one] = claimed()
    heartbeat, mine = heartbeat_of(one)
    with held(write(one)) as first:
        if POSTGRES:
            heartbeat.renew()
            assert heartbeat.interval() < 1, "tried again soon"
        else:
            with racing(heartbeat.renew) as [second]:
                second.wait_until_blocked()
                mine.ctx.check()
                first.rollback()
            second.result()
        mine.ctx.check()
        first.rollback()
    heartbeat.renew()
    mine.ctx.check()
    assert heartbeat.interval() > 1 and not mine.lost
    assert job().ownership == "current"


# An end beside its on_finish ---------------------------------------------------------------------


class Ending:
    """The end of a job whose ``on_finish`` stands still until the test lets it go on."""

    def __init__(self, one: ClaimedJob) -> None:
        self._one = one
        self.reached, self.go_on = Signal(), Signal()

    def __call__(self) -> Any:
        return finish_announced("default", self._one, done(self._one, result="1"), self._tell)

    def _tell(self, event: FinishEvent) -> None:
        tell(event)
        self.reached.set()
        self.go_on.wait()


def test_a_cancel_during_an_on_finish_changes_nothing() -> None:
    [one] = claimed()
    ending = Ending(one)
    with racing(ending) as [first]:
        ending.reached.wait()
        with racing(cancel) as [second]:
            second.wait_until_blocked()
            ending.go_on.set()
        assert second.result() == "unchanged"
        assert first.result().written == {one.id: "succeeded"}
    assert names() == ["told succeeded"]


def test_an_end_after_the_cancel_is_told_as_one() -> None:
    [one] = claimed()
    ending = Ending(one)
    ending.go_on.set()
    with paused(cancel) as first, racing(ending) as [second]:
        second.wait_until_blocked()
        first.go_on()
        assert second.result().written == {one.id: "cancelled"}
    assert names() == ["told cancelled"]


@pytest.mark.parametrize("by_hand", [True, False])
def test_an_end_after_the_recovery_is_not_told(by_hand: bool) -> None:
    [one] = claimed() if by_hand else expired()
    recover: Callable[[], Any] = (lambda: job().recover(one.token)) if by_hand else recover_all
    with paused(recover) as first, racing(Ending(one)) as [second]:
        second.wait_until_blocked()
        first.go_on()
        assert [lost.job for lost in second.result().lost] == [one.id]
    assert (job().status, names()) == ("queued", [])


def test_an_on_finish_that_runs_past_the_lease_stands(clock: FakeClock) -> None:
    """Nobody takes the job meanwhile, and its worker is not told that it lost it (FAULTS 4)."""
    [one] = claimed()
    heartbeat, mine = heartbeat_of(one)
    mine.ended = True
    ending = Ending(one)
    with racing(ending) as [first]:
        ending.reached.wait()
        clock.advance(LEASE + 1)
        with racing(recover_all) as [second]:
            if POSTGRES:
                assert second.result() == 0
                heartbeat.renew()
            else:
                second.wait_until_blocked()
            ending.go_on.set()
        assert second.result() == 0
        assert first.result().written == {one.id: "succeeded"}
    assert not mine.lost
    assert (recover_all(), names()) == (0, ["told succeeded"])


def test_two_writers_of_one_end_tell_it_once() -> None:
    """A handler that comes back while the hard limit ends its attempt."""
    [one] = claimed()
    ending, late = Ending(one), Ending(one)
    late.go_on.set()
    with racing(ending) as [first]:
        ending.reached.wait()
        with racing(late) as [second]:
            second.wait_until_blocked()
            ending.go_on.set()
        assert first.result().written == second.result().written == {one.id: "succeeded"}
    assert not late.reached.is_set()
    assert names() == ["told succeeded"]
