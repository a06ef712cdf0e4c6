"""Connections that do not answer: a network or a proxy may swallow a question for good (4.8).

TCP's own means tell a host that is gone, and nothing of a proxy that accepts data and forwards
none. So each of the worker's own threads says while it waits for the database, and the loop that
needs no database breaks off what takes too long: the thread gets the error of a lost connection,
which it waits out like any other.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from django.db import connections

from ..conf import settings

logger = logging.getLogger("django_durable_jobs.worker")

# On top of the longest wait for a lock: far more than any statement of ours takes.
STALLED_SECONDS = 30.0


def longest_answer() -> float:
    """Give the seconds after which a question counts as swallowed."""
    return float(settings.LOCK_TIMEOUT_SECONDS) + STALLED_SECONDS


def longest_renewal() -> float:
    """Likewise for a renewal, which must be asked again before the lease is over."""
    return min(longest_answer(), max(1.0, float(settings.LEASE_SECONDS) / 3))


def longest_pass() -> float:
    """Likewise for many questions in turn: a pass over many rows works page by page."""
    return 4 * longest_answer()


class Watched:
    """One thread's use of its connection."""

    def __init__(self, name: str, alias: str, longest: Callable[[], float]) -> None:
        self._name = name
        self._alias = alias
        self._longest = longest
        self._since: float | None = None
        self._connection: Any = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Say that this thread may wait for the database inside."""
        self._connection = connections[self._alias]
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def break_off(self) -> bool:
        """Cut the connection of a thread that has waited for too long; from another thread."""
        since = self._since
        if since is None or time.monotonic() - since < self._longest():
            return False
        raw = self._connection.connection
        if not hasattr(raw, "fileno"):
            return False
        # Not closed, which belongs to the thread: its read ends as if the server had gone.
        with suppress(Exception), socket.socket(fileno=os.dup(raw.fileno())) as line:
            if self._since is not since:
                return False
            line.shutdown(socket.SHUT_RDWR)
            self._since = time.monotonic()
            logger.warning("%s: the database does not answer; the connection is cut", self._name)
            return True
        return False
