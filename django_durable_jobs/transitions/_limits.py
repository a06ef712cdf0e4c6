"""Claims under concurrency limits: never more than n of a key at a time (CONTRACT 3.12).

The claim of lanes without limits is one statement. This one takes a few in one transaction:
the next jobs are picked and locked, their keys are locked, then their running jobs counted by
a statement of its own. (In one statement with the lock the count would be as old as the lock's
wait.) A key that is full or locked hides no other job: another round passes it over.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..dialects import dialect_for
from ..dialects.base import JOBS, KEY_COLUMNS, Lane, LimitKey, Row
from ..exceptions import LockTimeout
from ..handlers import registry
from ..payloads import decode_text
from ._let_in import IN_CLAIMS, PLACES, locked_of_keys, send_to_wait

# The rounds of one transaction. All but the first, which meets no full key as a rule, look at
# more jobs than are wanted.
ROUNDS = 3
LOOK_AT = 64
# How many jobs a claim sends to wait in one transaction.
SENT_AT_ONCE = 1000
# How long a claim stands in line for keys that others have locked: as long as their claims take.
LINE_SECONDS = 0.1

_COLUMNS = ("id", "handler", "handler_version", "concurrency_key", "scope", "scope_hash")


@dataclass(slots=True)
class Patience:
    """How long, in seconds, a claim goes on while it finds only jobs to send to wait.

    Where that was too long it is ``over``: what they hid may be due.
    """

    seconds: float = math.inf
    over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A job that may be claimed if there is room: ``limit`` jobs of its key at most.

    ``unkeyed`` tells which jobs from before the handler had a limit, and so without a key,
    count with it: ``""`` all of the handler's, else those of this scope's hash.
    """

    id: int
    version: int
    key: LimitKey | None = None
    limit: int = 0
    unkeyed: str | None = None
    is_stored: bool = True


@dataclass(slots=True, kw_only=True)
class Decision:
    """Which jobs are taken; of the others, whose key is full and whose is locked elsewhere."""

    taken: list[Candidate] = field(default_factory=list)
    full: list[Candidate] = field(default_factory=list)
    locked: list[Candidate] = field(default_factory=list)

    def add(self, other: Decision) -> None:
        self.taken += other.taken
        self.full += other.full
        self.locked += other.locked


def decide(candidates: Iterable[Candidate], running: Mapping[LimitKey, int], room: int) -> Decision:
    """Take jobs in their order while there is room, for them and under their limits. Pure.

    ``running`` counts the keys whose lock we hold: of others nothing can be said.
    """
    counts = Counter(running)
    found = Decision()
    for one in candidates:
        if len(found.taken) == room:
            break
        if one.key is None:
            found.taken.append(one)
        elif one.key not in running:
            found.locked.append(one)
        elif counts[one.key] < one.limit:
            counts[one.key] += 1
            found.taken.append(one)
        else:
            found.full.append(one)
    return found


def is_limited(lane: Lane) -> bool:
    """Tell whether this process's code holds the jobs of a lane to a limit."""
    handler = registry.get(lane.handler, lane.version)
    return handler is not None and handler.concurrency is not None


def claim_within_limits(
    alias: str,
    wanted: Sequence[Lane],
    *,
    limit: int,
    worker: str,
    lease: int,
    columns: Sequence[str],
    among: str = "",
    patience: Patience,
) -> list[Row]:
    """Claim as ``Dialect.claim`` does, within the limits of the lanes' handlers.

    While it takes nothing and only sends jobs to wait, it goes on: what they hid may be due.
    Where others have locked the keys of all that is left, it stands in line for them once.
    """
    dialect = dialect_for(alias)
    attempt = partial(
        _one_claim, alias, wanted, limit, worker=worker, lease=lease, columns=columns, among=among
    )
    end = time.monotonic() + patience.seconds
    in_line: set[LimitKey] = set()
    while True:
        try:
            rows, found, sent = dialect.retried(partial(attempt, in_line))
        except LockTimeout:
            if not in_line:
                raise
            return []
        locked = {one.key for one in found.locked if one.key is not None}
        is_done = not (sent or locked) or (in_line and not sent)
        patience.over = not rows and not is_done and time.monotonic() > end
        if rows or is_done or patience.over:
            return rows
        in_line = set() if sent else locked


def _one_claim(
    alias: str,
    wanted: Sequence[Lane],
    limit: int,
    in_line: Collection[LimitKey],
    *,
    worker: str,
    lease: int,
    columns: Sequence[str],
    among: str,
) -> tuple[list[Row], Decision, int]:
    """Give what is claimed, what was decided, and how many were sent to wait."""
    dialect = dialect_for(alias)
    with dialect.own(alias, lock_timeout=LINE_SECONDS if in_line else None):
        if in_line:
            dialect.wait_for_keys(alias, in_line)
        found = _decided(alias, wanted, limit, lease, among)
        ids = [one.id for one in found.taken]
        rows = []
        if ids:
            rows = dialect.claim_picked(alias, ids, worker=worker, lease=lease, columns=columns)
        return rows, found, _send_to_wait(alias, found.full)


