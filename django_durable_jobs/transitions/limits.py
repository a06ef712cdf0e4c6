"""The pass that lets in who waits for a place under a concurrency limit.

Whoever frees a place lets in the next in its own transaction (``_let_in``). The pass makes good
what that cannot: a crash right after a commit, a key locked too long, a next job that nobody
serves, a number that was raised or taken out of the code (CONTRACT 3.12).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from .. import states
from ..dialects import dialect_for
from ..dialects.base import JOBS, PAUSES, LimitKey
from ..handlers import registry
from ..payloads import decode_text
from ._lanes import after_last
from ._let_in import (
    PLACES,
    in_turn_sql,
    let_in_each,
    locked_next,
    number_of,
    who_wait,
    with_free_places,
)
from ._pages import PAGE
from .workers import Capability, live_capabilities

# So many keys a pass looks at, and so many jobs it lets in of a key without a limit.
KEYS = 200
UNLIMITED = PAGE
# How often one transaction looks whether those whom it let in can come.
ROUNDS = 8

_KEY = ("handler", "concurrency_key")
# A job ``n`` that waits for a place, as its index has it.
WAITING = (
    f"n.status = '{states.QUEUED}' AND n.concurrency_key IS NOT NULL"
    " AND CAST(n.limit_waiting AS integer) = 1"
)
# Where each database's next look begins in this process: behind the key of that job.
_looked_at: dict[str, int | None] = {}


class Serves(Protocol):
    """Which queues a worker serves, and which handler code it has."""

    @property
    def queues(self) -> Collection[str] | None: ...

    @property
    def excluded_queues(self) -> Collection[str]: ...

    @property
    def handlers(self) -> Collection[Capability]: ...


@dataclass(slots=True, kw_only=True)
class _Free:
    """How many may be let in of each key: of all that wait, or of those that we serve."""

    next: dict[LimitKey, int] = field(default_factory=dict)
    ours: dict[LimitKey, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.next or self.ours)


def waits_sql() -> str:
    """Ask whether any job waits for a place: the first of the order, not EXISTS."""
    order = ", ".join(f"n.{name}" for name in _KEY)
    return f"(SELECT n.id FROM {JOBS} n WHERE {WAITING} ORDER BY {order} LIMIT 1) IS NOT NULL"


def let_in_free(alias: str, serves: Serves, *, whole: bool = False) -> int:
    """Let jobs in where places are free and nobody is on the way to them; give how many.

    One page of keys, behind where this process looked last; all of them with ``whole``.
    """
    total = 0
    after = None if whole else _looked_at.get(alias)
    while True:
        found = _waiting_keys(alias, after)
        after = found[-1][0] if len(found) == KEYS else None
        keys = [LimitKey(*texts) for _, *texts in found if None not in texts]
        if keys:
            total += let_in_of(alias, keys, serves)
        if after is None or not whole:
            break
    _looked_at[alias] = after
    return total


def _waiting_keys(alias: str, after: int | None) -> list[tuple[Any, ...]]:
    """Find the next keys with waiting jobs, each by one of its jobs: a loose index scan."""
    dialect = dialect_for(alias)
    head = f"SELECT n.id FROM {JOBS} n WHERE {WAITING}"
    following = after_last(head, _KEY)
    if after is None:
        first = f"({head} ORDER BY {', '.join(f'n.{name}' for name in _KEY)} LIMIT 1)"
    else:
        first = f"(SELECT {following} FROM {JOBS} j WHERE j.id = {int(after)})"
    shown = ", ".join(
        f"(SELECT {dialect.undecoded(f'j.{name}')} FROM {JOBS} j WHERE j.id = k.id)"
        for name in _KEY
    )
    sql = (
        f"WITH RECURSIVE keys (id, place) AS (SELECT {first}, 1 UNION ALL"
        f" SELECT {following}, k.place + 1 FROM keys k JOIN {JOBS} j ON j.id = k.id"
        f" WHERE k.place < {KEYS})"
        f" SELECT k.id, {shown} FROM keys k WHERE k.id IS NOT NULL ORDER BY k.place"
    )
    return [(row[0], *map(decode_text, row[1:])) for row in dialect.fetch(alias, sql)]


def let_in_of(alias: str, keys: Sequence[LimitKey], serves: Serves) -> int:
    """Let in those of some keys for whom a place is free, and of whom we serve for each place.

    So a job that nobody takes, as its queue is paused or its worker busy, holds up no other
    worker. Gives how many.
    """
    ours, params = _served(alias, keys, serves)
    # Looked at without a lock first: as a rule nothing is free, and nothing is to be written.
    if not _free(alias, keys, ours, params):
        return 0
    return dialect_for(alias).retried(partial(_let_in_rounds, alias, keys, ours, params))


def _let_in_rounds(alias: str, keys: Sequence[LimitKey], ours: str, params: dict[str, Any]) -> int:
    """Let in the next of all; where those cannot come, or not to us, others in further rounds.

    Likewise where the database refuses them.
    """
    total = 0
    with dialect_for(alias).own(alias):
        for _ in range(ROUNDS):
            free = _free(alias, keys, ours, params)
            ids = locked_next(alias, free.next) + locked_next(alias, free.ours, ours, params)
            if not ids:
                break
            total += let_in_each(alias, ids)
    return total


def _free(alias: str, keys: Sequence[LimitKey], ours: str, params: dict[str, Any]) -> _Free:
    """Say who of each key waits for a free place, and is next in the order of claims.

    Where those have been let in and do not come, as they are in queues, or for code, that we do
    not serve, it is who of ours waits and is next of these.

    Without the keys' locks: one let in too many is sent to wait again by the claim.
    """
    free = _Free()
    limits = _limits(alias, keys)
    free.next = {key: UNLIMITED for key in keys if key in limits and limits[key] is None}
    numbers = {key: number for key, number in limits.items() if number is not None}
    if not numbers:
        return free
    dialect = dialect_for(alias)
    given, given_params = dialect.rows(PLACES, [(*key, one) for key, one in numbers.items()])
    most = max(numbers.values())
    first_waiting = f"{who_wait(alias, 'j.id')} ORDER BY j.priority DESC, j.run_at, j.id LIMIT 1"
    sql = (
        f"{with_free_places(given)} SELECT g.handler, g.key, {in_turn_sql(alias, most)},"
        f" {in_turn_sql(alias, most, ours)}"
        f" FROM g WHERE g.places > 0 AND ({first_waiting}) IS NOT NULL"
    )
    for handler, name, of_all, of_ours in dialect.fetch(alias, sql, params | given_params):
        key = LimitKey(handler, name)
        if of_all:
            free.next[key] = of_all
        elif of_ours:
            free.ours[key] = of_ours
    return free


def _limits(alias: str, keys: Sequence[LimitKey]) -> dict[LimitKey, int | None]:
    """Give the number of each key by the code that we have; None where it has no limit.

    A handler that we lack is left to a live worker that has it. Where none lives its jobs are
    let in, so that they are blocked as all others of it.
    """
    names = {key.handler for key in keys}
    numbers = {name: number_of(name) for name in names if _is_known(name)}
    unknown = names - numbers.keys()
    if unknown:
        known = {handler[0] for served in live_capabilities(alias) for handler in served.handlers}
        numbers |= dict.fromkeys(unknown - known)
    return {key: numbers[key.handler] for key in keys if key.handler in numbers}


def _is_known(name: str) -> bool:
    return any(handler.name == name for handler in registry.all())


def _served(alias: str, keys: Sequence[LimitKey], serves: Serves) -> tuple[str, dict[str, Any]]:
    """Give the condition that a job ``j`` of these keys is served, and its parameters."""
    dialect = dialect_for(alias)
    names = {key.handler for key in keys}
    columns = {"handler": "text", "version": "integer", "fingerprint": "text"}
    code = sorted(one for one in serves.handlers if one[0] in names)
    given, params = dialect.rows(columns, code, name="code")
    conditions = [
        "(j.handler, j.handler_version, j.fingerprint) IN"
        f" (SELECT c.handler, c.version, c.fingerprint FROM ({given}) AS c)",
        f"j.queue NOT IN (SELECT p.queue FROM {PAUSES} p)",
    ]
    for name, queues, word in (
        ("served", serves.queues, "IN"),
        ("excluded", serves.excluded_queues or None, "NOT IN"),
    ):
        if queues is not None:
            values = [(queue,) for queue in sorted(queues)]
            given, more = dialect.rows({"queue": "text"}, values, name=name)
            conditions.append(f"j.queue {word} (SELECT q.queue FROM ({given}) AS q)")
            params |= more
    return " AND ".join(conditions), params
