"""``manage.py jobs read-celery-beat``: ``schedule(...)`` lines from django-celery-beat's tables.

The tables are read as they are; neither package of Celery is needed. Whatever stands in them is
written as a Python literal or inside a comment of one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from django.db import connections

from ...exceptions import DurableJobsError, InvalidSchedule
from ...schedules.declaration import time_zone
from ...schedules.expression import parse
from .base import Options, Subcommand, plain

TABLE = "django_celery_beat_periodictask"
KINDS = {
    "crontab": "django_celery_beat_crontabschedule",
    "interval": "django_celery_beat_intervalschedule",
    "solar": "django_celery_beat_solarschedule",
    "clocked": "django_celery_beat_clockedschedule",
}
HEAD = (
    "# From the tables of django-celery-beat. The handlers are named as the tasks were: declare",
    "# each with @job, and adjust names and payloads where they differ.",
    "from django_durable_jobs import schedule",
)
# Celery's own house-keeping, which is not needed here.
CLEANUP = "celery.backend_cleanup"

Row = dict[str, Any]

# The bounds of each field, and the names that may stand for its numbers.
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_FIELDS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "minute": (0, 59, ()),
    "hour": (0, 23, ()),
    "day_of_month": (1, 31, ()),
    "month_of_year": (1, 12, _MONTHS),
    "day_of_week": (0, 6, _DAYS),
}
_SECONDS = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86_400}


class Inexpressible(Exception):
    """What a row asks for has no form here; the text says why."""


class NoTables(DurableJobsError):
    """django-celery-beat has no tables in the database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A cron, its time zone, and what is to be said of it."""

    cron: str
    timezone: str
    notes: tuple[str, ...] = ()


def _read(alias: str, options: Options) -> list[dict[str, Any]]:
    if TABLE not in connections[alias].introspection.table_names():
        raise NoTables(f'database "{alias}" has no table {TABLE}: name the right --database.')
    kinds = {kind: {row["id"]: row for row in _rows(alias, table)} for kind, table in KINDS.items()}
    return [_translated(row, kinds) for row in _rows(alias, TABLE) if row["task"] != CLEANUP]


def _rows(alias: str, table: str) -> list[Row]:
    if table not in connections[alias].introspection.table_names():
        return []
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SELECT * FROM {table} ORDER BY id")
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _translated(row: Row, kinds: dict[str, dict[Any, Row]]) -> dict[str, Any]:
    name = row["name"]
    try:
        timing = _timing(row, kinds)
        payload, notes = _payload(row)
    except (Inexpressible, InvalidSchedule) as error:
        said = f"Not translated: {name!r} (task {row['task']!r}): {error}"
        return {"name": name, "translated": False, "source": [_comment(said)]}
    notes = [*timing.notes, *notes, *_notes(row)]
    call = list(_call(row, timing, payload))
    if not row["enabled"]:
        notes.append("it was disabled there, so it is left out here")
        call = [f"# {line}" for line in call]
    return {
        "name": name,
        "translated": True,
        "source": [*(_comment(f"{name!r}: {note}.") for note in notes), *call],
    }


def _comment(text: str) -> str:
    """Make a comment of one line, whatever the text holds."""
    return f"# {plain(text)}"


def _call(row: Row, timing: Timing, payload: Any) -> Iterator[str]:
    yield "schedule("
    yield f"    {row['name']!r},"
    yield f"    {timing.cron!r},"
    yield f"    {row['task']!r},"
    if payload is not None:
        yield f"    {payload!r},"
    yield f"    timezone={timing.timezone!r},"
    if row.get("queue"):
        yield f"    queue={row['queue']!r},"
    if row.get("description"):
        yield f"    description={row['description'][:1000]!r},"
    yield ")"


def _payload(row: Row) -> tuple[Any, list[str]]:
    """Give the keyword arguments as the payload, and a note about others."""
    arguments = _json(row, "args", list)
    keywords = _json(row, "kwargs", dict)
    if not arguments:
        return keywords or None, []
    return keywords or None, [f"its positional arguments were {arguments!r}: name them"]


def _json(row: Row, column: str, kind: type) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    try:
        value = json.loads(row[column] or "null", parse_constant=refuse)
    except (ValueError, RecursionError):
        raise Inexpressible(f"its {column} are not JSON.") from None
    if value is not None and not isinstance(value, kind):
        raise Inexpressible(f"its {column} are no JSON {kind.__name__}.")
    return value


def _notes(row: Row) -> Iterator[str]:
    if row.get("priority") is not None:
        yield f"its priority was {row['priority']}: here they go from -100 to 100, higher first"
    if row.get("expires") is not None or row.get("expire_seconds") is not None:
        yield "it expired there: here the handler looks at ctx.scheduled_for"
    if row.get("start_time") is not None:
        yield f"it was to start at {row['start_time']}"


def _timing(row: Row, kinds: dict[str, dict[Any, Row]]) -> Timing:
    if row.get("one_off"):
        raise Inexpressible("it is to run once: stage its job with run_at=.")
    for kind, rows in kinds.items():
        found = rows.get(row.get(f"{kind}_id"))
        if found is not None:
            return _OF_KIND[kind](found)
    raise Inexpressible("it has no schedule.")


# Crontabs ---------------------------------------------------------------------------------------


def _of_crontab(row: Row) -> Timing:
    """Write the fields value by value where Celery reads them in another way than we do."""
    sets = {name: _values(name, str(row[name])) for name in _FIELDS}
    full = {name: frozenset(range(low, high + 1)) for name, (low, high, _) in _FIELDS.items()}
    if all(sets[name] != full[name] for name in ("day_of_month", "day_of_week")):
        raise Inexpressible(
            f"it fires on days that {row['day_of_month']!r} of the month and"
            f" {row['day_of_week']!r} of the week name both; here either would do."
        )
    cron = " ".join(
        "*" if sets[name] == full[name] else ",".join(map(str, sorted(sets[name])))
        for name in _FIELDS
    )
    timezone = str(row.get("timezone") or "UTC")
    time_zone(timezone)
    parse(cron)
    return Timing(cron=_as_written(row, cron), timezone=timezone)


def _as_written(row: Row, cron: str) -> str:
    """Give the row's own words, where they mean the same here."""
    written = " ".join(str(row[name]).replace(" ", "") for name in _FIELDS)
    try:
        found = parse(written)
    except InvalidSchedule:
        return cron
    return written if found.fingerprint("") == parse(cron).fingerprint("") else cron


