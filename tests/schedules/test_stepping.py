"""Stepping from minute to minute against the oracle: gaps, folds, leap days, any zone."""

from __future__ import annotations

import time
import tracemalloc
from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from django_durable_jobs import InvalidSchedule
from django_durable_jobs.schedules.expression import parse
from django_durable_jobs.schedules.stepping import EPOCH, MINUTE, Timetable
from tests._marks import no_database

from .oracle import Cron, cron, crons, fired, utc

pytestmark = no_database

# Zone, around its changes: an hour forward and back; at midnight; by half an hour; past midnight
# in the past; a whole day left out; two rules of one year.
CHANGES = [
    ("Europe/Paris", "2026-03-29T01:00"),
    ("Europe/Paris", "2026-10-25T01:00"),
    ("America/New_York", "2026-03-08T07:00"),
    ("America/New_York", "2026-11-01T06:00"),
    ("America/Santiago", "2026-04-05T03:00"),
    ("America/Santiago", "2026-09-06T04:00"),
    ("Australia/Lord_Howe", "2026-04-04T15:00"),
    ("Australia/Lord_Howe", "2026-10-03T15:30"),
    ("America/St_Johns", "2010-11-07T02:31"),
    ("America/St_Johns", "2010-03-14T03:31"),
    ("Pacific/Apia", "2011-12-30T10:00"),
    ("Africa/Casablanca", "2026-02-15T02:00"),
]
AT = {
    "Europe/Paris": "0,30 1-3 * * *",
    "America/New_York": "0,30 1-3 * * *",
    "America/Santiago": "0,30 22,23,0,1 * * *",
    "Australia/Lord_Howe": "0,15,45 1-2 * * *",
    "America/St_Johns": "0,1,45 23,0,1 * * *",
    "Pacific/Apia": "0 * * * *",
    "Africa/Casablanca": "0,30 1-4 * * *",
}


def table(text: str, zone: tzinfo) -> Timetable:
    return Timetable(parse(text), zone)


def minute(instant: datetime) -> int:
    return (instant - EPOCH) // MINUTE


def stepped(text: str, zone: tzinfo, first: datetime, last: datetime) -> list[datetime]:
    found = table(text, zone).between(minute(first), minute(last))
    return [EPOCH + one * MINUTE for one in found]


# The rules as they are documented -------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "zone", "date", "expected"),
    [
        # Left out: as long after the change as it would have come.
        ("30 2 * * *", "Europe/Paris", "2026-03-29", ["01:30"]),
        ("0,30 2,3 * * *", "Europe/Paris", "2026-03-29", ["01:00", "01:30"]),
        ("30 2 * * *", "America/New_York", "2026-03-08", ["07:30"]),
        ("15 0 * * *", "America/Santiago", "2026-09-06", ["04:15"]),
        ("0,15 2 * * *", "Australia/Lord_Howe", "2026-10-04", ["15:30", "15:45"]),
        # Twice: the first time.
        ("30 2 * * *", "Europe/Paris", "2026-10-25", ["00:30"]),
        ("30 1 * * *", "America/New_York", "2026-11-01", ["05:30"]),
        ("45 1 * * *", "Australia/Lord_Howe", "2026-04-05", ["14:45"]),
        # An interval rests while the clock repeats its hour.
        (
            "*/30 1-3 * * *",
            "Europe/Paris",
            "2026-10-25",
            ["23:00", "23:30", "00:00", "00:30", "02:00", "02:30"],
        ),
    ],
)
def test_gap_and_fold(text: str, zone: str, date: str, expected: list[str]) -> None:
    place = ZoneInfo(zone)
    midnight = datetime.fromisoformat(date)
    first, last = (
        one.replace(tzinfo=place).astimezone(UTC)
        for one in (midnight, midnight + timedelta(days=1))
    )
    assert [f"{one:%H:%M}" for one in stepped(text, place, first, last - MINUTE)] == expected


