"""The scheduling pass: each due minute once, in one transaction with its cursor (5.2, 5.4)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import DatabaseError, OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext

from django_durable_jobs import (
    JobContext,
    TransactionActive,
    job,
    schedule,
)
from django_durable_jobs.dialects import dialect_for
from django_durable_jobs.models import Job, OperatorAction, ScheduleCursor
from django_durable_jobs.schedules import cursors, passes
from django_durable_jobs.schedules.declaration import registry
from django_durable_jobs.schedules.passes import Scheduler, fire
from django_durable_jobs.schedules.stepping import Timetable
from django_durable_jobs.testing import FakeClock, drain, run_schedules
from tests.races.paused import paused

from .oracle import MINUTE, utc
from .support import HOUR, START, cursor, every, minutes, stored

# Firing ---------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_the_first_that_can_fire_is_the_minute_after_the_activation(
    tick: Any, clock: FakeClock
) -> None:
    schedule("tick", "* * * * *", tick)
    clock.advance(30)
    assert run_schedules() == []
    assert (cursor().last_minute, cursor().next_minute) == (START, START + MINUTE)
    clock.advance(29.999999)
    assert run_schedules() == []
    clock.advance(timedelta(microseconds=1))
    [fired] = run_schedules()
    assert (fired.schedule, fired.scheduled_for, fired.status) == ("tick", START + MINUTE, "queued")
    assert (fired.run_at, fired.initial_run_at, fired.newly_created) == (clock.now, None, True)
    assert run_schedules() == []
    assert (cursor().last_minute, cursor().next_minute) == (START + MINUTE, START + 2 * MINUTE)
    assert cursor().updated_at == clock.now


@pytest.mark.django_db
def test_the_handler_sees_its_minute(clock: FakeClock) -> None:
    seen = []

    @job("tests.seeing")
    def seeing(ctx: JobContext, payload: dict[str, int]) -> None:
        seen.append((ctx.scheduled_for, payload, ctx.queue, ctx.scope, ctx.max_attempts))

    options = {"queue": "reports", "scope": "tenant", "max_attempts": 9, "priority": 4}
    schedule("tick", "*/2 * * * *", seeing, {"a": 1}, **options)
    run_schedules()
    clock.advance(4 * 60)
    fired = run_schedules()
    assert [one.priority for one in fired] == [4, 4]
    drain()
    expected = [START + 2 * MINUTE, START + 4 * MINUTE]
    assert seen == [(minute, {"a": 1}, "reports", "tenant", 9) for minute in expected]


@pytest.mark.django_db
def test_nothing_due_is_one_query_and_no_write(tick: Any, clock: FakeClock) -> None:
    for number in range(50):
        schedule(f"tick {number}", f"{number} * * * *", tick)
    run_schedules()
    scheduler = Scheduler("default")
    with CaptureQueriesContext(connection) as caught:
        made = scheduler.run()
    assert (made.jobs, made.more, made.seconds_left) == ([], False, 60)
    [query] = caught.captured_queries
    assert query["sql"].startswith("SELECT")
    # Another start looks at each cursor, and finds nothing to write either.
    before = list(ScheduleCursor.objects.values())
    clock.advance(59)
    with CaptureQueriesContext(connection) as caught:
        assert run_schedules() == []
    assert len(caught) == 3
    assert all(query["sql"].startswith("SELECT") for query in caught.captured_queries)
    assert list(ScheduleCursor.objects.values()) == before


@pytest.mark.django_db
def test_all_fires_every_missed_minute_so_many_in_a_pass(tick: Any, clock: FakeClock) -> None:
    schedule("tick", "* * * * *", tick)
    schedule("fifth", "*/5 * * * *", tick)
    run_schedules()
    clock.advance(600 * 60)
    scheduler = Scheduler("default")
    fired = []
    for expected, more in ((256, True), (256, True), (88, False)):
        made = scheduler.run()
        fired += [one for one in made.jobs if one.schedule == "tick"]
        assert (sum(one.schedule == "tick" for one in made.jobs), made.more) == (expected, more)
    assert minutes(fired) == every(600) == stored()
    # 256 minutes from the first due one, not 256 times.
    assert stored("fifth") == every(600)[4::5]
    assert cursor().last_minute == clock.now
    assert scheduler.run().jobs == []


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # 12:01 to 13:00 are due at 13:00:30; 12:59 began 90 seconds before, 13:00 30 seconds.
        ({"catch_up": "none"}, [60]),
        ({"catch_up": "none", "grace": 29.999}, []),
        ({"catch_up": "none", "grace": 30}, [60]),
        ({"catch_up": "none", "grace": 89.999999}, [60]),
        ({"catch_up": "none", "grace": timedelta(seconds=90)}, [59, 60]),
        ({"catch_up": "latest"}, [59, 60]),
        ({"catch_up": "latest", "grace": 29}, [60]),
        ({"catch_up": "latest", "grace": 90}, [58, 59, 60]),
        ({"catch_up": "latest", "grace": 1e6}, list(range(1, 61))),
        ({"catch_up_limit": 3}, [57, 58, 59, 60]),
        ({"catch_up_limit": 256}, list(range(1, 61))),
        ({"catch_up": "all"}, list(range(1, 61))),
    ],
    ids=str,
)
def test_what_of_a_gap_fires(
    tick: Any, clock: FakeClock, options: dict[str, Any], expected: list[int]
) -> None:
    schedule("tick", "* * * * *", tick, **options)
    run_schedules()
    clock.advance(HOUR + timedelta(seconds=30))
    made = Scheduler("default").run()
    assert minutes(made.jobs) == [START + n * MINUTE for n in expected]
    assert (cursor().last_minute, made.more) == (START + HOUR, False)
    assert cursor().next_minute == START + HOUR + MINUTE


@pytest.mark.django_db
@pytest.mark.parametrize("catch_up", ["latest", "none"])
def test_a_long_gap_is_crossed_in_one_pass_of_bounded_work(
    tick: Any, clock: FakeClock, catch_up: str, monkeypatch: Any
) -> None:
    schedule("tick", "* * * * *", tick, catch_up=catch_up)
    schedule("yearly", "0 0 1 1 *", tick, catch_up=catch_up)
    run_schedules()
    clock.advance(timedelta(days=3650))
    steps = []
    for name in ("_first_of", "_last_of"):
        plain = getattr(Timetable, name)
        monkeypatch.setattr(
            Timetable,
            name,
            lambda self, day, minute, plain=plain: steps.append(day) or plain(self, day, minute),
        )
    made = Scheduler("default").run()
    assert len(steps) < 1500, "days that were looked at, of 7,300 in the gap"
    assert not made.more
    now = clock.now
    wanted = {"latest": [now - 2 * MINUTE], "none": []}[catch_up] + [now - MINUTE, now]
    assert [one.scheduled_for for one in made.jobs if one.schedule == "tick"] == wanted
    last_year = {"latest": [utc("2036-01-01T00:00")], "none": []}[catch_up]
    assert [one.scheduled_for for one in made.jobs if one.schedule == "yearly"] == last_year
    assert cursor("yearly").next_minute == utc("2037-01-01T00:00")


@pytest.mark.django_db
def test_the_clock_steps_back_and_forth(tick: Any, clock: FakeClock) -> None:
    schedule("tick", "* * * * *", tick)
    schedule("latest", "* * * * *", tick, catch_up="latest")
    run_schedules()
    clock.advance(10 * 60)
    run_schedules()
    assert stored() == every(10)
    clock.advance(-2 * 60)
    before = cursor()
    for _ in range(2):
        assert run_schedules() == []
        clock.advance(60)
    assert vars(cursor()) | {"_state": None} == vars(before) | {"_state": None}
    clock.advance(60)
    assert sorted(minutes(run_schedules())) == [START + 11 * MINUTE] * 2
    clock.advance(HOUR)
    run_schedules()
    assert stored() == every(71)
    # As in any gap: the last missed one, and what is not missed.
    assert stored("latest") == [START + n * MINUTE for n in (8, 9, 10, 11, 69, 70, 71)]


@pytest.mark.django_db
def test_an_occurrence_that_is_there_is_passed_over(tick: Any, clock: FakeClock) -> None:
    schedule("tick", "* * * * *", tick)
    run_schedules()
    clock.advance(5 * 60)
    run_schedules()
    old = stored()
    # The cursor says that nothing was fired, which no pass of ours can bring about.
    ScheduleCursor.objects.update(last_minute=START, next_minute=START + MINUTE)
    clock.advance(60)
    assert minutes(run_schedules()) == [START + 6 * MINUTE]
    assert stored() == [*old, START + 6 * MINUTE]
    # After pruning it is the cursor that keeps it.
    Job.objects.all().delete()
    assert run_schedules() == []


@pytest.mark.django_db
def test_names_and_minutes_tell_occurrences_apart(tick: Any, clock: FakeClock) -> None:
    schedule("tick", "* * * * *", tick)
    schedule("Tick", "* * * * *", tick)
    run_schedules()
    clock.advance(60)
    assert sorted(one.schedule or "" for one in run_schedules()) == ["Tick", "tick"]


@pytest.mark.django_db
def test_a_schedule_that_never_comes_again_rests_without_an_error(tick: Any) -> None:
    with FakeClock(utc("9999-12-27T20:00")) as clock:
        schedule("tick", "* * * * *", tick)
        run_schedules()
        fired = 0
        for _ in range(5):
            clock.advance(60 * 60)
            fired += len(run_schedules())
        assert fired > 0
        assert cursor().next_minute is None
        assert Scheduler("default").run().jobs == []


# The rules of zones, from the clock to the rows -----------------------------------------------


@pytest.mark.django_db
def test_the_zone_of_the_project_changes_nothing(tick: Any, settings: Any) -> None:
    """``USE_TZ=False`` in a zone whose clock repeats the hour in which the pass comes."""
    settings.USE_TZ, settings.TIME_ZONE = False, "America/New_York"
    first = utc("2026-11-01T05:30")
    with FakeClock(first) as clock:
        schedule("tick", "*/15 * * * *", tick)
        schedule("there", "45 1 * * *", tick, timezone="America/New_York")
        run_schedules()
        clock.advance(2 * HOUR)
        fired = run_schedules()
    found = [(one.schedule, one.scheduled_for) for one in fired]
    assert found == [
        ("there", utc("2026-11-01T05:45")),
        *(("tick", first + n * 15 * MINUTE) for n in range(1, 9)),
    ]
    assert cursor("there").next_minute == utc("2026-11-02T06:45")


@pytest.mark.django_db
def test_a_change_of_zone_rules_is_noticed_at_a_start(tick: Any, clock: FakeClock) -> None:
    schedule("tick", "0 14 * * *", tick)
    run_schedules()
    right = cursor().next_minute
    # What was worked out by the rules of yesterday.
    ScheduleCursor.objects.update(next_minute=START + 5 * HOUR)
    scheduler = Scheduler("default")
    cursors.activate("default", registry.all())
    assert cursor().next_minute == right == START + 2 * HOUR
    clock.advance(2 * HOUR)
    assert minutes(scheduler.run().jobs) == [right]


# One transaction -------------------------------------------------------------------------------


@pytest.mark.django_db
@pytest.mark.parametrize("broken", ["insert_new", "move"])
def test_a_pass_that_is_rolled_back_leaves_the_cursor(
    tick: Any, clock: FakeClock, monkeypatch: Any, broken: str
) -> None:
    schedule("tick", "* * * * *", tick)
    run_schedules()
    before = list(ScheduleCursor.objects.values("last_minute", "next_minute", "updated_at"))
    clock.advance(3 * 60)
    module: Any = passes if broken == "insert_new" else cursors
    plain = getattr(module, broken)

    def breaking(*arguments: Any) -> Any:
        plain(*arguments)
        raise OperationalError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(module, broken, breaking)
        assert run_schedules() == []
    assert stored() == []
    after = list(ScheduleCursor.objects.values("last_minute", "next_minute", "updated_at"))
    assert after == before
    assert minutes(run_schedules()) == every(3)


@pytest.mark.django_db(transaction=True)
def test_the_database_refuses_the_insert_or_the_commit(tick: Any) -> None:
    """The whole transaction goes; whichever statement it is that fails."""
    schedule("tick", "* * * * *", tick)
    run_schedules()
    ScheduleCursor.objects.update(last_minute=cursor().last_minute - 3 * MINUTE)
    cursors.activate("default", registry.all())
    before = cursor()
    with paused(lambda: fire("default", registry.all()[0])) as first:
        first.fail()
    assert isinstance(first.racer.error(), DatabaseError)
    assert stored() == []
    assert cursor().last_minute == before.last_minute
    assert len(run_schedules()) >= 3


# In tests ---------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_it_refuses_inside_the_tests_own_transaction(tick: Any) -> None:
    schedule("tick", "* * * * *", tick)
    with transaction.atomic(), pytest.raises(TransactionActive):
        run_schedules()


@pytest.mark.django_db(transaction=True)
def test_it_works_in_a_transaction_test_case_and_drain_fires_nothing(
    tick: Any, clock: FakeClock
) -> None:
    schedule("tick", "* * * * *", tick)
    run_schedules()
    clock.advance(60)
    assert drain() == []
    assert len(run_schedules(using="default")) == 1
    assert [one.status for one in drain()] == ["succeeded"]
    assert not connection.in_atomic_block


@pytest.mark.django_db(transaction=True)
def test_workers_are_told_once_it_is_committed(
    tick: Any, clock: FakeClock, monkeypatch: Any, is_postgres: bool
) -> None:
    if not is_postgres:
        pytest.skip("on SQLite workers look at the file, and nothing is announced")
    told = []

    def announce(alias: str, queues: Any) -> None:
        told.append((sorted(queues), connection.in_atomic_block, len(stored())))

    schedule("tick", "* * * * *", tick, queue="news")
    run_schedules()
    clock.advance(3 * 60)
    monkeypatch.setattr(dialect_for("default"), "announce", announce)
    run_schedules()
    assert told == [(["news"], False, 3)]


@pytest.mark.django_db
def test_the_deciding_clock_is_the_one_of_the_database(tick: Any) -> None:
    """Without a FakeClock: on PostgreSQL the server's, read in the pass itself."""
    schedule("tick", "* * * * *", tick)
    run_schedules()
    now = dialect_for("default").instant("default")
    minute = cursor().last_minute
    assert 0 <= now - minute.timestamp() * 1_000_000 < 120_000_000
    ScheduleCursor.objects.update(last_minute=minute - 2 * MINUTE)
    assert minutes(run_schedules())[:2] == [minute - MINUTE, minute]
    assert not OperatorAction.objects.exists()
