"""An operator's moves on schedules, by calls and by ``manage.py jobs`` (CONTRACT 5.3, 7.3)."""

from __future__ import annotations

import getpass
import io
import json
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_durable_jobs import InvalidSchedule, LockTimeout, schedule, unschedule
from django_durable_jobs.models import Job, OperatorAction, ScheduleCursor
from django_durable_jobs.schedules import cursors, operations
from django_durable_jobs.schedules.overview import overview
from django_durable_jobs.schedules.passes import Scheduler, fire
from django_durable_jobs.testing import FakeClock, drain, run_schedules
from tests.races.paused import paused
from tests.racing import held, racing

from .oracle import MINUTE
from .support import HOUR, START, cursor

pytestmark = pytest.mark.usefixtures("clock")


@pytest.fixture
def ticking(tick: Any) -> Any:
    """A schedule of each minute, activated."""
    declared = schedule("tick", "* * * * *", tick)
    return declared


def fired() -> list[datetime | None]:
    return [one.scheduled_for for one in run_schedules()]


def redeclare(tick: Any, cron: str = "*/5 * * * *") -> None:
    unschedule("tick")
    schedule("tick", cron, tick)


def command(*arguments: str) -> str:
    out = io.StringIO()
    call_command("jobs", *arguments, stdout=out)
    return out.getvalue()


# Adoption ---------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_adoption_goes_on_from_the_current_minute_and_replays_nothing(
    tick: Any, ticking: Any, clock: FakeClock
) -> None:
    run_schedules()
    clock.advance(2 * HOUR + timedelta(seconds=130))
    redeclare(tick)
    assert operations.adopt("default", "tick") == "adopted"
    adopted = cursor()
    assert adopted.last_minute == START + 2 * HOUR + 2 * MINUTE
    assert adopted.next_minute == START + 2 * HOUR + 5 * MINUTE
    assert fired() == []
    clock.advance(3 * 60)
    assert fired() == [START + 2 * HOUR + 5 * MINUTE]
    before = list(ScheduleCursor.objects.values())
    clock.advance(HOUR)
    assert operations.adopt("default", "tick") == "unchanged"
    assert list(ScheduleCursor.objects.values()) == before


@pytest.mark.django_db
def test_adoption_never_moves_the_cursor_back(tick: Any, ticking: Any, clock: FakeClock) -> None:
    run_schedules()
    clock.advance(HOUR)
    run_schedules()
    clock.advance(-HOUR)
    redeclare(tick)
    operations.adopt("default", "tick")
    assert (cursor().last_minute, cursor().next_minute) == (
        START + HOUR,
        START + HOUR + 5 * MINUTE,
    )


@pytest.mark.django_db
def test_adoption_keeps_a_pause_and_clears_a_problem(tick: Any, ticking: Any) -> None:
    run_schedules()
    ScheduleCursor.objects.update(paused=True, problem="IntegrityError")
    redeclare(tick)
    operations.adopt("default", "tick")
    assert (cursor().paused, cursor().problem) == (True, None)


@pytest.mark.django_db(transaction=True)
def test_adoption_waits_for_a_pass_and_the_pass_of_the_old_code_stops(
    tick: Any, ticking: Any, clock: FakeClock
) -> None:
    run_schedules()
    clock.advance(60)
    old = Scheduler("default")
    with paused(lambda: fire("default", ticking)) as first:
        redeclare(tick)
        with racing(lambda: operations.adopt("default", "tick")) as [adopting]:
            adopting.wait_until_blocked()
            first.go_on()
        assert adopting.result() == "adopted"
    assert Job.objects.count() == 1
    clock.advance(HOUR)
    assert fire("default", ticking) is None
    assert [one.scheduled_for for one in old.run().jobs][0] == START + 5 * MINUTE


# Pause and resume -------------------------------------------------------------------------------


@pytest.mark.django_db
def test_a_pause_fires_nothing_and_resuming_does_not_fire_at_once(
    ticking: Any, clock: FakeClock
) -> None:
    run_schedules()
    clock.advance(60)
    assert len(fired()) == 1
    assert operations.pause("default", "tick") == "paused"
    assert operations.pause("default", "tick") == "unchanged"
    clock.advance(HOUR + timedelta(seconds=30))
    assert operations.resume("default", "tick") == "resumed"
    assert operations.resume("default", "tick") == "unchanged"
    assert fired() == []
    assert cursor().last_minute == START + HOUR + MINUTE
    clock.advance(30)
    assert fired() == [START + HOUR + 2 * MINUTE]


