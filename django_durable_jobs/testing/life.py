"""One life of an attempt, ended at one of its statements as the death of its process would.

The open transaction of each of its connections is rolled back, and nothing that is sent after
the crash point reaches a database, whoever swallows what.
"""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from unittest.mock import patch

from django.db import DatabaseError, connections
from django.db.backends.signals import connection_created

from ..transactions import in_test_wrapper
from ..worker.connections import forget

logger = logging.getLogger("django_durable_jobs.worker")

BEFORE, AFTER = "before", "after"
COMMIT = "COMMIT"
SHOWN_SQL = 200


class Crashed(BaseException):
    """The process is dead: raised at the crash point, and for all that is sent after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashPoint:
    """Where an attempt was ended: just before or just after one of its statements was sent.

    ``statement`` counts from 1, in the order they were sent. ``sql`` is its text without
    parameters, shortened; ``"COMMIT"`` for the end of a transaction.
    """

    number: int
    when: str
    statement: int
    sql: str
    database: str

    def __str__(self) -> str:
        return f'{self.when} statement {self.statement} on "{self.database}": {self.sql}'


class Life:
    """Counts what is sent within it, and ends at its crash point number ``last`` (0: never).

    A context manager for each part of the attempt. Once dead it leaves the connections as a
    new process would find them, swallows what was raised, and lets nothing be sent within it.
    """

    def __init__(self, last: int) -> None:
        self.point: CrashPoint | None = None
        self.databases: set[str] = set()
        self._last = last
        self._points = self._statements = 0
        self._lock = threading.Lock()
        self._watched: dict[int, _Watched] = {}

    def __enter__(self) -> Life:
        for connection in connections.all(initialized_only=True):
            self._watch(connection)
        # Of other threads too: what they opened before cannot be told from strangers' work.
        connection_created.connect(self._opened, weak=False)
        logger.addFilter(self._may_log)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        connection_created.disconnect(self._opened)
        logger.removeFilter(self._may_log)
        for watched in self._watched.values():
            watched.leave()
            if self.point is not None:
                watched.bury()
        self._watched.clear()
        return self.point is not None and not isinstance(error, KeyboardInterrupt)

    def begin(self, sql: object, database: str) -> _Statement:
        """Count a statement; it must not be sent any more once the attempt is dead."""
        self.refuse_if_over()
        with self._lock:
            self._statements += 1
            self.databases.add(database)
            return _Statement(self._statements, _shown(sql), database)

    def refuse_if_over(self) -> None:
        if self.point is not None:
            raise Crashed("the process has died")

    def reach(self, when: str, statement: _Statement, cursor: Any = None) -> None:
        """Come to a point, before or after a statement; it may be the end."""
        with self._lock:
            self._points += 1
            if self._points != self._last:
                return
            self.point = CrashPoint(
                number=self._points,
                when=when,
                statement=statement.number,
                sql=statement.sql,
                database=statement.database,
            )
        if cursor is not None:
            # SQLite has done what RETURNING tells of only once that is fetched.
            with suppress(Exception):
                cursor.fetchall()
        self._die()
        raise Crashed(f"the process dies {self.point}")

    def _die(self) -> None:
        """End the transactions of this thread's connections, the others' when life is left."""
        for connection in connections.all(initialized_only=True):
            watched = self._watched.get(id(connection))
            if watched is not None:
                watched.die()

    def _may_log(self, record: logging.LogRecord) -> bool:
        return self.point is None

    def _opened(self, *, connection: Any, **_: Any) -> None:
        self._watch(connection)

    def _watch(self, connection: Any) -> None:
        if id(connection) not in self._watched:
            kind = _WatchedInTestCase if in_test_wrapper(connection) else _Watched
            self._watched[id(connection)] = kind(self, connection)


@dataclass(frozen=True, slots=True)
class _Statement:
    number: int
    sql: str
    database: str


def _shown(sql: object) -> str:
    """Give one line of a statement's text; what composes its values into it shows its type."""
    if not isinstance(sql, str):
        return type(sql).__name__
    line = " ".join(sql.split())
    return line if len(line) <= SHOWN_SQL else f"{line[:SHOWN_SQL]}…"


