"""Years and days under an injected clock against the oracle (FAULTS 22).

The clock steps back and forth, passes are missed for hours and weeks, schedulers start anew
and take turns. What has fired in the end is what the oracle says, by each policy.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from django_durable_jobs import schedule
from django_durable_jobs.models import Job, ScheduleCursor
from django_durable_jobs.schedules import cursors
from django_durable_jobs.schedules.catch_up import MINUTE as MICROSECONDS
from django_durable_jobs.schedules.catch_up import advance
from django_durable_jobs.schedules.declaration import registry
from django_durable_jobs.schedules.expression import parse
from django_durable_jobs.schedules.passes import Scheduler
from django_durable_jobs.schedules.stepping import EPOCH, Timetable
from django_durable_jobs.testing import FakeClock

from .oracle import MINUTE, Cron, cron, fired_by_each, utc

POLICIES: dict[str, dict[str, Any]] = {
    "all": {},
    "last five": {"catch_up_limit": 5, "grace": 150},
    "latest": {"catch_up": "latest"},
    "none": {"catch_up": "none", "grace": 3600},
}


@dataclass
class Model:
    """What a policy fires, pass by pass, of the minutes that the oracle gives."""

    policy: str
    minutes: Sequence[datetime]
    cursor: datetime
    fired: list[datetime] = field(default_factory=list)

    def make_pass(self, now: datetime) -> None:
        come = [one for one in self.minutes if self.cursor < one <= now]
        self.cursor = max(self.cursor, now)
        options = POLICIES[self.policy]
        grace = timedelta(seconds=options.get("grace", 60))
        missed = [one for one in come if now - one > grace]
        kept = {"all": len(missed), "last five": 5, "latest": 1, "none": 0}[self.policy]
        self.fired += missed[max(0, len(missed) - kept) :]
        self.fired += come[len(missed) :]


def moves(chance: random.Random, *, short: bool) -> timedelta:
    """How the clock goes on to the next pass: in its course, with downtimes, and by steps."""
    kind = chance.random()
    if kind < 0.1:
        return -timedelta(minutes=2)
    if kind < 0.2:
        return timedelta(hours=1)
    if kind < 0.3:
        return timedelta(hours=chance.uniform(2, 6)) if short else timedelta(days=chance.random())
    if kind < 0.33 and not short:
        return timedelta(days=chance.uniform(1, 40))
    return timedelta(seconds=chance.choice([1, 30, 59, 60, 61, 90, 600, 1800]))


# Years, in memory ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zone", "start"),
    [
        ("Europe/Paris", "2026-01-01"),
        ("America/Santiago", "2027-10-01"),
        ("America/New_York", "2099-09-01"),
    ],
)
def test_a_year_of_passes(zone: str, start: str) -> None:
    """Leap day 2028 and none in 2100, both changes of each clock."""
    texts = ["30 2 * * *", "15 0,23 * * *", "0 12 29 2 *", "*/20 1-3 1-10 * 0", "7 */5 28-31 * *"]
    crons = [cron(text) for text in texts]
    first = utc(start)
    last = first + timedelta(days=366)
    place = ZoneInfo(zone)
    expected = fired_by_each(crons, place, first + MINUTE, last)
    chance = random.Random(start)
    for written, minutes in zip(crons, expected, strict=True):
        for policy in POLICIES:
            model = Model(policy, minutes, first)
            assert _fired(written, place, first, last, policy, chance, model) == model.fired
            if policy == "all":
                assert model.fired == list(minutes)


def _fired(
    written: Cron,
    zone: ZoneInfo,
    first: datetime,
    last: datetime,
    policy: str,
    chance: random.Random,
    model: Model,
) -> list[datetime]:
    """Make passes over one cursor, as the rows would keep it, and the same with the model."""
    timetable = Timetable(parse(written.text), zone)
    options = POLICIES[policy]
    kept = {"all": None, "last five": 5, "latest": 1, "none": 0}[policy]
    grace = float(options.get("grace", 60))
    following = timetable.next_after((first - EPOCH) // MINUTE)
    found: list[datetime] = []
    now = first
    while now < last:
        now = min(now + moves(chance, short=False), last)
        micros = (now - EPOCH) // timedelta(microseconds=1)
        more = True
        while more and following is not None and following * MICROSECONDS <= micros:
            to = advance(timetable, first=following, now=micros, grace=grace, most_missed=kept)
            assert len(to.fire) <= 256 + 5
            found += [EPOCH + minute * MINUTE for minute in to.fire]
            following, more = to.next, to.more
        model.make_pass(now)
    return found


# Days, in the database -------------------------------------------------------------------------


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("zone", "start"),
    [
        ("Europe/Paris", "2026-03-28T12:00"),
        ("Europe/Paris", "2026-10-24T12:00"),
        ("America/New_York", "2028-02-28T18:00"),
        ("America/New_York", "2026-10-31T18:00"),
        ("America/Santiago", "2026-09-05T18:00"),
        ("Australia/Lord_Howe", "2026-04-04T06:00"),
        ("UTC", "2100-02-28T12:00"),
    ],
)
def test_days_of_passes_by_two_schedulers(zone: str, start: str, tick: Any) -> None:
    texts = ["*/3 * * * *", "*/7 * * * *", "30 0,1,2,23 * * *", "0 0 29 2 *", "15 12 1,29 * 0"]
    first = utc(start)
    last = first + timedelta(hours=36)
    place = ZoneInfo(zone)
    expected = fired_by_each([cron(text) for text in texts], place, first + MINUTE, last)
    models = {}
    others = list(POLICIES)[1:]
    for number, (text, minutes) in enumerate(zip(texts, expected, strict=True)):
        for policy in ("all", others[number % len(others)]):
            name = f"{policy}: {text}"
            schedule(name, text, tick, timezone=zone, **POLICIES[policy])
            models[name] = Model(policy, minutes, first)
    chance = random.Random(start)
    with FakeClock(first) as clock:
        schedulers = [_started(), _started()]
        while clock.now < last:
            clock.advance(min(moves(chance, short=True), last - clock.now))
            if chance.random() < 0.2:
                schedulers[chance.randrange(2)] = _started()
            _pass(chance.choice(schedulers))
            for model in models.values():
                model.make_pass(clock.now)
        assert all(one.run().jobs == [] for one in schedulers)
    found: dict[str, list[datetime | None]] = {name: [] for name in models}
    rows = Job.objects.order_by("id").values_list("schedule", "scheduled_for")
    for name, minute in rows:
        found[name].append(minute)
    assert found == {name: model.fired for name, model in models.items()}
    by_all = [models[f"all: {text}"].fired for text in texts]
    assert by_all == expected and len(by_all[0]) > 600
    assert not ScheduleCursor.objects.filter(next_minute__lte=last).exists()


def _started() -> Scheduler:
    cursors.activate("default", registry.all())
    return Scheduler("default")


def _pass(scheduler: Scheduler) -> None:
    while scheduler.run().more:
        pass
