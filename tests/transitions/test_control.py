"""An operator's moves, sentence by sentence: CONTRACT 3.5, 3.6, 3.7, 3.10, 3.15, 1.6."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.test import override_settings

from django_durable_jobs import states
from django_durable_jobs.exceptions import (
    AttemptsExhausted,
    InvalidSubmission,
    InvalidTransition,
    LockTimeout,
)
from django_durable_jobs.models import Job, JobAttempt
from django_durable_jobs.testing import FakeClock
from django_durable_jobs.transitions import control, leases, outcomes
from tests._rows import NOW, attempt_row, job_row
from tests.racing import LIMIT, PATIENT, held, racing
from tests.testapp.models import Business

from . import moves
from .live import LONG_AGO, check_rows, claim, claimed, done, expire, holders, lock, queued
from .moves import snapshot

pytestmark = pytest.mark.django_db
real = pytest.mark.django_db(transaction=True)
LATER = NOW + timedelta(hours=1)
STATUS_CHANGES: dict[str, dict[str, Any]] = {
    "scheduled": {"run_at": LATER},
    "queued": {},
    "blocked": {"blocked_reason": "unknown_handler"},
    "succeeded": {"finished_at": NOW, "attempt_count": 1},
    "failed": {"finished_at": NOW, "attempt_count": 1},
    "cancelled": {"finished_at": NOW, "attempt_count": 1},
    "interrupted": {"finished_at": NOW, "attempt_count": 1},
}
RETRIED = ("failed", "cancelled", "interrupted")


def stored(status: str, **changes: Any) -> Job:
    job = job_row(status=status, **(STATUS_CHANGES[status] | changes))
    job.save(force_insert=True)
    return job


# Cancel (3.5) -------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", states.WAITING)
def test_a_waiting_job_is_cancelled_at_once_and_uses_no_execution(status):
    job = stored(status, limit_waiting=status == "queued", concurrency_key="k")
    with FakeClock(LATER):
        assert job.request_cancel() == "cancelled"
    fresh = Job.objects.get()
    for one in (job, fresh):  # the given object shows it, too
        assert (one.status, one.attempt_count, one.blocked_reason) == ("cancelled", 0, None)
        assert one.cancel_requested_at == one.finished_at == LATER
        assert not one.limit_waiting
    assert not JobAttempt.objects.exists()


def test_a_running_job_gets_the_request_only_and_its_first_time_is_kept():
    with FakeClock(NOW) as clock:
        [one] = claimed()
        job = Job.objects.get()
        before = Job.objects.values().get()
        assert job.request_cancel() == "requested"
        assert Job.objects.values().get() == {**before, "cancel_requested_at": NOW}
        clock.advance(5)
        assert Job.objects.get().request_cancel() == "requested"
        assert Job.objects.values().get() == {**before, "cancel_requested_at": NOW}
        assert leases.cancel_requests("default", holders([one])) == {one.token}
        assert leases.cancel_requests("default", [(one.id, "0" * 32)]) == set()
        assert leases.renew("default", holders([one]), lease_seconds=60) == {one.token}
        assert JobAttempt.objects.get().status == "running", "storage kills no work"


@pytest.mark.parametrize("status", states.TERMINAL)
def test_a_terminal_job_is_left_alone_by_cancel(status):
    job = stored(status)
    before = snapshot()
    assert job.request_cancel() == "unchanged"
    assert snapshot() == before


def test_a_job_with_a_cancel_request_is_never_claimed():
    """Imported so: cancel ends a waiting job, it never leaves a request on one."""
    queued(cancel_requested_at=NOW)
    assert claim() == []


# Retry (3.6) --------------------------------------------------------------------------------------


def ended(status: str, **changes: Any) -> Job:
    """A job that has reported all that a job can."""
    job = stored(
        status,
        run_at=LATER,
        initial_run_at=NOW,
        cancel_requested_at=NOW,
        progress=0.75,
        progress_message="nearly",
        checkpoint={"page": 3},
        error_category="handler_error",
        error_summary="a summary",
        error_traceback="a traceback",
        **({"attempt_count": 2} | changes),
    )
    for number in (1, 2):
        attempt_row(
            job,
            number=number,
            status="failed",
            outcome="raised",
            finished_at=NOW,
            progress=0.75,
            cancel_requested_at=NOW,
            error_category="handler_error",
            error_summary="a summary",
            error_traceback="a traceback",
        ).save(force_insert=True)
    return job


@pytest.mark.parametrize("status", RETRIED)
def test_what_a_retry_clears_and_what_it_keeps(status):
    job = ended(status)
    before, attempts = Job.objects.values().get(), list(JobAttempt.objects.values())
    with FakeClock(LATER):
        assert job.retry() is job
    assert Job.objects.values().get() == {
        **before,
        "status": "queued",
        "run_at": LATER,
        "finished_at": None,
        "cancel_requested_at": None,
        "progress": 0.0,
        "progress_message": "",
        "result": None,
        "error_category": None,
        "error_summary": None,
        "error_traceback": None,
    }
    assert list(JobAttempt.objects.values()) == attempts
    assert job.status == "queued" and job.checkpoint == {"page": 3}


def test_a_retried_job_is_due_now_and_runs_again_with_its_checkpoint():
    [one] = claimed(max_attempts=2, checkpoint={"page": 3})
    outcomes.finish("default", [done(one, status="failed", final_status="failed")])
    Job.objects.get().retry()
    [again] = claim()
    assert (again.id, again.attempt_count, again.checkpoint) == (one.id, 2, '{"page":3}')
    assert again.token != one.token
    check_rows()


@pytest.mark.parametrize("status", [one for one in states.JOB_STATUSES if one not in RETRIED])
def test_a_retry_starts_from_nothing_else(status):
    job = Job.objects.get(pk=claimed()[0].id) if status == "running" else stored(status)
    before = snapshot()
    with pytest.raises(InvalidTransition, match=f"{job.job_id}.* is {status}"):
        job.retry(extra_attempts=5)
    assert snapshot() == before


def test_a_retry_needs_an_execution_that_is_left_or_granted():
    job = ended("failed", max_attempts=2)
    before = snapshot()
    with pytest.raises(AttemptsExhausted, match=r"2 executions.*extra_attempts=1"):
        job.retry()
    assert snapshot() == before
    assert job.retry(extra_attempts=1).granted_attempts == 1
    assert (job.max_attempts, job.attempt_count) == (2, 2), "what was asked never changes"
    check_rows()


def test_grants_add_up():
    job = ended("failed", max_attempts=1, granted_attempts=1)
    job.retry(extra_attempts=2)
    assert job.granted_attempts == 3
    job.request_cancel()
    assert job.retry().granted_attempts == 3


@pytest.mark.parametrize("extra", [-1, 1001, 1.0, True, "1", None])
def test_a_grant_is_a_whole_number_up_to_a_thousand(extra):
    job = ended("failed")
    before = snapshot()
    with pytest.raises(InvalidTransition, match="from 0 to 1000"):
        job.retry(extra_attempts=extra)
    assert snapshot() == before


KEYED = {"scope": "a", "dedupe_key": "k"}


@pytest.mark.parametrize("holder", states.LIVE)
def test_a_retry_whose_key_is_held_names_the_holder(holder):
    job = ended("failed", **KEYED)
    other = live_with_key(holder, **KEYED)
    before = snapshot()
    with pytest.raises(InvalidTransition, match=f"{job.job_id}.* held by job {other.job_id}"):
        job.retry()
    assert snapshot() == before


def live_with_key(status: str, **key: Any) -> Job:
    if status != "running":
        return stored(status, **key)
    job = job_row(status="running", attempt_count=1, **key)
    job.save(force_insert=True)
    return job


@pytest.mark.parametrize(
    "other",
    [
        {"scope": "b", "dedupe_key": "k"},
        {"scope": "a", "dedupe_key": "other"},
        {"scope": "a", "dedupe_key": "k", "handler": "another"},
        {"scope": "a", "dedupe_key": "k", "status": "succeeded"},
        {"scope": "a", "dedupe_key": "k", "status": "blocked", "blocked_reason": "corrupt_payload"},
    ],
)
def test_a_key_is_held_by_a_live_job_of_its_scope_and_handler_only(other):
    job = ended("failed", **KEYED)
    stored(other.pop("status", "queued"), **other)
    assert job.retry().status == "queued"


def test_a_release_whose_key_is_held_names_the_holder():
    job = stored("blocked", blocked_reason="corrupt_payload", run_at=LONG_AGO, **KEYED)
    holder = stored("queued", **KEYED)
    before = snapshot()
    with pytest.raises(InvalidTransition, match=f"{job.job_id}.* held by job {holder.job_id}"):
        job.release()
    assert snapshot() == before
    holder.request_cancel()
    assert job.release() == "queued"


@real
@pytest.mark.skipif(
    connection.vendor == "sqlite", reason="SQLite has one writer, so no holder ends meanwhile"
)
@pytest.mark.parametrize("move", ["retry", "release"])
def test_a_holder_that_ends_between_refusal_and_look_holds_nothing(move, monkeypatch):
    corrupt = {"blocked_reason": "corrupt_payload", "run_at": LONG_AGO}
    job = ended("failed", **KEYED) if move == "retry" else stored("blocked", **KEYED, **corrupt)
    holder = stored("queued", **KEYED)
    original, looked = control._holder, []

    def holder_ends(*given: Any) -> Any:
        looked.append(given)
        with racing(holder.request_cancel) as [ending]:
            assert ending.result() in ("cancelled", "unchanged")
        return original(*given)

    monkeypatch.setattr(control, "_holder", holder_ends)
    getattr(job, move)()
    assert len(looked) == 1
    assert Job.objects.get(pk=job.pk).status == "queued"


def test_a_refusal_of_another_kind_is_the_databases_own(monkeypatch):
    """Not taken for the key's, and not tried for ever."""
    from django.db import IntegrityError

    job = ended("failed")
    monkeypatch.setattr(states, "QUEUED", "unheard of")
    with pytest.raises(IntegrityError):
        job.retry()


