"""The fence: this job, this token, running, a lease that lives once the row is locked (3.2).

Past a lease during a wait, with the real clock: the leases are short, and each test proves by
the database that the writer waited (or was passed over) while its lease still lived. Where no
statement waits across the end of a lease, the clock is a fake one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import override_settings

from django_durable_jobs import states
from django_durable_jobs.clock import host_now
from django_durable_jobs.dialects.base import JOBS, FencedMove
from django_durable_jobs.exceptions import InvalidTransition, JobCancelled, LeaseLost
from django_durable_jobs.models import Job, JobAttempt
from django_durable_jobs.testing import FakeClock
from django_durable_jobs.transitions import _fence, claims, completion, leases, outcomes, recovery
from django_durable_jobs.transitions._fence import standings
from django_durable_jobs.transitions.claims import ClaimedJob
from tests._rows import NOW
from tests.racing import PATIENT, held, racing
from tests.testapp.models import Business

from .live import (
    check_rows,
    claim,
    claimed,
    database_now,
    done,
    expire,
    expired,
    holders,
    lease_of,
    lock,
    lock_attempt,
    queued,
    sleep_past,
)
from .moves import snapshot

real = pytest.mark.django_db(transaction=True)
only_postgres = pytest.mark.skipif(
    connection.vendor != "postgresql", reason="SQLite locks the whole database, not a row"
)


# For those that must not wait at all.
IMPATIENT = override_settings(DURABLE_JOBS={"LOCK_TIMEOUT_SECONDS": 10})


@pytest.fixture(autouse=True)
def _patience() -> Any:
    """Slow machines: what is tested is who may write, not how long it may take."""
    with override_settings(DURABLE_JOBS=PATIENT):
        yield


# Each move gives whether it was written; what is told to a handler is told by an exception.


def renew(one: ClaimedJob) -> bool:
    return bool(leases.renew("default", [(one.id, one.token)], lease_seconds=60))


def finish(one: ClaimedJob, *, wait: bool = False) -> bool:
    return bool(outcomes.finish("default", [done(one)], wait=wait).written)


def give_back(one: ClaimedJob, *, wait: bool = False) -> bool:
    return bool(claims.give_back("default", [(one.id, one.token)], wait=wait))


def block_claimed(one: ClaimedJob, *, wait: bool = False) -> bool:
    row = (one.id, one.token, states.CORRUPT_PAYLOAD)
    return bool(claims.block_claimed("default", [row], wait=wait))


def progress(one: ClaimedJob) -> bool:
    try:
        outcomes.record_progress("default", one.id, one.token, 0.5, "half")
    except LeaseLost:
        return False
    return True


def checkpoint(one: ClaimedJob) -> bool:
    try:
        outcomes.record_checkpoint("default", one.id, one.token, '"kept"')
    except LeaseLost:
        return False
    return True


def fence(one: ClaimedJob) -> bool:
    try:
        completion.fence("default", one.id, one.token)
    except LeaseLost:
        return False
    return True


def complete(one: ClaimedJob) -> bool:
    try:
        completion.complete("default", one.id, one.token, '"done"')
    except LeaseLost:
        return False
    return True


def finish_beside(one: ClaimedJob) -> bool:
    """The finish of a job with ``on_finish``, which is called exactly where it is written."""
    told: list[str] = []
    report = outcomes.finish_beside("default", done(one), told.append)
    assert told == list(report.written.values())
    return bool(report.written)


def in_a_transaction(write: Callable[[ClaimedJob], bool]) -> Callable[[ClaimedJob], bool]:
    def inside(one: ClaimedJob) -> bool:
        with transaction.atomic():
            return write(one)

    return inside


def waiting(move: FencedMove, *more: Any) -> Callable[[ClaimedJob], bool]:
    return lambda one: bool(_fence.fenced("default", move, [(one.id, one.token, *more)], wait=True))


Write = Callable[[ClaimedJob], bool]
GROUPED: dict[str, Write] = {
    "renew": renew,
    "finish": finish,
    "give_back": give_back,
    "block_claimed": block_claimed,
}
WAITING: dict[str, Write] = {
    "renew waiting": waiting(leases.RENEW, 60_000_000),
    "finish waiting": lambda one: finish(one, wait=True),
    "finish beside on_finish": finish_beside,
    "give_back waiting": lambda one: give_back(one, wait=True),
    "block_claimed waiting": lambda one: block_claimed(one, wait=True),
    "progress": progress,
    "checkpoint": checkpoint,
    "progress in a transaction": in_a_transaction(progress),
    "checkpoint in a transaction": in_a_transaction(checkpoint),
    "fence": in_a_transaction(fence),
    "complete": in_a_transaction(complete),
}
ALL = GROUPED | WAITING


def only_lock(one: ClaimedJob) -> None:
    lock(one.id)


def change_the_rows(one: ClaimedJob) -> None:
    changes = {"priority": 7, "progress": 0.25, "progress_message": "a stranger's"}
    Job.objects.filter(pk=one.id).update(**changes)
    JobAttempt.objects.filter(token=one.token).update(progress=0.25)


lockers = pytest.mark.parametrize("locker", [only_lock, change_the_rows])


def stranger_past_the_lease(write: Write, locker: Callable[[ClaimedJob], None]) -> None:
    """Let a stranger hold the row until the lease of its holder, who writes, is over."""
    # The lease must live until the writer has been seen waiting: longer on a busy machine.
    for lease in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0):
        [one] = claimed(lease=lease)
        end = lease_of(one.id)
        with held(lambda one=one: locker(one)) as stranger:
            with racing(lambda one=one: write(one)) as [writer]:
                writer.wait_until_blocked()
                began_in_time = database_now() < end
                sleep_past(end)
                stranger.commit()
            after_the_stranger = snapshot()
            written = writer.result()
        if began_in_time:
            break
    else:
        pytest.fail("the writer never began within its lease")
    assert not written
    assert snapshot() == after_the_stranger
    job = Job.objects.get(pk=one.id)
    assert (job.status, job.lease_token) == (states.RUNNING, one.token)
    assert job.checkpoint is None and job.progress_message in ("", "a stranger's")
    assert job.ownership == "expired"
    # And its row is free for whoever comes next.
    assert recovery.recover_expired("default") >= 1
    check_rows()


@real
@lockers
@pytest.mark.parametrize("name", WAITING)
def test_waiting_for_a_lock_past_the_lease_loses_it(name, locker):
    stranger_past_the_lease(WAITING[name], locker)


@real
@pytest.mark.skipif(
    connection.vendor == "postgresql",
    reason="on PostgreSQL these skip a locked row, they never wait",
)
@pytest.mark.parametrize("name", GROUPED)
def test_on_sqlite_the_grouped_moves_wait_and_lose_too(name):
    stranger_past_the_lease(GROUPED[name], change_the_rows)


@real
@only_postgres
@lockers
@pytest.mark.parametrize("name", GROUPED)
def test_a_grouped_move_passes_a_locked_row_over(name, locker):
    """Within the lease busy, not lost; once the lock has outlasted the lease, lost."""
    [one] = claimed(lease=2)
    end = lease_of(one.id)
    with held(lambda: locker(one)) as stranger:
        before = snapshot()
        assert not GROUPED[name](one), "it did not wait: the stranger still holds the row"
        found = standings("default", [(one.id, one.token)])[one.token]
        assert found.owns and found.attempt_open or database_now() >= end
        sleep_past(end)
        assert not GROUPED[name](one)
        assert not standings("default", [(one.id, one.token)])[one.token].owns
        assert recovery.recover_expired("default") == 0, "nobody takes a locked row"
        assert snapshot() == before
        stranger.commit()
    before = snapshot()
    assert not GROUPED[name](one)
    assert snapshot() == before
    assert recovery.recover_expired("default") == 1
    check_rows()


@real
@lockers
@pytest.mark.parametrize("name", WAITING)
def test_a_lock_within_the_lease_is_waited_for_and_written(name, locker):
    """What the stranger changed stays, and the write is based on it."""
    [one] = claimed()
    with held(lambda: locker(one)) as stranger:
        with racing(lambda: WAITING[name](one)) as [writer]:
            writer.wait_until_blocked()
            stranger.commit()
        assert writer.result()
    job = Job.objects.get(pk=one.id)
    assert job.priority == (7 if locker is change_the_rows else 0)
    check_rows()


@real
@only_postgres
@pytest.mark.parametrize("name", GROUPED)
@IMPATIENT
def test_a_locked_row_holds_up_nobody_else_of_its_group(name):
    ones = claimed(5)
    locked = ones[2]
    group: dict[str, Callable[[], set[int]]] = {
        "renew": lambda: _jobs_of(ones, leases.renew("default", holders(ones), lease_seconds=99)),
        "finish": lambda: set(outcomes.finish("default", [done(one) for one in ones]).written),
        "give_back": lambda: set(claims.give_back("default", holders(ones))),
        "block_claimed": lambda: set(
            claims.block_claimed(
                "default", [(*pair, states.CORRUPT_PAYLOAD) for pair in holders(ones)]
            )
        ),
    }
    with held(lambda: change_the_rows(locked)) as stranger:
        assert group[name]() == {one.id for one in ones} - {locked.id}
        standing = standings("default", holders([locked]))[locked.token]
        assert standing.owns and standing.attempt_open, "busy, not lost"
        stranger.commit()
    assert locked.id in group[name]()
    check_rows()


def _jobs_of(ones: list[ClaimedJob], tokens: set[str]) -> set[int]:
    return {one.id for one in ones if one.token in tokens}


@real
@only_postgres
def test_the_report_of_a_finish_tells_busy_from_lost_and_damaged():
    busy, lost, damaged, fine = ones = claimed(4)
    expire([lost])
    JobAttempt.objects.filter(token=damaged.token).delete()
    with held(lambda: lock(busy.id)):
        report = outcomes.finish("default", [done(one) for one in ones])
    assert report.written == {fine.id: states.SUCCEEDED}
    assert [one.job for one in report.busy] == [busy.id]
    assert [one.job for one in report.lost] == [lost.id]
    assert [one.job for one in report.damaged] == [damaged.id]
    assert outcomes.finish("default", report.busy).written == {busy.id: states.SUCCEEDED}


@real
@only_postgres
def test_an_attempt_locked_by_a_stranger_holds_up_its_finish_alone_and_no_renewal():
    with FakeClock(NOW) as clock:
        ones = claimed(3, lease=1.5)
        first, locked, last = ones
        with held(lambda: lock_attempt(locked.token)) as stranger:
            report = outcomes.finish("default", [done(one) for one in ones])
            assert set(report.written) == {first.id, last.id}
            assert [one.job for one in report.busy] == [locked.id]
            for _ in range(3):  # longer than the first lease
                clock.advance(1)
                assert renew_for(locked, 1.5)
                assert outcomes.finish("default", report.busy).busy
                assert recovery.recover_expired("default") == 0
            stranger.commit()
        assert outcomes.finish("default", report.busy).written == {locked.id: states.SUCCEEDED}
    check_rows()


def renew_for(one: ClaimedJob, seconds: float) -> bool:
    return bool(leases.renew("default", [(one.id, one.token)], lease_seconds=seconds))


@real
@only_postgres
@pytest.mark.parametrize("name", ["finish waiting", "give_back waiting", "progress"])
def test_while_a_write_waits_for_the_attempt_nobody_takes_the_job(name):
    """The lease is judged with the job's row locked, which stays so until the attempt is too."""
    with FakeClock(NOW) as clock:
        [one] = claimed(lease=1.5)
        with held(lambda: lock_attempt(one.token)) as stranger:
            with racing(lambda: WAITING[name](one)) as [writer]:
                writer.wait_until_blocked()
                clock.advance(2)
                assert recovery.recover_expired("default") == 0
                stranger.commit()
            assert writer.result()
    check_rows()


