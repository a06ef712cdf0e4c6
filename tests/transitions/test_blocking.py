"""Block what no live worker can run, release what this one can (CONTRACT 2.3, 4.6)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import override_settings

from django_durable_jobs import job, states
from django_durable_jobs.handlers import registry
from django_durable_jobs.models import Job, JobAttempt
from django_durable_jobs.testing import FakeClock, drain
from django_durable_jobs.transitions import _pages, blocking, claims, workers
from django_durable_jobs.worker.passes import Serving, own_capabilities, run_passes
from tests._rows import NOW
from tests.racing import held

from .live import HANDLER, LANE, claimed, holders, lock, queued
from .moves import snapshot
from .poison import poisoned

pytestmark = pytest.mark.django_db
real = pytest.mark.django_db(transaction=True)
POLL = 1.0
only_sqlite = pytest.mark.skipif(
    connection.vendor != "sqlite", reason="only SQLite needs the lease to outlast the timeout"
)
only_postgres = pytest.mark.skipif(
    connection.vendor == "sqlite", reason="SQLite has no locks of rows"
)


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    with registry.temporary(), override_settings(DURABLE_JOBS={"POLL_SECONDS": POLL}):
        yield


@pytest.fixture
def clock() -> Iterator[FakeClock]:
    with FakeClock(NOW) as one:
        yield one


def known(name: str = HANDLER, version: int = 1, **options: Any) -> dict[str, Any]:
    """Register a handler; give the columns of jobs that it can run."""

    @job(name, version=version, **options)
    def handler(ctx: Any) -> None:
        pass

    return {
        "handler": handler.name,
        "handler_version": handler.version,
        "fingerprint": handler.fingerprint,
    }


def passes(*, patient: bool = True, **serving: Any) -> None:
    run_passes("default", Serving(handlers=own_capabilities(), **serving), patient=patient)


def live_worker(**changes: Any) -> int:
    values: dict[str, Any] = {
        "name": "another",
        "queues": None,
        "excluded_queues": [],
        "capabilities": {LANE.capability},
    }
    return workers.register("default", **(values | changes))


def state(one: Job) -> tuple[str, str | None]:
    fresh = Job.objects.get(pk=one.pk)
    return fresh.status, fresh.blocked_reason


# Blocking -----------------------------------------------------------------------------------------


def test_a_job_that_nobody_can_run_is_blocked_once_due_for_two_polls(clock):
    [one] = queued(run_at=NOW, dedupe_key="k")
    before = Job.objects.values().get()
    for _ in range(2):
        passes()
        assert state(one) == ("queued", None)
        clock.advance(POLL - 1e-6)
    passes()
    assert state(one) == ("queued", None)
    clock.advance(2e-6)
    passes()
    blocked = {"status": "blocked", "blocked_reason": "unknown_handler"}
    assert Job.objects.values().get() == before | blocked, "kept as it is, nothing used up"
    assert not JobAttempt.objects.exists()


def test_patience_counts_from_when_it_is_due(clock):
    [one] = queued(run_at=NOW + timedelta(hours=1), status="scheduled")
    clock.advance(3600)
    passes()
    assert state(one) == ("queued", None)
    clock.advance(2 * POLL)
    passes()
    assert state(one)[0] == "blocked"


def test_drain_and_once_do_not_wait_two_polls(clock):
    [one] = queued(run_at=NOW)
    passes(patient=False)
    assert state(one)[0] == "blocked"
    Job.objects.update(status="queued", blocked_reason=None)
    assert drain() == []
    assert state(one)[0] == "blocked"


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"handler": "nobody's"}, "unknown_handler"),
        ({"handler_version": 2}, "unknown_handler"),
        ({"fingerprint": "0" * 64}, "schema_mismatch"),
    ],
)
def test_the_reason_says_what_is_not_known(columns, reason, clock):
    mine = known()
    [fine] = queued(run_at=NOW, **mine)
    [one] = queued(run_at=NOW, **(mine | columns))
    passes(patient=False)
    assert state(one) == ("blocked", reason)
    assert state(fine) == ("queued", None)


def test_a_live_worker_that_can_run_it_keeps_it_from_being_blocked(clock):
    """A rolling deploy: no ping-pong between old and new code."""
    [one] = queued(run_at=NOW)
    key = live_worker()
    for _ in range(10):
        clock.advance(5)
        workers.beat("default", key)
        passes()
        assert state(one) == ("queued", None)
    clock.advance(workers.LIVE_SECONDS)
    passes()
    assert state(one)[0] == "blocked", "the other has gone silent"


@pytest.mark.parametrize(
    "other",
    [
        {"queues": ["another"]},
        {"excluded_queues": ["default"]},
        {"capabilities": {(HANDLER, 2, LANE.fingerprint)}},
        {"capabilities": {(HANDLER, 1, "0" * 64)}},
        {"capabilities": set()},
    ],
)
def test_a_live_worker_that_cannot_run_it_keeps_nothing(other, clock):
    [one] = queued(run_at=NOW)
    live_worker(**other)
    passes(patient=False)
    assert state(one)[0] == "blocked"


def test_a_worker_that_has_left_keeps_nothing(clock):
    [one] = queued(run_at=NOW)
    workers.deregister("default", live_worker())
    passes(patient=False)
    assert state(one)[0] == "blocked"


@pytest.mark.parametrize("serving", [{"queues": ("mails",)}, {"excluded_queues": ("default",)}])
def test_a_worker_blocks_within_its_queues_only(serving, clock):
    [one] = queued(run_at=NOW)
    passes(patient=False, **serving)
    assert state(one) == ("queued", None)


def test_only_waiting_jobs_are_blocked(clock):
    claimed(run_at=NOW)
    queued(run_at=NOW + timedelta(hours=1), status="scheduled")
    queued(run_at=NOW, status="failed", finished_at=NOW)
    queued(run_at=NOW, status="blocked", blocked_reason="corrupt_payload")
    before = snapshot()
    assert blocking.block_lane("default", LANE, states.UNKNOWN_HANDLER, patience=0) == 0
    assert snapshot() == before


def test_a_reason_is_one_of_the_four():
    with pytest.raises(ValueError, match="no reason"):
        blocking.block_lane("default", LANE, "because", patience=0)


# A policy that cannot hold (4.6) ------------------------------------------------------------------

LEASE = 2.0
short_lease = override_settings(DURABLE_JOBS={"POLL_SECONDS": POLL, "LEASE_SECONDS": LEASE})


@only_sqlite
@short_lease
def test_on_sqlite_a_timeout_that_the_lease_cannot_hold_blocks_the_job(clock):
    mine = known()
    [one] = queued(run_at=NOW, timeout=LEASE, **mine)
    [fine] = queued(run_at=NOW, timeout=LEASE - 0.001, **mine)
    lanes = claims.queued_lanes("default")
    held_ones = claims.claim("default", lanes, limit=5, worker="w", lease_seconds=LEASE)
    assert [held_one.id for held_one in held_ones] == [fine.pk], "not claimed at all"
    passes(patient=False)
    assert state(one) == ("blocked", "invalid_policy")
    passes(patient=False)
    assert state(one) == ("blocked", "invalid_policy"), "not released while it cannot hold"
    longer = {"POLL_SECONDS": POLL, "LEASE_SECONDS": LEASE * 2}
    with override_settings(DURABLE_JOBS=longer):
        passes(patient=False)
    assert state(one) == ("queued", None)


@only_sqlite
@short_lease
def test_a_live_worker_whose_lease_can_hold_it_keeps_it_from_being_blocked(clock):
    """Old and new settings side by side: no ping-pong between the two."""
    mine = known()
    capability = (HANDLER, 1, mine["fingerprint"])
    [one] = queued(run_at=NOW, timeout=LEASE * 2, **mine)
    short = live_worker(capabilities={capability}, longest_timeout=LEASE * 2)
    longer = live_worker(capabilities={capability}, longest_timeout=LEASE * 3)
    live_worker(capabilities={capability}, queues=["another"], longest_timeout=LEASE * 3)
    for _ in range(3):
        passes(patient=False)
        assert state(one) == ("queued", None)
    workers.deregister("default", longer)
    passes(patient=False)
    assert state(one) == ("blocked", "invalid_policy"), "the other's lease is no longer than it"
    workers.deregister("default", short)
    passes(patient=False)
    assert state(one) == ("blocked", "invalid_policy")


@pytest.mark.skipif(
    connection.vendor == "sqlite", reason="SQLite blocks it: nothing may depend on renewals there"
)
@short_lease
def test_elsewhere_a_lease_may_be_shorter_than_the_timeout(clock):
    [one] = queued(run_at=NOW, timeout=3600, **known())
    passes(patient=False)
    assert state(one) == ("queued", None)


@only_sqlite
@short_lease
def test_those_that_cannot_hold_do_not_keep_the_others_from_the_claim(clock, monkeypatch):
    for module in (blocking, _pages):
        monkeypatch.setattr(module, "PAGE", 10)
    mine = known()
    queued(35, run_at=NOW, timeout=LEASE, priority=5, **mine)
    queued(3, run_at=NOW, **mine)
    passes(patient=False)
    assert Job.objects.filter(blocked_reason="invalid_policy").count() == 35
    assert Job.objects.filter(status="queued").count() == 3


# Releasing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", states.BLOCKED_REASONS)
def test_a_worker_releases_what_it_can_run_but_a_corrupt_payload(reason, clock):
    mine = known()
    [due] = queued(run_at=NOW, status="blocked", blocked_reason=reason, **mine)
    later = {"run_at": NOW + timedelta(hours=1), "status": "blocked", "blocked_reason": reason}
    [future] = queued(**later, **mine)
    passes()
    if reason == states.CORRUPT_PAYLOAD:
        assert state(due) == state(future) == ("blocked", reason)
    else:
        assert (state(due), state(future)) == (("queued", None), ("scheduled", None))
    assert not JobAttempt.objects.exists()


def test_a_rolling_deploy_needs_no_operator(clock):
    [one] = queued(run_at=NOW, **known())
    with registry.temporary():  # the worker with the old code
        registry._handlers.clear()
        passes(patient=False)
        assert state(one) == ("blocked", "unknown_handler")
        passes()
        assert state(one)[0] == "blocked"
    assert [attempt.status for attempt in drain()] == ["succeeded"]
    assert Job.objects.get().attempt_count == 1


@pytest.mark.parametrize(
    ("columns", "serving"),
    [
        ({"queue": "mails"}, {"queues": ("default",)}),
        ({}, {"excluded_queues": ("default",)}),
        ({"handler_version": 2}, {}),
        ({"fingerprint": "0" * 64}, {}),
    ],
)
def test_a_worker_releases_nothing_else(columns, serving, clock):
    blocked = {"status": "blocked", "blocked_reason": "unknown_handler"}
    queued(run_at=NOW, **blocked, **(known() | columns))
    before = snapshot()
    passes(**serving)
    assert snapshot() == before


def test_a_corrupt_payload_gave_up_its_key_and_is_an_operators_to_release(clock):
    """So no pass of a worker can meet a key that another holds; an operator is told."""
    mine = known() | {"scope": "a", "dedupe_key": "k"}
    corrupt = {"status": "blocked", "blocked_reason": "corrupt_payload"}
    [one], [holder] = queued(run_at=NOW, **mine, **corrupt), queued(run_at=NOW, **mine)
    before = Job.objects.values().get(pk=one.pk)
    passes()
    assert Job.objects.values().get(pk=one.pk) == before
    assert state(holder) == ("queued", None)


@real
def test_a_release_that_the_database_refuses_is_passed_over(caplog):
    mine = known()
    blocked = {"status": "blocked", "blocked_reason": "unknown_handler"}
    jobs = queued(20, **mine, **blocked)
    with poisoned([jobs[3].pk]):
        passes()
        assert Job.objects.filter(status="queued").count() == 19
    assert f"job {jobs[3].pk} cannot be moved" in caplog.text
    passes()
    assert state(jobs[3]) == ("queued", None)


# Bounded pages, locked rows -----------------------------------------------------------------------


@real
def test_blocking_and_releasing_go_page_by_page_and_each_commits(monkeypatch):
    monkeypatch.setattr(_pages, "PAGE", 10)
    mine = known()
    queued(35, **mine)
    lane = claims.queued_lanes("default")[0]
    pages: list[int] = []
    original = blocking.move

    def count(alias: str, ids: Any, *given: Any) -> Any:
        pages.append(len(ids))
        return original(alias, ids, *given)

    monkeypatch.setattr(blocking, "move", count)
    assert blocking.block_lane("default", lane, states.UNKNOWN_HANDLER, patience=0) == 35
    assert blocking.blocked_lanes("default") == [lane]
    assert blocking.release_lane("default", lane) == 35
    assert pages == [10, 10, 10, 5] * 2
    assert blocking.blocked_lanes("default") == []


@real
@only_postgres
def test_locked_rows_are_passed_over_and_hide_nothing(monkeypatch):
    monkeypatch.setattr(_pages, "PAGE", 10)
    jobs = queued(35)
    locked = [one.pk for one in jobs[:12]]
    with held(lambda: [lock(pk) for pk in locked]):
        assert blocking.block_lane("default", LANE, states.UNKNOWN_HANDLER, patience=0) == 23
    assert blocking.block_lane("default", LANE, states.UNKNOWN_HANDLER, patience=0) == 12
    with held(lambda: [lock(pk) for pk in locked]):
        assert blocking.release_lane("default", LANE) == 23
    assert blocking.release_lane("default", LANE) == 12


@real
def test_a_job_that_is_claimed_meanwhile_is_not_blocked(monkeypatch):
    """What is blocked is what is still queued: the source stands in the write (FAULTS 3)."""
    [one] = claimed()
    before = snapshot()
    assert _pages.move("default", [one.id], "status = 'blocked'", states.QUEUED) == []
    assert snapshot() == before


# Found at dispatch --------------------------------------------------------------------------------


def test_what_only_the_payload_tells_is_undone_in_one_fenced_write(clock):
    """CONTRACT 2.3: running to blocked; the attempt's row goes, the count is restored."""
    known()
    broken = {"payload_sha256": "0" * 64}
    [one] = queued(run_at=NOW, **known("another"), **broken)
    before = Job.objects.values().get()
    assert drain() == []
    blocked = {"status": "blocked", "blocked_reason": "corrupt_payload"}
    assert Job.objects.values().get() == before | blocked
    assert not JobAttempt.objects.exists()
    passes(patient=False)
    assert state(one) == ("blocked", "corrupt_payload")
    assert one.release() == "queued", "an operator can"