# Release (2.3) ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", states.BLOCKED_REASONS)
@pytest.mark.parametrize(("run_at", "status"), [(NOW, "queued"), (LATER, "scheduled")])
def test_an_operator_releases_whatever_the_reason(reason, run_at, status):
    job = stored("blocked", blocked_reason=reason, run_at=run_at)
    before = Job.objects.values().get()
    with FakeClock(NOW):
        assert job.release() == status
    assert Job.objects.values().get() == {**before, "status": status, "blocked_reason": None}
    assert job.status == status


# Recover by hand (3.7) ----------------------------------------------------------------------------


def running(**changes: Any) -> tuple[Job, str]:
    [one] = claimed(**changes)
    return Job.objects.get(pk=one.id), one.token


def test_recover_ends_the_attempt_and_requeues_in_one_write():
    with FakeClock(NOW) as clock:
        job, token = running()
        clock.advance(5)
        assert job.recover(token) == "queued"
    job.refresh_from_db()
    assert (job.status, job.run_at, job.attempt_count) == ("queued", clock.now, 1)
    assert (job.lease_token, job.lease_expires_at, job.error_category) == (None, None, "lost")
    attempt = job.attempts.get()
    assert (attempt.status, attempt.outcome) == ("interrupted", "lost")
    assert (attempt.finished_at, attempt.error_category) == (clock.now, "lost")
    check_rows()