class _Watched:
    """A connection of the attempt, whose end rolls back what is open."""

    def __init__(self, life: Life, connection: Any) -> None:
        self.life = life
        self.connection = connection
        self._ensure, self._commit = connection.ensure_connection, connection._commit
        self._patched = ExitStack()
        self._patched.enter_context(
            patch.multiple(connection, ensure_connection=self._ensuring, _commit=self._committing)
        )
        # The outermost: execute_wrapper() of the handler takes away the last one of the list.
        connection.execute_wrappers.insert(0, self._sending)
        self._patched.callback(connection.execute_wrappers.remove, self._sending)

    def leave(self) -> None:
        self._patched.close()

    def die(self) -> None:
        """Roll back and close, as the server does for a client that is gone, but at once."""
        with suppress(Exception):
            self.connection.connection.rollback()
        with suppress(Exception):
            self.connection.close()

    def bury(self) -> None:
        """Leave the connection as a new process would find it: closed, in no transaction."""
        # It may be of a thread that the handler has started.
        self.connection.inc_thread_sharing()
        try:
            self.die()
            forget(self.connection)
        finally:
            self.connection.dec_thread_sharing()

    def before(self) -> None:
        """Called before a statement is sent."""

    def after(self) -> None:
        """Called once a statement was carried out."""

    def _ensuring(self) -> None:
        self.life.refuse_if_over()
        self._ensure()

    def _sending(self, execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        statement = self.life.begin(sql, self.connection.alias)
        self.before()
        self.life.reach(BEFORE, statement)
        result = execute(sql, params, many, context)
        self.after()
        self.life.reach(AFTER, statement, context["cursor"])
        return result

    def _committing(self) -> None:
        statement = self.life.begin(COMMIT, self.connection.alias)
        self.life.reach(BEFORE, statement)
        self._commit()
        # Before any on_commit() callback.
        self.life.reach(AFTER, statement)


class _WatchedInTestCase(_Watched):
    """A connection in a TestCase's wrapper transaction, which must outlive the attempt.

    The handler's outermost ``atomic()`` stands for its transaction, and its savepoint for the
    BEGIN: released for COMMIT, and what a death rolls back to.
    """

    def __init__(self, life: Life, connection: Any) -> None:
        super().__init__(life, connection)
        self._blocks = len(connection.atomic_blocks)
        self._savepoints = len(connection.savepoint_ids)
        self._callbacks = len(connection.run_on_commit)
        self._open: str | None = None
        self._is_marked = False
        connection.atomic_blocks = _Blocks(connection)
        self._patched.callback(self._plain_blocks)

    def _plain_blocks(self) -> None:
        self.connection.atomic_blocks = list(self.connection.atomic_blocks)

    def before(self) -> None:
        if len(self.connection.atomic_blocks) > self._blocks:
            self._open = self.connection.savepoint_ids[self._savepoints]
        elif self._open is None:
            # Outside of a transaction, or the first of one; else it is the last of one.
            self._callbacks = len(self.connection.run_on_commit)

    def after(self) -> None:
        if len(self.connection.atomic_blocks) == self._blocks:
            self._open = None

    def die(self) -> None:
        """Roll the open transaction back, and mark how the tables stand now."""
        if self._is_marked:
            return
        with suppress(DatabaseError):
            if self._open is not None:
                self._send(self.connection.ops.savepoint_rollback_sql(self._open))
            self._send(f"SAVEPOINT {_MARK}")
            self._is_marked = True

    def bury(self) -> None:
        """Undo what went past Django to the database since, and what Django has noted."""
        self.die()
        if self._is_marked:
            self._send(f"ROLLBACK TO SAVEPOINT {_MARK}")
        connection = self.connection
        del connection.atomic_blocks[self._blocks :]
        del connection.savepoint_ids[self._savepoints :]
        del connection.run_on_commit[self._callbacks :]
        connection.needs_rollback = not self._is_marked

    def _send(self, sql: str) -> None:
        """Send past Django's cursors, so that nobody counts or refuses it."""
        raw = self.connection.connection
        with self.connection.wrap_database_errors, closing(raw.cursor()) as cursor:
            cursor.execute(sql)


_MARK = "durable_jobs_crash"


class _Blocks(list[Any]):
    """The ``atomic()`` blocks of a connection; the first one added has a savepoint in any case.

    Django begins no transaction in a TestCase for ``atomic(savepoint=False)``, which its own
    ``bulk_create()`` and ``delete()`` use; elsewhere that is one with its COMMIT.
    """

    def __init__(self, connection: Any) -> None:
        super().__init__(connection.atomic_blocks)
        self._connection = connection
        self._depth = len(self)

    def append(self, block: Any) -> None:
        savepoints = self._connection.savepoint_ids
        if len(self) == self._depth and savepoints[-1] is None:
            savepoints[-1] = self._connection.savepoint()
        super().append(block)
