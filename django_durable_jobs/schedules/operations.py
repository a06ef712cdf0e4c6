"""An operator's moves: adopt, pause, resume, run now, forget. They join an open transaction.

Each locks the cursor first and reads the clock after; ``InvalidSchedule`` says why not.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from django.db import connections

from ..dialects import dialect_for
from ..dialects.base import CURSORS
from ..exceptions import InvalidSchedule
from ..instants import to_microseconds
from ..models import Job, ScheduleCursor
from ..submission import new_job_id
from ..transitions.operators import UNCHANGED
from . import cursors
from .catch_up import MINUTE
from .declaration import Schedule, registry

T = TypeVar("T")
ADOPTED, PAUSED, RESUMED, FORGOTTEN = "adopted", "paused", "resumed", "forgotten"
RUN_NOW = "run now"


def adopt(alias: str, name: str) -> str:
    """Let this code's cron go on from the current minute; nothing is replayed (CONTRACT 5.3).

    ``"adopted"``, or ``"unchanged"`` where the cron is the stored one.
    """
    declared = _declared(name)

    def work(cursor: ScheduleCursor, now: int) -> str:
        if cursor.fingerprint == declared.fingerprint:
            return UNCHANGED
        _write(alias, cursor, declared, now, fingerprint=declared.fingerprint, problem=None)
        return ADOPTED

    return _locked(alias, name, work)


def pause(alias: str, name: str) -> str:
    """Fire nothing until it is resumed: ``"paused"``, or ``"unchanged"``."""

    def work(cursor: ScheduleCursor, now: int) -> str:
        if cursor.paused:
            return UNCHANGED
        _update(alias, cursor, now, paused=True)
        return PAUSED

    return _locked(alias, name, work)


def resume(alias: str, name: str) -> str:
    """Go on from the current minute, without what the pause has passed over.

    ``"resumed"``, or ``"unchanged"``. Refused to code whose cron is not the stored one.
    """

    def work(cursor: ScheduleCursor, now: int) -> str:
        if not cursor.paused:
            return UNCHANGED
        declared = _declared(name)
        if cursor.fingerprint != declared.fingerprint:
            raise InvalidSchedule(
                f"Schedule {name!r:.120} runs with another cron than this code's. To resume it"
                f" with this one, first {cursors.adoption(alias, name)}"
            )
        _write(alias, cursor, declared, now, paused=False)
        return RESUMED

    return _locked(alias, name, work)


def run_now(alias: str, name: str) -> Job:
    """Make one job of the schedule, apart from its minutes (``scheduled_for`` is None)."""
    submission = replace(_declared(name).submission(), job_id=new_job_id())
    job: Job = Job.objects.enqueue(submission, using=alias)
    return job


def forget(alias: str, name: str) -> str:
    """Remove the cursor of a schedule that this code does not declare any more.

    Its jobs stay as they are. ``InvalidSchedule`` while it is declared here.
    """
    if registry.get(name) is not None:
        raise InvalidSchedule(
            f"Schedule {name!r:.120} is declared by this code: remove the declaration first, or"
            " pause it."
        )

    def work(cursor: ScheduleCursor, now: int) -> str:
        cursor.delete()
        return FORGOTTEN

    return _locked(alias, name, work)


def _declared(name: str) -> Schedule:
    declared = registry.get(name)
    if declared is None:
        raise _unknown(name, [one.name for one in registry.all()], "declared by this code")
    return declared


def _unknown(name: str, known: list[str], where: str) -> InvalidSchedule:
    close = difflib.get_close_matches(name[:200], known, n=3)
    hint = f" Did you mean {', '.join(close)}?" if close else ""
    return InvalidSchedule(f"No schedule named {name!r:.120} is {where}.{hint}")


def _locked(alias: str, name: str, work: Callable[[ScheduleCursor, int], T]) -> T:
    """Run work with the cursor locked, in the open transaction or in one of our own."""
    dialect = dialect_for(alias)

    def locked() -> T:
        cursor = _lock(alias, name)
        declared = registry.get(name)
        if cursor is None and declared is not None:
            # No worker has seen it yet.
            cursors.insert(alias, [declared])
            cursor = _lock(alias, name)
        if cursor is None:
            stored = ScheduleCursor.objects.using(alias).values_list("name", flat=True)
            raise _unknown(name, list(stored), "known to the database")
        return work(cursor, dialect.instant(alias))

    return dialect.joined(alias, locked)


def _lock(alias: str, name: str) -> ScheduleCursor | None:
    lock = dialect_for(alias).for_update()
    with connections[alias].cursor() as cursor:
        if lock:
            cursor.execute(f"SELECT id FROM {CURSORS} WHERE name = %s{lock}", [name])
        else:
            # One writer: a no-op update takes the lock of the whole database.
            cursor.execute(f"UPDATE {CURSORS} SET name = name WHERE name = %s", [name])
    return ScheduleCursor.objects.using(alias).filter(name=name).first()


def _write(
    alias: str, cursor: ScheduleCursor, declared: Schedule, now: int, **columns: object
) -> None:
    """Take the current minute as processed, unless that would move the cursor back."""
    minute = max(now, to_microseconds(cursor.last_minute)) // MINUTE
    _update(alias, cursor, now, **cursors.standing_at(declared, minute), **columns)


def _update(alias: str, cursor: ScheduleCursor, now: int, **columns: object) -> None:
    rows = ScheduleCursor.objects.using(alias).filter(pk=cursor.pk)
    rows.update(updated_at=now, **columns)
