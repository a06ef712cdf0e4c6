"""Who waits for a place under a concurrency limit is let in by the transaction that frees one.

``limit_waiting`` keeps a queued job out of the claim's index (CONTRACT 3.12). Letting in only
puts it back: the claim alone decides, so one too many costs a look and never a place.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from django.db import Error, connections, transaction

from .. import states
from ..announcements import announce
from ..dialects import dialect_for
from ..dialects.base import JOBS, KEY_COLUMNS, FencedMove, LimitKey, Row
from ..exceptions import LockTimeout
from ..handlers import registry
from ..payloads import decode_text

logger = logging.getLogger("django_durable_jobs")

# The locks of keys are in a table of PostgreSQL's that all its sessions share.
KEYS_AT_ONCE = 64
# How long somebody may wait for a key that another transaction has locked; after that the next
# pass does it.
LINE_SECONDS = 0.25

PLACES = {**KEY_COLUMNS, "places": "integer"}
# In the words of the index on queued jobs with a key.
IN_CLAIMS, WAITS = (f"CAST(j.limit_waiting AS integer) = {number}" for number in (0, 1))


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
    """Let in as many of each key as places were freed ``by`` jobs, in their transaction.

    A claim that has a key locked may have counted before this transaction's commit, and be
    about to send its jobs to wait: nobody would let them in. So a key that is not to be had
    at once has its jobs let in right after the commit, once that claim has ended.
    """
    if not freed:
        return
    held = dialect_for(alias).try_keys(alias, list(islice(freed, KEYS_AT_ONCE)))
    _let_in_those_to_come(alias, {key: freed[key] for key in held}, by)
    missed = {key: places for key, places in freed.items() if key not in held}
    # (With autocommit off nobody tells us of the commit: then the next pass does it.)
    if missed and connections[alias].in_atomic_block:
        transaction.on_commit(partial(_let_in_later, alias, missed, by), using=alias, robust=True)


def _let_in_later(alias: str, missed: Freed, by: Sequence[int]) -> None:
    """Wait for the keys, some at a time; what takes too long is left to the next pass."""
    dialect = dialect_for(alias)
    keys = iter(sorted(missed))
    try:
        while some := list(islice(keys, KEYS_AT_ONCE)):
            with dialect.own(alias, lock_timeout=LINE_SECONDS):
                dialect.wait_for_keys(alias, some)
                _let_in_those_to_come(alias, {key: missed[key] for key in some}, by)
    except (Error, LockTimeout) as error:
        logger.debug("jobs are let in by the next pass: %s", type(error).__name__)


def _let_in_those_to_come(alias: str, freed: Freed, by: Sequence[int]) -> None:
    """Let in the next of each key, unless none of those let in before is taken.

    As many as the limit are there still: their queues are paused, or whoever serves them is busy
    or away. A worker that has freed a place sees to those whom it serves itself
    (``limits.let_in_of``).
    """
    untaken = _untaken(alias, freed, by)
    let_in_next(alias, {key: places for key, places in freed.items() if key not in untaken})


def _untaken(alias: str, keys: Iterable[LimitKey], by: Sequence[int]) -> list[LimitKey]:
    """Give the keys with a job let in for each place of the limit, but for those just moved."""
    numbers = {key: number_of(key.handler) for key in keys}
    values = [(*key, number) for key, number in numbers.items() if number is not None]
    if not values:
        return []
    dialect = dialect_for(alias)
    given, params = dialect.rows(PLACES, values)
    most = max(number for *_, number in values)
    moved = ", ".join(str(int(one)) for one in by)
    sql = (
        f"SELECT g.handler, g.key FROM ({given}) AS g"
        f" WHERE g.places <= (SELECT count(*) FROM"
        f" ({on_the_way(alias)} AND j.id NOT IN ({moved}) LIMIT {most}) AS c)"
    )
    return [LimitKey(*row) for row in dialect.fetch(alias, sql, params)]


def on_the_way(alias: str, columns: str = "1") -> str:
    """Select the jobs of a key ``g`` that were let in and that a claim could take now."""
    return (
        f"SELECT {columns} FROM {JOBS} j WHERE j.status = '{states.QUEUED}'"
        f" AND j.handler = g.handler AND j.concurrency_key = g.key"
        f" AND j.concurrency_key IS NOT NULL AND {IN_CLAIMS}"
        f" AND j.run_at <= {dialect_for(alias).now()} AND j.cancel_requested_at IS NULL"
        " AND j.attempt_count < j.max_attempts + j.granted_attempts"
    )


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
    values = [(*key, number) for key, number in places.items()]
    return let_in_those(alias, PLACES, values, WAITS, {}) if values else 0


def let_in_those(
    alias: str,
    columns: Mapping[str, str],
    values: Sequence[Sequence[Any]],
    condition: str,
    params: Mapping[str, Any],
) -> int:
    """Let in the first of each given key that meet a condition; tell the workers of it."""
    ids = dialect_for(alias).lock_of_keys(alias, columns, values, condition, params)
    queues = set_waiting(alias, ids, waiting=False)
    announce(alias, {name for queue in queues if (name := decode_text(queue)) is not None})
    return len(ids)


def set_waiting(alias: str, ids: Iterable[int], *, waiting: bool) -> list[Any]:
    """Move locked, queued jobs out of the claim's index or back into it; give their queues."""
    chosen = [(one,) for one in ids]
    if not chosen:
        return []
    dialect = dialect_for(alias)
    given, params = dialect.rows({"id": "bigint"}, chosen)
    sql = (
        f"UPDATE {JOBS} SET limit_waiting = {'true' if waiting else 'false'}"
        f" WHERE status || '' = '{states.QUEUED}' AND id IN (SELECT g.id FROM ({given}) AS g)"
        f" RETURNING {dialect.undecoded('queue')}"
    )
    return [row[0] for row in dialect.fetch(alias, sql, params)]
