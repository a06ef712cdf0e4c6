"""The registry of live workers: who serves which queues and can run what (CONTRACT 4.9).

Never referenced by history: attempts keep the worker's name as text.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from django.db.models import Func

from ..dialects import dialect_for
from ..dialects.base import Lane
from ..fields import InstantField
from ..instants import from_microseconds, seconds_to_microseconds
from ..models import LiveWorker

logger = logging.getLogger("django_durable_jobs")

Capability = tuple[str, int, str]

BEAT_SECONDS = 5.0
# A worker that has missed so many beats is taken for gone; its leases decide about its jobs.
LIVE_SECONDS = 4 * BEAT_SECONDS
# Its row is removed by any other one. If it lives after all, its next beat writes it again.
FORGET_SECONDS = 3 * LIVE_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What one live worker serves."""

    queues: frozenset[str] | None
    excluded_queues: frozenset[str]
    handlers: frozenset[Capability]
    longest_timeout: float = math.inf

    def runs(self, lane: Lane) -> bool:
        if lane.queue in self.excluded_queues:
            return False
        served = self.queues is None or lane.queue in self.queues
        return served and lane.capability in self.handlers


def register(
    alias: str,
    *,
    name: str,
    queues: Collection[str] | None,
    excluded_queues: Collection[str],
    capabilities: Collection[Capability],
    longest_timeout: float | None = None,
    health: dict[str, Any] | None = None,
) -> int:
    """Add this process's row and give its key.

    ``longest_timeout``: the seconds that a job's timeout must stay below there (CONTRACT 4.6).
    """
    now = from_microseconds(dialect_for(alias).instant(alias))
    with dialect_for(alias).own(alias):
        row = LiveWorker.objects.using(alias).create(
            name=name,
            host=socket.gethostname()[:255],
            pid=os.getpid(),
            queues=None if queues is None else sorted(queues),
            excluded_queues=sorted(excluded_queues),
            capabilities=sorted(capabilities),
            longest_timeout=longest_timeout,
            health=health or {},
            started_at=now,
            last_seen_at=now,
        )
    return int(row.pk)


def beat(alias: str, key: int, health: dict[str, Any] | None = None) -> bool:
    """Say that the worker lives, and how; False if its row is gone.

    Whoever beats forgets the rows of the dead.
    """
    dialect = dialect_for(alias)
    table = LiveWorker._meta.db_table
    gone = f"d.last_seen_at < {_ago(alias, FORGET_SECONDS)}"
    rows = dialect.run(
        alias,
        f"UPDATE {table} SET last_seen_at = {dialect.now()}, health = %s WHERE id = %s"
        f" RETURNING (SELECT COUNT(*) FROM {table} d WHERE {gone})",
        [json.dumps(health or {}), key],
    )
    if rows and rows[0][0]:
        forget_dead(alias)
    return bool(rows)


def forget_dead(alias: str) -> int:
    """Remove the rows of workers that have long gone silent; give how many."""
    gone = f"last_seen_at < {_ago(alias, FORGET_SECONDS)}"
    sql = f"DELETE FROM {LiveWorker._meta.db_table} WHERE {gone} RETURNING id"
    return len(dialect_for(alias).run(alias, sql))


def _ago(alias: str, seconds: float) -> str:
    return f"{dialect_for(alias).now()} - {seconds_to_microseconds(seconds)}"


def deregister(alias: str, key: int, *, lock_timeout: float | None = None) -> None:
    """Take the worker's row away at its end."""
    sql = f"DELETE FROM {LiveWorker._meta.db_table} WHERE id = %s RETURNING id"
    dialect_for(alias).run(alias, sql, [key], lock_timeout=lock_timeout)


class LiveSince(Func):
    """The instant after which a live worker has been seen, by the clock that decides."""

    output_field = InstantField()

    def as_sql(self, compiler: Any, connection: Any, *other: Any, **extra: Any) -> Any:
        return f"({_ago(compiler.using, LIVE_SECONDS)})", ()


def live_capabilities(alias: str) -> list[Served]:
    """Give what the live workers serve; a row that cannot be read (damaged) serves nothing."""
    live = LiveWorker.objects.using(alias).filter(last_seen_at__gt=LiveSince())
    return [served for worker in live if (served := _served(worker)) is not None]


def _served(worker: LiveWorker) -> Served | None:
    try:
        return Served(
            queues=None if worker.queues is None else frozenset(worker.queues),
            excluded_queues=frozenset(worker.excluded_queues),
            handlers=frozenset((name, version, key) for name, version, key in worker.capabilities),
            longest_timeout=math.inf if worker.longest_timeout is None else worker.longest_timeout,
        )
    except (TypeError, ValueError):
        logger.warning("the row of live worker %s cannot be read", worker.pk)
        return None
