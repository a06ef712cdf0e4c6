"""Races of moves, on connections of their own (CONTRACT 3; FAULTS 3, 13, 19, 21).

Each test proves that its race took place: the one move stands right before its commit
(``paused``) or in an open transaction (``held``) while the other is made, and the other is
seen waiting, or seen to end (a locked row is passed over) while the first still stands. On
SQLite there is one writer, so there every other move waits.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import override_settings

from django_durable_jobs import states
from django_durable_jobs.dialects import dialect_for
from django_durable_jobs.exceptions import InvalidTransition, LockTimeout
from django_durable_jobs.handlers import registry
from django_durable_jobs.models import Job, JobAttempt
from django_durable_jobs.transitions import (
    blocking,
    claims,
    leases,
    maintenance,
    outcomes,
    recovery,
)
from django_durable_jobs.transitions._fence import standings
from django_durable_jobs.transitions.claims import ClaimedJob
from tests.racing import LIMIT, PATIENT, barrier, held, racing, together
from tests.submission.handlers import HANDLERS, order
from tests.transitions.live import (
    LANE,
    LEASE,
    check_rows,
    claim,
    claimed,
    database_now,
    done,
    expire,
    expired,
    holders,
    queued,
)

from .paused import old_snapshot, passed_over, paused

pytestmark = pytest.mark.django_db(transaction=True)
POSTGRES = connection.vendor == "postgresql"
only_postgres = pytest.mark.skipif(not POSTGRES, reason="SQLite has one writer")


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    # Slow machines: what is tested here is who wins, not how long it may take.
    with registry.temporary(), override_settings(DURABLE_JOBS=PATIENT):
        for handler in HANDLERS:
            registry.register(handler)
        yield
    check_rows()


def job() -> Job:
    return Job.objects.get()


def cancel() -> str:
    return job().request_cancel()


def finish(one: ClaimedJob, *, wait: bool = False) -> Callable[[], Any]:
    return lambda: outcomes.finish("default", [done(one, result='"done"')], wait=wait)


def renew(one: ClaimedJob) -> Callable[[], set[str]]:
    return lambda: leases.renew("default", holders([one]), lease_seconds=2 * LEASE)


def recover_all() -> int:
    return recovery.recover_expired("default")


# Claim against claim ------------------------------------------------------------------------------


def test_a_second_claim_takes_the_next_jobs():
    jobs = [one.pk for one in queued(5)]
    with paused(lambda: claim(2)) as first, passed_over(lambda: claim(2), first.go_on) as second:
        assert [one.id for one in second.result()] == jobs[2:4]
        assert [one.id for one in first.go_on()] == jobs[:2]
    assert [one.id for one in claim(9)] == jobs[4:]


def test_a_second_claim_of_the_only_job_gets_nothing():
    queued()
    with paused(claim) as first, passed_over(claim, first.go_on) as second:
        assert second.result() == []
        assert len(first.go_on()) == 1
    assert JobAttempt.objects.count() == 1


def test_a_claim_that_fails_before_its_commit_has_claimed_nothing():
    queued(2)
    with paused(lambda: claim(2)) as first:
        first.fail()
        assert first.racer.error() is not None
    assert [one.status for one in Job.objects.all()] == ["queued"] * 2
    assert not JobAttempt.objects.exists()
    assert len(claim(2)) == 2


def test_eight_claimers_of_two_hundred_jobs():
    pks = {one.pk for one in queued(200)}

    line = barrier(8)

    def claim_all(number: int) -> list[list[ClaimedJob]]:
        # None goes on before each has some: nobody is so quick as to take all.
        while not (first := claim(7)):
            continue
        line.wait()
        taken = [first]
        # Some look again: a claim may find the next jobs locked and come home with less.
        while Job.objects.filter(status="queued").exists():
            taken.append(claim(7))
        return taken

    groups = [racer.result() for racer in together(claim_all, 8)]
    each = [one for groups_of_one in groups for group in groups_of_one for one in group]
    assert {one.id for one in each} == pks and len(each) == 200, "each job once"
    assert len({one.token for one in each}) == 200
    assert max(len(group) for groups_of_one in groups for group in groups_of_one) <= 7
    for groups_of_one in groups:  # each got its jobs in the claim's order
        order_ = [one.id for group in groups_of_one for one in group]
        assert order_ == sorted(order_)


@only_postgres
def test_a_claim_with_an_old_snapshot_takes_no_job_twice():
    """It read the row as queued; by the time that it locks it another claim has committed."""
    [one] = queued()
    with old_snapshot(claim) as late:
        [winner] = claim()
        assert late.go_on() == []
    assert (winner.id, JobAttempt.objects.count()) == (one.pk, 1)


# Claim against cancel -----------------------------------------------------------------------------


def test_a_cancel_after_a_claim_is_a_request():
    queued()
    with paused(claim) as first, racing(cancel) as [second]:
        second.wait_until_blocked()
        [one] = first.go_on()
        assert second.result() == "requested"
    assert Job.objects.execution_status(one.token) == "cancel_requested"


def test_a_claim_after_a_cancel_finds_nothing():
    queued()
    with paused(cancel) as first, passed_over(claim, first.go_on) as second:
        assert second.result() == []
        assert first.go_on() == "cancelled"
    assert claim() == [] and not JobAttempt.objects.exists()


def test_a_claim_after_a_cancel_that_was_rolled_back_gets_the_job():
    queued()
    with held(cancel) as first, racing(claim) as [second]:
        if POSTGRES:
            assert second.result() == []
        else:
            second.wait_until_blocked()
        first.rollback()
        assert len(claim() if POSTGRES else second.result()) == 1


@only_postgres
@pytest.mark.parametrize("change", ["cancel", "schedule", "block"])
def test_a_claim_with_an_old_snapshot_leaves_what_is_not_queued_any_more(change):
    queued()
    with old_snapshot(claim) as late:
        if change == "cancel":
            cancel()
        elif change == "block":
            blocking.block_lane("default", LANE, states.UNKNOWN_HANDLER, patience=0)
        else:
            Job.objects.update(run_at=database_now() + 60_000_000)
        assert late.go_on() == []
    assert not JobAttempt.objects.exists()


# Finish against cancel ----------------------------------------------------------------------------


def test_a_cancel_after_the_finish_changes_nothing():
    [one] = claimed()
    with paused(finish(one)) as first, racing(cancel) as [second]:
        second.wait_until_blocked()
        assert first.go_on().written == {one.id: "succeeded"}
        assert second.result() == "unchanged"
    assert (job().status, job().result, job().cancel_requested_at) == ("succeeded", "done", None)


@pytest.mark.parametrize("wait", [False, True])
def test_a_finish_after_the_cancel_is_a_cancel(wait):
    [one] = claimed()
    with paused(cancel) as first:
        with racing(finish(one, wait=wait)) as [second]:
            if POSTGRES and not wait:
                report = second.result()
                assert report.busy and not report.lost, "busy, not lost"
            else:
                second.wait_until_blocked()
            assert first.go_on() == "requested"
        report = second.result()
        if report.busy:
            report = outcomes.finish("default", report.busy)
        assert report.written == {one.id: "cancelled"}
    attempt = JobAttempt.objects.get()
    assert (job().result, attempt.status, attempt.outcome) == (None, "cancelled", "returned")


def test_a_finish_after_a_cancel_that_was_rolled_back_stands():
    [one] = claimed()
    with held(cancel) as first, racing(finish(one, wait=True)) as [second]:
        second.wait_until_blocked()
        first.rollback()
        assert second.result().written == {one.id: "succeeded"}
    assert job().result == "done"


def test_a_cancel_after_a_finish_that_failed_is_a_request():
    [one] = claimed()
    with paused(finish(one)) as first, racing(cancel) as [second]:
        second.wait_until_blocked()
        first.fail()
        assert first.racer.error() is not None
        assert second.result() == "requested"
    assert finish(one)().written == {one.id: "cancelled"}


def test_a_thousand_pairs_of_cancel_and_finish():
    """FAULTS 13: exactly one terminal transition each, and both know which."""
    ones = []
    for _ in range(2):
        ones += claimed(500, lease=600)
    start = barrier(4)
    answers: dict[int, str] = {}
    finished: list[int] = []

    def finish_all(seed: int) -> dict[int, str]:
        mine = ones[seed::2]
        random.Random(seed).shuffle(mine)
        start.wait()
        written: dict[int, str] = {}
        for at in range(0, len(mine), 10):
            left = [done(one, result="1") for one in mine[at : at + 10]]
            while left:
                report = outcomes.finish("default", left)
                assert not report.lost and not report.damaged
                assert not written.keys() & report.written.keys(), "finished twice"
                written |= report.written
                finished.extend(report.written)
                left = report.busy
            # A finish in groups is much faster than a cancel: neither side leaves the other behind.
            wait_for(lambda at=at: len(answers) >= at, start)
        return written

    def cancel_all(seed: int) -> None:
        mine = [handle(one.id) for one in ones[seed::2]]
        random.Random(seed + 2).shuffle(mine)
        start.wait()
        for at, one in enumerate(mine):
            answers[one.pk] = one.request_cancel()
            wait_for(lambda at=at: len(finished) >= 2 * at - 100, start)

    works = [lambda: finish_all(0), lambda: finish_all(1), lambda: cancel_all(0),
             lambda: cancel_all(1)]  # fmt: skip
    with racing(*works) as racers:
        pass
    written = racers[0].result() | racers[1].result()
    racers[2].result(), racers[3].result()
    assert len(written) == len(answers) == 1000
    for pk, status in written.items():
        # Requested before the finish, or unchanged after it: never both, never neither.
        assert (status, answers[pk]) in {("cancelled", "requested"), ("succeeded", "unchanged")}
    counts = Counter(written.values())
    assert min(counts["cancelled"], counts["succeeded"]) > 50, f"both orders took place: {counts}"
    stored = dict(Job.objects.values_list("pk", "status"))
    assert stored == written
    assert Job.objects.filter(status="cancelled", result__isnull=False).count() == 0
    assert JobAttempt.objects.exclude(outcome="returned").count() == 0


def handle(pk: int) -> Job:
    """Give a job to be moved, unread: a read would come first in the caller's transaction."""
    one = Job(pk=pk)
    one._state.db = "default"
    return one