RECOVERED = [
    # stored retry_on_interrupt, requeue, cancelled, executions left -> status
    (True, None, False, True, "queued"),
    (False, None, False, True, "interrupted"),
    (True, False, False, True, "interrupted"),
    (False, True, False, True, "queued"),
    (True, None, False, False, "interrupted"),
    (False, True, False, False, "interrupted"),
    (True, None, True, True, "cancelled"),
    (False, True, True, True, "cancelled"),
    (False, None, True, False, "cancelled"),
]


@pytest.mark.parametrize(("stored_policy", "requeue", "cancelled", "left", "status"), RECOVERED)
def test_where_recover_leads(stored_policy, requeue, cancelled, left, status):
    job, token = running(retry_on_interrupt=stored_policy, max_attempts=3 if left else 1)
    if cancelled:
        job.request_cancel()
    assert job.recover(token, requeue=requeue) == status
    assert Job.objects.get().status == status == job.status
    assert job.attempts.get().cancel_requested_at == job.cancel_requested_at
    check_rows()


def test_a_grant_is_an_execution_left():
    job, token = running(max_attempts=1, granted_attempts=1)
    assert job.recover(token) == "queued"


@pytest.mark.parametrize("token", ["e" * 32, "", None, 7, "\0", "\ud800", "x" * 100_000])
def test_recover_by_hand_takes_the_current_token_only(token):
    job, _ = running()
    before = snapshot()
    with pytest.raises(InvalidTransition, match=f"{job.job_id}.*not its current"):
        job.recover(token)
    assert snapshot() == before


