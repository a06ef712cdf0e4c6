"""The contract of a dialect, and the value types that its statements are made from."""

from __future__ import annotations

import abc
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from django.db import DatabaseError, InterfaceError, connections

from ..conf import settings
from ..exceptions import LockTimeout, TransactionActive
from ..transactions import in_callers_transaction, in_foreign_transaction, joins_transaction
from ._listening import Listener

JOBS = "django_durable_jobs_job"
ATTEMPTS = "django_durable_jobs_jobattempt"
PAUSES = "django_durable_jobs_queuepause"
CURSORS = "django_durable_jobs_schedulecursor"

# A ``LimitKey`` as a given row.
KEY_COLUMNS = {"handler": "text", "key": "text"}

Row = tuple[Any, ...]
Params = Sequence[Any] | Mapping[str, Any]
T = TypeVar("T")

TRIES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Queued jobs of one queue that one and the same handler code can run."""

    queue: str
    handler: str
    version: int
    fingerprint: str

    @property
    def capability(self) -> tuple[str, int, str]:
        """What a worker must have to run these jobs."""
        return (self.handler, self.version, self.fingerprint)


class LimitKey(NamedTuple):
    """What a concurrency limit counts: the jobs of a handler that have this key (3.12)."""

    handler: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a job stands in the order of claims, whenever its insert succeeds."""

    id: int
    created_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FencedMove:
    """One conditional write of a token's holder, on many jobs at once.

    ``inputs`` names the columns of the given rows and their SQL types, ``id`` and ``token``
    first. ``job_set`` and ``attempt_set`` map columns to expressions over ``o``: the locked
    job row, the given row and ``o.now``. An attempt is updated, deleted or only looked at;
    it must be open in each case, else its job stays as it is. It is locked as its job is,
    but for a move with ``locks_attempt=False``, which somebody's lock on it must not hold up.
    """

    name: str
    inputs: Mapping[str, str]
    job_set: Mapping[str, str]
    attempt_set: Mapping[str, str] = field(default_factory=dict)
    delete_attempt: bool = False
    locks_attempt: bool = True
    condition: str = ""
    returning: Sequence[str] = ("status",)


