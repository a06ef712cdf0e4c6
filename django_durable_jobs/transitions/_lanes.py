"""Which lanes exist, by a loose index scan: one index descent for each, however many rows."""

from __future__ import annotations

from django.db import connections

from ..dialects.base import JOBS, Lane

_LANE = "{0}.queue, {0}.handler, {0}.handler_version, {0}.fingerprint"


def lanes(alias: str, condition: str, restriction: str = "1 = 1") -> list[Lane]:
    """Give the lanes that hold jobs which meet ``condition``, written over the alias ``n``.

    A partial index led by the lane must exist for the condition. ``restriction`` is checked
    once for each lane, on one of its rows, ``j``.
    """
    head = f"SELECT n.id FROM {JOBS} n WHERE {condition}"
    order = f"ORDER BY {_LANE.format('n')} LIMIT 1"
    sql = f"""
        WITH RECURSIVE lanes (id) AS (
            SELECT ({head} {order})
            UNION ALL
            SELECT ({head} AND ({_LANE.format("n")}) > ({_LANE.format("j")}) {order})
            FROM lanes l JOIN {JOBS} j ON j.id = l.id
        )
        SELECT {_LANE.format("j")} FROM lanes l JOIN {JOBS} j ON j.id = l.id WHERE {restriction}
    """
    with connections[alias].cursor() as cursor:
        cursor.execute(sql)
        return [
            Lane(queue=row[0], handler=row[1], version=row[2], fingerprint=row[3])
            for row in cursor.fetchall()
        ]
