"""SQLite: one writer, so BEGIN IMMEDIATE is the lock, and the host's clock is read after it.

Threads of one process wait for the writer in line (a lock) rather than by SQLite's busy
handler, which sleeps and tries again.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from django.db import InterfaceError, connections, transaction

from ..clock import host_now, replaced
from ..conf import settings
from ..transactions import in_test_wrapper
from ._listening import Listener, SQLiteListener
from ._sqlite_claim import (
    NOW,
    OPEN_ATTEMPTS,
    claim_statement,
    of_keys_statement,
    pick_statement,
)
from ._writer import busy_timeout, immediate, writers
from .base import (
    ATTEMPTS,
    JOBS,
    Dialect,
    FencedMove,
    Lane,
    LimitKey,
    Params,
    Place,
    Row,
    assignments,
    in_lane,
    insert_one,
    lane_params,
    lock_timeout_ms,
    refuse_open_transaction,
)

# A compound SELECT has 500 terms at most.
LANES_AT_ONCE = 200

# A no-op update makes a transaction the writer, if it is not yet.
TAKE_WRITER = f"UPDATE {JOBS} SET id = id WHERE id = -1"

_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
# A full or failing disk may come back: what waits to be written is not given up for it.
_TRANSIENT = _BUSY | {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}

# No such folder, no permission, not a database.
_REFUSALS = {sqlite3.SQLITE_CANTOPEN: "SQLITE_CANTOPEN", sqlite3.SQLITE_NOTADB: "SQLITE_NOTADB"}


def _errorcode(error: BaseException) -> int:
    cause = error.__cause__ or error
    # The primary result code is the low byte of the extended one.
    return (getattr(cause, "sqlite_errorcode", None) or 0) & 0xFF


class SQLite(Dialect):
    vendor = "sqlite"

    def now(self) -> str:
        return str(host_now())

    @contextmanager
    def own(self, alias: str, *, lock_timeout: float | None = None) -> Iterator[None]:
        refuse_open_transaction(alias)
        connection = connections[alias]
        if in_test_wrapper(connection):
            with transaction.atomic(using=alias):
                yield
            return
        milliseconds = lock_timeout_ms(lock_timeout)
        connection.ensure_connection()
        with (
            writers.turn(str(connection.settings_dict["NAME"]), milliseconds) as left,
            self.translated(),
            busy_timeout(connection, left),
            immediate(connection, alias),
        ):
            yield

    def run(
        self, alias: str, sql: str, params: Params = (), *, lock_timeout: float | None = None
    ) -> list[Row]:
        with self.own(alias, lock_timeout=lock_timeout):
            return self.fetch(alias, sql, params)

    def rows(
        self, columns: Mapping[str, str], values: Iterable[Sequence[Any]], *, name: str = "given"
    ) -> tuple[str, dict[str, Any]]:
        picked = ", ".join(
            f"json_extract(given.value, '$[{index}]') AS {column}"
            for index, column in enumerate(columns)
        )
        text = json.dumps(list(values), ensure_ascii=False, separators=(",", ":"))
        return f"SELECT {picked}, given.key AS ord FROM json_each(%({name})s) AS given", {
            name: text
        }

    def fenced(
        self,
        alias: str,
        move: FencedMove,
        values: Sequence[Sequence[Any]],
        *,
        wait: bool,
        own: bool,
        lock_timeout: float | None = None,
    ) -> list[Row]:
        if not own:
            self.fetch(alias, TAKE_WRITER)
            return self._fenced(alias, move, values)
        with self.own(alias, lock_timeout=lock_timeout):
            return self._fenced(alias, move, values)

    def _fenced(self, alias: str, move: FencedMove, values: Sequence[Sequence[Any]]) -> list[Row]:
        given, params = self.rows(move.inputs, values)
        params["now"] = host_now()
        owned = _owned(move, given)
        if not move.delete_attempt and not move.attempt_set:
            return self.fetch(alias, _job_write(move, owned, _ATTEMPT_IS_OPEN), params)
        ids = self.fetch(alias, _attempt_write(move, owned), params)
        params["mine"] = json.dumps([row[0] for row in ids])
        narrowed = " AND o.id IN (SELECT value FROM json_each(%(mine)s))"
        return self.fetch(alias, _job_write(move, owned, narrowed), params)

    def claim(
        self,
        alias: str,
        lanes: Sequence[Lane],
        *,
        limit: int,
        worker: str,
        lease: int,
        columns: Sequence[str],
        among: str = "",
    ) -> list[Row]:
        claimable = self.claimable("j") + (f" AND {among}" if among else "")
        with self.own(alias):
            params = {"now": host_now(), "lease": lease, "limit": limit}
            ids = [row[0] for row in self._pick(alias, lanes, claimable, params, ("id",))]
            if not ids:
                return []
            return self.claim_picked(alias, ids, worker=worker, lease=lease, columns=columns)

    def pick(
        self,
        alias: str,
        lanes: Sequence[Lane],
        *,
        limit: int,
        lease: int,
        columns: Sequence[str],
        among: str = "",
        params: Mapping[str, Any],
    ) -> list[Row]:
        claimable = self.claimable("j") + (f" AND {among}" if among else "")
        given = {"now": host_now(), "lease": lease, "limit": limit, **params}
        return self._pick(alias, lanes, claimable, given, columns)

    def _pick(
        self,
        alias: str,
        lanes: Sequence[Lane],
        claimable: str,
        params: Mapping[str, Any],
        columns: Sequence[str],
    ) -> list[Row]:
        """Give the first jobs of all lanes in the claim's order, some lanes in a statement."""
        found: list[Row] = []
        for first in range(0, len(lanes), LANES_AT_ONCE):
            some = lanes[first : first + LANES_AT_ONCE]
            conditions = [f"{in_lane(n)} AND {claimable}" for n in range(len(some))]
            sql = pick_statement(conditions, columns)
            found += self.fetch(alias, sql, {**params, **lane_params(some)})
        if len(lanes) > LANES_AT_ONCE:
            found.sort(key=lambda row: (-row[-2], row[-1], row[-3]))
        return [row[:-3] for row in found[: params["limit"]]]

    def claim_picked(
        self, alias: str, ids: Sequence[int], *, worker: str, lease: int, columns: Sequence[str]
    ) -> list[Row]:
        picked = json.dumps(list(ids))
        params = {"now": host_now(), "lease": lease, "worker": worker, "picked": picked}
        claimed = self.fetch(alias, claim_statement(columns), params)
        self.fetch(alias, OPEN_ATTEMPTS, params)
        place = {job: number for number, job in enumerate(ids)}
        at = list(columns).index("id")
        return [_decoded(row) for row in sorted(claimed, key=lambda row: place[row[at]])]

    def try_keys(self, alias: str, keys: Collection[LimitKey]) -> set[LimitKey]:
        """All of them: the one writer holds every lock there is, once it writes."""
        self.fetch(alias, TAKE_WRITER)
        return set(keys)

    def wait_for_keys(self, alias: str, keys: Collection[LimitKey]) -> None:
        self.fetch(alias, TAKE_WRITER)

    def lock_of_keys(
        self,
        alias: str,
        columns: Mapping[str, str],
        values: Sequence[Sequence[Any]],
        condition: str,
        params: Mapping[str, Any],
    ) -> list[int]:
        given, given_params = self.rows(columns, values)
        most = max(row[list(columns).index("places")] for row in values)
        sql = of_keys_statement(given, condition)
        rows = self.fetch(alias, sql, {**params, **given_params, "most": most})
        return [row[0] for row in rows]

    def insert_job(
        self, alias: str, columns: Mapping[str, str], values: Sequence[Any], *, own: bool
    ) -> list[Row]:
        if own:
            with self.own(alias):
                return self.insert_job(alias, columns, values, own=False)
        sql, params = insert_one(columns, NOW, values)
        params["now"] = host_now()
        return self.fetch(alias, sql, params)

    def draw_places(self, alias: str, count: int) -> list[Place]:
        """AUTOINCREMENT numbers only grow, and from here on we are the only writer.

        A write comes first: a read would keep a transaction of the caller from becoming the
        writer once another has written.
        """
        self.fetch(alias, TAKE_WRITER)
        now = host_now()
        last = self.fetch(alias, "SELECT seq FROM sqlite_sequence WHERE name = %s", [JOBS])
        first = last[0][0] + 1 if last else 1
        return [Place(id=number, created_at=now) for number in range(first, first + count)]

    def insert_jobs(
        self,
        alias: str,
        columns: Mapping[str, str],
        values: Sequence[Sequence[Any]],
        places: Sequence[Place],
    ) -> list[Row]:
        """Insert in the given order by one prepared statement, then read what was inserted."""
        at = list(columns).index("initial_run_at")
        rows = [_placed(place, row, row[at]) for place, row in zip(places, values, strict=True)]
        with connections[alias].cursor() as cursor:
            cursor.executemany(_insert_statement(list(columns)), rows)
        return self.fetch(alias, _INSERTED, [places[0].id, places[-1].id])

    announces = False

    def announce(self, alias: str, queues: Sequence[str]) -> None:
        """Nothing to do: a worker sees that something was written."""

    def listener(self, alias: str) -> Listener | None:
        return SQLiteListener(alias)

    def lock_jobs(
        self,
        alias: str,
        condition: str,
        params: Params = (),
        *,
        limit: int,
        order: str = "j.id",
        to_delete: bool = False,
    ) -> list[Row]:
        return self.fetch(
            alias,
            f"SELECT j.id, {self.now()} FROM {JOBS} j WHERE {condition}"
            f" ORDER BY {order} LIMIT {int(limit)}",
            params,
        )

    def longest_timeout(self, lease_seconds: float | None = None) -> float | None:
        # One writer: a renewal may fail while a handler writes, so the lease must outlast it.
        return float(settings.LEASE_SECONDS if lease_seconds is None else lease_seconds)

    def undecoded(self, column: str) -> str:
        # SQLite holds any bytes as text, and one such value would fail the whole query.
        return f"CAST({column} AS BLOB)"

    def octets(self, column: str) -> str:
        if sqlite3.sqlite_version_info >= (3, 43):
            return super().octets(column)
        # One value after the other is read, inside the database.
        return f"COALESCE(length(CAST({column} AS BLOB)), 0)"

    def claimable(self, row: str) -> str:
        # A partial index serves only where its very words stand, and Django wrote "NOT"
        # into this one before 6.1, "= 0" since.
        return f"{super().claimable(row)} AND {row}.limit_waiting = 0"

    def seconds_since(self, instant: int) -> float:
        # A clock that a test moves says nothing about the time that a handler has had.
        return 0.0 if replaced() else max(0.0, (host_now() - instant) / 1_000_000)

    def for_update(self) -> str:
        return ""

    def is_transient(self, error: BaseException) -> bool:
        return _errorcode(error) in _TRANSIENT or isinstance(error, InterfaceError)

    def refusal(self, error: BaseException) -> str | None:
        return _REFUSALS.get(_errorcode(error))

    def is_conflict(self, error: BaseException) -> bool:
        return False

    def is_lock_timeout(self, error: BaseException) -> bool:
        return _errorcode(error) in _BUSY