class Dialect(abc.ABC):
    """Clock, transactions of our own, set-based statements, and errors told by their code."""

    vendor: str

    @staticmethod
    def fetch(alias: str, sql: str, params: Params = ()) -> list[Row]:
        """Run one statement in whatever transaction is open and give its rows."""
        with connections[alias].cursor() as cursor:
            cursor.execute(sql, params)
            return list(cursor.fetchall())

    @abc.abstractmethod
    def now(self) -> str:
        """Give an SQL expression for the instant, in microseconds since 1970 UTC."""

    def instant(self, alias: str) -> int:
        """Read the clock that decides, in microseconds since 1970 UTC."""
        with connections[alias].cursor() as cursor:
            cursor.execute(f"SELECT {self.now()}")
            return int(cursor.fetchone()[0])

    @abc.abstractmethod
    def own(self, alias: str, *, lock_timeout: float | None = None) -> Any:
        """Open a transaction of our own, in which lock waits are bounded (3.15, 4.1)."""

    @abc.abstractmethod
    def run(
        self, alias: str, sql: str, params: Params = (), *, lock_timeout: float | None = None
    ) -> list[Row]:
        """Run one statement in a transaction of our own and give its rows."""

    @abc.abstractmethod
    def rows(
        self, columns: Mapping[str, str], values: Iterable[Sequence[Any]], *, name: str = "given"
    ) -> tuple[str, dict[str, Any]]:
        """Give a SELECT over the given values, in their order, and its parameters, so named."""

    @abc.abstractmethod
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
        """Make a fenced move and give ``(id, *returning)`` of the jobs that it changed.

        Without ``wait`` rows that another transaction has locked are passed over. ``own``
        makes a transaction of our own; else the caller's open one is joined.
        """

    @abc.abstractmethod
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
        """Claim up to ``limit`` jobs of the lanes in the order of 4.1; give their columns.

        ``among`` is a further condition over the job row ``j``.
        """

    @abc.abstractmethod
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
        """Lock, inside ``own``, up to ``limit`` jobs that ``claim`` would take, in its order.

        ``among`` is a further condition over ``j``, with its ``params``. Gives the columns, text
        maybe as bytes (``undecoded``).
        """

    @abc.abstractmethod
    def claim_picked(
        self, alias: str, ids: Sequence[int], *, worker: str, lease: int, columns: Sequence[str]
    ) -> list[Row]:
        """Claim exactly these jobs, which the open transaction has picked; as ``claim``."""

    @abc.abstractmethod
    def try_keys(self, alias: str, keys: Collection[LimitKey]) -> set[LimitKey]:
        """Lock keys to the end of the open transaction; give those that nobody else holds.

        It never waits, so whoever holds rows may try. What they guard is read by a statement
        that begins after this one (CONTRACT 3.12).
        """

    @abc.abstractmethod
    def wait_for_keys(self, alias: str, keys: Collection[LimitKey]) -> None:
        """Lock keys, each waited for, in one order: only where nothing else is held yet."""

    @abc.abstractmethod
    def lock_of_keys(
        self,
        alias: str,
        columns: Mapping[str, str],
        values: Sequence[Sequence[Any]],
        condition: str,
        params: Mapping[str, Any],
    ) -> list[int]:
        """Lock the first queued jobs of each key in the claim's order; busy ones are passed over.

        Each of the given rows ``g`` has ``handler``, ``key``, and ``places``: how many jobs.
        ``condition`` is over ``j`` and ``g``. Must run inside a transaction.
        """

    @abc.abstractmethod
    def insert_job(
        self, alias: str, columns: Mapping[str, str], values: Sequence[Any], *, own: bool
    ) -> list[Row]:
        """Insert one job; if it is new give id, scope_hash, job_id, created_at, run_at, status."""

    @abc.abstractmethod
    def draw_places(self, alias: str, count: int) -> list[Place]:
        """Draw ascending ids and one creation instant, in the transaction that inserts."""

    @abc.abstractmethod
    def insert_jobs(
        self,
        alias: str,
        columns: Mapping[str, str],
        values: Sequence[Sequence[Any]],
        places: Sequence[Place],
    ) -> list[Row]:
        """Insert many at their places, in the open transaction; answer as ``insert_job``."""

    # Whether workers hear of new work only if it is announced to them.
    announces: bool

    @abc.abstractmethod
    def announce(self, alias: str, queues: Sequence[str]) -> None:
        """Announce work of these queues to all listeners; in autocommit mode."""

    @abc.abstractmethod
    def listener(self, alias: str) -> Listener | None:
        """Give what hears of new work; None where this driver has nothing of the kind."""

    @abc.abstractmethod
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
        """Lock up to ``limit`` jobs that meet an SQL condition; busy ones are passed over.

        Gives ``(id, now)``; must run inside ``own``. The condition is checked on the locked row.
        With ``to_delete`` also a job is busy that an open transaction has made a row refer to.
        """

    def undecoded(self, column: str) -> str:
        """Give an expression for a text column that the driver reads whatever it holds.

        What comes may be bytes: ``payloads.decode_text``.
        """
        return column

    def octets(self, column: str) -> str:
        """Give an expression for the number of bytes that a text column holds; 0 for NULL."""
        return f"CAST(COALESCE(octet_length({column}), 0) AS bigint)"

    def claimable(self, row: str) -> str:
        """Give the condition of the claim's index over a job row, in words that match it."""
        return f"{row}.status = 'queued' AND NOT {row}.limit_waiting"

    def longest_timeout(self, lease_seconds: float | None = None) -> float | None:
        """Give the seconds that a job's timeout must stay below, None for no such limit (4.6).

        ``lease_seconds`` is the lease of its claim, unless ``LEASE_SECONDS``.
        """
        return None

    def seconds_since(self, instant: int) -> float:
        """Give the time since an instant of ``now()``; 0 where the clock is another host's."""
        return 0.0

    @abc.abstractmethod
    def for_update(self) -> str:
        """Give the clause that locks the rows of a SELECT inside a transaction."""

    @abc.abstractmethod
    def is_transient(self, error: BaseException) -> bool:
        """Tell whether trying again may help: lost connection, deadlock, serialization, busy."""

    def may_pass(self, error: BaseException) -> bool:
        """Tell what is waited out: what is transient, and our own ``LockTimeout``."""
        if isinstance(error, LockTimeout):
            return True
        return isinstance(error, DatabaseError | InterfaceError) and self.is_transient(error)

    @abc.abstractmethod
    def refusal(self, error: BaseException) -> str | None:
        """Give the code by which the database lets nobody in who comes like this, None for no such.

        It does not pass: another password, name or permission is needed. For the start of a
        worker, since it may ask the database again, for ten seconds at most.
        """

    @abc.abstractmethod
    def is_conflict(self, error: BaseException) -> bool:
        """Tell a deadlock's victim or a serialization failure."""

    @abc.abstractmethod
    def is_lock_timeout(self, error: BaseException) -> bool:
        """Tell an error that means: somebody else held a lock too long."""

    def blames_row(self, error: BaseException) -> bool:
        """Tell an error that is transient, and may be about one row all the same.

        A trigger that takes a lock with NOWAIT raises it at once for its row, each time.
        """
        return False

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Raise ``LockTimeout`` for the database's own error of that kind."""
        try:
            yield
        except DatabaseError as error:
            if not self.is_lock_timeout(error):
                raise
            raise LockTimeout(
                "another transaction held a lock longer than LOCK_TIMEOUT_SECONDS;"
                " nothing was changed. Try again, or keep transactions short."
            ) from error

    def retried(self, work: Callable[[], T]) -> T:
        """Run a whole transaction of our own again when it fell victim to another one."""
        for number in range(1, TRIES + 1):
            try:
                return work()
            except DatabaseError as error:
                if number == TRIES or not self.is_conflict(error):
                    raise
                time.sleep(random.uniform(0, 0.01 * 2**number))  # noqa: S311 (only jitter)
        raise AssertionError("unreachable")

    def joined(self, alias: str, work: Callable[[], T]) -> T:
        """Run work in the open transaction; where none is, in one of our own, retried."""

        def alone() -> T:
            with self.own(alias):
                return work()

        return work() if joins_transaction(connections[alias]) else self.retried(alone)