def test_the_token_of_an_older_attempt_is_not_the_current_one():
    job, old = running()
    job.recover(old)
    [newer] = claim()
    with pytest.raises(InvalidTransition):
        job.recover(old)
    assert Job.objects.get().lease_token == newer.token


UNKNOWN = {
    "neither": (None, None),
    "no lease": ("a" * 32, None),
    "no token": (None, LATER),
    "an empty token": ("", LATER),
}


def unknown(kind: str, **changes: Any) -> Job:
    token, expires = UNKNOWN[kind]
    job = job_row(
        status="running",
        attempt_count=2,
        lease_token=token,
        lease_expires_at=expires,
        **changes,
    )
    job.save(force_insert=True)
    return job


@pytest.mark.parametrize("kind", UNKNOWN)
def test_an_unknown_job_is_never_guessed_to_be_dead(kind):
    from django_durable_jobs.transitions import recovery
    from django_durable_jobs.worker.passes import Serving, run_passes

    job = unknown(kind)
    attempt_row(job, number=2, token=UNKNOWN[kind][0] or "b" * 32).save(force_insert=True)
    before = snapshot()
    with FakeClock(LATER + timedelta(days=99)):
        assert job.ownership == "unknown"
        assert recovery.recover_expired("default") == 0
        run_passes("default", Serving.everything(), patient=False)
    assert snapshot() == before


@pytest.mark.parametrize("kind", UNKNOWN)
@pytest.mark.parametrize("open_attempts", [0, 1, 2])
def test_an_operator_ends_whatever_attempts_of_an_unknown_job_are_open(kind, open_attempts):
    job = unknown(kind)
    token = UNKNOWN[kind][0]
    attempt_row(job, number=9, status="failed", finished_at=NOW).save(force_insert=True)
    for number in range(open_attempts):
        attempt_row(job, number=number + 1).save(force_insert=True)
    for wrong in {None, "", "c" * 32} - {token}:
        with pytest.raises(InvalidTransition):
            job.recover(wrong)
    assert job.recover(token) == "queued"
    assert job.ownership == "unclaimed"
    assert job.attempts.filter(status="interrupted", outcome="lost").count() == open_attempts
    assert not job.attempts.filter(status="running").exists()
    assert job.attempts.get(number=9).status == "failed"


def test_a_known_job_whose_attempt_is_missing_is_left_and_the_caller_told():
    job, token = running()
    JobAttempt.objects.all().delete()
    before = snapshot()
    with pytest.raises(InvalidTransition, match="attempt row is missing; nothing was changed"):
        job.recover(token)
    assert snapshot() == before


@pytest.mark.parametrize("requeue", ["no", 0, 1, object()])
def test_requeue_is_true_false_or_left_out(requeue):
    job, token = running()
    with pytest.raises(InvalidTransition, match="requeue"):
        job.recover(token, requeue=requeue)
    assert Job.objects.get().status == "running"


def test_ownership():
    with FakeClock(NOW) as clock:
        [one] = claimed(lease=60)
        job = Job.objects.get()
        assert job.ownership == "current"
        clock.advance(60 - 1e-6)
        assert job.ownership == "current"
        clock.advance(1e-6)
        assert job.ownership == "expired"
        outcomes.finish("default", [done(one)])
        assert Job.objects.get().ownership == "expired"
        job.recover(one.token)
        assert job.ownership == "unclaimed"
        job.request_cancel()
        assert job.ownership == "terminal"
    assert {stored(status).ownership for status in states.WAITING} == {"unclaimed"}
    assert {stored(status).ownership for status in states.TERMINAL} == {"terminal"}


# What an operator sees and reaches ----------------------------------------------------------------


