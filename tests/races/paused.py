"""A move that stands still right before its commit, and a statement that reads an old snapshot.

    with paused(lambda: finish(...)) as first:
        with racing(job.request_cancel) as [second]:
            second.wait_until_blocked()
            first.go_on()
        assert second.result() == "unchanged"

The transaction is the package's own, sent as it always sends it: a trigger on the table of
jobs stops it, on PostgreSQL by an advisory lock, on SQLite by a function of the test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar
from unittest.mock import patch

from django.db import DEFAULT_DB_ALIAS, connections

from django_durable_jobs.dialects.base import JOBS
from django_durable_jobs.dialects.postgresql import PostgreSQL
from tests.racing import Racer, Signal, observer, racing

T = TypeVar("T")
_LOCK = 70_707
_ON_POSTGRES = f"""
CREATE FUNCTION tests_pause() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF current_setting('tests.pause', true) = 'on' THEN
        PERFORM pg_advisory_xact_lock_shared({_LOCK});
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER tests_pause AFTER INSERT OR UPDATE ON {JOBS}
FOR EACH STATEMENT EXECUTE FUNCTION tests_pause();
"""
_OFF_POSTGRES = f"DROP TRIGGER tests_pause ON {JOBS}; DROP FUNCTION tests_pause()"
# Not the no-op updates that take the write lock: those set the id only.
_EVENTS = (
    "INSERT",
    "UPDATE OF status, limit_waiting, lease_expires_at, cancel_requested_at, progress, checkpoint",
)


class Paused(Generic[T]):
    """The move in its thread; ``go_on`` lets it commit and gives what it gave."""

    def __init__(
        self, racer: Racer[T], release: Callable[[], Any], fail: Callable[[], Any]
    ) -> None:
        self.racer = racer
        self._release: Callable[[], Any] | None = release
        self._fail = fail

    def fail(self) -> None:
        """Let the database refuse the statement at which it stands; waits for its end."""
        self._release = None
        self._fail()
        self.racer.join()

    def go_on(self) -> T:
        self.release()
        return self.racer.result()

    def release(self) -> None:
        """Let it go on without waiting for it."""
        release, self._release = self._release, None
        if release is not None:
            release()


@contextmanager
def paused(work: Callable[[], T], *, alias: str = DEFAULT_DB_ALIAS) -> Iterator[Paused[T]]:
    """Run ``work``; once it has written and is about to commit, go on with the block.

    At the end of the block it commits, if ``go_on`` has not been called.
    """
    postgres = connections[alias].vendor == "postgresql"
    with (_on_postgres if postgres else _on_sqlite)(work, alias) as one:
        try:
            yield one
        finally:
            one.release()


@contextmanager
def passed_over(work: Callable[[], Any], first: Any) -> Iterator[Racer[Any]]:
    """Race ``work``, which does not wait for locked rows, against ``first``, which stands.

    On PostgreSQL it ends at once; on SQLite it waits for ``first``, which then goes on.
    """
    with racing(work) as [second]:
        if connections[DEFAULT_DB_ALIAS].vendor == "postgresql":
            second.result()
        else:
            second.wait_until_blocked()
            first()
        yield second


@contextmanager
def _on_postgres(work: Callable[[], T], alias: str) -> Iterator[Paused[T]]:
    def pausing() -> T:
        with connections[alias].cursor() as cursor:
            cursor.execute("SET tests.pause = 'on'")
        return work()

    with observer(alias) as cursor:
        cursor.execute(_ON_POSTGRES)
        try:
            with _advisory_lock(cursor) as release, racing(pausing, alias=alias) as [racer]:
                try:
                    racer.wait_until_blocked()
                    yield Paused(racer, release, lambda: _cancel(cursor, racer))
                finally:
                    release()
        finally:
            cursor.execute(_OFF_POSTGRES)


def _cancel(cursor: Any, racer: Racer[Any]) -> None:
    cursor.execute("SELECT pg_cancel_backend(%s)", [racer._backend])


@contextmanager
def _advisory_lock(cursor: Any) -> Iterator[Callable[[], None]]:
    """Hold the lock that stops the others; the function given releases it."""
    cursor.execute(f"SELECT pg_advisory_lock({_LOCK})")
    # Not a second unlock: PostgreSQL warns of it.
    yield lambda: cursor.execute("SELECT pg_advisory_unlock_all()")


@contextmanager
def _on_sqlite(work: Callable[[], T], alias: str) -> Iterator[Paused[T]]:
    reached, released, failing = Signal(), Signal(), Signal()

    def stop() -> None:
        reached.set()
        released.wait()
        if failing.is_set():
            raise RuntimeError("the test wants it to fail")

    def fail() -> None:
        failing.set()
        released.set()

    def pausing() -> T:
        connections[alias].ensure_connection()
        raw = connections[alias].connection
        raw.create_function("tests_pause", 0, stop)
        for event in _EVENTS:
            name = event.split()[0]
            raw.execute(
                f"CREATE TEMP TRIGGER tests_pause_{name} AFTER {event} ON {JOBS}"
                " BEGIN SELECT tests_pause(); END"
            )
        return work()

    with racing(pausing, alias=alias) as [racer]:
        try:
            reached.wait()
            yield Paused(racer, released.set, fail)
        finally:
            released.set()


@contextmanager
def old_snapshot(work: Callable[[], T], *, alias: str = DEFAULT_DB_ALIAS) -> Iterator[Paused[T]]:
    """Run ``work``; stop its first statement that reads the clock, its snapshot taken already.

    Whatever commits now is newer than what that statement sees. PostgreSQL only.
    """
    slow = threading.local()
    read = PostgreSQL.now

    def now(self: PostgreSQL) -> str:
        return "tests_slow_clock()" if getattr(slow, "here", False) else read(self)

    def slowly() -> T:
        slow.here = True
        return work()

    with observer(alias) as cursor:
        cursor.execute(
            "CREATE FUNCTION tests_slow_clock() RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN"
            f" PERFORM pg_advisory_xact_lock_shared({_LOCK});"
            f" RETURN {read(PostgreSQL())}; END $$"
        )
        try:
            with (
                patch.object(PostgreSQL, "now", now),
                _advisory_lock(cursor) as release,
                racing(slowly, alias=alias) as [racer],
            ):
                try:
                    racer.wait_until_blocked()
                    yield Paused(racer, release, lambda: _cancel(cursor, racer))
                finally:
                    release()
        finally:
            cursor.execute("DROP FUNCTION tests_slow_clock()")
