"""Who waits for a place under a concurrency limit is let in by the transaction that frees one.

``limit_waiting`` keeps a queued job out of the claim's index (CONTRACT 3.12). Letting in only
puts it back: the claim alone decides, so one too many costs a look and never a place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any

from django.db import DatabaseError, Error, connections, transaction

from .. import states
from ..announcements import announce
from ..dialects import dialect_for
from ..dialects.base import JOBS, KEY_COLUMNS, FencedMove, LimitKey, Row
from ..exceptions import LockTimeout
from ..handlers import registry
from ..payloads import decode_text
from ._pages import isolated
from ._refused import left_out, refuse

logger = logging.getLogger("django_durable_jobs")

# The locks of keys are in a table of PostgreSQL's that all its sessions share.
KEYS_AT_ONCE = 64
# How long somebody may wait for a key that another transaction has locked; after that the next
# pass does it.
LINE_SECONDS = 0.25

PLACES = {**KEY_COLUMNS, "places": "integer"}
# In the words of the index on queued jobs with a key.
IN_CLAIMS, WAITS = (f"CAST(j.limit_waiting AS integer) = {number}" for number in (0, 1))
_OF_KEY = "j.handler = g.handler AND j.concurrency_key = g.key"
_QUEUED_OF_KEY = f"j.status = '{states.QUEUED}' AND {_OF_KEY} AND j.concurrency_key IS NOT NULL"


def fenced_and_let_in(
    alias: str,
    move: FencedMove,
    values: Sequence[Sequence[Any]],
    *,
    wait: bool,
    lock_timeout: float | None = None,
) -> list[Row]:
    """Make a move that ends attempts, in a transaction of our own with who is let in by it."""
    dialect = dialect_for(alias)

    def work() -> list[Row]:
        with dialect.own(alias, lock_timeout=lock_timeout):
            rows = dialect.fenced(alias, move, values, wait=wait, own=False)
            pass_on(alias, [row[0] for row in rows])
            return rows

    return dialect.retried(work)


def pass_on(alias: str, ids: Sequence[int]) -> None:
    """Let in one for each of the jobs that has a key: it has given up its place, or its turn.

    In the transaction that moves the jobs, after the move.
    """
    if not ids:
        return
    dialect = dialect_for(alias)
    given, params = dialect.rows({"id": "bigint"}, [(one,) for one in ids])
    names = ("j.handler", "j.concurrency_key")
    sql = (
        f"SELECT {', '.join(map(dialect.undecoded, names))}, count(*) FROM {JOBS} j"
        " WHERE j.concurrency_key IS NOT NULL"
        f" AND j.id IN (SELECT g.id FROM ({given}) AS g) GROUP BY {', '.join(names)}"
    )
    freed: dict[LimitKey, int] = {}
    for *texts, places in dialect.fetch(alias, sql, params):
        handler, key = map(decode_text, texts)
        if handler is not None and key is not None:
            freed[LimitKey(handler, key)] = int(places)
    let_in(alias, freed, ids)


# How many places of each key were freed.
Freed = Mapping[LimitKey, int]


def let_in(alias: str, freed: Freed, by: Sequence[int]) -> None:
    """Let in who of each key has a turn now that ``by`` jobs have moved, in their transaction.

    A claim that has a key locked may have counted before this transaction's commit, and be
    about to send its jobs to wait: nobody would let them in. So a key that is not to be had
    at once has its jobs let in right after the commit, once that claim has ended. So have those
    whom the database refuses to let in here: whoever waits must not undo what ends.
    """
    if not freed:
        return
    held = dialect_for(alias).try_keys(alias, list(islice(freed, KEYS_AT_ONCE)))
    places = _in_turn(alias, {key: freed[key] for key in held}, by)
    if places and not _could_let_in(alias, places):
        held -= places.keys()
    missed = {key: places for key, places in freed.items() if key not in held}
    # (With autocommit off nobody tells us of the commit: then the next pass does it.)
    if missed and connections[alias].in_atomic_block:
        transaction.on_commit(partial(_let_in_later, alias, missed, by), using=alias, robust=True)


def _could_let_in(alias: str, places: Mapping[LimitKey, int]) -> bool:
    """Let in the next of each key; undo that alone where the database refuses one of them."""
    connection = connections[alias]
    try:
        with transaction.atomic(using=alias):
            _let_in_locked(alias, locked_next(alias, places))
    except DatabaseError as error:
        if connection.needs_rollback or connection.closed_in_transaction:
            raise  # all is lost
        logger.debug("jobs are let in after the commit: %s", type(error).__name__)
        return False
    return True


def _let_in_later(alias: str, missed: Freed, by: Sequence[int]) -> None:
    """Wait for the keys, some at a time; what takes too long is left to the next pass."""
    dialect = dialect_for(alias)
    keys = iter(sorted(missed))
    try:
        while some := list(islice(keys, KEYS_AT_ONCE)):
            with dialect.own(alias, lock_timeout=LINE_SECONDS):
                dialect.wait_for_keys(alias, some)
                let_in_next(alias, _in_turn(alias, {key: missed[key] for key in some}, by))
    except (Error, LockTimeout) as error:
        logger.debug("jobs are let in by the next pass: %s", type(error).__name__)


def _in_turn(alias: str, freed: Freed, by: Sequence[int]) -> dict[LimitKey, int]:
    """Give how many of each key are to be let in, those aside that were just moved.

    Those let in before may be there still: their queues are paused, or whoever serves them is
    busy or away. A worker that has freed a place sees to those whom it serves itself
    (``limits.let_in_of``). Without a limit each place goes to one.
    """
    numbers = {key: number_of(key.handler) for key in freed}
    values = [(*key, number) for key, number in numbers.items() if number is not None]
    places = {key: freed[key] for key, number in numbers.items() if number is None}
    if values:
        dialect = dialect_for(alias)
        given, params = dialect.rows(PLACES, values)
        most = max(number for *_, number in values)
        moved = f"j.id NOT IN ({', '.join(str(int(one)) for one in by)})"
        sql = (
            f"{with_free_places(given)}"
            f" SELECT g.handler, g.key, {in_turn_sql(alias, most, moved)}"
            " FROM g WHERE g.places > 0"
        )
        found = dialect.fetch(alias, sql, params)
        places |= {LimitKey(handler, key): number for handler, key, number in found if number}
    return places


def with_free_places(given: str) -> str:
    """Take from the ``places`` of given keys those that jobs run in: the query of them is ``g``."""
    running = (
        f"SELECT count(*) FROM {JOBS} j WHERE j.status = '{states.RUNNING}'"
        " AND j.handler = p.handler AND j.concurrency_key = p.key"
    )
    return (
        "WITH g AS MATERIALIZED"
        f" (SELECT p.handler, p.key, p.places - ({running}) AS places FROM ({given}) AS p)"
    )


def in_turn_sql(alias: str, most: int, condition: str = "true") -> str:
    """Count those that wait among the first of a key ``g``, as many as it has free places.

    The order is the claim's, of those that wait together with those let in before, as far as
    they meet a condition on ``j``. ``most`` is the greatest limit of the keys.
    """
    first = f"AND {condition} ORDER BY j.priority DESC, j.run_at, j.id LIMIT {int(most)}"
    let_in = on_the_way(alias, "j.priority, j.run_at, j.id, 0 AS waits")
    waiting = who_wait(alias, "j.priority, j.run_at, j.id, 1 AS waits")
    return (
        "(SELECT count(*) FROM (SELECT t.waits,"
        " row_number() OVER (ORDER BY t.priority DESC, t.run_at, t.id) AS turn"
        f" FROM (SELECT * FROM ({let_in} {first}) AS l"
        f" UNION ALL SELECT * FROM ({waiting} {first}) AS w) AS t) AS c"
        " WHERE c.waits = 1 AND c.turn <= g.places)"
    )


def who_wait(alias: str, columns: str) -> str:
    """Select the jobs of a key ``g`` that wait for a place."""
    waiting = left_out(alias, f"{_QUEUED_OF_KEY} AND {WAITS}")
    return f"SELECT {columns} FROM {JOBS} j WHERE {waiting}"


def on_the_way(alias: str, columns: str) -> str:
    """Select the jobs of a key ``g`` that were let in and that a claim could take now."""
    claimable = (
        f"{_QUEUED_OF_KEY} AND {IN_CLAIMS}"
        f" AND j.run_at <= {dialect_for(alias).now()} AND j.cancel_requested_at IS NULL"
        " AND j.attempt_count < j.max_attempts + j.granted_attempts"
    )
    return f"SELECT {columns} FROM {JOBS} j WHERE {left_out(alias, claimable)}"


def number_of(name: str) -> int | None:
    """Give the greatest number that a version of a handler allows here; None for no limit."""
    numbers = [
        handler.concurrency
        for handler in registry.all()
        if handler.name == name and handler.concurrency is not None
    ]
    return max(numbers, default=None)


def let_in_next(alias: str, places: Mapping[LimitKey, int]) -> int:
    """Let in the first that wait for each key, in the order of claims; give how many."""
    return let_in_each(alias, locked_next(alias, places))


def let_in_each(alias: str, ids: list[int]) -> int:
    """Let in locked jobs; what the database refuses is passed over for a while. Gives how many."""
    return len(_moved(alias, ids, _let_in_locked))


def send_to_wait(alias: str, ids: list[int]) -> int:
    """Likewise out of the claim's index."""
    return len(_moved(alias, ids, partial(_set_waiting, waiting=True)))


