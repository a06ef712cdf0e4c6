"""The worker's pass over expired leases, and the other bounded passes beside poison (3.7)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
from django.db import DatabaseError, OperationalError, connection, transaction

from django_durable_jobs import states
from django_durable_jobs.dialects import dialect_for
from django_durable_jobs.dialects.base import ATTEMPTS
from django_durable_jobs.models import Job, JobAttempt
from django_durable_jobs.testing import FakeClock
from django_durable_jobs.transitions import _pages, _refused, maintenance, recovery
from django_durable_jobs.transitions.claims import ClaimedJob
from tests._rows import NOW, attempt_row, job_row
from tests.racing import LIMIT, held, observer

from .live import LONG_AGO, check_rows, claim, claimed, expired, lock, queued
from .moves import snapshot
from .poison import poisoned

pytestmark = pytest.mark.django_db
real = pytest.mark.django_db(transaction=True)
MANY = 2_500
FIRST_PAGE = _pages.PAGE


# What becomes of a job ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("retry_on_interrupt", "cancelled", "left", "status"),
    [
        (True, False, True, "queued"),
        (False, False, True, "interrupted"),
        (True, False, False, "interrupted"),
        (True, True, True, "cancelled"),
        (False, True, False, "cancelled"),
    ],
)
def test_where_an_expired_lease_leads(retry_on_interrupt, cancelled, left, status):
    with FakeClock(NOW) as clock:
        changes = {"retry_on_interrupt": retry_on_interrupt, "max_attempts": 3 if left else 1}
        [one] = claimed(lease=60, **changes)
        if cancelled:
            Job.objects.get().request_cancel()
        clock.advance(60 - 1e-6)
        assert recovery.recover_expired("default") == 0
        end = clock.advance(1e-6)
        assert recovery.recover_expired("default") == 1
    job = Job.objects.get()
    assert job.status == status
    assert (job.finished_at is None) == (status == "queued")
    assert job.run_at == (end if status == "queued" else LONG_AGO)
    assert job.error_category == (None if cancelled else "lost")
    assert (job.cancel_requested_at is None) == (not cancelled)
    attempt = job.attempts.get()
    assert (attempt.status, attempt.outcome, attempt.token) == ("interrupted", "lost", one.token)
    assert (attempt.finished_at, attempt.error_category) == (end, "lost")
    assert attempt.cancel_requested_at == job.cancel_requested_at
    check_rows()


def test_a_grant_is_an_execution_left_to_the_pass():
    expired(max_attempts=1, granted_attempts=1)
    assert recovery.recover_expired("default") == 1
    assert Job.objects.get().status == "queued"


def test_a_job_that_loses_its_worker_again_and_again_ends_and_says_why():
    """FAULTS 7: each claim uses an execution up, whatever becomes of it."""
    with FakeClock(NOW) as clock:
        queued(max_attempts=3)
        starts = 0
        while claim(lease=1):
            starts += 1
            clock.advance(1)
            assert recovery.recover_expired("default") == 1
    job = Job.objects.get()
    assert (starts, job.status, job.error_category) == (3, "interrupted", "lost")
    assert [one.outcome for one in job.attempts.all()] == ["lost"] * 3
    check_rows()


def test_only_the_expired_are_touched():
    current = claimed(2)
    gone = expired(2)
    unknown = job_row(status="running", attempt_count=1)
    unknown.save(force_insert=True)
    untouched = Job.objects.exclude(pk__in=[one.id for one in gone]).order_by("pk")
    before = list(untouched.values_list())
    assert recovery.recover_expired("default") == 2
    assert list(untouched.values_list()) == before
    assert {one.status for one in Job.objects.filter(pk__in=[one.id for one in current])} == {
        "running"
    }


# Thousands, with a first page that cannot be recovered (FAULTS 5) ---------------------------------


def attempts_missing(ones: list[ClaimedJob]) -> AbstractContextManager[Any]:
    JobAttempt.objects.filter(token__in=[one.token for one in ones]).delete()
    return nullcontext()


def attempts_ended(ones: list[ClaimedJob]) -> AbstractContextManager[Any]:
    ended = {"status": states.FAILED, "finished_at": LONG_AGO}
    JobAttempt.objects.filter(token__in=[one.token for one in ones]).update(**ended)
    return nullcontext()


def jobs_locked(ones: list[ClaimedJob]) -> AbstractContextManager[Any]:
    return held(lambda: [lock(one.id) for one in ones])


def attempts_locked(ones: list[ClaimedJob]) -> AbstractContextManager[Any]:
    tokens = [one.token for one in ones]

    def lock_all() -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT 1 FROM {ATTEMPTS} WHERE token = ANY(%s) FOR UPDATE", [tokens])

    return held(lock_all)


def job_refused(ones: list[ClaimedJob]) -> AbstractContextManager[Any]:
    return poisoned([one.id for one in ones])


def job_locked_at_once(ones: list[ClaimedJob]) -> AbstractContextManager[Any]:
    """As a trigger does that takes a lock with NOWAIT."""
    return locked_at_once_by_id([one.id for one in ones])


@contextmanager
def locked_at_once_by_id(ids: list[int]) -> Iterator[None]:
    # What is at once takes longer on a slow machine.
    with poisoned(ids, sqlstate="55P03"), patch.object(_pages, "AT_ONCE_SECONDS", LIMIT):
        yield


def attempt_refused(ones: list[ClaimedJob]) -> AbstractContextManager[Any]:
    return poisoned([one.id for one in ones], ATTEMPTS, "job_id")


Obstacle = Callable[[list[ClaimedJob]], AbstractContextManager[Any]]
locks = pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no locks of rows")


@real
@pytest.mark.parametrize(
    ("obstacle", "many"),
    [
        (attempts_missing, FIRST_PAGE + 1),
        (attempts_ended, FIRST_PAGE + 1),
        pytest.param(jobs_locked, FIRST_PAGE + 1, marks=locks),
        pytest.param(attempts_locked, FIRST_PAGE + 1, marks=locks),
        (job_refused, 1),
        (job_refused, 41),
        pytest.param(job_locked_at_once, 7, marks=locks),
        (attempt_refused, 7),
    ],
)
def test_rows_that_cannot_be_recovered_never_hide_the_next(
    obstacle: Obstacle, many, caplog, monkeypatch
):
    if obstacle is job_refused:  # one by one, so of small pages
        monkeypatch.setattr(_pages, "PAGE", 40)
    ones = expired(MANY if many > FIRST_PAGE else 200)
    poison, fine = ones[:many], ones[many:]
    stuck = Job.objects.filter(pk__in=[one.id for one in poison])
    with obstacle(poison), caplog.at_level(logging.CRITICAL):
        before = list(stuck.order_by("pk").values_list())
        assert recovery.recover_expired("default") == len(fine), "all others in the same pass"
        assert recovery.recover_expired("default") == 0
        assert list(stuck.order_by("pk").values_list()) == before
    recovered = Job.objects.exclude(pk__in=[one.id for one in poison])
    assert set(recovered.values_list("status", flat=True)) == {"queued"}
    if "missing" not in obstacle.__name__ and "ended" not in obstacle.__name__:
        assert recovery.recover_expired("default") == many, "once nothing is in the way"
        check_rows()


@real
def test_one_refused_row_among_many_is_named_in_the_log(caplog):
    ones = expired(5)
    with poisoned([ones[3].id]):
        assert recovery.recover_expired("default") == 4
    [record] = caplog.records
    assert record.getMessage() == f"job {ones[3].id} cannot be moved and is passed over"
    assert record.levelname == "ERROR" and record.exc_info


# No moment in between -----------------------------------------------------------------------------


@real
def test_no_moment_exists_in_which_the_job_is_neither(monkeypatch):
    """Another connection looks between the two writes of the pass, and after it."""
    [one] = expired()
    seen: list[Any] = []
    original = recovery.move

    def look_then_move(*given: Any) -> Any:
        seen.append(elsewhere())
        return original(*given)

    monkeypatch.setattr(recovery, "move", look_then_move)
    assert recovery.recover_expired("default") == 1
    seen.append(elsewhere())
    assert seen == [
        [("running", one.token, "running")],
        [("queued", None, "interrupted")],
    ]


def elsewhere() -> list[Any]:
    with observer() as cursor:
        cursor.execute(
            "SELECT j.status, j.lease_token, a.status FROM django_durable_jobs_job j"
            f" JOIN {ATTEMPTS} a ON a.job_id = j.id"
        )
        return [tuple(row) for row in cursor.fetchall()]


@real
def test_a_pass_that_dies_between_its_two_writes_has_changed_nothing(monkeypatch):
    expired(3)
    before = snapshot()

    def die(*given: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(recovery, "move", die)
        recovery.recover_expired("default")
    assert snapshot() == before
    assert recovery.recover_expired("default") == 3


@real
def test_each_page_is_a_transaction_of_its_own(monkeypatch):
    """What a pass has recovered stays so, if a later page fails."""
    expired(FIRST_PAGE + 1)
    original, pages = recovery.move, []

    def fail_at_the_second(*given: Any) -> Any:
        pages.append(given)
        if len(pages) == 2:
            raise KeyboardInterrupt
        return original(*given)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(recovery, "move", fail_at_the_second)
        recovery.recover_expired("default")
    assert Job.objects.filter(status="queued").count() == FIRST_PAGE
    assert recovery.recover_expired("default") == 1
    check_rows()


@real
@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no deadlocks")
@pytest.mark.parametrize("times", [1, 3])
def test_a_page_that_fell_victim_to_another_transaction_is_done_again(times, monkeypatch):
    ones = expired(3)
    original, tries = recovery.move, []

    def deadlock(*given: Any) -> Any:
        moved = original(*given)
        tries.append(moved)
        if len(tries) <= times:
            with connection.cursor() as cursor:
                cursor.execute("DO $$ BEGIN RAISE SQLSTATE '40P01'; END $$")
        return moved

    monkeypatch.setattr(recovery, "move", deadlock)
    assert recovery.recover_expired("default") == len(ones)
    assert len(tries) == times + 1
    check_rows()


@real
def test_a_pass_that_always_falls_victim_says_so_in_the_end(monkeypatch):
    expired()
    dialect = dialect_for("default")

    def deadlock(*given: Any) -> Any:
        raise OperationalError("deadlock detected")

    monkeypatch.setattr(recovery, "move", deadlock)
    monkeypatch.setattr(dialect, "is_conflict", lambda error: True)
    monkeypatch.setattr(dialect, "is_transient", lambda error: True)
    with pytest.raises(OperationalError):
        recovery.recover_expired("default")


# The passes beside it (FAULTS 6) ------------------------------------------------------------------


def waiting_rows(name: str) -> list[Job]:
    if name == "promote":
        return queued(200, status="scheduled")
    return queued(200, attempt_count=3)


PASSES = {
    "promote": (maintenance.promote_due, "queued"),
    "exhaust": (maintenance.exhaust, "failed"),
}


@real
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("obstacle", ["refused", pytest.param("locked", marks=locks)])
def test_poison_holds_up_no_other_row_of_a_pass(name, obstacle, caplog, monkeypatch):
    run, target = PASSES[name]
    monkeypatch.setattr(_pages, "PAGE", 40)
    jobs = waiting_rows(name)
    stuck = [job.pk for job in jobs[:41]]
    obstacles = {"refused": lambda: poisoned(stuck), "locked": lambda: held(lock_jobs(stuck))}
    with obstacles[obstacle](), caplog.at_level(logging.CRITICAL):
        assert run("default") == len(jobs) - len(stuck)
        assert run("default") == 0
    assert run("default") == len(stuck)
    assert set(Job.objects.values_list("status", flat=True)) == {target}


def lock_jobs(ids: list[int]) -> Callable[[], None]:
    return lambda: [lock(pk) for pk in ids][0]


def test_the_passes_take_what_is_theirs_only():
    with FakeClock(NOW) as clock:
        later = {"status": "scheduled", "run_at": NOW + timedelta(seconds=1)}
        [due] = queued(status="scheduled", run_at=NOW)
        [future] = queued(**later)
        waits = {"limit_waiting": True, "concurrency_key": "k"}
        [spent] = queued(attempt_count=3, error_summary="of an import", **waits)
        [granted] = queued(attempt_count=3, granted_attempts=1)
        assert maintenance.exhaust("default") == 1
        assert maintenance.promote_due("default") == 1
        assert statuses(due, future, spent, granted) == ["queued", "scheduled", "failed", "queued"]
        spent.refresh_from_db()
        assert (spent.error_category, spent.finished_at, spent.attempt_count) == (
            "exhausted",
            NOW,
            3,
        )
        assert spent.error_summary is None and not spent.limit_waiting
        clock.advance(1)
        assert maintenance.promote_due("default") == 1
    assert not spent.attempts.exists()


def statuses(*jobs: Job) -> list[str]:
    return [Job.objects.get(pk=job.pk).status for job in jobs]


def test_which_passes_have_work():
    with FakeClock(NOW) as clock:
        assert set(_work()) == set()
        queued(status="scheduled", run_at=NOW)
        assert _work() == ["promote"]
        maintenance.promote_due("default")
        claim(lease=1)
        assert _work() == []
        clock.advance(1)
        assert _work() == ["recover"]
        recovery.recover_expired("default")
        Job.objects.all().delete()
        queued(status="blocked", blocked_reason="unknown_handler")
        queued(attempt_count=3)
        assert _work() == ["exhaust", "release"]


def _work() -> list[str]:
    found = maintenance.waiting("default")
    return [name for name in ("promote", "recover", "exhaust", "release") if getattr(found, name)]


def test_passes_refuse_an_open_transaction():
    from django_durable_jobs.exceptions import TransactionActive

    with transaction.atomic(), pytest.raises(TransactionActive):
        recovery.recover_expired("default")


# Claims -------------------------------------------------------------------------------------------


@pytest.fixture
def _nothing_refused(monkeypatch) -> None:
    monkeypatch.setattr(_refused, "_refused", {})
    monkeypatch.setattr(_refused, "REFUSED_SECONDS", 600)


def number_is_taken(jobs: list[Job]) -> AbstractContextManager[Any]:
    """An import that brought attempts, and a count that leaves them out."""
    ended = {"status": "failed", "finished_at": LONG_AGO, "number": 1}
    JobAttempt.objects.bulk_create([attempt_row(job, **ended) for job in jobs])
    return nullcontext()


def refused(jobs: list[Job]) -> AbstractContextManager[Any]:
    return poisoned([job.pk for job in jobs])


def locked_at_once(jobs: list[Job]) -> AbstractContextManager[Any]:
    return locked_at_once_by_id([job.pk for job in jobs])


@real
@pytest.mark.usefixtures("_nothing_refused")
@pytest.mark.parametrize("limit", [1, 10])
@pytest.mark.parametrize(
    "damage", [number_is_taken, refused, pytest.param(locked_at_once, marks=locks)]
)
def test_poison_holds_up_no_claim(damage, limit, caplog, monkeypatch):
    jobs = queued(12)
    poison, fine = jobs[:3] + jobs[5:6], jobs[3:5] + jobs[6:]
    with damage(poison):
        before = list(Job.objects.filter(pk__in=[job.pk for job in poison]).values_list())
        first = claim(limit)
        assert [one.id for one in first] == [job.pk for job in fine[:limit]]
        messages = [record.getMessage() for record in caplog.records]
        told = [job.pk for job in poison[: 3 if limit == 1 else 4]]
        assert messages == [f"job {pk} cannot be claimed and is passed over" for pk in told]
        caplog.clear()
        taken = len(first)
        while more := claim(limit):
            taken += len(more)
        assert taken == len(fine)
        assert len(caplog.records) == 4 - len(told), "each is told once, not at each claim"
        after = list(Job.objects.filter(pk__in=[job.pk for job in poison]).values_list())
        assert after == before
    monkeypatch.setattr(_refused, "REFUSED_SECONDS", 0)
    for key in _refused._refused:
        _refused._refused[key] = 0
    if damage is not number_is_taken:
        assert len(claim(9)) == 4, "tried again after a while"
        check_rows()


@real
@pytest.mark.usefixtures("_nothing_refused")
def test_where_nothing_can_be_claimed_the_error_is_raised(caplog):
    jobs = queued(2)
    before = snapshot()
    with refused(jobs), pytest.raises(DatabaseError, match="poison"):
        claim(5)
    assert snapshot() == before
    assert claim(5) == []


@pytest.mark.usefixtures("_nothing_refused")
def test_a_passing_trouble_of_the_database_is_no_poison(monkeypatch):
    queued(2)
    dialect = dialect_for("default")
    original, calls = dialect.claim, []

    def trouble(*given: Any, **more: Any) -> Any:
        calls.append(more)
        raise OperationalError("the server is away")

    monkeypatch.setattr(dialect, "claim", trouble)
    monkeypatch.setattr(dialect, "is_transient", lambda error: True)
    with pytest.raises(OperationalError):
        claim(2)
    assert len(calls) == 1 and not _refused._refused
    monkeypatch.setattr(dialect, "claim", original)
    assert len(claim(2)) == 2