def test_execution_status():
    [one] = claimed()
    read = Job.objects.execution_status
    assert read(one.token) == "running"
    Job.objects.get().request_cancel()
    assert read(one.token) == "cancel_requested"
    Job.objects.get().recover(one.token)
    assert read(one.token) == "ended"
    Job.objects.get().retry()
    [newer] = claim()
    assert (read(one.token), read(newer.token)) == ("ended", "running")
    outcomes.finish("default", [done(newer)])
    assert read(newer.token) == "ended"


@pytest.mark.parametrize(
    "token",
    ["", "\0", "\0" * 32, "\ud800" * 32, "x" * 10_000_000, "' OR 1=1 --", "%s", "é" * 32, "A" * 32],
    ids=range(9),
)
def test_any_text_has_an_execution_status(token):
    claimed()
    assert Job.objects.execution_status(token) == "ended"


def test_an_execution_status_reads_no_payload(django_assert_num_queries):
    [one] = claimed()
    with django_assert_num_queries(1) as queries:
        Job.objects.execution_status(one.token)
    assert "payload" not in queries[0]["sql"]


def test_a_scope_is_never_crossed():
    mine, theirs = stored("queued", scope="Owner"), stored("queued", scope="owner")
    nobodys = stored("queued")
    in_scope = Job.objects.in_scope
    assert list(in_scope("Owner")) == [mine]
    assert list(in_scope("owner")) == [theirs]
    assert list(in_scope("")) == [nobodys]
    assert list(in_scope("Owner").filter(pk=theirs.pk)) == []
    for scope in (" Owner", "Owner ", "OWNER", "%", "Owner\u200b", "*"):
        assert not in_scope(scope).exists()
    for wrong in ("\0", "\ud800", "x" * 201, None, 5):
        with pytest.raises(InvalidSubmission):
            in_scope(wrong)
    in_scope("Owner").get().request_cancel()
    assert [one.status for one in Job.objects.order_by("pk")] == ["cancelled", "queued", "queued"]


@pytest.mark.skipif(connection.vendor != "sqlite", reason="PostgreSQL stores no such text")
def test_text_that_cannot_be_decoded_hinders_no_operator():
    job = stored("queued")
    connection.cursor().execute(
        "UPDATE django_durable_jobs_job SET payload = CAST(x'ff' AS TEXT),"
        " progress_message = CAST(x'ff' AS TEXT)"
    )
    seen = Job.objects.only("status").get(pk=job.pk)
    assert seen.request_cancel() == "cancelled"
    assert seen.retry().status == "queued"


def test_a_move_of_a_pruned_job_says_that_it_does_not_exist():
    job = stored("queued")
    Job.objects.all().delete()
    for move in (job.request_cancel, job.retry, job.release, lambda: job.recover(None)):
        with pytest.raises(Job.DoesNotExist):
            move()


# Transactions and locks (3, 3.15) -----------------------------------------------------------------


def movable(name: str) -> tuple[Job, Any]:
    """Give a job and an operator's move that changes it."""
    if name == "cancel":
        job = queued()[0]
        return job, job.request_cancel
    if name == "request_cancel":
        job, _ = running()
        return job, job.request_cancel
    if name == "retry":
        job = stored("failed")
        return job, job.retry
    if name == "release":
        job = stored("blocked")
        return job, job.release
    job, token = running()
    return job, lambda: job.recover(token)


MOVES = ("cancel", "request_cancel", "retry", "release", "recover")
each_move = pytest.mark.parametrize("name", MOVES)


@real
@each_move
def test_a_move_joins_an_open_transaction_and_rolls_back_with_it(name):
    job, move = movable(name)
    before = snapshot()
    with transaction.atomic():
        Business.objects.create(name="beside the move")
        move()
        assert snapshot() != before
        with racing(snapshot) as [elsewhere]:
            assert elsewhere.result() == before
        transaction.set_rollback(True)
    assert snapshot() == before and not Business.objects.exists()
    with transaction.atomic():
        Business.objects.create(name="beside the move")
        Job.objects.get(pk=job.pk)
        move()
    assert snapshot() != before and Business.objects.exists()