@real
@only_postgres
@pytest.mark.parametrize("name", ALL)
@IMPATIENT
def test_a_foreign_key_to_the_job_holds_up_no_write(name):
    """A row of the host that references the job locks its key only, and for as long as it likes."""
    [one] = claimed()
    with held(lambda: reference(one.id)):
        assert ALL[name](one)
    check_rows()


def reference(pk: int) -> None:
    """Lock the row as the insert of a row that references it does."""
    _execute(f"SELECT 1 FROM {JOBS} WHERE id = {pk} FOR KEY SHARE")


@real
@only_postgres
@IMPATIENT
def test_a_foreign_key_to_the_job_holds_up_no_claim_recovery_or_operator():
    waiting_job = queued()[0]
    with held(lambda: reference(waiting_job.pk)):
        [one] = claim()
        expire([one])
        assert recovery.recover_expired("default") == 1
        assert waiting_job.request_cancel() == "cancelled"
    check_rows()


# Stale holders ------------------------------------------------------------------------------------


@pytest.mark.django_db
@pytest.mark.parametrize("name", ALL)
def test_a_stale_holder_writes_nothing_while_the_newer_attempt_runs(name):
    """FAULTS 1 and 2: both attempts carry the same worker's name; the token decides."""
    [stale] = expired()
    assert recovery.recover_expired("default") == 1
    [newer] = claim()
    assert newer.id == stale.id and newer.token != stale.token
    before = snapshot()
    assert not ALL[name](stale)
    assert snapshot() == before
    assert Job.objects.get(pk=newer.id).lease_token == newer.token, "the token was compared"
    assert ALL[name](newer)


