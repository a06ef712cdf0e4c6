"""The bounded passes, as a worker runs them: in drain mode by itself, else in a loop of chores."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from .. import states
from ..conf import settings
from ..dialects import dialect_for
from ..dialects.base import Lane
from ..handlers import registry
from ..transitions.blocking import (
    block_damaged,
    block_lane,
    block_unholdable,
    blocked_lanes,
    has_unholdable,
    release_lane,
)
from ..transitions.claims import queued_lanes
from ..transitions.limits import let_in_free
from ..transitions.maintenance import exhaust, promote_due, waiting
from ..transitions.recovery import recover_expired
from ..transitions.workers import Capability, live_capabilities
from ..words import counted

logger = logging.getLogger("django_durable_jobs.worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Which queues a worker serves, and which handler code it has."""

    queues: tuple[str, ...] | None = None
    excluded_queues: tuple[str, ...] = ()
    handlers: frozenset[Capability] = field(default_factory=frozenset)

    @classmethod
    def everything(cls) -> Serving:
        return cls(handlers=own_capabilities())

    def serves(self, queue: str) -> bool:
        return queue not in self.excluded_queues and (self.queues is None or queue in self.queues)

    def runs(self, lane: Lane) -> bool:
        """Tell whether it serves the lane's queue and has exactly the code of its jobs."""
        return self.serves(lane.queue) and lane.capability in self.handlers


def own_capabilities() -> frozenset[Capability]:
    """Give name, version and fingerprint of each handler of this process."""
    return frozenset(
        (handler.name, handler.version, handler.fingerprint) for handler in registry.all()
    )


def run_passes(
    alias: str,
    serving: Serving,
    *,
    patient: bool = True,
    recover: bool = True,
    lease_seconds: float | None = None,
) -> list[Lane]:
    """Recover, exhaust, promote, release, let in, block, where there is something to do.

    ``patient`` passes block a job only once it is due for two poll intervals (CONTRACT 2.3), and
    look at some keys of limits at a time (3.12).
    ``recover`` is False where a look for expired leases is not due yet. ``lease_seconds`` is
    what the worker claims with, unless ``LEASE_SECONDS``. Gives the lanes that hold queued jobs
    which this worker can run. Where there is nothing to do it is one query.
    """
    found = waiting(alias, recover=recover)
    moved = 0
    if found.recover:
        moved += _told(recover_expired(alias), "recovered: the lease had expired")
    if found.exhaust:
        _told(exhaust(alias), "failed: no executions were left")
    if found.promote:
        moved += promote_due(alias)
    if found.release:
        moved += _release(alias, serving, lease_seconds)
    if found.let_in:
        moved += let_in_free(alias, serving, whole=not patient)
    for job in found.queued.damaged:
        _told(block_damaged(alias, job), f"blocked: job {job} is damaged, as its whole lane is")
    queued = queued_lanes(alias) if moved else found.queued.sound
    runnable = [lane for lane in queued if serving.runs(lane)]
    _block_unholdable(alias, runnable, lease_seconds)
    foreign = [lane for lane in queued if serving.serves(lane.queue) and not serving.runs(lane)]
    if foreign:
        _block(alias, foreign, serving.handlers, 2 * settings.POLL_SECONDS if patient else 0)
    return runnable


def _told(jobs: int, what: str) -> int:
    if jobs:
        logger.info("%s %s", counted(jobs, "job"), what)
    return jobs


def _release(alias: str, serving: Serving, lease_seconds: float | None) -> int:
    lanes = [lane for lane in blocked_lanes(alias) if serving.runs(lane)]
    released = sum(release_lane(alias, lane, lease_seconds=lease_seconds) for lane in lanes)
    return _told(released, "released: this worker can run")


def _block_unholdable(alias: str, runnable: Iterable[Lane], lease_seconds: float | None) -> None:
    """Block what neither this lease can hold nor that of another live worker of the lane (4.6)."""
    own = dialect_for(alias).longest_timeout(lease_seconds)
    if own is None:
        return
    lanes = [lane for lane in runnable if has_unholdable(alias, lane, own)]
    others = live_capabilities(alias) if lanes else []
    for lane in lanes:
        longest = [other.longest_timeout for other in others if other.runs(lane)]
        blocked = block_unholdable(alias, lane, max([own, *longest]))
        _told(blocked, "blocked: the lease cannot hold their timeout")


def _block(
    alias: str, foreign: Iterable[Lane], known: Iterable[Capability], patience: float
) -> None:
    """Block the jobs of lanes that this worker lacks the code for and no live one has."""
    others = live_capabilities(alias)
    for lane in foreign:
        if not any(other.runs(lane) for other in others):
            reason = _reason(lane, known)
            blocked = block_lane(alias, lane, reason, patience=patience)
            _told(blocked, f"of handler {lane.handler} version {lane.version} blocked: {reason}")


def _reason(lane: Lane, known: Iterable[Capability]) -> str:
    """Say what is wrong with a lane's code, by what this worker knows."""
    same = any(name == lane.handler and version == lane.version for name, version, _ in known)
    return states.SCHEMA_MISMATCH if same else states.UNKNOWN_HANDLER
