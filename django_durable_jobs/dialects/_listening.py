"""How a worker hears of new work before its next poll (CONTRACT 4.4)."""

from __future__ import annotations

import abc
import selectors
import time
import uuid
from typing import Any

from django.db import connections
from django.db.utils import load_backend

NOTHING: frozenset[str] = frozenset()


class Listener(abc.ABC):
    """Belongs to one thread, whose own connection of the alias it uses."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    @abc.abstractmethod
    def wait(self, seconds: float) -> frozenset[str] | None:
        """Wait up to so many seconds; give the queues heard of, None where it may be any."""

    def hears(self) -> bool:
        """Tell, by trying it once, whether announcements arrive."""
        return True


class SQLiteListener(Listener):
    """``PRAGMA data_version`` changes when another connection has written; it reads one number."""

    PROBE_SECONDS = 0.02

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self._raw: Any = None
        self._version = 0

    def wait(self, seconds: float) -> frozenset[str] | None:
        connection = connections[self.alias]
        connection.ensure_connection()
        raw = connection.connection
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(self.PROBE_SECONDS)
            with connection.wrap_database_errors:
                version = raw.execute("PRAGMA data_version").fetchone()[0]
            # The number of a new connection cannot be compared with an older one's.
            changed = raw is not self._raw or version != self._version
            self._raw, self._version = raw, version
            if changed:
                return None
        return NOTHING


CHANNEL = "django_durable_jobs"
TEST_CHANNEL = "django_durable_jobs_test"
TEST_SECONDS = 2.0
# A connection that the network has swallowed says nothing either.
SILENCE_SECONDS = 30.0


class PostgreSQLListener(Listener):
    """LISTEN on the thread's connection, through libpq, which any psycopg 3 gives."""

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self._raw: Any = None
        self._alive_at = 0.0

    def wait(self, seconds: float) -> frozenset[str] | None:
        if self._subscribe():
            return None
        heard = self._heard(seconds)
        if heard:
            self._alive_at = time.monotonic()
        elif time.monotonic() > self._alive_at + SILENCE_SECONDS:
            self._ask("SELECT 1")
        return frozenset(text for channel, text in heard if channel == CHANNEL)

    def hears(self) -> bool:
        """Announce on another connection: behind a pooler of transactions it does not arrive."""
        self._subscribe()
        mark = uuid.uuid4().hex
        settings = connections[self.alias].settings_dict
        other = load_backend(settings["ENGINE"]).DatabaseWrapper(settings, self.alias)
        try:
            with other.cursor() as cursor:
                cursor.execute("SELECT pg_notify(%s, %s)", [TEST_CHANNEL, mark])
        finally:
            other.close()
        end = time.monotonic() + TEST_SECONDS
        while (left := end - time.monotonic()) > 0:
            if (TEST_CHANNEL, mark) in self._heard(left):
                return True
        return False

    def _subscribe(self) -> bool:
        """Listen on a connection that is new; tell whether announcements may have been missed."""
        connection = connections[self.alias]
        connection.ensure_connection()
        if connection.connection is self._raw:
            return False
        self._ask(f"LISTEN {CHANNEL}; LISTEN {TEST_CHANNEL}")
        self._raw = connection.connection
        return True

    def _ask(self, sql: str) -> None:
        with connections[self.alias].cursor() as cursor:
            cursor.execute(sql)
        self._alive_at = time.monotonic()

    def _heard(self, seconds: float) -> set[tuple[str, str]]:
        with connections[self.alias].wrap_database_errors, selectors.DefaultSelector() as selector:
            selector.register(self._raw.fileno(), selectors.EVENT_READ)
            selector.select(seconds)
            libpq = self._raw.pgconn
            libpq.consume_input()
            heard = set()
            while (notify := libpq.notifies()) is not None:
                heard.add((notify.relname.decode(), notify.extra.decode(errors="replace")))
            return heard
