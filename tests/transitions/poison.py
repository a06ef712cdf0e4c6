"""A database that refuses the change of single rows, for a reason the package cannot know."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections

from django_durable_jobs.dialects.base import JOBS
from tests.racing import observer


@contextmanager
def poisoned(
    ids: Collection[int], table: str = JOBS, column: str = "id", *, sqlstate: str = "P0001"
) -> Iterator[None]:
    """Let every update of these rows fail until the end of the block.

    On PostgreSQL with that SQLSTATE. On a connection of its own, so that it works beside tests
    with transactions of their own.
    """
    listed = ", ".join(map(str, ids))
    with observer(DEFAULT_DB_ALIAS) as cursor:
        if connections[DEFAULT_DB_ALIAS].vendor == "postgresql":
            on = (
                "CREATE FUNCTION tests_poison() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
                f" RAISE EXCEPTION 'poison' USING ERRCODE = '{sqlstate}'; END $$;"
                f" CREATE TRIGGER tests_poison BEFORE UPDATE OR INSERT ON {table} FOR EACH ROW"
                f" WHEN (NEW.{column} IN ({listed})) EXECUTE FUNCTION tests_poison()"
            )
            off = f"DROP TRIGGER tests_poison ON {table}; DROP FUNCTION tests_poison()"
            with _executed(cursor, [on], [off]):
                yield
            return
        events = ("UPDATE", "INSERT")
        names = [f"tests_poison_{number}" for number in range(len(events))]
        on = [
            f"CREATE TRIGGER {name} BEFORE {event} ON {table} WHEN NEW.{column} IN ({listed})"
            " BEGIN SELECT RAISE(ABORT, 'poison'); END"
            for name, event in zip(names, events, strict=True)
        ]
        with _executed(cursor, on, [f"DROP TRIGGER {name}" for name in names]):
            yield


@contextmanager
def _executed(cursor: Any, before: list[str], after: list[str]) -> Iterator[None]:
    for sql in before:
        cursor.execute(sql)
    try:
        yield
    finally:
        for sql in after:
            cursor.execute(sql)
