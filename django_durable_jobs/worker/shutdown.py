"""How a worker ends: handlers, results, and what does not end (CONTRACT 4.7)."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from .. import states
from ..conf import settings
from ..transitions.claims import give_back
from ..transitions.outcomes import Outcome, finish
from ..words import counted
from . import connections
from .ends import Ends
from .finisher import longest_wait
from .held import Held, HeldJobs
from .on_finish import on_finish_of
from .overdue import HardLimit
from .slots import Slots
from .stalls import Watched
from .supervised import backoff, is_transient

logger = logging.getLogger("django_durable_jobs.worker")

SHORTEST_WAIT_SECONDS = 0.1
# Results wait so long for a database that is away or busy.
RESULTS_SECONDS = 30.0
# Threads that have only to end, and what else is waited for once it is known that some are left
# behind.
END_SECONDS = 5.0
LAST_SECONDS = 0.5
# Whatever comes without a nudge is seen by then.
LOOK_SECONDS = 0.25


class Shutdown:
    """Wait for the handlers, ask them to stop, write what has ended, and last what has not."""

    def __init__(
        self,
        alias: str,
        *,
        held: HeldJobs,
        ends: Ends,
        slots: Slots,
        hard_limit: HardLimit,
        watched: Watched,
        owns_process: bool,
        is_stopping: Callable[[], bool],
        wait: Callable[[float], None],
    ) -> None:
        self._alias = alias
        self._held = held
        self._ends = ends
        self._slots = slots
        self._hard_limit = hard_limit
        self._watched = watched
        self._owns_process = owns_process
        self._is_stopping = is_stopping
        self._wait = wait

    def run(self) -> bool:
        """Tell whether all has ended by itself and is written."""
        self._wait_until(self._is_idle)
        if self._is_stopping():
            self._stop_handlers()
        # Results are written first: what does not end must not cost them their leases (4.8).
        self._wait_until(self._has_no_results, time.monotonic() + RESULTS_SECONDS)
        stuck = [held for held in self._held.all() if not held.ended]
        end = time.monotonic() + longest_wait()
        if stuck and self._owns_process:
            with self._watched.waiting():
                end_stuck(self._alias, stuck, self._ends.put_elsewhere, until=end)
        some_left = bool(stuck or self._hard_limit.lost_slots)
        shortest = LAST_SECONDS if some_left else END_SECONDS
        written = self._ends.stop(max(shortest, end - time.monotonic()))
        in_time = written and not stuck and not self._hard_limit.lost_slots
        self._slots.stop(timeout=END_SECONDS if in_time else 0.1)
        return in_time

    def _stop_handlers(self) -> None:
        # In somebody else's process a signal is not ours.
        hint = ", a second signal ends them now" if self._owns_process else ""
        logger.info("stopping; it holds %s%s", counted(len(self._held), "job"), hint)
        end = time.monotonic() + float(settings.SHUTDOWN_SECONDS)
        with self._watched.waiting():
            give_back_unbegun(self._alias, self._held.take_unbegun(), until=end)
        self._wait_until(self._is_idle, end)
        for held in self._held.all():
            held.ctx.mark_stop_requested()
        self._wait_until(self._is_idle, time.monotonic() + float(settings.TIMEOUT_GRACE_SECONDS))

    def _is_idle(self) -> bool:
        return len(self._held) == 0

    def _has_no_results(self) -> bool:
        """Tell whether all that is held has no result, or an ``on_finish`` that runs on."""
        return all(
            not held.ended or held.overdue or self._ends.runs_on(held) for held in self._held.all()
        )

    def _wait_until(self, is_so: Callable[[], bool], end: float | None = None) -> None:
        """Wait until that monotonic time; without one, until told to stop."""
        while not is_so():
            if end is None and self._is_stopping():
                return
            left = LOOK_SECONDS if end is None else end - time.monotonic()
            if left <= 0:
                return
            self._wait(min(left, LOOK_SECONDS))


def give_back_unbegun(alias: str, unbegun: list[Held], *, until: float) -> None:
    """Undo the claims whose handlers never began; try again until that monotonic time.

    Rows that somebody has locked are waited for, after the others are written. What is refused
    keeps no other: it is tried alone, whatever the time, and once more.
    """
    left = deque([([(held.job.id, held.job.token) for held in unbegun], False)])
    later: list[tuple[list[tuple[int, str]], bool]] = []
    refused: set[tuple[int, str]] = set()
    failures = 0
    while left or later:
        if not left:
            if time.monotonic() >= until:
                count = sum(len(holders) for holders, _ in later)
                logger.warning("%s left to their leases", counted(count, "claim"))
                return
            failures += 1
            time.sleep(min(backoff(failures), max(0.0, until - time.monotonic())))
            left.extend(later)
            later.clear()
        holders, wait = left.popleft()
        try:
            given = give_back(alias, holders, wait=wait)
        except Exception as error:
            connections.clean()
            if is_transient(alias, error):
                later.append((holders, wait))
                continue
            logger.exception("giving claims back failed")
            if len(holders) > 1:
                left.extend(([one], wait) for one in holders)
            elif refused.isdisjoint(holders):
                refused.update(holders)
                later.append((holders, wait))
            continue
        missing = [one for one in holders if one[0] not in given]
        if missing and not wait:
            left.append((missing, True))
            continue
        # Having waited, what is missing is not ours any more, or has no open attempt row.
        for job, _ in missing:
            logger.warning("job %d cannot be given back; it is left unchanged", job)


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