@pytest.mark.django_db
def test_the_same_group_may_hold_a_stale_and_a_newer_attempt_of_one_job():
    [stale] = expired()
    recovery.recover_expired("default")
    [newer] = claim()
    for order in ([stale, newer], [newer, stale]):
        assert leases.renew("default", holders(order), lease_seconds=60) == {newer.token}
    for order in ([stale, newer], [newer, stale]):
        report = outcomes.finish("default", [done(one) for one in order])
        assert [one.token for one in report.lost][:1] == [stale.token]
    assert Job.objects.get().status == states.SUCCEEDED
    check_rows()


@pytest.mark.django_db
def test_a_handler_is_told_why_its_write_was_refused():
    [one] = claimed()
    with pytest.raises(InvalidTransition, match=r"forward only.*0\.5"):
        for fraction in (0.5, 0.4):
            outcomes.record_progress("default", one.id, one.token, fraction, "")
    Job.objects.get().request_cancel()
    with pytest.raises(JobCancelled):
        outcomes.record_progress("default", one.id, one.token, 0.6, "")
    outcomes.record_checkpoint("default", one.id, one.token, '"kept"')
    assert Job.objects.get().checkpoint == "kept"


@pytest.mark.django_db
def test_a_cancel_that_committed_before_the_finish_wins_and_the_attempt_says_what_it_did():
    [one] = claimed()
    Job.objects.get().request_cancel()
    report = outcomes.finish("default", [done(one, result='"late"')])
    assert report.written == {one.id: states.CANCELLED}
    job = Job.objects.get()
    assert job.result is None and job.progress == 0
    attempt = job.attempts.get()
    assert (attempt.status, attempt.outcome) == (states.CANCELLED, states.RETURNED)
    assert attempt.cancel_requested_at == job.cancel_requested_at


