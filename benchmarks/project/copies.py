"""Many rows that look like a real one, made inside the database."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import connection


def is_postgres() -> bool:
    return connection.vendor == "postgresql"


def columns_of(table: str) -> list[str]:
    with connection.cursor() as cursor:
        return [
            column.name for column in connection.introspection.get_table_description(cursor, table)
        ]


def copy_row(table: str, key: Any, count: int, values: Mapping[str, str]) -> None:
    """Insert ``count`` copies of the row whose id is ``key``.

    ``values`` gives SQL for the columns that differ, over the row ``t`` and the number ``g.n``
    of the copy. Without a value for the id the database draws it.
    """
    columns = [name for name in columns_of(table) if name != "id" or name in values]
    chosen = ", ".join(values.get(name, f"t.{name}") for name in columns)
    numbers = (
        "WITH RECURSIVE g (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM g WHERE n < %s)"
        if not is_postgres()
        else "WITH g (n) AS (SELECT generate_series(1, %s))"
    )
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {table} ({', '.join(columns)}) {numbers}"
            f" SELECT {chosen} FROM g JOIN {table} t ON t.id = %s",
            [count, key],
        )


def settle() -> None:
    """Do what autovacuum would have done by the time a table has so many rows."""
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE" if is_postgres() else "ANALYZE")


def uuid_key() -> str:
    """Give SQL for a random UUID as Django stores it."""
    return "gen_random_uuid()" if is_postgres() else "lower(hex(randomblob(16)))"


def token() -> str:
    """Give SQL for a random text of 32 characters."""
    if is_postgres():
        return "replace(gen_random_uuid()::text, '-', '')"
    return "lower(hex(randomblob(16)))"


def ordered_id(prefix: str) -> str:
    """Give SQL for a text as long as a UUID that grows with ``g.n``, and is unique in its prefix.

    ``prefix`` is one hexadecimal digit.
    """
    number = "lpad(to_hex(g.n), 7, '0')" if is_postgres() else "printf('%%07x', g.n)"
    return f"'{prefix}' || {number} || '-0000-7000-8000-' || substr({token()}, 1, 12)"