@pytest.mark.django_db
def test_the_minutes_of_a_pause_pass(ticking: Any, clock: FakeClock) -> None:
    """So that nothing fires at once either where somebody clears the flag by an update."""
    run_schedules()
    ScheduleCursor.objects.update(paused=True)
    clock.advance(10 * HOUR)
    assert fired() == []
    assert (cursor().last_minute, cursor().next_minute) == (
        START + 10 * HOUR,
        START + 10 * HOUR + MINUTE,
    )
    assert cursors.due("default")[1] == []
    ScheduleCursor.objects.update(paused=False)
    assert fired() == []
    clock.advance(60)
    assert fired() == [START + 10 * HOUR + MINUTE]


@pytest.mark.django_db
def test_what_is_queued_already_runs_while_it_is_paused(ticking: Any, clock: FakeClock) -> None:
    run_schedules()
    clock.advance(60)
    run_schedules()
    operations.pause("default", "tick")
    assert [one.status for one in drain()] == ["succeeded"]


@pytest.mark.django_db
def test_resuming_never_moves_the_cursor_back(ticking: Any, clock: FakeClock) -> None:
    run_schedules()
    clock.advance(HOUR)
    run_schedules()
    operations.pause("default", "tick")
    clock.advance(-HOUR)
    operations.resume("default", "tick")
    assert cursor().last_minute == START + HOUR


@pytest.mark.django_db
def test_a_pause_before_the_first_worker(ticking: Any, clock: FakeClock) -> None:
    assert operations.pause("default", "tick") == "paused"
    clock.advance(HOUR)
    assert fired() == []
    operations.resume("default", "tick")
    assert cursor().last_minute == START + HOUR


@pytest.mark.django_db
def test_another_cron_is_paused_and_not_resumed(tick: Any, ticking: Any) -> None:
    run_schedules()
    redeclare(tick)
    assert operations.pause("default", "tick") == "paused"
    with pytest.raises(InvalidSchedule, match="first manage.py jobs adopt-schedule tick"):
        operations.resume("default", "tick")
    unschedule("tick")
    with pytest.raises(InvalidSchedule, match="declared by this code"):
        operations.resume("default", "tick")
    assert cursor().paused


# Run now ----------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_run_now_is_no_occurrence(ticking: Any, clock: FakeClock) -> None:
    run_schedules()
    before = list(ScheduleCursor.objects.values())
    jobs = [operations.run_now("default", "tick") for _ in range(2)]
    assert [(one.schedule, one.scheduled_for, one.status) for one in jobs] == [
        ("tick", None, "queued")
    ] * 2
    assert list(ScheduleCursor.objects.values()) == before
    operations.pause("default", "tick")
    operations.run_now("default", "tick")
    assert len(drain()) == 3


# Forget -----------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_a_removed_schedule_is_forgotten_and_its_jobs_stay(
    tick: Any, ticking: Any, clock: FakeClock
) -> None:
    run_schedules()
    clock.advance(60)
    run_schedules()
    with pytest.raises(InvalidSchedule, match="declared by this code"):
        operations.forget("default", "tick")
    unschedule("tick")
    assert operations.forget("default", "tick") == "forgotten"
    assert not ScheduleCursor.objects.exists()
    assert [one.status for one in drain()] == ["succeeded"]
    # Declared again it is a new one.
    schedule("tick", "* * * * *", tick)
    clock.advance(HOUR)
    assert fired() == []


# What all of them share -------------------------------------------------------------------------


@pytest.mark.django_db
def test_names_that_nobody_knows(ticking: Any) -> None:
    run_schedules()
    for move in (operations.adopt, operations.run_now):
        with pytest.raises(InvalidSchedule, match=r"declared by this code\. Did you mean tick\?"):
            move("default", "tck")
    for other in (operations.pause, operations.resume, operations.forget):
        with pytest.raises(InvalidSchedule, match=r"known to the database\. Did you mean tick\?"):
            other("default", "tck")


@pytest.mark.django_db
def test_moves_join_an_open_transaction(ticking: Any) -> None:
    run_schedules()
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        operations.pause("default", "tick")
        operations.run_now("default", "tick")
        assert cursor().paused
        1 / 0  # noqa: B018
    assert not cursor().paused
    assert not Job.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_waits_for_a_lock_are_bounded(ticking: Any, settings: Any) -> None:
    settings.DURABLE_JOBS = {"LOCK_TIMEOUT_SECONDS": 0.2}
    run_schedules()
    with (
        held(lambda: ScheduleCursor.objects.update(problem=None)),
        pytest.raises(LockTimeout),
    ):
        operations.pause("default", "tick")
    assert not cursor().paused