def test_a_claim_that_is_blocked_at_dispatch_keeps_its_history(clock):
    [one] = claimed(attempt_count=0, run_at=NOW)
    Job.objects.get().recover(one.token)
    [again] = claims.claim("default", [LANE], limit=1, worker="w", lease_seconds=60)
    rows = [(again.id, again.token, states.CORRUPT_PAYLOAD)]
    assert claims.block_claimed("default", rows) == {again.id: "blocked"}
    after = Job.objects.get()
    assert (after.attempt_count, after.attempts.get().number) == (1, 1)
    assert (after.lease_token, after.blocked_reason) == (None, "corrupt_payload")


@pytest.mark.parametrize("undo", ["give_back", "block_claimed"])
def test_a_claim_that_is_undone_after_a_cancel_ends_cancelled(undo, clock):
    [one] = claimed(run_at=NOW)
    Job.objects.get().request_cancel()
    if undo == "give_back":
        assert claims.give_back("default", holders([one])) == {one.id: "cancelled"}
    else:
        rows = [(one.id, one.token, states.CORRUPT_PAYLOAD)]
        assert claims.block_claimed("default", rows) == {one.id: "cancelled"}
    after = Job.objects.get()
    assert (after.attempt_count, after.blocked_reason, after.finished_at) == (0, None, NOW)
    assert not after.attempts.exists()


def test_a_claim_given_back_is_as_it_was(clock):
    queued(run_at=NOW)
    before = Job.objects.values().get()
    [one] = claims.claim("default", [LANE], limit=1, worker="w", lease_seconds=60)
    assert claims.give_back("default", holders([one])) == {one.id: "queued"}
    assert Job.objects.values().get() == before
    assert not JobAttempt.objects.exists()
