"""Whose transaction is open: the caller's, a TestCase's, or none; and how to doom it."""

from __future__ import annotations

from typing import Any


def _caller_depth(connection: Any) -> int | None:
    """Give the index of the outermost ``atomic()`` that is not a TestCase's own."""
    for depth, block in enumerate(connection.atomic_blocks):
        if not getattr(block, "_from_testcase", False):
            return depth
    return None


def in_callers_transaction(connection: Any) -> bool:
    """Tell whether the caller has an ``atomic()`` open; a TestCase's wrapper is not one."""
    return connection.in_atomic_block and _caller_depth(connection) is not None


def joins_transaction(connection: Any) -> bool:
    """Tell whether a write would join a transaction: the caller's ``atomic()``, or autocommit off.

    The doors ask ``in_callers_transaction`` instead: they take an ``atomic()`` only.
    """
    if connection.in_atomic_block:
        return _caller_depth(connection) is not None
    return not connection.get_autocommit()


def in_test_wrapper(connection: Any) -> bool:
    """Tell whether only a TestCase's wrapper transaction is open."""
    return connection.in_atomic_block and _caller_depth(connection) is None


def in_foreign_transaction(connection: Any) -> bool:
    """Tell a transaction that Django does not know of, by a plain ``BEGIN`` through a cursor.

    Read from the driver, without asking the server. A connection that broke is in none.
    """
    raw = connection.connection
    if raw is None or connection.in_atomic_block:
        return False
    if hasattr(raw, "info"):
        # psycopg: in a transaction, in a failed one.
        return int(raw.info.transaction_status) in (2, 3)
    return bool(getattr(raw, "in_transaction", False))


def doom(connection: Any) -> None:
    """Let the caller's whole transaction roll back, whoever catches what in between (1.4).

    ``set_rollback(True)`` alone dooms the innermost savepoint: the block around it would
    go on. An ``atomic()`` that ends without a savepoint hands the mark outwards, so the
    savepoints inside the outermost block are forgotten; they go when that block rolls back.
    """
    depth = _caller_depth(connection)
    if not connection.in_atomic_block or depth is None:
        return
    # The last entries of savepoint_ids belong to the blocks inside. (Counted from the end:
    # the first block of all has an entry of its own only where autocommit is off.)
    for back in range(1, len(connection.atomic_blocks) - depth):
        connection.savepoint_ids[-back] = None
    connection.needs_rollback = True
