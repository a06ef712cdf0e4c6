"""What cannot be written portably: one small contract, two implementations."""

from __future__ import annotations

from functools import cache

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ._listening import Listener
from .base import Dialect

# The first with RETURNING.
_OLDEST_SQLITE = (3, 35, 0)


@cache
def _dialect(vendor: str) -> Dialect:
    if vendor == "postgresql":
        from .postgresql import PostgreSQL

        return PostgreSQL()
    if vendor == "sqlite":
        from .sqlite import SQLite

        return SQLite()
    raise ImproperlyConfigured(
        f"durable jobs live in PostgreSQL or SQLite, not in {vendor}: point"
        ' DURABLE_JOBS["DATABASE"] to such a database.'
    )


def dialect_for(alias: str) -> Dialect:
    """Give the dialect of a database; ``ImproperlyConfigured`` for one we do not know."""
    return _dialect(connections[alias].vendor)


def version_problems(alias: str) -> list[str]:
    """Say that the database is too old; told by its driver, without a connection (4.1)."""
    if connections[alias].vendor != "sqlite":
        return []
    import sqlite3

    if sqlite3.sqlite_version_info >= _OLDEST_SQLITE:
        return []
    return [
        f"Durable jobs need SQLite {_shown(_OLDEST_SQLITE)} or later, and this Python brings"
        f" {_shown(sqlite3.sqlite_version_info)}: use a newer Python or SQLite library."
    ]


def _shown(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


__all__ = ["Dialect", "Listener", "dialect_for", "version_problems"]
