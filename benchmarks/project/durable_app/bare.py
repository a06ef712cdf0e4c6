"""The floor: the same columns by bare INSERTs through the same Django connection."""

from __future__ import annotations

import itertools
from typing import Any

from django.db import connection
from django_durable_jobs.models import Job
from django_durable_jobs.submission import new_job_id

from .jobs import noop

TABLE = Job._meta.db_table


class BareInserts:
    """Insert rows like the one that the package stored for a real job.

    The values are made beforehand: only the database and its driver are timed.
    """

    def __init__(self, count: int) -> None:
        self.columns, self.types, row = _stored_row()
        place = self.columns.index("job_id")
        rows = (row[:place] + (new_job_id(),) + row[place + 1 :] for _ in range(count))
        self._rows = iter(list(rows))
        names = ", ".join(self.columns)
        holders = ", ".join("%s" for _ in self.columns)
        self._sql = f"INSERT INTO {TABLE} ({names}) VALUES ({holders})"
        arrays = ", ".join(f"%s::{kind}[]" for kind in self.types)
        self._bulk_sql = f"INSERT INTO {TABLE} ({names}) SELECT * FROM unnest({arrays})"

    def one_by_one(self, count: int) -> None:
        for row in itertools.islice(self._rows, count):
            with connection.cursor() as cursor:
                cursor.execute(self._sql, row)

    def in_bulk(self, count: int) -> None:
        """Insert in one transaction, in the way that is fastest on the database."""
        rows = list(itertools.islice(self._rows, count))
        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                cursor.execute(self._bulk_sql, [list(values) for values in zip(*rows, strict=True)])
            else:
                _in_transaction(cursor, self._sql, rows)


def _in_transaction(cursor: Any, sql: str, rows: list[tuple[Any, ...]]) -> None:
    cursor.execute("BEGIN IMMEDIATE")
    cursor.executemany(sql, rows)
    cursor.execute("COMMIT")


def _stored_row() -> tuple[list[str], list[str], tuple[Any, ...]]:
    """Give columns, their SQL types and the values of a job that was really submitted."""
    job = noop.submit(0)
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT * FROM {TABLE} WHERE id = %s", [job.pk])
        # The id comes first, and the database draws it.
        columns = [column[0] for column in cursor.description][1:]
        row = cursor.fetchone()[1:]
        types = {}
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT column_name, data_type FROM information_schema.columns"
                " WHERE table_name = %s",
                [TABLE],
            )
            types = dict(cursor.fetchall())
    return columns, [types.get(name, "") for name in columns], row
