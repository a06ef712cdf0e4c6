"""When a worker makes its passes: every poll interval, and when a backoff of its own is over."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from .. import states
from ..conf import settings
from ..dialects.base import Lane
from ..instants import SECOND
from ..transitions.outcomes import FinishReport, Outcome
from .stalls import longest_pass
from .supervised import Loop

RECOVERY_SECONDS = 5.0
DUE_MARGIN_SECONDS = 0.005
# Jobs that fall due within so long share a pass, however many fail.
DUE_STEP_SECONDS = 0.05
# The ends of longer backoffs are left to the polls: what is remembered stays small.
LONGEST_REMEMBERED_SECONDS = 60.0


class Passes(Protocol):
    """Make the passes; give the lanes that hold queued jobs which this worker can run."""

    def __call__(self, *, recover: bool) -> list[Lane]: ...


class DueTimes:
    """When backoffs of ours are over, in monotonic seconds; any thread may add and ask."""

    def __init__(self) -> None:
        self._steps: set[int] = set()
        self._lock = threading.Lock()

    def add(self, delays: Iterable[float]) -> bool:
        """Remember those that are not too long; tell whether one ends before all others."""
        begin = time.monotonic() + DUE_MARGIN_SECONDS
        steps = {
            math.ceil((begin + delay) / DUE_STEP_SECONDS)
            for delay in delays
            if delay <= LONGEST_REMEMBERED_SECONDS
        }
        with self._lock:
            is_first = min(steps, default=math.inf) < min(self._steps, default=math.inf)
            self._steps |= steps
        return is_first

    def first(self) -> float:
        with self._lock:
            return min(self._steps, default=math.inf) * DUE_STEP_SECONDS

    def forget_until(self, now: float) -> None:
        with self._lock:
            self._steps = {one for one in self._steps if one * DUE_STEP_SECONDS > now}


class Chores:
    """The loop of the passes; ``found`` gets the lanes that are worth a claim."""

    def __init__(self, alias: str, passes: Passes, found: Callable[[list[Lane]], None]) -> None:
        self._passes = passes
        self._found = found
        self._next_recovery = 0.0
        self._due_times = DueTimes()
        self._looked_at = -math.inf
        # Held by whoever makes passes: what these are moving is locked, and would be passed over.
        self.turn = threading.Lock()
        self.loop = Loop(
            "chores", alias, self._step, interval=self._interval, longest_answer=longest_pass
        )

    def is_look_overdue(self) -> bool:
        """Tell whether a long pass keeps the chores from the look that they make for claims."""
        return time.monotonic() - self._looked_at > 1.5 * float(settings.POLL_SECONDS)

    def notice_retries(self, ended: Iterable[Outcome], report: FinishReport) -> None:
        """Have a promotion come when each of our short backoffs is over."""
        delays = [
            outcome.retry_delay / SECOND
            for outcome in ended
            if outcome.retry_delay is not None
            and report.written.get(outcome.job) == states.SCHEDULED
        ]
        if self._due_times.add(delays) and self._interval() < float(settings.POLL_SECONDS):
            self.loop.wake()

    def _step(self) -> None:
        now = time.monotonic()
        self._due_times.forget_until(now)
        # The look for expired leases reads every running row, and none expires that soon.
        recover = now >= self._next_recovery
        if recover:
            self._next_recovery = now + min(RECOVERY_SECONDS, settings.LEASE_SECONDS / 10)
        with self.turn:
            lanes = self._passes(recover=recover)
        self._looked_at = time.monotonic()
        if lanes:
            self._found(lanes)

    def _interval(self) -> float:
        """The poll interval; less where a job of ours is due again before that."""
        soon = self._due_times.first() - time.monotonic()
        return max(DUE_MARGIN_SECONDS, min(float(settings.POLL_SECONDS), soon))