def _decoded(row: Row) -> Row:
    """Decode the columns of ``UNDECODED``; what is not UTF-8 is told at dispatch (2.3)."""
    return tuple(
        value.decode(errors="surrogateescape") if isinstance(value, bytes) else value
        for value in row
    )


def _owned(move: FencedMove, given: str) -> str:
    """The job rows that the given tokens hold at ``now``, which was read under the write lock."""
    extra = "".join(f", i.{name}" for name in move.inputs if name != "id")
    condition = f" WHERE {move.condition}" if move.condition else ""
    return (
        f"SELECT * FROM (SELECT j.id, j.status, j.lease_token, j.lease_expires_at, j.attempt_count,"
        " j.max_attempts, j.granted_attempts, j.retry_on_interrupt, j.cancel_requested_at,"
        f" j.progress, j.run_at{extra}, {NOW} AS now FROM ({given}) AS i JOIN {JOBS} j"
        " ON j.id = i.id WHERE j.status = 'running' AND j.lease_token = i.token"
        f" AND j.lease_expires_at > {NOW}) AS o{condition}"
    )


# The open attempt ``a`` of a row of ``_owned``.
_OPEN = (
    "a.job_id = o.id AND a.token = o.token AND a.number = o.attempt_count AND a.status = 'running'"
)
_ATTEMPT_IS_OPEN = f" AND EXISTS (SELECT 1 FROM {ATTEMPTS} a WHERE {_OPEN})"


