"""One scheduling pass: each due schedule in a transaction of its own, none for the others' sake."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from django.db import DatabaseError, InterfaceError, connections

from ..dialects import dialect_for
from ..doors import insert_new
from ..exceptions import DurableJobsError, LockTimeout
from ..instants import SECOND, from_microseconds
from ..models import Job
from ..submission import JobSubmission, new_job_id
from ..words import counted
from . import cursors
from .catch_up import MINUTE, Advance, advance, pass_over
from .cursors import Due, Locked
from .declaration import Schedule, registry

logger = logging.getLogger("django_durable_jobs")

# A schedule that failed is left alone for so long at most.
LONGEST_REST_SECONDS = 60.0
# So many in a row that the database could not serve: it is away, and the pass ends.
AWAY = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What a pass has fired, whether more is due at once, and how long the minute still goes."""

    jobs: list[Job]
    more: bool
    seconds_left: float


@dataclass(slots=True)
class _Trouble:
    """A schedule that could not fire."""

    failures: int = 0
    rests_until: float = 0.0


def fire(alias: str, declared: Schedule) -> tuple[list[Job], bool] | None:
    """Insert the occurrences of a due schedule and advance its cursor, in one transaction.

    Gives the new jobs, and whether more is due; None where another transaction holds the
    cursor or has advanced it. An occurrence that is there already is passed over (CONTRACT
    5.2), and so is every minute of a paused schedule.
    """

    def work() -> tuple[list[Job], bool] | None:
        with dialect.own(alias):
            cursor = cursors.lock_due(alias, declared)
            if cursor is None:
                return None
            to = _advance(declared, cursor)
            jobs = insert_new(alias, _occurrences(declared, to.fire))
            cursors.move(alias, cursor, to)
        return jobs, to.more

    dialect = dialect_for(alias)
    return dialect.retried(work)


def _advance(declared: Schedule, cursor: Locked) -> Advance:
    if cursor.paused:
        return pass_over(declared.timetable, now=cursor.now)
    return advance(
        declared.timetable,
        first=cursor.next,
        now=cursor.now,
        grace=declared.grace,
        most_missed=declared.most_missed,
    )


def _occurrences(declared: Schedule, minutes: tuple[int, ...]) -> list[JobSubmission]:
    if not minutes:
        return []
    made = declared.submission()
    return [
        replace(made, job_id=new_job_id(), scheduled_for=from_microseconds(minute * MINUTE))
        for minute in minutes
    ]


class Scheduler:
    """Makes scheduling passes; remembers which schedules are in trouble or another's.

    ``failures`` counts what could not fire. ``is_stopping`` ends a pass between two schedules.
    """

    def __init__(self, alias: str, *, is_stopping: Callable[[], bool] = lambda: False) -> None:
        self.failures = 0
        self._alias = alias
        self._is_stopping = is_stopping
        self._troubles: dict[str, _Trouble] = {}
        self._foreign: set[tuple[str, str]] = set()

    def run(self) -> Pass:
        """Fire everything that is due, once over; with nothing due it is one query.

        A schedule that cannot fire is put aside and told once; the others are fired. Raises
        the database's error only where it serves none of them.
        """
        now, due = cursors.due(self._alias)
        jobs: list[Job] = []
        more = False
        unserved = 0
        for declared in filter(None, map(self._to_fire, due)):
            if self._is_stopping():
                break
            try:
                fired = fire(self._alias, declared)
            except Exception as error:
                unserved = unserved + 1 if self._put_aside(declared, error) else 0
                if unserved == AWAY:
                    raise
                continue
            unserved = 0
            if fired is not None:
                self._is_well(declared, len(fired[0]))
                jobs += fired[0]
                more = more or fired[1]
        return Pass(jobs=jobs, more=more, seconds_left=(MINUTE - now % MINUTE) / SECOND)

    def _to_fire(self, due: Due) -> Schedule | None:
        """Give the schedule if it is ours and not put aside."""
        declared = registry.get(due.name)
        if declared is None:
            return None
        if declared.fingerprint != due.fingerprint:
            self._leave_alone(declared, due.fingerprint)
            return None
        trouble = self._troubles.get(due.name)
        return None if trouble and time.monotonic() < trouble.rests_until else declared

    def _leave_alone(self, declared: Schedule, fingerprint: str) -> None:
        """Another version has adopted another cron: say so once (CONTRACT 5.3)."""
        if (declared.name, fingerprint) not in self._foreign:
            self._foreign.add((declared.name, fingerprint))
            logger.warning(
                "schedule %s runs with another cron now, adopted by other code; it is left to that",
                declared.name,
            )

    def _put_aside(self, declared: Schedule, error: Exception) -> bool:
        """Let a schedule rest, longer each time; tell whether the database is to blame."""
        self.failures += 1
        is_new = declared.name not in self._troubles
        trouble = self._troubles.setdefault(declared.name, _Trouble())
        trouble.failures += 1
        rest = min(LONGEST_REST_SECONDS, 2.0 ** min(trouble.failures - 1, 10))
        trouble.rests_until = time.monotonic() + rest
        self._clean()
        if dialect_for(self._alias).may_pass(error):
            if is_new:
                logger.warning("schedule %s waits: %s", declared.name, type(error).__name__)
            return True
        if is_new and self._mark(declared, error):
            logger.error("schedule %s cannot fire", declared.name, exc_info=error)
        return False

    def _mark(self, declared: Schedule, error: Exception) -> bool:
        """Mark it; False if it is marked so already, and has been told by who did it."""
        # Our own errors name fields and types; a database's may name values.
        text = f": {error}" if isinstance(error, DurableJobsError) else ""
        try:
            return cursors.mark(self._alias, declared, f"{type(error).__name__}{text}"[:1000])
        except (DatabaseError, InterfaceError, LockTimeout):
            logger.warning("schedule %s cannot be marked", declared.name, exc_info=True)
            self._clean()
            return True

    def _is_well(self, declared: Schedule, jobs: int) -> None:
        trouble = self._troubles.pop(declared.name, None)
        if trouble:
            logger.info(
                "schedule %s fires again, after %d failures", declared.name, trouble.failures
            )
        if jobs:
            logger.debug("schedule %s: %s", declared.name, counted(jobs, "job"))

    def _clean(self) -> None:
        """Close a broken connection, so that the next schedule gets a new one."""
        connection = connections[self._alias]
        # A TestCase's wrapper transaction keeps its connection.
        if not connection.in_atomic_block:
            connection.close_if_unusable_or_obsolete()