def wait_for(condition: Callable[[], bool], start: Any) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition() and not start.broken:
        assert time.monotonic() < deadline
        time.sleep(0.001)


# Finish, renew and write against recovery ---------------------------------------------------------


def test_a_recovery_after_the_finish_finds_nothing(clock):
    """The finish came in time and stands, although its lease is over before it commits."""
    [one] = claimed()
    with paused(finish(one)) as first:
        clock.advance(LEASE + 1)
        with passed_over(recover_all, first.go_on) as second:
            assert second.result() == 0
            assert first.go_on().written == {one.id: "succeeded"}
    assert recover_all() == 0


@pytest.mark.parametrize("wait", [False, True])
def test_a_finish_after_the_recovery_is_refused(wait):
    [one] = expired()
    with paused(recover_all) as first:
        with racing(finish(one, wait=wait)) as [second]:
            if POSTGRES and not wait:
                assert [lost.job for lost in second.result().lost] == [one.id]
            else:
                second.wait_until_blocked()
            assert first.go_on() == 1
        assert [lost.job for lost in second.result().lost] == [one.id]
    assert (job().status, job().result) == ("queued", None)
    assert JobAttempt.objects.get().outcome == "lost"


@pytest.mark.parametrize("wait", [False, True])
def test_a_finish_after_a_recovery_by_hand_within_the_lease_is_refused(wait):
    """The token decides: the lease still lives while the operator's transaction is open."""
    [one] = claimed()
    with held(lambda: job().recover(one.token)) as first:
        with racing(finish(one, wait=wait)) as [second]:
            if POSTGRES and not wait:
                report = second.result()
                assert report.busy, "until the operator commits, it is its own"
            else:
                second.wait_until_blocked()
            first.commit()
        report = second.result()
        if report.busy:
            report = outcomes.finish("default", report.busy)
        assert [lost.job for lost in report.lost] == [one.id]
    assert job().status == "queued"


