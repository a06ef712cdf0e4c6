"""The hard limit: an attempt whose handler runs on past its grace is ended without it (4.5)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ..conf import settings
from .described import log_timeout
from .ends import Ends
from .execution import overdue_outcome
from .held import Held, HeldJobs

logger = logging.getLogger("django_durable_jobs.worker")


class HardLimit:
    """End what is overdue, and count the slots whose threads did not come back.

    Nothing can be injected into a running thread. It is left alone: its late result is
    refused, and its slot is no free one unless it returns after all.
    """

    def __init__(self, held: HeldJobs, ends: Ends, forget: Callable[[Held], None]) -> None:
        self._held = held
        self._ends = ends
        self._forget = forget
        self._lock = threading.Lock()
        self._lost: set[str] = set()

    @property
    def lost_slots(self) -> int:
        with self._lock:
            return len(self._lost | self._ends.stuck)

    def interval(self) -> float:
        """Until the first attempt is overdue; the poll interval at most."""
        poll = float(settings.POLL_SECONDS)
        begun = [
            held.ctx.until_overdue() for held in self._held.all() if held.begun and not held.ended
        ]
        return max(0.01, min([poll, *begun]))

    def step(self) -> None:
        for held in self._held.all():
            if held.begun and held.ctx.overdue() and self._takes_over(held):
                # First of all: the project's logging may raise.
                self._end(held)
                log_timeout(held.job)
                logger.error(
                    "handler %s of job %s does not end; its attempt is ended and its slot lost",
                    held.job.handler,
                    held.job.job_id,
                )
            elif held.ended and self._ends.gives_up(held, in_all=self.lost_slots > 0):
                self._forget(held)
                logger.error(
                    "the on_finish of job %s (handler %s) does not end; its slot is lost, and"
                    " its lease not renewed",
                    held.job.job_id,
                    held.job.handler,
                )

    def _takes_over(self, held: Held) -> bool:
        with self._lock:
            is_first = self._held.end(held)
            if is_first:
                held.overdue = True
                self._lost.add(held.job.token)
        return is_first

    def _end(self, held: Held) -> None:
        try:
            outcome = overdue_outcome(held.job)
        except LookupError:
            # It was to be blocked, and the database has not let us.
            self._forget(held)
            return
        self._ends.put_elsewhere(held, outcome)

    def came_back(self, held: Held) -> None:
        """Count a slot as free again, if it was lost; after the slot's own ``end`` or ``put``."""
        with self._lock:
            self._lost.discard(held.job.token)
