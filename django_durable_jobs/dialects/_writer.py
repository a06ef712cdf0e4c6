"""Becoming SQLite's one writer: in line within a process, for a bounded time, IMMEDIATE."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import transaction

from ..exceptions import LockTimeout


class Writers:
    """The line of this process's writers, one for each database file."""

    def __init__(self) -> None:
        self.forget()

    @contextmanager
    def turn(self, name: str, timeout_ms: int) -> Iterator[int]:
        """Wait for this thread's turn; give the milliseconds that are left to wait."""
        began = time.monotonic()
        with self._guard:
            lock = self._locks.setdefault(name, threading.RLock())
        if not lock.acquire(timeout=timeout_ms / 1000):
            raise LockTimeout(
                "another thread of this process wrote to the database longer than"
                " LOCK_TIMEOUT_SECONDS; nothing was changed. Try again."
            )
        try:
            yield max(1, timeout_ms - round((time.monotonic() - began) * 1000))
        finally:
            lock.release()

    def forget(self) -> None:
        """Begin anew, as a forked child must: no other thread has come along."""
        self._guard = threading.Lock()
        # Not for its own sake: hooks of a commit run before the turn is over, and may write.
        self._locks: dict[str, threading.RLock] = {}


writers = Writers()
os.register_at_fork(after_in_child=writers.forget)


@contextmanager
def busy_timeout(connection: Any, milliseconds: int) -> Iterator[None]:
    """Bound the wait for the writer for this transaction alone."""
    raw = connection.connection
    before = raw.execute("PRAGMA busy_timeout").fetchone()[0]
    if before == milliseconds:
        yield
        return
    raw.execute(f"PRAGMA busy_timeout = {int(milliseconds)}")
    try:
        yield
    finally:
        if connection.connection is raw:
            raw.execute(f"PRAGMA busy_timeout = {int(before)}")


@contextmanager
def immediate(connection: Any, alias: str) -> Iterator[None]:
    """Open a durable transaction by BEGIN IMMEDIATE whatever OPTIONS say."""
    before = connection.transaction_mode
    connection.transaction_mode = "IMMEDIATE"
    try:
        with transaction.atomic(using=alias, durable=True):
            connection.transaction_mode = before
            yield
    finally:
        connection.transaction_mode = before