def test_a_recovery_by_hand_after_the_finish_is_refused():
    [one] = claimed()
    with paused(finish(one)) as first, racing(lambda: job().recover(one.token)) as [second]:
        second.wait_until_blocked()
        first.go_on()
        assert isinstance(second.error(), InvalidTransition)
    assert job().status == "succeeded"


def test_a_recovery_after_the_renewal_finds_nothing(clock):
    [one] = claimed()
    with paused(renew(one)) as first:
        clock.advance(LEASE + 1)
        with passed_over(recover_all, first.go_on) as second:
            assert second.result() == 0
            assert first.go_on() == {one.token}
    assert recover_all() == 0 and job().ownership == "current"


@only_postgres
def test_a_recovery_with_an_old_snapshot_leaves_what_was_renewed_or_finished():
    """It read the leases as over; each was renewed, ended, or claimed anew before it locked."""
    renewed, finished, anew, dead = expired(4)
    with old_snapshot(recover_all) as late:
        far = database_now() + 60_000_000
        Job.objects.filter(pk__in=[renewed.id, finished.id]).update(lease_expires_at=far)
        finish(finished)()
        Job.objects.get(pk=anew.id).recover(anew.token)
        [newer] = claim()
        assert newer.id == anew.id
        assert late.go_on() == 1
    found = {one.pk: one.status for one in Job.objects.all()}
    assert [found[one.id] for one in (renewed, finished, anew, dead)] == [
        "running",
        "succeeded",
        "running",
        "queued",
    ]


