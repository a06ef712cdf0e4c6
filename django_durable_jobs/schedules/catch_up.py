"""What one pass fires of a schedule that is due, and where its cursor stands then. Pure (5.4)."""

from __future__ import annotations

from dataclasses import dataclass

from ..instants import SECOND
from .stepping import Timetable

MINUTE = 60 * SECOND
# So many minutes are scanned in one pass; the rest follow in later ones (CONTRACT 5.2).
SCANNED = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """The minutes to fire, ascending, then the last one processed and the next one to fire."""

    fire: tuple[int, ...]
    last: int
    next: int | None
    # Whether more is due already.
    more: bool


def advance(
    timetable: Timetable, *, first: int, now: int, grace: float, most_missed: int | None
) -> Advance:
    """Advance a cursor whose next firing minute ``first`` has begun at ``now`` (microseconds).

    Of what was missed by more than ``grace`` seconds, the last ``most_missed`` minutes fire and
    the rest is not visited; None: each of them fires, so many minutes in a pass.
    """
    current = now // MINUTE
    fire: list[int] = []
    start: int | None = first
    if most_missed is not None:
        fresh = max(first, _first_not_missed(now, grace))
        fire = _last_missed(timetable, first, fresh - 1, most_missed)
        start = timetable.next_after(fresh - 1)
    last = current if start is None else min(current, start + SCANNED - 1)
    if start is not None:
        fire += timetable.between(start, last)
    following = timetable.next_after(last)
    more = following is not None and following <= current
    return Advance(fire=tuple(fire), last=last, next=following, more=more)


def pass_over(timetable: Timetable, *, now: int) -> Advance:
    """Advance a paused cursor: its minutes pass, and none of them fires."""
    last = now // MINUTE
    return Advance(fire=(), last=last, next=timetable.next_after(last), more=False)


def _first_not_missed(now: int, grace: float) -> int:
    """Give the first minute that began not more than the grace ago."""
    return -((round(grace * SECOND) - now) // MINUTE)


def _last_missed(timetable: Timetable, first: int, last: int, count: int) -> list[int]:
    """Give the last ``count`` firing minutes of a gap, ascending, looked for from its end."""
    found: list[int] = []
    minute: int | None = last
    while len(found) < count:
        minute = timetable.last_until(last, since=first)
        if minute is None:
            break
        found.append(minute)
        last = minute - 1
    return found[::-1]
