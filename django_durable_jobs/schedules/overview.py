"""What is to be said of the schedules: their last and next times, their lag, what is wrong (6)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from ..dialects import dialect_for
from ..dialects.base import JOBS
from ..instants import SECOND, from_microseconds, to_microseconds
from ..models import ScheduleCursor
from .catch_up import MINUTE
from .declaration import Schedule, registry

TIMES = 5
# A compound SELECT has 500 terms at most on SQLite.
NAMES_AT_ONCE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """One schedule: ``declared`` by this code, its ``cursor`` in the database, or both."""

    name: str
    declared: Schedule | None
    cursor: ScheduleCursor | None
    # Of the newest occurrences that are kept, ascending.
    last_times: tuple[datetime, ...]
    # Empty while it is paused or not ours.
    next_times: tuple[datetime, ...]
    # Seconds since the minute that should have fired.
    lag: float

    @property
    def runs_another_cron(self) -> bool:
        """Whether the stored cursor belongs to another cron than this code's."""
        if self.declared is None or self.cursor is None:
            return False
        return self.cursor.fingerprint != self.declared.fingerprint

    @property
    def is_paused(self) -> bool:
        return self.cursor is not None and self.cursor.paused


def overview(alias: str, cursors: Iterable[ScheduleCursor] | None = None) -> list[Overview]:
    """Give the schedules by name: those of the given rows, else all of code and database."""
    declared = {one.name: one for one in registry.all()}
    if cursors is None:
        rows = {row.name: row for row in ScheduleCursor.objects.using(alias).all()}
        names = sorted(declared.keys() | rows.keys())
    else:
        rows = {row.name: row for row in cursors}
        names = sorted(rows)
    now = dialect_for(alias).instant(alias)
    last = last_times(alias, names)
    return [
        _one(name, declared.get(name), rows.get(name), last.get(name, ()), now) for name in names
    ]


def _one(
    name: str,
    declared: Schedule | None,
    cursor: ScheduleCursor | None,
    last: Sequence[datetime],
    now: int,
) -> Overview:
    made = Overview(
        name=name,
        declared=declared,
        cursor=cursor,
        last_times=tuple(last),
        next_times=(),
        lag=_lag(cursor, now),
    )
    if declared is None or made.is_paused or made.runs_another_cron:
        return made
    after = now if cursor is None else max(now, to_microseconds(cursor.last_minute))
    return replace(made, next_times=next_times(declared, after))


def _lag(cursor: ScheduleCursor | None, now: int) -> float:
    if cursor is None or cursor.paused or cursor.next_minute is None:
        return 0.0
    return max(0, now - to_microseconds(cursor.next_minute)) / SECOND


def next_times(declared: Schedule, after: int) -> tuple[datetime, ...]:
    """Give the next minutes at which a schedule fires after an instant in microseconds."""
    found: list[datetime] = []
    minute = declared.timetable.next_after(after // MINUTE)
    while minute is not None and len(found) < TIMES:
        found.append(from_microseconds(minute * MINUTE))
        minute = declared.timetable.next_after(minute)
    return tuple(found)


def last_times(alias: str, names: Collection[str]) -> dict[str, list[datetime]]:
    """Give the newest occurrences of each schedule, ascending, by one descent each."""
    found: dict[str, list[datetime]] = {}
    listed = list(names)
    for first in range(0, len(listed), NAMES_AT_ONCE):
        some = listed[first : first + NAMES_AT_ONCE]
        newest = (
            f"SELECT * FROM (SELECT j.schedule, j.scheduled_for FROM {JOBS} j"
            " WHERE j.schedule = %s AND j.scheduled_for IS NOT NULL"
            f" ORDER BY j.scheduled_for DESC LIMIT {TIMES}) AS newest"
        )
        sql = " UNION ALL ".join([newest] * len(some))
        for name, minute in dialect_for(alias).fetch(alias, f"{sql} ORDER BY scheduled_for", some):
            found.setdefault(name, []).append(from_microseconds(minute))
    return found
