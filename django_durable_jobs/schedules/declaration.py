"""``schedule(...)``: what is declared, judged at once, and the registry of it (CONTRACT 5.1).

Declaring needs neither settings nor loaded apps: what only they can judge (the handler, its
payload, queue, priority) is judged by the system checks and by the start of a worker, or at
once where the project is up already.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
import zoneinfo
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

from django.apps import apps

from .. import conf
from ..clock import host_now
from ..exceptions import DurableJobsError, InvalidSchedule, InvalidSubmission
from ..instants import from_microseconds
from ..payloads import check_text
from ..retry import to_seconds
from ..submission import JobSubmission
from .expression import Expression, parse
from .stepping import Timetable

ALL, LATEST, NONE = "all", "latest", "none"
CATCH_UP = (ALL, LATEST, NONE)
CATCH_UP_LIMIT_MAX = 256


def schedule(
    name: str,
    cron: str,
    handler: Any,
    payload: Any = None,
    *,
    timezone: str = "UTC",
    catch_up: str = ALL,
    grace: float | timedelta = 60,
    catch_up_limit: int | None = None,
    queue: str | None = None,
    priority: int | None = None,
    max_attempts: int | None = None,
    scope: str = "",
    description: str = "",
) -> Schedule:
    """Declare that a job is made at each minute that ``cron`` names in ``timezone``.

    ``handler`` is what ``JobSubmission.create`` takes, and so are ``queue``, ``priority``,
    ``max_attempts`` and ``scope``. A minute that is come to more than ``grace`` (seconds or a
    timedelta) after it began is missed: of those ``catch_up`` fires ``"all"`` (with
    ``catch_up_limit`` the last so many), the ``"latest"``, or ``"none"``. The payload is
    copied. Raises ``InvalidSchedule``, which names what to write (CONTRACT 5.1, 5.4).
    """
    frame = sys._getframe(1)
    try:
        declared = Schedule(
            name=check_text("name", name, 1, 200),
            cron=cron,
            expression=parse(cron),
            handler=handler,
            payload=_copied(payload),
            timezone=timezone,
            zone=time_zone(timezone),
            most_missed=_most_missed(catch_up, catch_up_limit),
            grace=_grace(grace),
            options={
                "queue": queue,
                "priority": priority,
                "max_attempts": max_attempts,
                "scope": scope,
            },
            description=check_text("description", description, 0, 1000),
            place=f"{frame.f_globals.get('__name__')}:{frame.f_lineno}",
        )
    except (InvalidSchedule, InvalidSubmission) as error:
        raise InvalidSchedule(f"Schedule {name!r:.120}: {error}") from error
    if apps.ready and not conf.problems():
        for problem in declared.problems():
            raise InvalidSchedule(problem)
    registry.add(declared)
    return declared


def unschedule(name: str) -> None:
    """Take a schedule back, as a test does; one that is not declared is no error."""
    registry.remove(name)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """A declared schedule. Immutable; made by ``schedule()``."""

    name: str
    cron: str
    expression: Expression
    handler: Any
    payload: Any = dataclasses.field(repr=False)
    timezone: str
    zone: tzinfo = dataclasses.field(repr=False)
    # How many of the minutes that were missed fire, the last ones; None: every one.
    most_missed: int | None
    grace: float
    options: dict[str, Any]
    description: str
    place: str
    timetable: Timetable = dataclasses.field(init=False, repr=False)
    fingerprint: str = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "timetable", Timetable(self.expression, self.zone))
        object.__setattr__(self, "fingerprint", self.expression.fingerprint(self.timezone))

    @property
    def handler_name(self) -> str:
        """The name of the handler, however it was given."""
        found = self.handler[0] if isinstance(self.handler, tuple) else self.handler
        return str(getattr(found, "name", found))

    def submission(self) -> JobSubmission:
        """Make the request for one run now; ``InvalidSubmission`` if it is refused."""
        made = JobSubmission.create(self.handler, self.payload, **self.options)
        return dataclasses.replace(made, schedule=self.name)

    def problems(self) -> list[str]:
        """Say what needs settings and loaded apps to be judged."""
        try:
            self.submission()
        except DurableJobsError as error:
            return [f"Schedule {self.name!r:.120} ({self.place}): {error}"]
        return []

    def warnings(self) -> list[str]:
        """Say what is allowed and rarely meant."""
        said = f"Schedule {self.name!r:.120} ({self.place}):"
        found = []
        if self.expression.interval_like and _changes_its_clock(self.zone):
            found.append(
                f'{said} "{self.cron}" is meant as an interval, and in {self.timezone} it rests'
                ' while the clock repeats an hour: write timezone="UTC".'
            )
        poll = float(conf.settings.POLL_SECONDS)
        if self.most_missed is not None and self.grace < 2 * poll:
            found.append(
                f"{said} grace={self.grace:g} is shorter than two polls of a worker"
                f" ({2 * poll:g} s), so minutes may count as missed that were not: raise it."
            )
        return found


class Registry:
    """The schedules of this process, by name."""

    def __init__(self) -> None:
        self._schedules: dict[str, Schedule] = {}

    def add(self, declared: Schedule) -> None:
        """Add a schedule; a second one of its name is an ``InvalidSchedule``."""
        other = self._schedules.setdefault(declared.name, declared)
        if other is not declared:
            raise InvalidSchedule(
                f"Two schedules are named {declared.name!r:.120}: {other.place} and"
                f" {declared.place}. Rename one."
            )

    def get(self, name: str) -> Schedule | None:
        return self._schedules.get(name)

    def all(self) -> tuple[Schedule, ...]:
        """Give every schedule, by name."""
        return tuple(sorted(self._schedules.values(), key=lambda one: one.name))

    def remove(self, name: str) -> None:
        self._schedules.pop(name, None)

    def problems(self) -> list[str]:
        """Say in one sentence each what is wrong; settings must be good."""
        return [problem for one in self.all() for problem in one.problems()]

    def warnings(self) -> list[str]:
        return [warning for one in self.all() for warning in one.warnings()]

    @contextlib.contextmanager
    def temporary(self) -> Iterator[Registry]:
        """Forget at the end what was declared inside, and bring back the rest; for tests."""
        before = dict(self._schedules)
        try:
            yield self
        finally:
            self._schedules.clear()
            self._schedules.update(before)


registry = Registry()


def _copied(payload: Any) -> Any:
    try:
        return copy.deepcopy(payload)
    except Exception as error:
        raise InvalidSchedule(f"payload cannot be copied ({type(error).__name__}).") from error


def time_zone(key: object) -> tzinfo:
    """Give the time zone of a name that means the same on every host."""
    if key == "UTC":
        return UTC
    example = 'timezone must be a name such as "UTC" or "Europe/Paris"'
    if not isinstance(key, str):
        raise InvalidSchedule(f"{example}, not {type(key).__name__}.")
    # The host's own zone, and those that count leap seconds.
    if key in ("localtime", "posixrules") or key.startswith(("posix/", "right/")):
        raise InvalidSchedule(f"{example}, not {key!r:.60}.")
    try:
        return zoneinfo.ZoneInfo(key)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise InvalidSchedule(f"{example}; {key!r:.60} is unknown on this host.") from None


def _most_missed(catch_up: object, limit: object) -> int | None:
    if catch_up not in CATCH_UP:
        raise InvalidSchedule(f'catch_up must be "all", "latest" or "none", not {catch_up!r:.50}.')
    if limit is None:
        return {ALL: None, LATEST: 1, NONE: 0}[str(catch_up)]
    if type(limit) is not int or not 1 <= limit <= CATCH_UP_LIMIT_MAX:
        raise InvalidSchedule(
            f"catch_up_limit must be a whole number from 1 to {CATCH_UP_LIMIT_MAX}, or None."
        )
    if catch_up != ALL:
        raise InvalidSchedule(f'catch_up_limit goes with catch_up="all", not {catch_up!r}.')
    return limit


def _grace(value: object) -> float:
    seconds = to_seconds(value)
    if seconds is None:
        raise InvalidSchedule(
            f"grace must be a number of seconds from 0 on or a timedelta, not {value!r:.50}."
        )
    return seconds


def _changes_its_clock(zone: tzinfo) -> bool:
    """Tell whether the zone's offset changes within the next year."""
    start: datetime = from_microseconds(host_now())
    offsets = {(start + timedelta(days=n)).astimezone(zone).utcoffset() for n in range(366)}
    return len(offsets) > 1
