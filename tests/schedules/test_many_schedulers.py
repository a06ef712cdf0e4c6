"""Several schedulers at once, and of several versions of the code (5.2, 5.3)."""

from __future__ import annotations

from typing import Any

import pytest

from django_durable_jobs import (
    InvalidSchedule,
    schedule,
    unschedule,
)
from django_durable_jobs.models import ScheduleCursor
from django_durable_jobs.schedules import cursors, passes
from django_durable_jobs.schedules.declaration import registry
from django_durable_jobs.schedules.passes import Scheduler, fire
from django_durable_jobs.testing import FakeClock, run_schedules
from tests.races.paused import paused
from tests.racing import held, racing, together

from .oracle import MINUTE
from .support import START, cursor, every, minutes, stored

# Two schedulers ---------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_what_another_holds_is_skipped_and_fired_once(
    tick: Any, clock: FakeClock, is_postgres: bool
) -> None:
    schedule("tick", "* * * * *", tick)
    run_schedules()
    clock.advance(3 * 60)
    with paused(lambda: Scheduler("default").run().jobs) as first:
        with racing(lambda: Scheduler("default").run().jobs) as [second]:
            if is_postgres:
                # It passes over the locked cursor at once.
                assert second.result() == []
            else:
                second.wait_until_blocked()
            fired = first.go_on()
        assert second.result() == []
    assert minutes(fired) == every(3) == stored()