def test_a_renewal_after_the_recovery_is_refused():
    [one] = expired()
    with paused(recover_all) as first:
        with passed_over(renew(one), first.go_on) as second:
            assert second.result() == set()
            assert first.go_on() == 1
        assert renew(one)() == set()
    assert not standings("default", holders([one]))[one.token].owns


def test_a_renewal_during_a_recovery_by_hand_is_busy_then_lost():
    [one] = claimed()
    with held(lambda: job().recover(one.token)) as first:
        with passed_over(renew(one), first.commit) as second:
            assert second.result() == set()
            assert standings("default", holders([one]))[one.token].owns == POSTGRES
        first.commit()
    assert renew(one)() == set()
    assert not standings("default", holders([one]))[one.token].owns


# Recovery against recovery ------------------------------------------------------------------------


def test_two_passes_recover_each_job_once():
    expired(3)
    with paused(recover_all) as first, passed_over(recover_all, first.go_on) as second:
        assert second.result() == 0
        assert first.go_on() == 3
    assert Job.objects.filter(status="queued").count() == 3


def test_two_passes_at_once_share_what_is_expired():
    expired(1200)
    answers = [racer.result() for racer in together(lambda number: recover_all(), 4)]
    assert sum(answers) + recover_all() == 1200
    assert JobAttempt.objects.filter(status="interrupted").count() == 1200


def test_a_recovery_by_hand_during_a_pass_is_refused():
    [one] = expired()
    with paused(recover_all) as first, racing(lambda: job().recover(one.token)) as [second]:
        second.wait_until_blocked()
        assert first.go_on() == 1
        assert isinstance(second.error(), InvalidTransition)
    assert job().status == "queued"


def test_a_pass_during_a_recovery_by_hand_finds_nothing():
    [one] = expired(retry_on_interrupt=False)
    with (
        paused(lambda: job().recover(one.token, requeue=True)) as first,
        passed_over(recover_all, first.go_on) as second,
    ):
        assert second.result() == 0
        assert first.go_on() == "queued"
    assert job().status == "queued", "the operator's word stands"


def test_a_recovery_against_a_claim_of_the_same_job():
    """A recovered job is claimed once its recovery has committed, not before."""
    expired()
    with paused(recover_all) as first, passed_over(claim, first.go_on) as second:
        taken = second.result()
        assert len(taken) == (0 if POSTGRES else 1)
        first.go_on()
    taken = taken or claim()
    assert [one.attempt_count for one in taken] == [2]


def test_a_cancel_during_a_recovery():
    expired()
    with paused(recover_all) as first, racing(cancel) as [second]:
        second.wait_until_blocked()
        first.go_on()
        assert second.result() == "cancelled", "queued again, so at once"


def test_a_recovery_after_a_cancel_request():
    expired()
    with paused(cancel) as first, passed_over(recover_all, first.go_on) as second:
        assert second.result() == (0 if POSTGRES else 1)
        first.go_on()
    assert recover_all() == (1 if POSTGRES else 0)
    assert job().status == "cancelled"


# Operators against operators ----------------------------------------------------------------------


def failed(**changes: Any) -> Job:
    values = {"status": "failed", "finished_at": database_now(), "attempt_count": 0}
    return queued(**(values | changes))[0]


def test_two_retries_queue_once():
    one = failed()
    with (
        paused(lambda: Job.objects.get().retry()) as first,
        racing(lambda: job().retry(extra_attempts=5)) as [second],
    ):
        second.wait_until_blocked()
        first.go_on()
        assert isinstance(second.error(), InvalidTransition)
    assert Job.objects.get(pk=one.pk).granted_attempts == 0


def test_two_cancels_keep_the_first_time():
    one = handle(claimed()[0].id)
    with (
        held(lambda: (one.request_cancel(), one.cancel_requested_at)) as first,
        racing(cancel) as [second],
    ):
        second.wait_until_blocked()
        first.commit()
        assert second.result() == "requested"
    assert first.value == ("requested", job().cancel_requested_at)


