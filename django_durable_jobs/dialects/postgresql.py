"""PostgreSQL: SKIP LOCKED, ``clock_timestamp()`` after the lock, one round trip a move.

Each move is one statement, so a transaction of our own can go to the server whole:
BEGIN at READ COMMITTED, the lock timeout for this transaction alone, the statement, COMMIT.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from django.db import InterfaceError, OperationalError, connections, transaction

from ..clock import replaced
from ..exceptions import LockTimeout
from ..transactions import in_test_wrapper
from ._listening import CHANNEL, Listener, PostgreSQLListener
from ._postgresql_claim import (
    DELETE_LOCK,
    ROW_LOCK,
    best_lanes_statement,
    claim_statement,
    of_keys_statement,
    pick_statement,
    try_keys_statement,
    wait_for_keys_statement,
)
from ._refusals import refusal_codes
from .base import (
    ATTEMPTS,
    JOBS,
    KEY_COLUMNS,
    Dialect,
    FencedMove,
    Lane,
    LimitKey,
    Params,
    Place,
    Row,
    assignments,
    insert_one,
    lane_params,
    lock_timeout_ms,
    refuse_open_transaction,
)

_CONFLICTS = frozenset({"40001", "40P01"})
_LOCK_NOT_AVAILABLE = "55P03"
# Class 08: connection; 57P01..57P05: shut down, crash, starting up; 53300: too many connections;
# 25006: a failover left us on a read-only server. 57014, 25P03: somebody's time limit; 53100,
# 53200: no disk, no memory. Each may pass, and none is about what is written.
_TRANSIENT = frozenset(
    {"57P01", "57P02", "57P03", "57P04", "57P05", "57014", "25006", "25P03"}
    | {"53100", "53200", "53300"}
)

# Classes: authorization, no such database, what a role or the startup packet may not do.
_REFUSALS = ("28", "3D", "42501", "42704", "22023")

# The claim's statement has a part for each lane, so planning it takes longer with each.
LANES_AT_ONCE = 64
_LANE_COLUMNS = {"queue": "text", "handler": "text", "version": "integer", "fingerprint": "text"}

_LOCKED_COLUMNS = (
    "status",
    "lease_token",
    "lease_expires_at",
    "attempt_count",
    "max_attempts",
    "granted_attempts",
    "retry_on_interrupt",
    "cancel_requested_at",
    "progress",
    "run_at",
)


def _sqlstate(error: BaseException) -> str:
    cause = error.__cause__ or error
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) or ""


class PostgreSQL(Dialect):
    vendor = "postgresql"

    def now(self) -> str:
        instant = replaced()
        if instant is not None:
            return f"{instant}::bigint"
        # extract() of a timestamptz is numeric, so this is exact to the microsecond.
        return "(extract(epoch from clock_timestamp()) * 1000000)::bigint"

    @contextmanager
    def own(self, alias: str, *, lock_timeout: float | None = None) -> Iterator[None]:
        refuse_open_transaction(alias)
        connection = connections[alias]
        if in_test_wrapper(connection):
            with transaction.atomic(using=alias):
                yield
            return
        with self.translated(), transaction.atomic(using=alias, durable=True):
            with connection.cursor() as cursor:
                cursor.execute(
                    "SET TRANSACTION ISOLATION LEVEL READ COMMITTED;"
                    f" SET LOCAL lock_timeout = {lock_timeout_ms(lock_timeout)}"
                )
            yield

    def run(
        self, alias: str, sql: str, params: Params = (), *, lock_timeout: float | None = None
    ) -> list[Row]:
        return self.retried(lambda: self._run(alias, sql, params, lock_timeout))

    def _run(self, alias: str, sql: str, params: Params, lock_timeout: float | None) -> list[Row]:
        connection = connections[alias]
        refuse_open_transaction(alias)
        if in_test_wrapper(connection) or not _sends_whole_scripts(connection):
            with self.own(alias, lock_timeout=lock_timeout):
                return self.fetch(alias, sql, params)
        script = (
            "BEGIN ISOLATION LEVEL READ COMMITTED;"
            f" SET LOCAL lock_timeout = {lock_timeout_ms(lock_timeout)}; {sql}; COMMIT"
        )
        with self.translated(), connection.cursor() as cursor:
            try:
                cursor.execute(script, params)
            except BaseException:
                _leave_failed_transaction(connection)
                raise
            cursor.nextset()
            cursor.nextset()
            return list(cursor.fetchall())

    def rows(
        self, columns: Mapping[str, str], values: Iterable[Sequence[Any]], *, name: str = "given"
    ) -> tuple[str, dict[str, Any]]:
        arrays = ", ".join(f"%({name}_{column})s::{kind}[]" for column, kind in columns.items())
        transposed = [list(column) for column in zip(*values, strict=True)] or [[]] * len(columns)
        return (
            f"SELECT * FROM unnest({arrays}) WITH ORDINALITY AS given({', '.join(columns)}, ord)",
            {f"{name}_{column}": one for column, one in zip(columns, transposed, strict=True)},
        )

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
        given, params = self.rows(move.inputs, values)
        sql = _fenced_statement(move, given, now=self.now(), wait=wait)
        if own:
            return self.run(alias, sql, params, lock_timeout=lock_timeout)
        return self.fetch(alias, sql, params)

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
        """In one statement, so that a claim is whole: it ends with the lanes that give any job."""
        now = self.now()
        claimable = self.claimable("j") + (f" AND {among}" if among else "")
        for some in self._best_lanes(partial(self.run, alias), lanes, claimable, {}, limit):
            picked = pick_statement(len(some), claimable, now=now, limit=limit)
            sql = claim_statement(picked, now=now, lease=lease, columns=columns)
            if rows := self.run(alias, sql, {**lane_params(some), "worker": worker}):
                return rows
        return []

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
        now = self.now()
        found: list[Row] = []
        for some in self._best_lanes(partial(self.fetch, alias), lanes, claimable, params, limit):
            left = limit - len(found)
            sql = pick_statement(len(some), claimable, now=now, limit=left, columns=columns)
            found += self.fetch(alias, sql, {**lane_params(some), **params})
            if len(found) == limit:
                break
        return found

    def _best_lanes(
        self,
        fetch: Callable[[str, Params], list[Row]],
        lanes: Sequence[Lane],
        claimable: str,
        params: Mapping[str, Any],
        limit: int,
    ) -> Iterator[Sequence[Lane]]:
        """Give the lanes so many at a time, those first that hold the first jobs of the claim.

        Where there are few they are given as they are. The first ``limit`` jobs are in no more
        lanes than that; later ones are asked for only where others have locked these.
        """
        size = max(LANES_AT_ONCE, limit)
        while len(lanes) > size:
            values = [(one.queue, one.handler, one.version, one.fingerprint) for one in lanes]
            given, given_params = self.rows(_LANE_COLUMNS, values, name="lane")
            sql = best_lanes_statement(given, claimable, now=self.now(), limit=size)
            best = [lanes[row[0] - 1] for row in fetch(sql, {**params, **given_params})]
            if best:
                yield best
            if len(best) < size:
                return
            given_out = set(best)
            lanes = [one for one in lanes if one not in given_out]
        yield lanes

    def claim_picked(
        self, alias: str, ids: Sequence[int], *, worker: str, lease: int, columns: Sequence[str]
    ) -> list[Row]:
        given, params = self.rows({"id": "bigint"}, [(one,) for one in ids])
        picked = f"SELECT g.id FROM ({given}) AS g"
        sql = claim_statement(picked, now=self.now(), lease=lease, columns=columns)
        return self.fetch(alias, sql, {**params, "worker": worker})

    def try_keys(self, alias: str, keys: Collection[LimitKey]) -> set[LimitKey]:
        given, params = self.rows(KEY_COLUMNS, list(keys))
        rows = self.fetch(alias, try_keys_statement(given), params)
        return {LimitKey(row[0], row[1]) for row in rows if row[2]}

    def wait_for_keys(self, alias: str, keys: Collection[LimitKey]) -> None:
        given, params = self.rows(KEY_COLUMNS, list(keys))
        self.fetch(alias, wait_for_keys_statement(given), params)

    def lock_of_keys(
        self,
        alias: str,
        columns: Mapping[str, str],
        values: Sequence[Sequence[Any]],
        condition: str,
        params: Mapping[str, Any],
    ) -> list[int]:
        given, given_params = self.rows(columns, values)
        rows = self.fetch(alias, of_keys_statement(given, condition), {**params, **given_params})
        return [row[0] for row in rows]

    def insert_job(
        self, alias: str, columns: Mapping[str, str], values: Sequence[Any], *, own: bool
    ) -> list[Row]:
        sql, params = insert_one(columns, self.now(), values)
        return self.run(alias, sql, params) if own else self.fetch(alias, sql, params)

    def draw_places(self, alias: str, count: int) -> list[Place]:
        sql = (
            f"SELECT nextval(pg_get_serial_sequence('{JOBS}', 'id')::regclass), t.now"
            f" FROM (SELECT {self.now()} AS now) AS t, generate_series(1, %s)"
        )
        drawn = self.fetch(alias, sql, [count])
        return [
            Place(id=number, created_at=drawn[0][1]) for number in sorted(row[0] for row in drawn)
        ]

    def insert_jobs(
        self,
        alias: str,
        columns: Mapping[str, str],
        values: Sequence[Sequence[Any]],
        places: Sequence[Place],
    ) -> list[Row]:
        placed = [(at.id, at.created_at, *row) for at, row in zip(places, values, strict=True)]
        given, params = self.rows({"id": "bigint", "created_at": "bigint", **columns}, placed)
        return self.fetch(alias, _insert_statement(list(columns), given), params)

    announces = True

    def announce(self, alias: str, queues: Sequence[str]) -> None:
        self.fetch(alias, f"SELECT pg_notify('{CHANNEL}', q) FROM unnest(%s::text[]) q", [queues])

    def listener(self, alias: str) -> Listener | None:
        return PostgreSQLListener(alias) if _is_psycopg_3(connections[alias]) else None

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
        lock = DELETE_LOCK if to_delete else ROW_LOCK
        return self.fetch(
            alias,
            f"WITH locked AS MATERIALIZED (SELECT j.id FROM {JOBS} j WHERE {condition}"
            f" ORDER BY {order} LIMIT {int(limit)}{lock} OF j SKIP LOCKED)"
            f" SELECT id, {self.now()} FROM locked",
            params,
        )

    def for_update(self) -> str:
        return ROW_LOCK

    def is_transient(self, error: BaseException) -> bool:
        if isinstance(error, InterfaceError):
            return True
        state = _sqlstate(error)
        if state in _CONFLICTS or state in _TRANSIENT or state == _LOCK_NOT_AVAILABLE:
            return True
        # A connection that broke or was refused has no SQLSTATE.
        return state.startswith("08") or (isinstance(error, OperationalError) and not state)

    def refusal(self, error: BaseException) -> str | None:
        cause = error.__cause__ or error
        failed = getattr(cause, "pgconn", None)
        codes = [state] if (state := _sqlstate(error)) else []
        if not codes and isinstance(error, OperationalError) and failed is not None:
            # The server asks for a password, and there is none to send.
            codes = ["28P01"] if failed.needs_password else refusal_codes(failed)
        # With several hosts each of those that answer must refuse.
        if codes and all(code.startswith(_REFUSALS) for code in codes):
            return f"SQLSTATE {codes[-1]}"
        return None

    def is_conflict(self, error: BaseException) -> bool:
        return _sqlstate(error) in _CONFLICTS

    def is_lock_timeout(self, error: BaseException) -> bool:
        return _sqlstate(error) == _LOCK_NOT_AVAILABLE

    def blames_row(self, error: BaseException) -> bool:
        return isinstance(error, LockTimeout) or self.is_lock_timeout(error)


def _sends_whole_scripts(connection: Any) -> bool:
    """Tell whether the driver binds on the client, so that a script may carry parameters."""
    return _is_psycopg_3(connection) and not connection.settings_dict["OPTIONS"].get(
        "server_side_binding", False
    )


def _is_psycopg_3(connection: Any) -> bool:
    return bool(connection.Database.__name__ == "psycopg")


def _leave_failed_transaction(connection: Any) -> None:
    """Roll a failed script back, so that the session is idle again; a dead one is closed."""
    raw = connection.connection
    if raw is None:
        return
    try:
        raw.rollback()
    except Exception:  # noqa: BLE001 (any failure here means that the connection is gone)
        connection.close()


def _fenced_statement(move: FencedMove, given: str, *, now: str, wait: bool) -> str:
    """Lock the job, then its attempt; compare the locked row's expiry with the clock after (3.2).

    Without ``wait`` a locked row of either table is passed over, so that no job of a group
    waits for another's lock.
    """
    locked = ", ".join(f"j.{column}" for column in _LOCKED_COLUMNS)
    extra = "".join(f", i.{name}" for name in move.inputs if name != "id")
    skip = "" if wait else " SKIP LOCKED"
    condition = f" AND ({move.condition})" if move.condition else ""
    return (
        f"WITH i AS ({given}),"
        f" locked AS MATERIALIZED (SELECT j.id, {locked}{extra} FROM {JOBS} j JOIN i ON j.id = i.id"
        f" ORDER BY j.id{ROW_LOCK} OF j{skip}),"
        f" timed AS MATERIALIZED (SELECT locked.*, {now} AS now FROM locked),"
        " o AS MATERIALIZED (SELECT * FROM timed o WHERE o.status = 'running'"
        f" AND o.lease_token = o.token AND o.lease_expires_at > o.now{condition}),"
        f"{_attempt_write(move, skip)}"
        f" w AS ({_job_write(move)})"
        " SELECT * FROM w"
    )


def _job_write(move: FencedMove) -> str:
    """Write the owned rows whose attempt is there; a move that only locks writes nothing."""
    if not move.job_set:
        return "SELECT o.id, o.status FROM o WHERE o.id IN (SELECT job_id FROM a)"
    returning = "".join(f", j.{column}" for column in move.returning)
    return (
        f"UPDATE {JOBS} j SET {assignments(move.job_set)} FROM o"
        f" WHERE j.id = o.id AND o.id IN (SELECT job_id FROM a) RETURNING j.id{returning}"
    )


def _attempt_write(move: FencedMove, skip: str) -> str:
    """The open attempt of the token: updated, deleted, or only required to be there."""
    mode = DELETE_LOCK if move.delete_attempt else ROW_LOCK
    lock = f"{mode} OF a{skip}" if move.locks_attempt else ""
    found = (
        f" m AS MATERIALIZED (SELECT a.id, a.job_id FROM {ATTEMPTS} a JOIN o ON a.job_id = o.id"
        f" AND a.token = o.token AND a.number = o.attempt_count AND a.status = 'running'{lock}),"
    )
    if move.delete_attempt:
        write = f"DELETE FROM {ATTEMPTS} a USING m WHERE a.id = m.id RETURNING a.job_id"
    elif move.attempt_set:
        write = (
            f"UPDATE {ATTEMPTS} a SET {assignments(move.attempt_set)}"
            " FROM m JOIN o ON o.id = m.job_id WHERE a.id = m.id RETURNING a.job_id"
        )
    else:
        write = "SELECT m.job_id FROM m"
    return f"{found} a AS ({write}),"


def _insert_statement(columns: list[str], given: str) -> str:
    """Insert in order of identity, so that two callers of the same ones cannot deadlock."""
    copied = ", ".join(columns)
    return (
        f"INSERT INTO {JOBS} (id, created_at, run_at, status, {copied}, attempt_count,"
        " granted_attempts, limit_waiting, progress, progress_message)"
        " SELECT g.id, g.created_at, coalesce(g.initial_run_at, g.created_at),"
        " CASE WHEN g.initial_run_at > g.created_at THEN 'scheduled' ELSE 'queued' END,"
        f" {', '.join('g.' + column for column in columns)}, 0, 0, false, 0, ''"
        f' FROM ({given}) AS g ORDER BY g.scope_hash COLLATE "C", g.job_id COLLATE "C"'
        " ON CONFLICT DO NOTHING"
        " RETURNING id, scope_hash, job_id, created_at, run_at, status"
    )
