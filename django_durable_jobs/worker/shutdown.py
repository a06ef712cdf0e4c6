"""The last writes of a worker: claims given back, stuck handlers ended (CONTRACT 4.7)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from .. import states
from ..transitions.claims import give_back
from ..transitions.outcomes import Outcome, finish
from . import connections
from .held import Held
from .on_finish import on_finish_of
from .supervised import backoff, is_transient

logger = logging.getLogger("django_durable_jobs.worker")

SHORTEST_WAIT_SECONDS = 0.1


def give_back_unbegun(alias: str, unbegun: list[Held], *, until: float) -> None:
    """Undo the claims whose handlers never began; try again until that monotonic time.

    Rows that somebody has locked are waited for, after the others are written.
    """
    holders = [(held.job.id, held.job.token) for held in unbegun]
    failures = 0
    wait = False
    while holders:
        try:
            given = give_back(alias, holders, wait=wait)
        except Exception as error:
            failures += 1
            if not is_transient(alias, error):
                logger.exception("giving claims back failed")
            connections.clean()
            if time.monotonic() > until:
                logger.warning("%d claims are left to their leases", len(holders))
                return
            time.sleep(backoff(failures))
            continue
        holders = [one for one in holders if one[0] not in given]
        if wait:
            # Having waited, what is missing is not ours any more, or has no open attempt row.
            for job, _ in holders:
                logger.warning("job %d cannot be given back; it is left unchanged", job)
            return
        wait = True


def end_stuck(
    alias: str,
    stuck: list[Held],
    put_elsewhere: Callable[[Held, Outcome], None],
    *,
    until: float,
) -> None:
    """Requeue what runs on, for a process that exits at once after it: nothing waits for a lease.

    A handler's own open transaction that holds its job's row cannot be passed: the lease then.
    Locks are waited for until that monotonic time, all of them together.
    """
    for held in stuck:
        if on_finish_of(held.job) is not None:
            put_elsewhere(held, _stopped(held))
    _end_together(alias, [held for held in stuck if on_finish_of(held.job) is None], until)


def _end_together(alias: str, stuck: list[Held], until: float) -> None:
    """End all at once; then alone whoever is locked, or was refused with the others."""
    left = [_stopped(held) for held in stuck]
    try:
        left = finish(alias, left, lock_timeout=_left(until)).busy
    except Exception:
        connections.clean()
    for one in left:
        _end_alone(alias, one, until)


def _end_alone(alias: str, one: Outcome, until: float) -> None:
    try:
        finish(alias, [one], wait=True, lock_timeout=_left(until))
    except Exception as error:
        connections.clean()
        logger.warning("a stuck handler keeps its lease: %s", type(error).__name__)


def _left(until: float) -> float:
    """Give the seconds until then; enough for what is not locked, however late it is."""
    return max(SHORTEST_WAIT_SECONDS, until - time.monotonic())


def _stopped(held: Held) -> Outcome:
    return Outcome(
        job=held.job.id,
        token=held.job.token,
        status=states.INTERRUPTED,
        outcome=states.STOPPED,
        final_status=states.INTERRUPTED,
        stopped_by_worker=True,
        is_keyed=held.job.concurrency_key is not None,
        error_category=states.STOPPED_CATEGORY,
    )
