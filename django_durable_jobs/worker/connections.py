"""Keep a thread's connections clean between handlers, and close them when the thread ends."""

from __future__ import annotations

from django.db import connections


def clean() -> None:
    """Make the thread's connections fit for the next handler.

    One that a handler left in a transaction, without autocommit or broken is closed, which
    rolls back what it had open; the next use opens a new one.
    """
    for connection in connections.all(initialized_only=True):
        if connection.in_atomic_block or connection.needs_rollback:
            connection.close()
            # Closing inside an atomic block only marks the connection; forget the block too.
            connection.connection = None
            connection.in_atomic_block = False
            connection.atomic_blocks = []
            connection.savepoint_ids = []
            connection.needs_rollback = False
            connection.closed_in_transaction = False
            connection.run_on_commit = []
        elif connection.connection is not None and not connection.get_autocommit():
            connection.close()
        else:
            connection.close_if_unusable_or_obsolete()


def close_all() -> None:
    for connection in connections.all(initialized_only=True):
        connection.close()