@pytest.mark.django_db(transaction=True)
def test_an_operators_lock_on_one_schedule_holds_up_no_other(
    tick: Any, clock: FakeClock, is_postgres: bool, settings: Any, caplog: Any
) -> None:
    settings.DURABLE_JOBS = {"LOCK_TIMEOUT_SECONDS": 0.2}
    for name in ("a", "tick", "z"):
        schedule(name, "* * * * *", tick)
    run_schedules()
    clock.advance(60)

    def lock() -> None:
        ScheduleCursor.objects.filter(name="tick").update(problem=None)

    with held(lock) as other:
        if is_postgres:
            fired = Scheduler("default").run().jobs
            assert [one.schedule for one in fired] == ["a", "z"]
            assert "waits" not in caplog.text
        else:
            # One writer: nobody is served, for a bounded time.
            with pytest.raises(Exception, match="held a lock longer"):
                Scheduler("default").run()
        other.commit()
    Scheduler("default").run()
    assert stored() == stored("a") == stored("z") == every(1)


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("resting")
def test_a_lock_on_one_occurrence_holds_up_no_other_schedule(
    tick: Any, clock: FakeClock, is_postgres: bool, settings: Any
) -> None:
    if not is_postgres:
        pytest.skip("SQLite has one lock, for the whole database")
    settings.DURABLE_JOBS = {"LOCK_TIMEOUT_SECONDS": 0.2}
    declared = [schedule(name, "* * * * *", tick) for name in ("a", "b", "c", "d", "z")]
    run_schedules()
    clock.advance(60)

    def same_minute() -> None:
        for one in declared[:4]:
            made = passes._occurrences(one, (int(START.timestamp()) // 60 + 1,))
            passes.insert_new("default", made)

    with held(same_minute) as other:
        scheduler = Scheduler("default")
        with pytest.raises(Exception, match="held a lock longer"):
            scheduler.run()
        # Those that waited rest, and the pass comes to the one behind them.
        assert [one.schedule for one in scheduler.run().jobs] == ["z"]
        other.rollback()
    assert len(Scheduler("default").run().jobs) == 4


@pytest.mark.django_db(transaction=True)
def test_many_schedulers_at_once_fire_each_minute_once(tick: Any, clock: FakeClock) -> None:
    schedule("tick", "* * * * *", tick)
    schedule("other", "*/3 * * * *", tick)
    run_schedules()
    for _ in range(4):
        clock.advance(10 * 60)
        racers = together(lambda _: Scheduler("default").run().jobs, 4)
        assert all(racer.error() is None for racer in racers)
    Scheduler("default").run()
    assert stored() == every(40)
    assert stored("other") == every(40)[2::3]


@pytest.mark.django_db
@pytest.mark.parametrize("change", ["nothing", "advanced", "paused", "never again"])
def test_the_lock_is_followed_by_another_look(tick: Any, clock: FakeClock, change: str) -> None:
    """What was due when it was looked at may be fired, paused or over once it is locked."""
    declared = schedule("tick", "* * * * *", tick)
    run_schedules()
    clock.advance(60)
    assert len(cursors.due("default")[1]) == 1
    if change == "advanced":
        run_schedules()
    elif change == "paused":
        ScheduleCursor.objects.update(paused=True)
    elif change == "never again":
        ScheduleCursor.objects.update(next_minute=None)
    before = list(ScheduleCursor.objects.values())
    clock.advance(1)
    fired = fire("default", declared)
    if change in ("advanced", "never again"):
        assert fired is None
        assert list(ScheduleCursor.objects.values()) == before
    else:
        assert fired is not None
        assert (len(fired[0]), fired[1]) == (change == "nothing", False)
        assert cursor().last_minute == START + MINUTE


@pytest.mark.django_db
def test_a_start_writes_over_no_pass_that_came_in_between(tick: Any, clock: FakeClock) -> None:
    declared = schedule("tick", "* * * * *", tick)
    run_schedules()
    read = cursor()
    read.next_minute = None
    clock.advance(60)
    run_schedules()
    after = cursor().next_minute
    cursors._recompute("default", declared, read)
    assert cursor().next_minute == after


@pytest.mark.django_db(transaction=True)
def test_two_first_activations_make_one_cursor(tick: Any) -> None:
    with FakeClock(START):
        schedule("tick", "* * * * *", tick)
        schedule("other", "* * * * *", tick)
        racers = together(lambda _: cursors.activate("default", registry.all()), 4)
        assert [racer.error() for racer in racers] == [None] * 4
        assert ScheduleCursor.objects.count() == 2


# Versions ---------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_another_cron_stops_the_start_and_names_the_command(tick: Any, clock: FakeClock) -> None:
    schedule("it's mine", "* * * * *", tick)
    run_schedules()
    unschedule("it's mine")
    schedule("it's mine", "*/2 * * * *", tick, timezone="Europe/Paris")
    with pytest.raises(InvalidSchedule) as caught:
        run_schedules()
    said = str(caught.value)
    assert "manage.py jobs adopt-schedule 'it'\"'\"'s mine'" in said
    assert '"*/2 * * * *" in Europe/Paris' in said


@pytest.mark.django_db
def test_only_the_meaning_of_the_cron_is_fingerprinted(tick: Any, clock: FakeClock) -> None:
    schedule("tick", "* * * * *", tick)
    run_schedules()
    unschedule("tick")
    schedule(
        "tick", "*/1 0-23 * 1-12 *", tick, catch_up="latest", grace=5, queue="q", description="d"
    )
    clock.advance(60)
    assert [one.queue for one in run_schedules()] == ["q"]


@pytest.mark.django_db
def test_an_older_process_leaves_what_was_adopted_and_says_so_once(
    tick: Any, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    schedule("tick", "* * * * *", tick)
    schedule("other", "* * * * *", tick)
    run_schedules()
    old = Scheduler("default")
    ScheduleCursor.objects.filter(name="tick").update(fingerprint="f" * 64)
    before = cursor()
    for _ in range(3):
        clock.advance(60)
        assert [one.schedule for one in old.run().jobs] == ["other"]
    # Adopted again, by a third one.
    ScheduleCursor.objects.filter(name="tick").update(fingerprint="e" * 64)
    old.run()
    told = [one for one in caplog.records if "another cron" in one.getMessage()]
    assert len(told) == 2
    # Not even a start of the old code rewrites it (a race with the check before it).
    ScheduleCursor.objects.filter(name="tick").update(next_minute=START)
    cursors.activate("default", registry.all())
    assert (cursor().last_minute, cursor().next_minute) == (before.last_minute, START)
    assert fire("default", registry.get("tick")) is None  # type: ignore[arg-type]


@pytest.mark.django_db
def test_a_cursor_that_nobody_declares_is_left_alone(tick: Any, clock: FakeClock) -> None:
    schedule("tick", "* * * * *", tick)
    schedule("gone", "* * * * *", tick)
    run_schedules()
    unschedule("gone")
    clock.advance(60)
    assert [one.schedule for one in run_schedules()] == ["tick"]
    assert cursor("gone").last_minute == START