def test_a_release_during_a_cancel():
    queued(status="blocked", blocked_reason="unknown_handler")
    with paused(cancel) as first, racing(lambda: job().release()) as [second]:
        second.wait_until_blocked()
        first.go_on()
        assert isinstance(second.error(), InvalidTransition)
    assert job().status == "cancelled"


PASSES: dict[str, tuple[dict[str, Any], Callable[[], int]]] = {
    "promote": ({"status": "scheduled"}, lambda: maintenance.promote_due("default")),
    "exhaust": ({"attempt_count": 3}, lambda: maintenance.exhaust("default")),
    "block": (
        {},
        lambda: blocking.block_lane("default", LANE, states.UNKNOWN_HANDLER, patience=0),
    ),
    "release": (
        {"status": "blocked", "blocked_reason": "unknown_handler"},
        lambda: blocking.release_lane("default", LANE),
    ),
}


@pytest.mark.parametrize("name", PASSES)
def test_a_cancel_against_a_pass(name):
    columns, run = PASSES[name]
    one = queued(**columns)[0]
    with paused(one.request_cancel) as first, passed_over(run, first.go_on) as second:
        assert second.result() == 0
        assert first.go_on() == "cancelled"
    assert run() == 0
    Job.objects.all().delete()
    one = queued(**columns)[0]
    with paused(run) as first, racing(one.request_cancel) as [second]:
        second.wait_until_blocked()
        assert first.go_on() == 1
        assert second.result() == ("unchanged" if name == "exhaust" else "cancelled")
    # (The rows of an import have no attempts to compare with.)
    Job.objects.all().delete()


# Keys ---------------------------------------------------------------------------------------------


def ended_with_key() -> Job:
    one = Job.objects.submit(order("ended", dedupe_key="k"))
    one.request_cancel()
    return one


@pytest.mark.parametrize("commit", [True, False])
def test_a_retry_while_a_submission_of_its_key_is_open(commit):
    one = ended_with_key()
    with held(lambda: Job.objects.stage(order("newer", dedupe_key="k"))) as submission:
        with racing(one.retry) as [retry]:
            retry.wait_until_blocked()
            submission.commit() if commit else submission.rollback()
        error = retry.error()
    if commit:
        assert isinstance(error, InvalidTransition) and "newer" in str(error)
        assert Job.objects.get(job_id="ended").status == "cancelled"
    else:
        assert error is None and one.status == "queued"
    assert Job.objects.filter(dedupe_key="k", status="queued").count() == 1


@pytest.mark.parametrize("commit", [True, False])
def test_a_submission_while_a_retry_of_its_key_is_open(commit):
    one = ended_with_key()
    with held(lambda: Job.objects.get(pk=one.pk).retry()) as retry:
        with racing(lambda: Job.objects.submit(order("newer", dedupe_key="k"))) as [submission]:
            submission.wait_until_blocked()
            retry.commit() if commit else retry.rollback()
        answer = submission.result()
    assert (answer.pk == one.pk, answer.newly_created) == (commit, not commit)
    assert Job.objects.filter(dedupe_key="k", status="queued").count() == 1


def test_many_retries_and_submissions_of_one_key():
    """FAULTS 19: one live job at most, whoever comes first."""
    ended = [ended_with_key_of(number) for number in range(5)]

    def work(number: int) -> Job | InvalidTransition:
        if number < 5:
            try:
                return Job.objects.get(pk=ended[number].pk).retry()
            except InvalidTransition as error:
                return error
        return Job.objects.submit(order(f"new-{number}", dedupe_key="k"))

    answers = [racer.result() for racer in together(work, 10)]
    [live] = Job.objects.filter(dedupe_key="k", status="queued")
    for answer in answers:
        if isinstance(answer, InvalidTransition):
            assert live.job_id in str(answer)
        else:
            assert answer.pk == live.pk


def ended_with_key_of(number: int) -> Job:
    one = Job.objects.submit(order(f"ended-{number}", dedupe_key="k"))
    one.request_cancel()
    return one


