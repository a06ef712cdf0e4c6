"""Is the work being done? What a probe asks of the database (CONTRACT 7.3)."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from .. import states
from ..dialects import dialect_for
from ..dialects.base import JOBS, PAUSES
from ..instants import SECOND, seconds_to_microseconds, to_microseconds
from ..models import LiveWorker
from ..transitions.workers import LiveSince
from ..words import counted

# A loop is late when it has missed three successes and so many seconds.
LATE_SECONDS = 30.0
# An expired lease that no pass has recovered for so long.
STUCK_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A worker's row, and how many seconds ago it was written."""

    name: str
    host: str
    pid: int
    queues: Any
    excluded_queues: Any
    started_at: datetime
    seen_seconds: float
    is_live: bool
    health: dict[str, Any]

    def late_loops(self) -> list[str]:
        """Name the loops whose last success is too long ago, with the seconds."""
        return [
            f"{name} ({age:.0f} s)"
            for name, loop in self.loops().items()
            if (age := loop["age"] + self.seen_seconds) > 3 * loop["pace"] + LATE_SECONDS
        ]

    def loops(self) -> dict[str, Any]:
        """Give the loops that can be read; the row may be of another version."""
        loops = self.health.get("loops")
        if not isinstance(loops, dict):
            return {}
        return {name: one for name, one in loops.items() if _is_readable(one)}


def _is_readable(loop: Any) -> bool:
    return isinstance(loop, dict) and all(
        isinstance(loop.get(key), int | float) for key in ("age", "pace")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """``problems`` is empty if all is well. ``stuck`` leases are over and nobody recovers them;
    ``unknown`` jobs run without a lease or a token and need an operator.
    """

    oldest_due_seconds: float | None
    stuck: int
    unknown: int
    workers: list[Seen]
    problems: list[str] = field(default_factory=list)


def seen_workers(alias: str) -> list[Seen]:
    """Give every row of a worker, the dead ones that nobody has removed included."""
    now = dialect_for(alias).instant(alias)
    rows = LiveWorker.objects.using(alias).annotate(live_since=LiveSince()).order_by("name", "pk")
    return [
        Seen(
            name=row.name,
            host=row.host,
            pid=row.pid,
            queues=row.queues,
            excluded_queues=row.excluded_queues,
            started_at=row.started_at,
            seen_seconds=max(0.0, (now - to_microseconds(row.last_seen_at)) / SECOND),
            is_live=row.last_seen_at > row.live_since,
            health=row.health if isinstance(row.health, dict) else {},
        )
        for row in rows
    ]


def health(alias: str, *, name: str | None = None, max_due_seconds: float | None = None) -> Health:
    """Judge the workers, or those that were started with ``name``, and what waits for them."""
    workers = [one for one in seen_workers(alias) if name is None or _is_named(one, name)]
    live = [one for one in workers if one.is_live]
    oldest, stuck, unknown = _jobs(alias)
    found = Health(oldest_due_seconds=oldest, stuck=stuck, unknown=unknown, workers=workers)
    if not live:
        found.problems.append("no worker lives" + (f" that is named {name}" if name else ""))
    for one in live:
        if late := one.late_loops():
            found.problems.append(f"worker {one.name}: late loops: {', '.join(late)}")
    if stuck:
        lost = counted(stuck, "running job")
        found.problems.append(f"no pass has recovered {lost} whose lease was lost")
    if max_due_seconds is not None and oldest is not None and oldest > max_due_seconds:
        found.problems.append(f"the oldest due job has waited for {oldest:.0f} s")
    return found


def _is_named(worker: Seen, name: str) -> bool:
    """A supervisor's children are named NAME/1, NAME/2, ..."""
    return worker.name == name or worker.name.rpartition("/")[0] == name


def _jobs(alias: str) -> tuple[float | None, int, int]:
    dialect = dialect_for(alias)
    now = dialect.now()
    unpaused = f"j.queue NOT IN (SELECT p.queue FROM {PAUSES} p)"
    running = f"FROM {JOBS} WHERE status = '{states.RUNNING}'"
    long_ago = f"{now} - {seconds_to_microseconds(STUCK_SECONDS)}"
    sql = (
        f"SELECT {now} - MIN(j.run_at),"
        f" (SELECT COUNT(*) {running} AND lease_expires_at < {long_ago}),"
        f" (SELECT COUNT(*) {running} AND (lease_token IS NULL OR lease_expires_at IS NULL))"
        f" FROM {JOBS} j WHERE {dialect.claimable('j')} AND {unpaused}"
    )
    ((waited, stuck, unknown),) = dialect.fetch(alias, sql)
    return (None if waited is None else max(0.0, waited / SECOND)), stuck, unknown
