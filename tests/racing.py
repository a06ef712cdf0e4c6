"""Threads that race over the database, and the proof that a race took place.

    with held(lambda: Job.objects.stage(ship, order, job_id="a")) as winner:
        with racing(lambda: Job.objects.submit(ship, order, job_id="a")) as [loser]:
            loser.wait_until_blocked()  # it really waits for the winner's transaction
            winner.rollback()
        assert loser.result().newly_created

Each function runs in a thread of its own, on connections of its own, which are closed at
its end. Every wait ends after ``LIMIT`` seconds with an error that says what was waited
for. Tests that use this need ``@pytest.mark.django_db(transaction=True)``.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Generic, TypeVar
from unittest.mock import patch

from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

T = TypeVar("T")
LIMIT = 120.0
# Settings for those who are to wait for a lock: no stall of a slow machine ends their wait.
PATIENT = {"LOCK_TIMEOUT_SECONDS": LIMIT}
_LOOK = 0.01
# SQLite says nothing about its waiters: one that has not moved from a database call for
# so many looks in a row waits (any statement of these tests takes less by far).
_STILL_LOOKS = 10
_SQLITE_CALLS = (
    "django/db/backends/sqlite3/base.py",
    # Its commit, which waits for readers where the journal is not a write-ahead log.
    "django/db/backends/base/base.py",
    "django_durable_jobs/dialects/sqlite.py",
    "django_durable_jobs/dialects/_writer.py",
)


class Signal(threading.Event):
    """An event whose ``wait`` fails after ``LIMIT`` seconds instead of giving False."""

    def wait(self, timeout: float | None = LIMIT) -> bool:
        assert super().wait(timeout), "nobody gave the signal"
        return True


def barrier(parties: int) -> threading.Barrier:
    """Make a barrier that breaks, for everybody, after ``LIMIT`` seconds."""
    return threading.Barrier(parties, timeout=LIMIT)


class Racer(Generic[T]):
    """One function in a thread of its own; ``racing`` starts and joins it."""

    def __init__(self, work: Callable[[], T], alias: str) -> None:
        self._work = work
        self._alias = alias
        self._value: T
        self._error: BaseException | None = None
        self._backend: int | None = None
        self._ready = Signal()
        self._thread = threading.Thread(target=self._run, name="racer", daemon=True)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(LIMIT)
        assert not self.is_running, f"a racer is stuck in {_place(self._frame())}"

    def result(self) -> T:
        """Give what the function gave, or raise what it raised, once it has ended."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._value

    def error(self) -> BaseException | None:
        """Give what the function raised, or None, once it has ended."""
        self.join()
        return self._error

    def wait_until_blocked(self) -> None:
        """Return once the database makes the thread wait for somebody else's lock."""
        self._ready.wait()
        if self._backend is None:
            return self._watch(self._stands_still)
        with observer(self._alias) as cursor:
            self._watch(lambda: self._waits_on_postgres(cursor))

    def _watch(self, blocked: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT
        while not blocked():
            assert self.is_running, f"it ended without a wait: {self._error!r}"
            assert time.monotonic() < deadline, f"it never waited: {_place(self._frame())}"
            time.sleep(_LOOK)

    def _run(self) -> None:
        try:
            self._connect()
            self._value = self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()
            connections.close_all()

    def _connect(self) -> None:
        connection = connections[self._alias]
        connection.ensure_connection()
        if connection.vendor == "postgresql":
            self._backend = connection.connection.info.backend_pid
        self._ready.set()

    def _waits_on_postgres(self, cursor: Any) -> bool:
        cursor.execute("SELECT cardinality(pg_blocking_pids(%s))", [self._backend])
        return bool(cursor.fetchone()[0])

    def _stands_still(self) -> bool:
        place = _place(self._frame())
        if not place.startswith(_SQLITE_CALLS):
            return False
        for _ in range(_STILL_LOOKS):
            time.sleep(_LOOK)
            if _place(self._frame()) != place:
                return False
        return True

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._thread.ident or 0)