def _attempt_write(move: FencedMove, owned: str) -> str:
    """End or change the open attempts of the owned jobs; gives the ids of those jobs."""
    if move.delete_attempt:
        return (
            f"DELETE FROM {ATTEMPTS} AS a WHERE a.id IN"
            f" (SELECT a.id FROM ({owned}) AS o JOIN {ATTEMPTS} a ON {_OPEN}) RETURNING job_id"
        )
    return (
        f"UPDATE {ATTEMPTS} AS a SET {assignments(move.attempt_set)} FROM ({owned}) AS o"
        f" WHERE {_OPEN} RETURNING job_id"
    )


def _job_write(move: FencedMove, owned: str, narrowed: str) -> str:
    if not move.job_set:
        return f"SELECT o.id, o.status FROM ({owned}) AS o WHERE 1 = 1{narrowed}"
    returning = "".join(f", {column}" for column in move.returning)
    return (
        f"UPDATE {JOBS} AS j SET {assignments(move.job_set)} FROM ({owned}) AS o"
        f" WHERE j.id = o.id{narrowed} RETURNING id{returning}"
    )


_INSERTED = (
    "SELECT id, scope_hash, job_id, created_at, run_at, status"
    f" FROM {JOBS} WHERE id BETWEEN %s AND %s"
)


def _insert_statement(columns: list[str]) -> str:
    return (
        f"INSERT INTO {JOBS} (id, created_at, run_at, status, {', '.join(columns)}, attempt_count,"
        " granted_attempts, limit_waiting, progress, progress_message)"
        f" VALUES (%s, %s, %s, %s, {', '.join('%s' for _ in columns)}, 0, 0, 0, 0, '')"
        " ON CONFLICT DO NOTHING"
    )


def _placed(place: Place, row: Sequence[Any], run_at: int | None) -> tuple[Any, ...]:
    """Put id, created_at, run_at and status before the columns of a row."""
    due = place.created_at if run_at is None else run_at
    status = "scheduled" if due > place.created_at else "queued"
    return (place.id, place.created_at, due, status, *row)