# Rows that are not exactly there ------------------------------------------------------------------


def attempt_is_missing(one: ClaimedJob) -> None:
    JobAttempt.objects.filter(token=one.token).delete()


def attempt_has_ended(one: ClaimedJob) -> None:
    ended = {
        "status": states.FAILED,
        "outcome": "raised",
        "finished_at": Job.objects.get(pk=one.id).created_at,
    }
    JobAttempt.objects.filter(token=one.token).update(**ended)


def attempt_has_another_token(one: ClaimedJob) -> None:
    JobAttempt.objects.filter(token=one.token).update(token="d" * 32)


def attempt_has_another_number(one: ClaimedJob) -> None:
    JobAttempt.objects.filter(token=one.token).update(number=9)


def attempt_belongs_to_another_job(one: ClaimedJob) -> None:
    other = queued(status=states.SUCCEEDED, finished_at=Job.objects.get(pk=one.id).created_at)
    JobAttempt.objects.filter(token=one.token).update(job=other[0])


def job_has_another_token(one: ClaimedJob) -> None:
    """Its attempt is still open: the job's own column is compared, too."""
    Job.objects.filter(pk=one.id).update(lease_token="d" * 32)


DAMAGES = [
    attempt_is_missing,
    attempt_has_ended,
    attempt_has_another_token,
    attempt_has_another_number,
    attempt_belongs_to_another_job,
]