@contextmanager
def racing(*works: Callable[[], T], alias: str = DEFAULT_DB_ALIAS) -> Iterator[list[Racer[T]]]:
    """Run each function in a thread of its own; at the end of the block all are joined.

    ``alias`` is the database whose locks ``wait_until_blocked`` watches.
    """
    racers = [Racer(work, alias) for work in works]
    for racer in racers:
        racer.start()
    try:
        yield racers
    finally:
        for racer in racers:
            racer.join()


def together(work: Callable[[int], T], count: int) -> list[Racer[T]]:
    """Run ``work(0)`` to ``work(count - 1)`` at once, from a barrier; give the ended racers."""
    line = barrier(count)

    def from_the_line(number: int) -> T:
        line.wait()
        return work(number)

    with racing(*(lambda number=number: from_the_line(number) for number in range(count))) as all_:
        pass
    return all_


class Held(Generic[T]):
    """A transaction that another thread holds open until it is told how to end."""

    def __init__(self) -> None:
        self.value: T
        self._ready = Signal()
        self._end = Signal()
        self._ended = Signal()
        self._commit = False

    def commit(self) -> None:
        self._finish(commit=True)

    def rollback(self) -> None:
        self._finish(commit=False)

    def _finish(self, *, commit: bool) -> None:
        if not self._end.is_set():
            self._commit = commit
            self._end.set()
        self._ended.wait()

    def _hold(self, work: Callable[[], T], alias: str) -> None:
        try:
            with transaction.atomic(using=alias):
                self.value = work()
                self._ready.set()
                self._end.wait()
                transaction.set_rollback(not self._commit, using=alias)
        finally:
            self._ready.set()
            self._ended.set()


@contextmanager
def held(work: Callable[[], T], *, alias: str = DEFAULT_DB_ALIAS) -> Iterator[Held[T]]:
    """Run ``work`` in a transaction of another thread that stays open until it is ended.

    ``value`` is what it gave. At the end of the block a transaction that nobody ended is
    rolled back, and what went wrong in the thread is raised.
    """
    transaction_ = Held[T]()
    with racing(lambda: transaction_._hold(work, alias), alias=alias) as [racer]:
        transaction_._ready.wait()
        if transaction_._ended.is_set():
            racer.result()
        try:
            yield transaction_
        finally:
            transaction_.rollback()
    racer.result()


@contextmanager
def another_alias(name: str = "other", **changes: Any) -> Iterator[str]:
    """Give a second alias of the test's database, for every thread; ``changes`` are settings."""
    guarded = BaseDatabaseWrapper.ensure_connection

    def ensure_connection(self: BaseDatabaseWrapper) -> None:
        # Tests name their databases beforehand, and others are guarded against.
        if self.alias != name:
            guarded(self)
        elif self.connection is None:
            with self.wrap_database_errors:
                self.connect()

    connections.settings[name] = {**connections[DEFAULT_DB_ALIAS].settings_dict, **changes}
    try:
        with patch.object(BaseDatabaseWrapper, "ensure_connection", ensure_connection):
            yield name
    finally:
        connections[name].close()
        del connections[name]
        del connections.settings[name]


@contextmanager
def observer(alias: str = DEFAULT_DB_ALIAS) -> Iterator[Any]:
    """Give a cursor of a connection of its own, whatever state the thread's one is in."""
    connection = connections[alias].copy()
    try:
        with connection.cursor() as cursor:
            yield cursor
    finally:
        connection.close()


def _place(frame: FrameType | None) -> str:
    """Give where a thread stands: the file below its package root, line and instruction."""
    if frame is None:
        return "no frame"
    file = frame.f_code.co_filename.replace("\\", "/")
    for root in ("/django/", "/django_durable_jobs/"):
        before, found, after = file.rpartition(root)
        if found:
            file = root.strip("/") + "/" + after
            break
    return f"{file}:{frame.f_lineno}:{frame.f_lasti}"
