"""Which minutes a cron fires, worked out in another way than the package does.

It parses nothing: a cron is a text and the sets that it was written from. And it knows no
``fold``: it walks through UTC minute by minute beside a clock on the wall, keeps what the
clock has shown, and lets a second clock run on where the first one jumps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo

from hypothesis import strategies as st

MINUTE = timedelta(minutes=1)
# A jump of a wall clock is looked for so long before the first minute that is asked for.
LEAD = timedelta(days=2)


@dataclass(frozen=True)
class Cron:
    """A cron text, and what each of its fields says, by the values it was written from."""

    text: str
    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    any_day: bool
    any_weekday: bool

    def on_date(self, year: int, month: int, day: int) -> bool:
        if month not in self.months:
            return False
        by_day = day in self.days
        by_weekday = datetime(year, month, day).isoweekday() % 7 in self.weekdays
        if self.any_day and self.any_weekday:
            return True
        if self.any_day:
            return by_weekday
        if self.any_weekday:
            return by_day
        return by_day or by_weekday

    def shows(self, wall: datetime) -> bool:
        """Tell whether the cron names what a clock on the wall shows."""
        return (
            wall.minute in self.minutes
            and wall.hour in self.hours
            and self.on_date(wall.year, wall.month, wall.day)
        )


def fired(cron: Cron, zone: tzinfo, first: datetime, last: datetime) -> list[datetime]:
    """Give the UTC minutes from ``first`` to ``last``, both included, at which a cron fires."""
    return fired_by_each([cron], zone, first, last)[0]


def fired_by_each(
    crons: Sequence[Cron], zone: tzinfo, first: datetime, last: datetime
) -> list[list[datetime]]:
    """Do as ``fired`` for several crons, in one walk."""
    found: list[set[datetime]] = [set() for _ in crons]
    some_minute = frozenset().union(*(cron.minutes for cron in crons))
    for now, wall in _shown(zone, first - LEAD, last):
        if wall.minute not in some_minute:
            continue
        for cron, minutes in zip(crons, found, strict=True):
            if cron.shows(wall):
                minutes.add(now)
    return [sorted(one for one in minutes if first <= one <= last) for minutes in found]


def _shown(zone: tzinfo, now: datetime, last: datetime) -> Iterator[tuple[datetime, datetime]]:
    """Give each local time once, with the UTC minute at which it is taken to come."""
    shown = now.astimezone(zone).replace(tzinfo=None, fold=0)
    yield now, shown
    # The furthest that the clock has shown: what lies behind it was shown before.
    furthest = shown
    while now < last:
        now += MINUTE
        showed, shown = shown, now.astimezone(zone).replace(tzinfo=None, fold=0)
        # Where it jumped, what it left out is read off a clock that ran on.
        left_out, then = showed + MINUTE, now
        while left_out < shown:
            if left_out > furthest:
                yield then, left_out
            left_out += MINUTE
            then += MINUTE
        if shown > furthest:
            furthest = shown
            yield now, shown


# Crons to choose from ----------------------------------------------------------------------------

_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_WEEKDAYS = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"]


@st.composite
def _values(draw: st.DrawFn, low: int, high: int, names: list[str]) -> tuple[str, frozenset[int]]:
    """One item of a list: a value, a range, or one with a step; and what it names."""

    def written(value: int) -> str:
        if names and draw(st.booleans()):
            name = names[value - low]
            return draw(st.sampled_from([name, name.upper(), name.capitalize()]))
        return draw(st.sampled_from([str(value), f"{value:02d}"]))

    shape = draw(st.sampled_from(["value", "range", "stepped", "every"]))
    start = draw(st.integers(low, high))
    end = draw(st.integers(start, high))
    step = draw(st.integers(1, high))
    if shape == "value":
        return written(start), frozenset({start})
    if shape == "range":
        return f"{written(start)}-{written(end)}", frozenset(range(start, end + 1))
    if shape == "stepped":
        text = f"{written(start)}-{written(end)}/{step}"
        return text, frozenset(v for v in range(start, end + 1) if (v - start) % step == 0)
    return f"*/{step}", frozenset(v for v in range(low, high + 1) if (v - low) % step == 0)


@st.composite
def _field(
    draw: st.DrawFn, low: int, high: int, names: list[str] | None = None
) -> tuple[str, frozenset[int]]:
    if draw(st.booleans()):
        return "*", frozenset(range(low, high + 1))
    items = draw(st.lists(_values(low, high, names or []), min_size=1, max_size=3))
    return ",".join(text for text, _ in items), frozenset().union(*(some for _, some in items))


@st.composite
def crons(draw: st.DrawFn) -> Cron:
    """A cron of any legal form; its date may be one that never comes."""
    minutes = draw(_field(0, 59))
    hours = draw(_field(0, 23))
    days = draw(_field(1, 31))
    months = draw(_field(1, 12, _MONTHS))
    weekdays = draw(_field(0, 6, _WEEKDAYS))
    fields = (minutes, hours, days, months, weekdays)
    return Cron(
        " ".join(text for text, _ in fields),
        *(values for _, values in fields),
        any_day=days[0] == "*",
        any_weekday=weekdays[0] == "*",
    )


def cron(text: str) -> Cron:
    """Give the cron of a plain text: values, lists, ranges and steps, no names."""
    fields = text.split()
    bounds = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 6))
    return Cron(
        text,
        *(_plain(*pair) for pair in zip(fields, bounds, strict=True)),
        any_day=fields[2] == "*",
        any_weekday=fields[4] == "*",
    )


def _plain(text: str, bounds: tuple[int, int]) -> frozenset[int]:
    low, high = bounds
    named: set[int] = set()
    for item in text.split(","):
        span, _, step = item.partition("/")
        start, _, end = (f"{low}-{high}" if span == "*" else span).partition("-")
        named |= set(range(int(start), int(end or start) + 1, int(step or 1)))
    return frozenset(named)


def utc(text: str) -> datetime:
    """Read an instant in UTC, such as 2026-03-29T01:00."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC)