def _moved(alias: str, ids: list[int], work: Callable[[str, list[int]], Any]) -> list[int]:
    if not ids:
        return []
    moved = isolated(alias, ids, lambda some: [row[0] for row in work(alias, some)])
    for one in set(ids) - set(moved):
        refuse(alias, one)
    return moved


def locked_next(
    alias: str,
    places: Mapping[LimitKey, int],
    condition: str = "true",
    params: Mapping[str, Any] = MappingProxyType({}),
) -> list[int]:
    """Lock the first that wait for each key and meet a condition on ``j``."""
    if not places:
        return []
    values = [(*key, number) for key, number in places.items()]
    return locked_of_keys(alias, PLACES, values, f"{WAITS} AND {condition}", params)


def locked_of_keys(
    alias: str,
    columns: Mapping[str, str],
    values: Sequence[Sequence[Any]],
    condition: str,
    params: Mapping[str, Any],
) -> list[int]:
    """Lock the first queued jobs of each given key that meet a condition on ``j`` and ``g``."""
    chosen = left_out(alias, condition)
    return dialect_for(alias).lock_of_keys(alias, columns, values, chosen, params)


def _let_in_locked(alias: str, ids: Sequence[int]) -> list[Row]:
    rows = _set_waiting(alias, ids, waiting=False)
    queues = {name for _, queue in rows if (name := decode_text(queue)) is not None}
    announce(alias, queues)
    return rows


def _set_waiting(alias: str, ids: Sequence[int], *, waiting: bool) -> list[Row]:
    """Move locked, queued jobs out of the claim's index or back into it; give ids and queues."""
    if not ids:
        return []
    dialect = dialect_for(alias)
    given, params = dialect.rows({"id": "bigint"}, [(one,) for one in ids])
    sql = (
        f"UPDATE {JOBS} SET limit_waiting = {'true' if waiting else 'false'}"
        f" WHERE status || '' = '{states.QUEUED}' AND id IN (SELECT g.id FROM ({given}) AS g)"
        f" RETURNING id, {dialect.undecoded('queue')}"
    )
    return dialect.fetch(alias, sql, params)