def test_a_repeated_time_at_midnight_belongs_to_the_day_before() -> None:
    """Santiago, 2026-04-04: after 23:59 comes 23:00 again."""
    found = stepped(
        "30 23 * * *",
        ZoneInfo("America/Santiago"),
        utc("2026-04-04T00:00"),
        utc("2026-04-07T00:00"),
    )
    assert found == [utc("2026-04-04T02:30"), utc("2026-04-05T02:30"), utc("2026-04-06T03:30")]


def test_leap_days() -> None:
    found = stepped("0 0 29 2 *", ZoneInfo("UTC"), utc("2026-01-01"), utc("2110-01-01"))
    years = [one.year for one in found]
    assert years == [year for year in range(2028, 2110, 4) if year != 2100]
    assert all((one.month, one.day) == (2, 29) for one in found)
    # 2100 has none, and the month goes on without it.
    daily = stepped("0 12 * * *", ZoneInfo("UTC"), utc("2100-02-27"), utc("2100-03-03"))
    assert [one.day for one in daily] == [27, 28, 1, 2]


# Against the oracle ---------------------------------------------------------------------------


@pytest.mark.parametrize(("zone", "change"), CHANGES)
@pytest.mark.parametrize("text", ["interval", "around", "*/7 * * * *", "30 2 1,8 * 0"])
def test_around_each_change_of_a_clock(zone: str, change: str, text: str) -> None:
    written = cron({"interval": "*/15 * * * *", "around": AT[zone]}.get(text, text))
    at = utc(change)
    first, last = at - timedelta(days=1.5), at + timedelta(days=2.5)
    place = ZoneInfo(zone)
    offsets = {(at + delta).astimezone(place).utcoffset() for delta in (-MINUTE, MINUTE)}
    assert len(offsets) == 2, "the clock does change there"
    expected = fired(written, place, first, last)
    assert stepped(written.text, place, first, last) == expected
    assert expected


@pytest.mark.parametrize("zone", ["Europe/Paris", "America/Santiago", "Australia/Lord_Howe"])
def test_whole_years_of_hours(zone: str) -> None:
    """Coarser than by minutes: at :00 and :30 nothing is lost, and nothing comes twice."""
    place = ZoneInfo(zone)
    first, last = utc("2026-01-01"), utc("2027-01-01")
    found = stepped("0,30 * * * *", place, first, last)
    assert len(found) == len(set(found)) and found == sorted(found)
    shown = {one.astimezone(place).replace(tzinfo=None) for one in found}
    assert len(shown) == len(found), "each local time once"
    halves = int((last - first) / timedelta(minutes=30))
    repeated = sum(
        one.astimezone(place).fold for one in (first + n * 30 * MINUTE for n in range(halves + 1))
    )
    assert len(found) == halves + 1 - repeated


class Jump(tzinfo):
    """A zone that changes its offset once, by any number of minutes, at any time of the day."""

    def __init__(self, at: str, before: int, after: int) -> None:
        self._at = datetime.fromisoformat(at)
        self._before, self._after = before * MINUTE, after * MINUTE

    def utcoffset(self, wall: datetime | None) -> timedelta:
        assert wall is not None
        bare = wall.replace(tzinfo=None)
        by_before, by_after = bare - self._before < self._at, bare - self._after < self._at
        is_before = (by_before and by_after) if wall.fold else (by_before or by_after)
        return self._before if is_before else self._after

    def dst(self, wall: datetime | None) -> None:
        return None

    def tzname(self, wall: datetime | None) -> str:
        return "Jump"

    def fromutc(self, now: datetime) -> datetime:
        is_before = now.replace(tzinfo=None) < self._at
        return now + (self._before if is_before else self._after)


