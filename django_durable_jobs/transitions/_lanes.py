"""Which lanes exist, by a loose index scan: one index descent for each, however many rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..dialects import dialect_for
from ..dialects.base import JOBS, PAUSES, Lane
from ..models import Job

_COLUMNS = ("queue", "handler", "handler_version", "fingerprint")


def lane_of(job: Job) -> Lane:
    """Give the lane that a job is claimed from while it is queued."""
    return Lane(
        queue=job.queue,
        handler=job.handler,
        version=job.handler_version,
        fingerprint=job.fingerprint,
    )


def lanes(alias: str, condition: str) -> list[Lane]:
    """Give the lanes that hold jobs which meet ``condition``; see ``lanes_sql``."""
    return [as_lane(row) for row in dialect_for(alias).fetch(alias, lanes_sql(condition))]


def queued_lanes(alias: str) -> list[Lane]:
    """Give the lanes that hold queued jobs now, paused queues left out; takes no lock."""
    return [as_lane(row) for row in dialect_for(alias).fetch(alias, queued_lanes_sql(alias))]


def queued_lanes_sql(alias: str) -> str:
    return lanes_sql(
        dialect_for(alias).claimable("n"), f"x.queue NOT IN (SELECT p.queue FROM {PAUSES} p)"
    )


def as_lane(row: Sequence[Any]) -> Lane:
    return Lane(queue=row[0], handler=row[1], version=row[2], fingerprint=row[3])


def lanes_sql(condition: str, restriction: str = "1 = 1") -> str:
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
    return (
        f"WITH RECURSIVE lanes (id) AS (SELECT ({head} {order}) UNION ALL"
        f" SELECT {_after_last(head, order)}"
        f" FROM lanes l JOIN {JOBS} j ON j.id = l.id)"
        f" SELECT * FROM (SELECT {found} FROM lanes l WHERE l.id IS NOT NULL) AS x"
        f" WHERE {restriction}"
    )


def _after_last(head: str, order: str) -> str:
    """The first job of the lane after that of ``j``, by one index descent for each column.

    Not ``(n.queue, ...) > (j.queue, ...)``: there SQLite reads on through all that is equal,
    which is the whole lane.
    """
    found = []
    for place in reversed(range(len(_COLUMNS))):
        same = "".join(f" AND n.{name} = j.{name}" for name in _COLUMNS[:place])
        beyond = f"n.{_COLUMNS[place]} > j.{_COLUMNS[place]}"
        found.append(f"({head}{same} AND {beyond} {order})")
    return f"COALESCE({', '.join(found)})"