# The command ------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_the_command_shows_each_schedule(tick: Any, ticking: Any, clock: FakeClock) -> None:
    schedule("daily", "30 2 * * *", tick, timezone="Europe/Paris", description="Every night")
    run_schedules()
    clock.advance(8 * 60)
    run_schedules()
    clock.advance(90)
    schedule("new", "0 0 1 1 *", "tests.tick")
    ScheduleCursor.objects.create(
        name="gone", fingerprint="f" * 64, last_minute=START, updated_at=START
    )
    ScheduleCursor.objects.filter(name="daily").update(problem="IntegrityError")
    found = {one["name"]: one for one in json.loads(command("schedules", "--json"))}
    assert list(found) == ["daily", "gone", "new", "tick"]
    one = found["tick"]
    assert (one["state"], one["cron"], one["handler"]) == ("active", "* * * * *", "tests.tick")
    assert one["lag_seconds"] == 30
    assert one["last_times"] == [f"2026-03-01T12:0{n}:00Z" for n in (4, 5, 6, 7, 8)]
    assert one["next_times"][0] == "2026-03-01T12:10:00Z" and len(one["next_times"]) == 5
    assert found["daily"]["next_times"][:2] == ["2026-03-02T01:30:00Z", "2026-03-03T01:30:00Z"]
    assert (found["daily"]["state"], found["daily"]["description"]) == ("broken", "Every night")
    assert (found["new"]["state"], found["new"]["last_minute"]) == ("not started", None)
    assert (found["gone"]["state"], found["gone"]["cron"]) == ("not declared", None)
    assert found["gone"]["next_times"] == []
    text = command("schedules")
    assert 'tick: active, "* * * * *" in UTC' in text
    assert "2026-03-01 12:07, 2026-03-01 12:08" in text
    assert "lag          30 s" in text or "lag      30 s" in text
    assert "IntegrityError" in text and "Every night" in text


@pytest.mark.django_db
def test_the_command_without_any_schedule() -> None:
    assert command("schedules") == "No schedules.\n"
    assert json.loads(command("schedules", "--json")) == []


@pytest.mark.django_db
def test_the_commands_make_the_moves_and_record_them(tick: Any, ticking: Any) -> None:
    run_schedules()
    assert command("pause-schedule", "tick") == "tick: paused\n"
    assert [one.is_paused for one in overview("default")] == [True]
    assert overview("default")[0].next_times == ()
    assert command("pause-schedule", "tick") == "tick: unchanged\n"
    assert command("resume-schedule", "tick") == "tick: resumed\n"
    ran = json.loads(command("run-schedule", "tick", "--json"))
    job = Job.objects.get()
    assert ran == {"schedule": "tick", "outcome": "run now", "job": job.pk}
    redeclare(tick)
    assert overview("default")[0].runs_another_cron
    assert command("adopt-schedule", "tick") == "tick: adopted\n"
    unschedule("tick")
    assert command("forget-schedule", "tick") == "tick: forgotten\n"
    kept = OperatorAction.objects.order_by("id")
    assert [(one.action, one.job_key) for one in kept] == [
        ("pause_schedule", None),
        ("resume_schedule", None),
        ("run_schedule", job.pk),
        ("adopt_schedule", None),
        ("forget_schedule", None),
    ]
    assert kept[0].detail == "schedule tick: paused"
    assert {one.operator for one in kept} == {f"{getpass.getuser()} (manage.py)"}
    assert {one.happened_at for one in kept} == {START}


@pytest.mark.django_db
def test_a_refusal_is_one_sentence_and_leaves_no_record(ticking: Any) -> None:
    with pytest.raises(CommandError, match="Did you mean tick") as caught:
        command("run-schedule", "tock")
    assert caught.value.returncode == 1
    with pytest.raises(CommandError, match=r"not in DATABASES: use one of default"):
        command("schedules", "--database", "nowhere")
    assert not OperatorAction.objects.exists()


def test_bad_settings_are_one_sentence(settings: Any) -> None:
    settings.DURABLE_JOBS = {"POLL_SECONDS": "x"}
    with pytest.raises(CommandError, match="POLL_SECONDS"):
        command("schedules")


@pytest.mark.django_db
def test_an_operator_without_a_name(ticking: Any, monkeypatch: Any) -> None:
    def nameless() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr(getpass, "getuser", nameless)
    command("pause-schedule", "tick")
    assert OperatorAction.objects.get().operator == "manage.py"


@pytest.mark.django_db
def test_many_schedules_are_shown_by_few_queries(tick: Any) -> None:
    for number in range(300):
        schedule(f"tick {number}", f"{number % 60} {number % 24} * * *", tick)
    run_schedules()
    with CaptureQueriesContext(connection) as caught:
        assert len(overview("default")) == 300
    assert len(caught) == 4