@pytest.mark.parametrize(
    ("text", "jump"),
    [
        # 23:45 to 00:15: what is left out of a day comes after the next has begun.
        ("16,50 23,0 * * *", Jump("2026-03-01T23:45", 0, 30)),
        ("14,16,46 * * * *", Jump("2026-03-01T23:45", 0, 30)),
        # 12:00 to 11:59 of the next day, and back.
        ("0 */5 1 3 *", Jump("2026-03-01T12:00", -720, 719)),
        ("7 */5 * * 1", Jump("2026-03-02T00:00", 719, -720)),
        # 00:10 to 23:40 of the day before.
        ("0,5,50 23,0 * * *", Jump("2026-03-02T00:10", 0, -30)),
        ("1 0 2 * *", Jump("2026-03-02T00:10", 0, -30)),
        ("* * * * *", Jump("2026-03-01T03:00", 600, 345)),
    ],
)
def test_changes_across_midnight(text: str, jump: Jump) -> None:
    first, last = utc("2026-03-01"), utc("2026-03-04")
    expected = fired(cron(text), jump, first, last)
    assert stepped(text, jump, first, last) == expected
    timetable = table(text, jump)
    marks = [minute(one) for one in expected]
    for asked in range(minute(first), minute(last), 7):
        later = [one for one in marks if one > asked]
        earlier = [one for one in marks if one <= asked]
        if later:
            assert timetable.next_after(asked) == later[0]
        for since in (minute(first), max(minute(first), asked - 60)):
            wanted = [one for one in earlier if one >= since]
            assert timetable.last_until(asked, since=since) == (wanted[-1] if wanted else None)


ZONES = [zone for zone, _ in CHANGES] + ["UTC", "Asia/Kathmandu", "Pacific/Kiritimati"]


@given(crons(), st.sampled_from(CHANGES), st.integers(-2880, 2880), st.integers(0, 1440))
@settings(max_examples=40)
@example(cron("0-59/7 0-23 * * *"), ("Pacific/Apia", "2011-12-30T10:00"), -1440, 1440)
def test_any_cron_near_any_change(
    written: Cron, where: tuple[str, str], shift: int, length: int
) -> None:
    zone, at = ZoneInfo(where[0]), utc(where[1])
    first = at + shift * MINUTE
    last = first + length * MINUTE
    try:
        timetable = table(written.text, zone)
    except InvalidSchedule:
        assume(False)
    expected = fired(written, zone, first, last)
    assert stepped(written.text, zone, first, last) == expected
    # Backwards from the end it is the same.
    found = timetable.last_until(minute(last), since=minute(first))
    assert found == (minute(expected[-1]) if expected else None)


@given(crons(), st.sampled_from(ZONES), st.integers(-(10**6), 10**8))
@settings(max_examples=80)
def test_both_directions_agree_far_away(written: Cron, zone: str, start: int) -> None:
    """Whatever rests in between: months, or years until a leap day."""
    try:
        timetable = table(written.text, ZoneInfo(zone))
    except InvalidSchedule:
        assume(False)
    following = timetable.next_after(start)
    assert following is not None and following > start
    assert timetable.last_until(following, since=start) == following
    assert timetable.last_until(following - 1, since=start + 1) is None
    before = timetable.last_until(start, since=start - 10**7)
    if before is not None:
        assert timetable.next_after(before) == following
        assert timetable.next_after(before - 1) == before


# Bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["* * * * *", "0 0 29 2 *", "59 23 31 12 *", "0 0 1 1 0"])
@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati", "America/Adak"])
def test_the_ends_of_the_calendar_are_no_error(text: str, zone: str) -> None:
    timetable = table(text, ZoneInfo(zone))
    assert timetable.next_after(10**15) is None
    assert (timetable.next_after(-(10**15)) or 0) < -1_000_000_000
    last = timetable.last_until(10**15, since=-(10**15))
    assert last is not None and (EPOCH + last * MINUTE).year in range(9992, 10_000)
    assert timetable.next_after(last) is None
    assert timetable.last_until(-(10**15), since=-(10**15)) is None


@given(crons(), st.sampled_from(ZONES), st.integers(-(10**9), 4 * 10**9))
@settings(max_examples=50)
def test_a_step_is_bounded_in_time_and_memory(written: Cron, zone: str, start: int) -> None:
    try:
        timetable = table(written.text, ZoneInfo(zone))
    except InvalidSchedule:
        assume(False)
    began = time.process_time()
    tracemalloc.start()
    timetable.next_after(start)
    timetable.last_until(start, since=-(10**15))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.process_time() - began < 1
    assert peak < 2_000_000
