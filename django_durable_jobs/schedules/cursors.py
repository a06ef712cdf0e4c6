"""The rows of schedules: what is due, locked, advanced; first activation and adoption (5.2, 5.3).

A row is written only under its lock or where it still says what was read, and only by code
whose cron has the stored fingerprint: two versions never rewrite each other's cursor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import Q

from ..dialects import dialect_for
from ..dialects.base import CURSORS
from ..exceptions import InvalidSchedule
from ..instants import from_microseconds, to_microseconds
from ..models import ScheduleCursor
from .catch_up import MINUTE, Advance
from .declaration import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A schedule whose next minute has begun, as it was read without a lock."""

    name: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Locked:
    """A cursor that this transaction has locked; minutes are counted from 1970."""

    id: int
    next: int
    paused: bool
    now: int


def due(alias: str) -> tuple[int, list[Due]]:
    """Read the clock (microseconds) and what is due, the oldest first, in one indexed query."""
    sql = (
        "SELECT t.now, c.name, c.fingerprint"
        f" FROM (SELECT {dialect_for(alias).now()} AS now) AS t"
        f" LEFT JOIN {CURSORS} c ON c.next_minute <= t.now"
        " ORDER BY c.next_minute, c.id"
    )
    rows = dialect_for(alias).fetch(alias, sql)
    found = [Due(name=row[1], fingerprint=row[2]) for row in rows if row[1] is not None]
    return int(rows[0][0]), found


def lock_due(alias: str, declared: Schedule) -> Locked | None:
    """Lock the cursor and read the clock; None if it is held, not due any more, or another's.

    Must run inside ``own``.
    """
    dialect = dialect_for(alias)
    lock = f"{dialect.for_update()} SKIP LOCKED" if dialect.for_update() else ""
    rows = dialect.fetch(
        alias,
        "WITH locked AS MATERIALIZED (SELECT c.id, c.next_minute, c.paused"
        f" FROM {CURSORS} c WHERE c.name = %s AND c.fingerprint = %s{lock})"
        f" SELECT l.*, {dialect.now()} FROM locked l",
        [declared.name, declared.fingerprint],
    )
    for key, following, paused, now in rows:
        if following is not None and following <= now:
            return Locked(id=key, next=following // MINUTE, paused=bool(paused), now=now)
    return None


def move(alias: str, cursor: Locked, to: Advance) -> None:
    """Write where the locked cursor stands now; what was wrong with it is over."""
    ScheduleCursor.objects.using(alias).filter(pk=cursor.id).update(
        last_minute=to.last * MINUTE,
        next_minute=None if to.next is None else to.next * MINUTE,
        problem=None,
        updated_at=cursor.now,
    )


def activate(alias: str, schedules: Iterable[Schedule]) -> None:
    """Make the cursors that are missing, and work out anew what fires next (5.2).

    A new one takes the current minute as processed. Zone rules may have changed since the
    others were advanced.
    """
    rows = {row.name: row for row in ScheduleCursor.objects.using(alias).all()}
    missing = []
    for declared in schedules:
        row = rows.get(declared.name)
        if row is None:
            missing.append(declared)
        elif row.fingerprint == declared.fingerprint:
            _recompute(alias, declared, row)
    if missing:
        dialect_for(alias).joined(alias, lambda: insert(alias, missing))


def insert(alias: str, missing: Sequence[Schedule]) -> None:
    """Make cursors that have processed the current minute; one that is there already stays."""
    now = dialect_for(alias).instant(alias)
    ScheduleCursor.objects.using(alias).bulk_create(
        (
            ScheduleCursor(
                name=declared.name,
                fingerprint=declared.fingerprint,
                updated_at=from_microseconds(now),
                **standing_at(declared, now // MINUTE),
            )
            for declared in missing
        ),
        ignore_conflicts=True,
    )


def _recompute(alias: str, declared: Schedule, row: ScheduleCursor) -> None:
    following = standing_at(declared, to_microseconds(row.last_minute) // MINUTE)["next_minute"]
    if following == row.next_minute:
        return
    unchanged = {"fingerprint": row.fingerprint, "last_minute": row.last_minute}
    with dialect_for(alias).own(alias):
        rows = ScheduleCursor.objects.using(alias).filter(pk=row.pk, **unchanged)
        rows.update(next_minute=following)


def standing_at(declared: Schedule, minute: int) -> dict[str, Any]:
    """Give the columns of a cursor that has processed this minute and no later one."""
    following = declared.timetable.next_after(minute)
    return {
        "last_minute": from_microseconds(minute * MINUTE),
        "next_minute": None if following is None else from_microseconds(following * MINUTE),
    }


def mark(alias: str, declared: Schedule, problem: str) -> bool:
    """Write down why a schedule could not fire; False if that stands there already.

    Its next success takes it away.
    """
    with dialect_for(alias).own(alias):
        rows = ScheduleCursor.objects.using(alias).filter(name=declared.name)
        new = rows.filter(Q(problem=None) | ~Q(problem=problem), fingerprint=declared.fingerprint)
        return bool(new.update(problem=problem))


def require_adopted(alias: str, schedules: Iterable[Schedule]) -> None:
    """Raise ``InvalidSchedule`` where a stored cursor belongs to another cron (5.3)."""
    stored = dict(ScheduleCursor.objects.using(alias).values_list("name", "fingerprint"))
    for declared in schedules:
        if stored.get(declared.name, declared.fingerprint) != declared.fingerprint:
            raise InvalidSchedule(
                f"Schedule {declared.name!r:.120} has run with another cron or timezone than"
                f' "{declared.cron}" in {declared.timezone}. To go on with this one from the'
                f" current minute: {adoption(alias, declared.name)}"
            )


def adoption(alias: str, name: str) -> str:
    """Give the command that adopts a schedule."""
    from shlex import quote

    database = "" if alias == "default" else f" --database {quote(alias)}"
    return f"manage.py jobs adopt-schedule {quote(name)}{database}"
