"""Keep a thread's connections clean between handlers, and close them when the thread ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from django.db import connections


def clean() -> None:
    """Make the thread's connections fit for the next handler, and close those that are too old."""
    undo()
    for connection in connections.all(initialized_only=True):
        connection.close_if_unusable_or_obsolete()


def undo() -> None:
    """Undo what the project's code has left behind on the thread's connections.

    One in a transaction, without autocommit or with an error behind it is closed, which rolls
    back what it had open; the next use opens a new one. Whether it still works is not asked:
    nobody watches that question, which a network may swallow for good.
    """
    for connection in connections.all(initialized_only=True):
        if connection.errors_occurred or not _is_clean(connection):
            forget(connection)


def close_all() -> None:
    for connection in connections.all(initialized_only=True):
        if connection.in_atomic_block:
            forget(connection)
        else:
            connection.close()


# What a worker's own connections ask for on PostgreSQL, where the project's OPTIONS do not: a
# server or a network that is gone is noticed within half a minute, not within hours.
PATIENCE = {
    "connect_timeout": 10,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}


@contextmanager
def own(alias: str, *, patient: bool = False) -> Iterator[None]:
    """Give this thread a connection of its own with ``PATIENCE``, unless ``patient``.

    No pool lends it: handlers may hold all of those (4.3).
    """
    lent = connections[alias]
    options = dict(lent.settings_dict["OPTIONS"])
    is_pooled = bool(options.pop("pool", None))
    if not is_pooled and (patient or lent.vendor != "postgresql"):
        yield
        return
    lent.close()
    settings = {**lent.settings_dict, "OPTIONS": {**PATIENCE, **options}}
    connections[alias] = mine = type(lent)(settings, alias)
    try:
        yield
    finally:
        mine.close()
        connections[alias] = lent


def close_before_fork() -> None:
    """Close what a forked child must not share: connections, and pools with their threads."""
    close_all()
    for connection in connections.all(initialized_only=True):
        close_pool = getattr(connection, "close_pool", None)
        if close_pool is not None:
            close_pool()


def _is_clean(connection: Any) -> bool:
    """Tell whether a connection is open, in autocommit and in no transaction, not even in one
    that Django does not know of (``BEGIN`` through a cursor); without asking the server.
    """
    if connection.in_atomic_block or connection.needs_rollback:
        return False
    raw = connection.connection
    if raw is None:
        return True
    try:
        if not connection.get_autocommit():
            return False
        if hasattr(raw, "info"):
            # psycopg: 0 is idle; a closed connection reads as unknown.
            return int(raw.info.transaction_status) == 0
        return not getattr(raw, "in_transaction", False)
    except Exception:
        return False


def forget(connection: Any) -> None:
    """Leave a connection closed and in no transaction, whatever became of it."""
    # What was closed under Django's feet may refuse to be closed again.
    with suppress(Exception):
        connection.close()
    # Closing inside an atomic block only marks the connection; forget the block too.
    connection.connection = _rolled_back(connection) if _is_in_memory(connection) else None
    connection.in_atomic_block = False
    connection.atomic_blocks = []
    connection.savepoint_ids = []
    connection.needs_rollback = False
    connection.closed_in_transaction = False
    connection.run_on_commit = []


def _is_in_memory(connection: Any) -> bool:
    """Tell a SQLite database that goes with its last connection, as tests use it."""
    return connection.vendor == "sqlite" and bool(connection.is_in_memory_db())


def _rolled_back(connection: Any) -> Any:
    """Give the driver's connection back in autocommit, without what was open; None if closed."""
    raw = connection.connection
    try:
        raw.rollback()
        raw.isolation_level = None
    except Exception:
        return None
    connection.autocommit = True
    return raw