def _values(name: str, text: str) -> frozenset[int]:
    """Give what Celery reads: its ranges may wrap around the end of a field."""
    found: set[int] = set()
    for item in text.replace(" ", "").lower().split(","):
        span, slash, step = item.partition("/")
        values = _span(name, span)
        if slash and not (step.isascii() and step.isdigit() and int(step[:4]) > 0):
            raise Inexpressible(f"{name} {item!r} is not understood.")
        found.update(values[:: int(step[:4])] if slash else values)
    return frozenset(found)


def _span(name: str, text: str) -> list[int]:
    low, high, _ = _FIELDS[name]
    if text == "*":
        return list(range(low, high + 1))
    first, dash, last = text.partition("-")
    start = _number(name, first)
    end = _number(name, last) if dash else start
    if start <= end:
        return list(range(start, end + 1))
    return [*range(start, high + 1), *range(low, end + 1)]


def _number(name: str, text: str) -> int:
    low, high, names = _FIELDS[name]
    if text[:3] in names and text.isalpha():
        return names.index(text[:3]) + low
    if text.isascii() and text.isdigit() and low <= int(text[:4]) <= high:
        return int(text[:4])
    raise Inexpressible(f"{name} {text!r} is not understood.")


# The other kinds --------------------------------------------------------------------------------


def _of_interval(row: Row) -> Timing:
    every, period = row["every"], row["period"]
    seconds = every * _SECONDS.get(period, 0)
    if not seconds or seconds % 60:
        raise Inexpressible(f"an interval of {every} {period} is not of whole minutes.")
    cron = _every(seconds // 60)
    if cron is None:
        raise Inexpressible(f"an interval of {every} {period} divides neither hour, day nor week.")
    note = "it counted from its last run; this counts from the full hour, day or week"
    return Timing(cron=cron, timezone="UTC", notes=(note,))


def _every(minutes: int) -> str | None:
    if minutes == 1:
        return "* * * * *"
    if 60 % minutes == 0:
        return f"*/{minutes} * * * *" if minutes < 60 else "0 * * * *"
    if minutes % 60 == 0 and 24 % (minutes // 60) == 0:
        return f"0 */{minutes // 60} * * *" if minutes < 1440 else "0 0 * * *"
    return "0 0 * * 0" if minutes == 7 * 1440 else None


def _of_solar(row: Row) -> Timing:
    raise Inexpressible(f"it follows the sun ({row['event']}); no cron does.")


def _of_clocked(row: Row) -> Timing:
    raise Inexpressible(f"it is to run once, at {row['clocked_time']}: stage its job with run_at=.")


_OF_KIND = {
    "crontab": _of_crontab,
    "interval": _of_interval,
    "solar": _of_solar,
    "clocked": _of_clocked,
}


def _lines(found: list[dict[str, Any]]) -> Iterable[str]:
    yield from HEAD
    for one in found:
        yield ""
        yield from one["source"]


SUBCOMMANDS = (
    Subcommand(
        name="read-celery-beat",
        help="Print schedule(...) lines for the rows of django-celery-beat's tables.",
        run=_read,
        lines=_lines,
    ),
)