@pytest.mark.parametrize("move", ["promote", "recover"])
def test_a_job_that_is_moved_holds_its_key_all_the_time(move):
    """A submission in the middle of the move gets the live job."""
    if move == "promote":
        holder = queued(status="scheduled", handler=order("x").handler, dedupe_key="k")[0]
        run: Callable[[], int] = lambda: maintenance.promote_due("default")  # noqa: E731
    else:
        one = Job.objects.submit(order("holder", dedupe_key="k"))
        [held_one] = claims.claim(
            "default", claims.queued_lanes("default"), limit=1, worker="w", lease_seconds=7200
        )
        expire([held_one])
        holder, run = one, recover_all
    with (
        paused(run) as first,
        racing(lambda: Job.objects.submit(order("newer", dedupe_key="k"))) as [submission],
    ):
        submission.wait_until_blocked()
        first.go_on()
        assert submission.result().pk == holder.pk
    assert Job.objects.filter(dedupe_key="k").count() == 1


# Deadlocks (FAULTS 21) ----------------------------------------------------------------------------

ROWS, SECONDS = 300, 4.0


def test_no_deadlock_over_the_same_rows(monkeypatch):
    """Renew, finish, recover, cancel, retry and claim over the same rows, in any order."""
    dialect = dialect_for("default")
    conflicts: list[BaseException] = []
    original = dialect.is_conflict

    def is_conflict(error: BaseException) -> bool:
        found = original(error)
        if found:
            conflicts.append(error)
        return found

    monkeypatch.setattr(dialect, "is_conflict", is_conflict)
    queued(ROWS, max_attempts=1000)
    pks = list(Job.objects.values_list("pk", flat=True))
    end = time.monotonic() + SECONDS
    done_work: Counter[str] = Counter()

    def goes_on() -> bool:
        """Until the time is over, or longer while somebody has had no work yet."""
        idle = any(not done_work[name] for name in steps)
        return time.monotonic() < end + (LIMIT / 2 if idle else 0)

    def rounds(name: str, step: Callable[[random.Random], int], seed: int) -> Callable[[], None]:
        def run() -> None:
            dice = random.Random(seed)
            while goes_on():
                done_work[name] += step(dice)

        return run

    def running(dice: random.Random) -> list[tuple[int, str]]:
        rows = Job.objects.filter(status="running", lease_token__isnull=False)
        found = list(rows.values_list("pk", "lease_token"))
        dice.shuffle(found)
        return found

    def claim_some(dice: random.Random) -> int:
        return len(claim(dice.randint(1, 150), lease=dice.choice([0.1, 0.3, 5])))

    def renew_all(dice: random.Random) -> int:
        try:
            renewed = leases.renew("default", running(dice), lease_seconds=dice.choice([0.2, 5]))
        except LockTimeout:  # it waits for SQLite's writer a sixth of the lease, no longer
            return 0
        return len(renewed)

    def finish_some(dice: random.Random) -> int:
        outcomes_ = [
            outcomes.Outcome(
                job=pk,
                token=token,
                status="failed",
                outcome="raised",
                final_status="failed",
                retry_delay=0,
            )
            for pk, token in running(dice)[:100]
        ]
        wait = dice.random() < 0.5
        return len(outcomes.finish("default", outcomes_, wait=wait).written)

    def give_some_back(dice: random.Random) -> int:
        return len(claims.give_back("default", running(dice)[:20], wait=True))

    def passes(dice: random.Random) -> int:
        return recover_all() + maintenance.promote_due("default")

    def cancel_and_retry(dice: random.Random) -> int:
        moved = 0
        for pk in dice.sample(pks, 10):
            one = Job.objects.get(pk=pk)
            moved += one.request_cancel() != "unchanged"
            retry(one)
        return moved

    def retry(one: Job) -> None:
        with suppress(InvalidTransition):  # it runs, or another was quicker
            one.retry(extra_attempts=1)

    def operators_transaction(dice: random.Random) -> int:
        with transaction.atomic():
            for pk in sorted(dice.sample(pks, 5)):
                handle(pk).request_cancel()
        for one in Job.objects.filter(status="cancelled")[:20]:
            retry(one)
        return 1

    steps = {
        "claim": claim_some,
        "renew": renew_all,
        "renew too": renew_all,
        "finish": finish_some,
        "finish too": finish_some,
        "give back": give_some_back,
        "recover": passes,
        "recover too": passes,
        "cancel": cancel_and_retry,
        "operator": operators_transaction,
    }
    works = [rounds(name, step, seed) for seed, (name, step) in enumerate(steps.items())]
    with racing(*works) as racers:
        pass
    errors = [error for racer in racers if (error := racer.error()) is not None]
    assert not errors
    assert not conflicts, "none was even tried again"
    assert all(done_work[name] for name in steps), f"all had work: {done_work}"