def assignments(values: Mapping[str, str]) -> str:
    """Write the SET list of an UPDATE."""
    return ", ".join(f"{column} = {expression}" for column, expression in values.items())


def lane_params(lanes: Sequence[Lane]) -> dict[str, Any]:
    """Give the parameters that ``in_lane`` names, numbered from 0."""
    params: dict[str, Any] = {}
    for number, lane in enumerate(lanes):
        params[f"queue{number}"] = lane.queue
        params[f"handler{number}"] = lane.handler
        params[f"version{number}"] = lane.version
        params[f"fingerprint{number}"] = lane.fingerprint
    return params


def in_lane(number: int = 0) -> str:
    """Give the condition that ``j`` is of the lane with that number in ``lane_params``."""
    return (
        f"j.queue = %(queue{number})s AND j.handler = %(handler{number})s"
        f" AND j.handler_version = %(version{number})s"
        f" AND j.fingerprint = %(fingerprint{number})s"
    )


def insert_one(
    columns: Mapping[str, str], now: str, values: Sequence[Any]
) -> tuple[str, dict[str, Any]]:
    """Insert a single job: the same as the bulk statements, planned and bound for one row."""
    params = dict(zip(columns, values, strict=True))
    at = "CAST(%(initial_run_at)s AS bigint)"
    sql = (
        f"INSERT INTO {JOBS} (created_at, run_at, status, {', '.join(columns)}, attempt_count,"
        " granted_attempts, limit_waiting, progress, progress_message)"
        f" SELECT t.now, coalesce({at}, t.now),"
        f" CASE WHEN {at} > t.now THEN 'scheduled' ELSE 'queued' END,"
        f" {', '.join(f'%({name})s' for name in columns)}, 0, 0, false, 0, ''"
        f" FROM (SELECT {now} AS now) AS t WHERE true ON CONFLICT DO NOTHING"
        " RETURNING id, scope_hash, job_id, created_at, run_at, status"
    )
    return sql, params


def lock_timeout_ms(seconds: float | None) -> int:
    chosen = settings.LOCK_TIMEOUT_SECONDS if seconds is None else seconds
    return max(1, round(chosen * 1000))


def refuse_open_transaction(alias: str) -> None:
    """Raise ``TransactionActive`` where a transaction of our own cannot begin."""
    connection = connections[alias]
    if in_callers_transaction(connection):
        raise TransactionActive(
            f'a transaction is open on database "{alias}", and this call makes its own:'
            " call it outside transaction.atomic()."
        )
    if in_foreign_transaction(connection):
        raise TransactionActive(
            f'a transaction that Django does not know of is open on database "{alias}" (a plain'
            " BEGIN), and our COMMIT would end it: use transaction.atomic(), or call this after it."
        )
    if not connection.in_atomic_block and not connection.get_autocommit():
        raise TransactionActive(
            f'autocommit is off on database "{alias}", so a transaction is always open there:'
            " turn it on, or call this on another connection."
        )
