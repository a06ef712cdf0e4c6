"""The registry of live workers: who serves which queues and can run what (CONTRACT 4.9).

Never referenced by history: attempts keep the worker's name as text.
"""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Collection
from dataclasses import dataclass

from ..dialects import dialect_for
from ..dialects.base import Lane
from ..instants import from_microseconds, seconds_to_microseconds
from ..models import LiveWorker

logger = logging.getLogger("django_durable_jobs")

Capability = tuple[str, int, str]

BEAT_SECONDS = 5.0
# A worker that has missed so many beats is taken for gone; its leases decide about its jobs.
LIVE_SECONDS = 4 * BEAT_SECONDS


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
) -> int:
    """Add this process's row and give its key; forget rows that have long gone silent.

    ``longest_timeout``: the seconds that a job's timeout must stay below there (CONTRACT 4.6).
    """
    now = dialect_for(alias).instant(alias)
    gone = from_microseconds(now - seconds_to_microseconds(20 * LIVE_SECONDS))
    workers = LiveWorker.objects.using(alias)
    with dialect_for(alias).own(alias):
        workers.filter(last_seen_at__lt=gone).delete()
        row = workers.create(
            name=name,
            host=socket.gethostname()[:255],
            pid=os.getpid(),
            queues=None if queues is None else sorted(queues),
            excluded_queues=sorted(excluded_queues),
            capabilities=sorted(capabilities),
            longest_timeout=longest_timeout,
            started_at=from_microseconds(now),
            last_seen_at=from_microseconds(now),
        )
    return int(row.pk)


def beat(alias: str, key: int) -> bool:
    """Say that the worker lives; False if its row is gone."""
    sql = f"UPDATE {LiveWorker._meta.db_table} SET last_seen_at = {dialect_for(alias).now()}"
    return bool(dialect_for(alias).run(alias, f"{sql} WHERE id = %s RETURNING id", [key]))


def deregister(alias: str, key: int) -> None:
    """Take the worker's row away at its end."""
    sql = f"DELETE FROM {LiveWorker._meta.db_table} WHERE id = %s RETURNING id"
    dialect_for(alias).run(alias, sql, [key])


def live_capabilities(alias: str) -> list[Served]:
    """Give what the live workers serve; a row that cannot be read (damaged) serves nothing."""
    now = dialect_for(alias).instant(alias)
    since = from_microseconds(now - seconds_to_microseconds(LIVE_SECONDS))
    live = LiveWorker.objects.using(alias).filter(last_seen_at__gt=since)
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