@real
@each_move
def test_a_refused_move_leaves_the_callers_transaction_usable(name):
    job = stored("succeeded")
    holder = stored("queued", **KEYED)
    loser = stored("failed", **KEYED)
    _, move = movable(name)
    with transaction.atomic():
        for refused in (job.retry, job.release, loser.retry, lambda: job.recover(None)):
            with pytest.raises(InvalidTransition):
                refused()
        move()
        Business.objects.create(name="after the refusals")
    assert Business.objects.exists() and holder.request_cancel() == "cancelled"


@real
@each_move
def test_a_move_of_its_own_waits_a_bounded_time_and_changes_nothing(name):
    bound = 0.15
    job, move = movable(name)
    with held(lambda: lock(job.pk)):
        before = snapshot()
        began = time.monotonic()
        with (
            override_settings(DURABLE_JOBS={"LOCK_TIMEOUT_SECONDS": bound}),
            pytest.raises(LockTimeout, match="nothing was changed"),
        ):
            move()
        assert bound * 0.9 <= time.monotonic() - began < LIMIT / 2
        assert snapshot() == before
    move()
    assert snapshot() != before


@real
@each_move
@override_settings(DURABLE_JOBS=PATIENT)
def test_a_move_waits_for_the_row_and_judges_what_it_finds_then(name):
    job, move = movable(name)
    with held(lambda: Job.objects.filter(pk=job.pk).update(priority=7)) as stranger:
        with racing(move) as [moving]:
            moving.wait_until_blocked()
            stranger.commit()
        moving.result()
    assert Job.objects.get(pk=job.pk).priority == 7
    check_attempts(job)


def check_attempts(job: Job) -> None:
    fresh = Job.objects.get(pk=job.pk)
    assert fresh.attempts.filter(status="running").exists() == (fresh.status == "running")


def wait_setting() -> Any:
    with connection.cursor() as cursor:
        postgres = connection.vendor == "postgresql"
        cursor.execute("SHOW lock_timeout" if postgres else "PRAGMA busy_timeout")
        return cursor.fetchone()[0]


@real
@each_move
def test_no_setting_outlives_a_move_and_none_is_changed_in_a_callers_transaction(name):
    before = wait_setting()
    first, second, third = (movable(name)[1] for _ in range(3))
    first()
    assert wait_setting() == before
    with transaction.atomic():
        second()
        assert wait_setting() == before
        if connection.vendor == "postgresql":
            connection.cursor().execute("SET LOCAL lock_timeout = 77777")
            third()
            assert wait_setting() == "77777ms"
    assert wait_setting() == before


@real
@pytest.mark.skipif(
    connection.vendor == "sqlite",
    reason="on SQLite the connection's own timeout bounds the wait: see test_locks",
)
@each_move
def test_in_a_callers_transaction_his_own_bound_and_the_databases_error_count(name):
    job, move = movable(name)
    with (
        held(lambda: lock(job.pk)),
        override_settings(DURABLE_JOBS={"LOCK_TIMEOUT_SECONDS": 3600}),
        pytest.raises(OperationalError) as caught,
        transaction.atomic(),
    ):
        connection.cursor().execute("SET LOCAL lock_timeout = 100")
        move()
    assert caught.value.__cause__.sqlstate == "55P03"  # type: ignore[union-attr]
    assert connections["default"].get_autocommit()


@real
def test_a_handlers_write_of_its_own_waits_a_bounded_time_too():
    [one] = claimed()
    with held(lambda: lock(one.id)):
        before = snapshot()
        for write in (
            lambda: outcomes.record_progress("default", one.id, one.token, 0.5, ""),
            lambda: outcomes.record_checkpoint("default", one.id, one.token, "1"),
        ):
            with (
                override_settings(DURABLE_JOBS={"LOCK_TIMEOUT_SECONDS": 0.1}),
                pytest.raises(LockTimeout),
            ):
                write()
        assert snapshot() == before
    outcomes.record_progress("default", one.id, one.token, 0.5, "")


def test_operators_moves_are_in_the_table_of_moves():
    assert {move.name for move in states.MOVES if "operator" in move.by} == {
        *MOVES,
    }
    assert set(moves.CALLS) >= set(MOVES)


def test_an_expired_lease_is_recovered_by_hand_as_well():
    [one] = claimed()
    expire([one])
    assert Job.objects.get().recover(one.token) == "queued"
    check_rows()
