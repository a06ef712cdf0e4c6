"""Which lanes exist, by a loose index scan: one index descent for each, however many rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..dialects import dialect_for
from ..dialects.base import JOBS, PAUSES, Lane, Row
from ..models import Job
from ..payloads import decode_text

_COLUMNS = ("queue", "handler", "handler_version", "fingerprint")
_TEXTS = ("queue", "handler", "fingerprint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """The lanes that were found, and a job of each lane whose names cannot be read (damaged)."""

    sound: list[Lane] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)


def lane_of(job: Job) -> Lane:
    """Give the lane that a job is claimed from while it is queued."""
    return Lane(
        queue=job.queue,
        handler=job.handler,
        version=job.handler_version,
        fingerprint=job.fingerprint,
    )


def lanes(alias: str, condition: str) -> Lanes:
    """Find the lanes that hold jobs which meet ``condition``; see ``lanes_sql``."""
    return read_lanes(dialect_for(alias).fetch(alias, lanes_sql(alias, condition)))


def queued_lanes(alias: str) -> Lanes:
    """Find the lanes that hold queued jobs now, paused queues left out; takes no lock."""
    return read_lanes(dialect_for(alias).fetch(alias, queued_lanes_sql(alias)))


def queued_lanes_sql(alias: str) -> str:
    unpaused = f"x.queue NOT IN (SELECT p.queue FROM {PAUSES} p)"
    return lanes_sql(alias, dialect_for(alias).claimable("n"), unpaused)


def read_lanes(rows: Iterable[Row]) -> Lanes:
    """Read what ``lanes_sql`` has found."""
    found = Lanes()
    for job, version, *texts in rows:
        queue, handler, fingerprint = map(decode_text, texts)
        if queue is None or handler is None or fingerprint is None or type(version) is not int:
            found.damaged.append(job)
        else:
            lane = Lane(queue=queue, handler=handler, version=version, fingerprint=fingerprint)
            found.sound.append(lane)
    return found


def in_lane_of(job: int) -> str:
    """Give the condition that a job ``j`` is in the lane of another, compared in the database."""
    return " AND ".join(
        f"j.{name} = (SELECT x.{name} FROM {JOBS} x WHERE x.id = {int(job)})" for name in _COLUMNS
    )


def lanes_sql(alias: str, condition: str, restriction: str = "1 = 1") -> str:
    """The lanes that hold jobs which meet ``condition``, written over the alias ``n``.

    A partial index led by the lane must exist for the condition. ``restriction`` is checked
    once for each lane, ``x``.
    """
    of_next = ", ".join(f"n.{name}" for name in _COLUMNS)
    head = f"SELECT n.id FROM {JOBS} n WHERE {condition}"
    order = f"ORDER BY {of_next} LIMIT 1"
    # Looked up one by one: a join lets a planner without statistics read the whole table.
    found = ", ".join(
        f"(SELECT j.{name} FROM {JOBS} j WHERE j.id = l.id) AS {name}" for name in _COLUMNS
    )
    shown = ", ".join(f"{dialect_for(alias).undecoded(f'x.{name}')} AS {name}" for name in _TEXTS)
    return (
        f"WITH RECURSIVE lanes (id) AS (SELECT ({head} {order}) UNION ALL"
        f" SELECT {after_last(head, _COLUMNS)}"
        f" FROM lanes l JOIN {JOBS} j ON j.id = l.id)"
        f" SELECT x.id, x.handler_version, {shown}"
        f" FROM (SELECT l.id, {found} FROM lanes l WHERE l.id IS NOT NULL) AS x"
        f" WHERE {restriction}"
    )


def after_last(head: str, columns: Sequence[str]) -> str:
    """The first job of ``head`` behind all that are as ``j`` in its index's first columns.

    By one index descent for each column. Not ``(n.queue, ...) > (j.queue, ...)``: there SQLite
    reads on through all that is equal, which is the whole lane.
    """
    order = f"ORDER BY {', '.join(f'n.{name}' for name in columns)} LIMIT 1"
    found = []
    for place in reversed(range(len(columns))):
        same = "".join(f" AND n.{name} = j.{name}" for name in columns[:place])
        beyond = f"n.{columns[place]} > j.{columns[place]}"
        found.append(f"({head}{same} AND {beyond} {order})")
    return f"COALESCE({', '.join(found)})"
