"""Schedules that cannot fire, and databases that do not serve: nobody else waits (FAULTS 6, 10)."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from django.db import OperationalError, connection

from django_durable_jobs import (
    InvalidSubmission,
    JobContext,
    job,
    schedule,
)
from django_durable_jobs.models import ScheduleCursor
from django_durable_jobs.schedules import cursors, passes
from django_durable_jobs.schedules.declaration import registry
from django_durable_jobs.schedules.passes import Scheduler
from django_durable_jobs.testing import FakeClock, run_schedules
from tests.transitions.poison import poisoned

from .oracle import MINUTE
from .support import START, cursor, every, minutes, stored


@pytest.mark.django_db(transaction=True)
def test_a_broken_schedule_delays_no_other(
    tick: Any, clock: FakeClock, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    """It is put aside, marked, told once and counted; then it fires what it owes."""
    for number in range(10):
        schedule(f"a {number}", "* * * * *", tick)
    # The oldest of all, so that it stands first in each pass.
    schedule("broken", "* * * * *", tick)
    run_schedules()
    ScheduleCursor.objects.filter(name="broken").update(
        last_minute=START - MINUTE, next_minute=START
    )
    monkeypatch.setattr(passes, "LONGEST_REST_SECONDS", 0.0)
    scheduler = Scheduler("default")
    with poisoned(["'broken'"], column="schedule"), caplog.at_level(logging.INFO):
        for _ in range(3):
            clock.advance(60)
            assert len(scheduler.run().jobs) == 10
    assert scheduler.failures == 3
    told = [one for one in caplog.records if "broken cannot fire" in one.getMessage()]
    assert len(told) == 1 and told[0].exc_info
    assert (cursor("broken").problem or "").endswith("Error")
    assert stored("broken") == []
    with caplog.at_level(logging.INFO):
        made = scheduler.run()
    assert minutes(made.jobs) == [START, *every(3)]
    assert cursor("broken").problem is None
    assert "broken fires again, after 3 failures" in caplog.text


@pytest.mark.django_db
def test_what_is_marked_already_was_told_by_who_marked_it(
    tick: Any, clock: FakeClock, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def breaking(alias: str, declared: Any) -> Any:
        raise RuntimeError("a fault of ours") if len(told()) < 2 else ValueError("another")

    def told() -> list[str]:
        return [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]

    schedule("tick", "* * * * *", tick)
    run_schedules()
    clock.advance(60)
    with monkeypatch.context() as patch:
        patch.setattr(passes, "fire", breaking)
        for _ in range(3):
            assert run_schedules() == []
            assert told() == ["schedule tick cannot fire"]
            assert cursor().problem == "RuntimeError"
        ScheduleCursor.objects.update(problem=None)
        run_schedules()
        run_schedules()
        assert (len(told()), cursor().problem) == (3, "ValueError")
    assert len(run_schedules()) == 1
    assert cursor().problem is None


@pytest.mark.django_db
def test_a_broken_schedule_rests_longer_each_time(
    tick: Any, clock: FakeClock, monkeypatch: Any
) -> None:
    now = 1000.0
    monkeypatch.setattr(passes.time, "monotonic", lambda: now)
    tries = []

    def breaking(alias: str, declared: Any) -> Any:
        tries.append(now)
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(passes, "fire", breaking)
    schedule("tick", "* * * * *", tick)
    run_schedules()
    clock.advance(60)
    scheduler = Scheduler("default")
    for _ in range(4000):
        scheduler.run()
        now += 0.125
    rests = [later - earlier for earlier, later in zip(tries, tries[1:], strict=False)]
    assert rests[:7] == [1, 2, 4, 8, 16, 32, 60]
    assert set(rests[7:]) == {60}
    assert scheduler.failures == len(tries)


@pytest.mark.django_db
def test_a_request_that_is_refused_at_run_time_is_marked_with_the_reason(
    tick: Any, clock: FakeClock
) -> None:
    refused = False

    def key(payload: Any) -> str | None:
        if refused:
            raise InvalidSubmission("no")
        return "k"

    @job("tests.keyed", concurrency=1, concurrency_key=key)
    def keyed(ctx: JobContext, payload: dict[str, str]) -> None: ...

    schedule("keyed", "* * * * *", keyed, {"secret": "s3cr3t"})
    schedule("tick", "* * * * *", tick)
    run_schedules()
    refused = True
    clock.advance(60)
    assert [one.schedule for one in Scheduler("default").run().jobs] == ["tick"]
    problem = cursor("keyed").problem or ""
    assert problem.startswith("InvalidSubmission: The concurrency_key function of tests.keyed")
    assert "s3cr3t" not in problem
    # A worker would not even start with it.
    assert "The concurrency_key function" in registry.problems()[0]


@pytest.mark.django_db
@pytest.mark.usefixtures("resting")
def test_a_database_that_serves_nobody_ends_the_pass(
    tick: Any, clock: FakeClock, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(10):
        schedule(f"tick {number}", "* * * * *", tick)
    run_schedules()
    clock.advance(60)
    tries = []

    def away(alias: str, declared: Any) -> Any:
        tries.append(declared.name)
        raise OperationalError("server closed the connection")

    monkeypatch.setattr(passes.dialect_for("default").__class__, "is_transient", lambda *_: True)
    monkeypatch.setattr(passes, "fire", away)
    scheduler = Scheduler("default")
    with pytest.raises(OperationalError):
        scheduler.run()
    assert len(tries) == 3
    # Those rest, and the next pass comes to the others: one that always fails hides none.
    with pytest.raises(OperationalError):
        scheduler.run()
    assert len(set(tries)) == 6
    monkeypatch.setattr(passes, "LONGEST_REST_SECONDS", 0.0)
    for _ in range(3):
        with pytest.raises(OperationalError):
            scheduler.run()
    told = [one.getMessage() for one in caplog.records if "waits" in one.getMessage()]
    assert len(told) == len(set(told)) == len(set(tries)) < len(tries)
    assert not ScheduleCursor.objects.exclude(problem=None).exists()


@pytest.mark.django_db
def test_faults_of_ours_end_no_pass_and_a_stop_does(
    tick: Any, clock: FakeClock, monkeypatch: Any
) -> None:
    for number in range(10):
        schedule(f"tick {number}", "* * * * *", tick)
    run_schedules()
    clock.advance(60)
    tries: list[str] = []

    def breaking(alias: str, declared: Any) -> Any:
        tries.append(declared.name)
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(passes, "fire", breaking)
    assert Scheduler("default").run().jobs == []
    assert len(tries) == 10
    Scheduler("default", is_stopping=lambda: len(tries) == 14).run()
    assert len(tries) == 14


@pytest.mark.django_db(transaction=True)
def test_a_dropped_connection_costs_one_try(
    tick: Any, clock: FakeClock, is_postgres: bool, monkeypatch: Any
) -> None:
    schedule("tick", "* * * * *", tick)
    schedule("zzz", "* * * * *", tick)
    run_schedules()
    clock.advance(2 * 60)
    plain = cursors.move

    def dropping(*arguments: Any) -> None:
        monkeypatch.setattr(cursors, "move", plain)
        _drop_connection(is_postgres)
        plain(*arguments)

    monkeypatch.setattr(cursors, "move", dropping)
    monkeypatch.setattr(passes, "LONGEST_REST_SECONDS", 0.0)
    scheduler = Scheduler("default")
    assert [one.schedule for one in scheduler.run().jobs] == ["zzz", "zzz"]
    assert [one.schedule for one in scheduler.run().jobs] == ["tick", "tick"]
    assert stored() == stored("zzz") == every(2)


def _drop_connection(is_postgres: bool) -> None:
    if not is_postgres:
        connection.connection.close()
        return
    pid = connection.connection.info.backend_pid
    from tests.racing import observer

    with observer() as other:
        other.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