@pytest.mark.django_db
@pytest.mark.parametrize("damage", [*DAMAGES, job_has_another_token])
@pytest.mark.parametrize("name", ALL)
def test_a_job_without_exactly_its_attempt_is_left_as_it_is(name, damage):
    [one] = claimed()
    damage(one)
    before = snapshot()
    assert not ALL[name](one)
    assert snapshot() == before


@pytest.mark.django_db
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_job_is_reported_once_and_its_neighbours_are_written(damage):
    """Not as busy: that would be tried again for as long as its lease is renewed."""
    ones = claimed(3)
    damage(ones[1])
    renewed = leases.renew("default", holders(ones), lease_seconds=60)
    assert renewed == {ones[0].token, ones[2].token}
    report = outcomes.finish("default", [done(one) for one in ones])
    assert set(report.written) == {ones[0].id, ones[2].id}
    assert [one.job for one in report.damaged] == [ones[1].id]
    assert not report.busy and not report.lost


@pytest.mark.django_db
@pytest.mark.parametrize("name", ALL)
def test_a_token_left_on_a_job_that_does_not_run_is_worth_nothing(name):
    """A constraint forbids it; the fence does not rely on that."""
    [one] = claimed()
    with without_the_constraint("durable_job_lease_only_running"):
        Job.objects.filter(pk=one.id).update(status=states.QUEUED)
        before = snapshot()
        assert not ALL[name](one)
        assert snapshot() == before
        Job.objects.filter(pk=one.id).update(status=states.RUNNING)
    assert ALL[name](one)


def without_the_constraint(name: str) -> ExitStack:
    """Let rows break a constraint until the end of the block."""
    stack = ExitStack()
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute("PRAGMA ignore_check_constraints = ON")
            stack.callback(_execute, "PRAGMA ignore_check_constraints = OFF")
        else:
            # Rolled back with the test, as everything in it.
            cursor.execute(f"ALTER TABLE {JOBS} DROP CONSTRAINT {name}")
    return stack


def _execute(sql: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)


# Clocks -------------------------------------------------------------------------------------------


@pytest.mark.django_db
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("left", "may"), [(0, False), (30_000_000, True)])
def test_a_lease_ends_at_its_instant(name, left, may, monkeypatch):
    [one] = claimed()
    now = host_now()
    monkeypatch.setattr("django_durable_jobs.clock._replacement", lambda: now)
    _execute(f"UPDATE {JOBS} SET lease_expires_at = {now + left} WHERE id = {one.id}")
    assert ALL[name](one) is may


@real
@only_postgres
@pytest.mark.parametrize("off", [-600, 600])
def test_a_hosts_wrong_clock_breaks_no_lease(off, monkeypatch):
    """FAULTS 26: the worker's host is ten minutes off."""
    wrong = time.time_ns() + off * 1_000_000_000
    monkeypatch.setattr("django_durable_jobs.clock.time.time_ns", lambda: wrong)
    before = database_now()
    [one] = claimed(lease=300)
    assert before + 300_000_000 <= lease_of(one.id) <= database_now() + 300_000_000
    assert renew_for(one, 400)
    assert recovery.recover_expired("default") == 0
    assert renew_for(one, 0.5)
    end = lease_of(one.id)
    sleep_past(end)
    assert not finish(one)
    assert recovery.recover_expired("default") == 1
    check_rows()


@real
def test_one_start_while_renewals_succeed_however_long_the_handler():
    """FAULTS 4: a lease of five seconds, held for ten minutes."""
    with FakeClock(NOW) as clock:
        [one] = claimed(lease=5)
        with transaction.atomic():
            Business.objects.create(name="a handler's own work")
        for _ in range(600 // 4):
            clock.advance(4)
            assert renew_for(one, 5)
            assert recovery.recover_expired("default") == 0
            assert claim() == []
        assert finish(one)
    assert JobAttempt.objects.count() == 1
    check_rows()
