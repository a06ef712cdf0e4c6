"""From one firing minute to the next, in any time zone. Pure.

Minutes are counted in UTC from 1970. A local time is read with the offset from before a change
of the clock (Python's ``fold=0``): one that comes twice fires the first time only, and one that
is left out fires as long after the change as it would have come: 02:30 at 03:30. So each local
time fires once, and two that fall on the same minute are one occurrence.

Zones change their offset by at most a day at once, and not twice within a local day.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta, tzinfo
from functools import lru_cache

from .expression import Expression

MINUTE = timedelta(minutes=1)
DAY = 24 * 60
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
EPOCH_DAY = EPOCH.toordinal()
# Far enough inside the years 1 to 9999 that no offset leads out of them.
FIRST_DAY, LAST_DAY = date.min.toordinal() + 3, date.max.toordinal() - 3
FIRST_MINUTE, LAST_MINUTE = (FIRST_DAY - EPOCH_DAY) * DAY, (LAST_DAY - EPOCH_DAY) * DAY
# From 29 February 2096 to that of 2104 nothing rests longer.
LONGEST_REST = 8 * 366


class Timetable:
    """The minutes at which an expression fires in a time zone."""

    def __init__(self, expression: Expression, zone: tzinfo) -> None:
        self._expression = expression
        self._zone = zone
        self._times = sorted(60 * h + m for h in expression.hours for m in expression.minutes)
        # Steps stay among the same few days.
        self._minutes_of = lru_cache(maxsize=4)(self._read_day)

    def next_after(self, minute: int) -> int | None:
        """Give the first firing minute after this one; None if the calendar ends before."""
        start = self._day_of(minute) - 1
        for day in range(start, min(start + LONGEST_REST, LAST_DAY)):
            found = self._first_of(day, minute)
            if found is not None:
                # What the clock left out of this day may come after the next has begun.
                following = self._first_of(day + 1, minute)
                return found if following is None else min(found, following)
        return None

    def last_until(self, minute: int, *, since: int) -> int | None:
        """Give the last firing minute up to this one and not before ``since``.

        It is looked for from its end, so that a long gap before it costs nothing.
        """
        end = min(self._day_of(minute) + 1, LAST_DAY - 1)
        for day in range(end, max(self._day_of(since) - 1, end - LONGEST_REST) - 1, -1):
            found = self._last_of(day, minute)
            if found is not None:
                preceding = self._last_of(day - 1, minute)
                found = found if preceding is None else max(found, preceding)
                return found if found >= since else None
        return None

    def between(self, first: int, last: int) -> Iterator[int]:
        """Give the firing minutes from ``first`` to ``last``, both included."""
        minute = self.next_after(first - 1)
        while minute is not None and minute <= last:
            yield minute
            minute = self.next_after(minute)

    def _first_of(self, day: int, minute: int) -> int | None:
        """Give the day's first firing minute after this one."""
        begin, times = self._minutes_of(day)
        at = bisect_right(times, minute - begin)
        return begin + times[at] if at < len(times) else None

    def _last_of(self, day: int, minute: int) -> int | None:
        """Give the day's last firing minute up to this one."""
        begin, times = self._minutes_of(day)
        at = bisect_right(times, minute - begin)
        return begin + times[at - 1] if at else None

    def _read_day(self, day: int) -> tuple[int, Sequence[int]]:
        """Give where a local day begins, and its firing minutes from there, ascending."""
        local = date.fromordinal(day)
        # Ordinals count from a Monday, 1.
        if not self._expression.names_day(local.day, local.month, day % 7):
            return 0, ()
        begin = (day - EPOCH_DAY) * DAY
        offset = self._offset(day, 0)
        if offset == self._offset(day + 1, 0):
            return begin - offset, self._times
        return begin, sorted({time - self._offset(day, time) for time in self._times})

    def _offset(self, day: int, time: int) -> int:
        """Give the minutes that a local time is ahead of UTC, by the offset before a change."""
        local = datetime.fromordinal(day) + time * MINUTE
        offset = self._zone.utcoffset(local)
        return 0 if offset is None else offset // MINUTE

    def _day_of(self, minute: int) -> int:
        """Give the local day of a minute, as an ordinal; outside the calendar its first or last."""
        minute = min(max(minute, FIRST_MINUTE), LAST_MINUTE)
        return (EPOCH + minute * MINUTE).astimezone(self._zone).toordinal()