def _decided(alias: str, wanted: Sequence[Lane], limit: int, lease: int, among: str) -> Decision:
    """Pick, lock and count in rounds, until there are enough or nothing is left to look at."""
    dialect = dialect_for(alias)
    found = Decision()
    running: dict[LimitKey, int] = {}
    asked: set[LimitKey] = set()
    for number in range(ROUNDS):
        room = limit - len(found.taken)
        size = max(room, LOOK_AT) if number else room
        passed_over, params = _passed_over(alias, found, among)
        rows = dialect.pick(
            alias,
            wanted,
            limit=size,
            lease=lease,
            columns=_COLUMNS,
            among=passed_over,
            params=params,
        )
        candidates = _candidates(rows)
        by_key = {one.key: one for one in candidates if one.key is not None}
        new = {key: one for key, one in by_key.items() if key not in asked}
        if new:
            asked.update(new)
            held = dialect.try_keys(alias, new)
            running |= _running(alias, [one for key, one in new.items() if key in held])
        decision = decide(candidates, running, room)
        for one in decision.taken:
            if one.key is not None:
                running[one.key] += 1
        _store_keys(alias, [*decision.taken, *decision.full])
        found.add(decision)
        if len(decision.taken) == room or len(rows) < size:
            break
    return found


def _candidates(rows: Iterable[Row]) -> list[Candidate]:
    return [_candidate(*row[:3], *map(decode_text, row[3:])) for row in rows]


def _candidate(
    job: int,
    name: str,
    version: int,
    stored: str | None,
    scope: str | None,
    scope_hash: str | None,
) -> Candidate:
    handler = registry.get(name, version)
    if handler is None or handler.concurrency is None:
        return Candidate(id=job, version=version)
    key = handler.stored_key(stored, scope)
    if key is None:
        return Candidate(id=job, version=version)
    return Candidate(
        id=job,
        version=version,
        key=LimitKey(name, key),
        limit=handler.concurrency,
        unkeyed=handler.unkeyed_of(scope_hash),
        is_stored=stored is not None,
    )


def _running(alias: str, ones: Sequence[Candidate]) -> dict[LimitKey, int]:
    """Count the running jobs of keys, those whose lease has expired included."""
    if not ones:
        return {}
    dialect = dialect_for(alias)
    given, params = dialect.rows(
        {**KEY_COLUMNS, "unkeyed": "text"}, [(*(one.key or ()), one.unkeyed) for one in ones]
    )
    of_handler = (
        f"SELECT count(*) FROM {JOBS} j WHERE j.status = 'running' AND j.handler = g.handler"
    )
    sql = (
        f"SELECT g.handler, g.key, ({of_handler} AND j.concurrency_key = g.key)"
        f" + ({of_handler} AND j.concurrency_key IS NULL AND g.unkeyed IS NOT NULL"
        f" AND (g.unkeyed = '' OR j.scope_hash = g.unkeyed)) FROM ({given}) AS g"
    )
    return {LimitKey(row[0], row[1]): row[2] for row in dialect.fetch(alias, sql, params)}


def _passed_over(alias: str, found: Decision, among: str) -> tuple[str, dict[str, Any]]:
    """Leave out what is taken, and the keys that are known to be full or locked."""
    conditions = [among] if among else []
    if found.taken:
        conditions.append(f"j.id NOT IN ({', '.join(str(one.id) for one in found.taken)})")
    keys = {
        (one.key.handler, one.version, text)
        for one in (*found.full, *found.locked)
        if one.key is not None
        for text in (one.key.key, *([""] if one.unkeyed == "" else []))
    }
    params: dict[str, Any] = {}
    if keys:
        given, params = dialect_for(alias).rows(
            {"handler": "text", "version": "integer", "key": "text"}, sorted(keys)
        )
        conditions.append(
            "(j.handler, j.handler_version, coalesce(j.concurrency_key, ''))"
            f" NOT IN (SELECT g.handler, g.version, g.key FROM ({given}) AS g)"
        )
    return " AND ".join(conditions), params


def _store_keys(alias: str, ones: Iterable[Candidate]) -> None:
    """Give jobs from before there was a limit the key that they count under."""
    values = [(one.id, one.key.key) for one in ones if one.key is not None and not one.is_stored]
    if not values:
        return
    dialect = dialect_for(alias)
    given, params = dialect.rows({"id": "bigint", "key": "text"}, values)
    dialect.fetch(
        alias,
        f"UPDATE {JOBS} AS j SET concurrency_key = g.key FROM ({given}) AS g WHERE j.id = g.id"
        " RETURNING 1",
        params,
    )


def _send_to_wait(alias: str, full: Sequence[Candidate]) -> int:
    """Take the queued jobs of full keys out of the claim's index, many at once; say how many."""
    keys = {(*one.key, one.version) for one in full if one.key is not None}
    if not keys:
        return 0
    each = -(-SENT_AT_ONCE // len(keys))
    ids = locked_of_keys(
        alias,
        {**PLACES, "version": "integer"},
        [(handler, key, each, version) for handler, key, version in sorted(keys)],
        f"{IN_CLAIMS} AND j.handler_version = g.version",
        {},
    )
    return send_to_wait(alias, ids)
