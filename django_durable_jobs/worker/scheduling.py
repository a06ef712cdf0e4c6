"""The schedules of a worker: activated at its start, fired as their minutes begin (CONTRACT 5)."""

from __future__ import annotations

from collections.abc import Callable

from ..conf import settings
from ..schedules import cursors
from ..schedules.declaration import registry
from ..schedules.passes import Scheduler
from .stalls import longest_pass
from .supervised import Loop

# A pass comes so long after the minute has begun by the clock that decides, rather than before.
MARGIN_SECONDS = 0.005


class Scheduling:
    """The step of a worker's schedule loop, and how long it may wait for the next one."""

    def __init__(
        self, alias: str, *, fired: Callable[[], None], is_stopping: Callable[[], bool]
    ) -> None:
        self._alias = alias
        self._fired = fired
        self._is_stopping = is_stopping
        self._scheduler = Scheduler(alias, is_stopping=is_stopping)
        self._is_active = False
        self._wait = 0.0
        self.loop = Loop(
            "schedules", alias, self.step, interval=self.interval, longest_answer=longest_pass
        )

    def step(self) -> None:
        """Make one pass; the first one activates what is declared."""
        if self._is_stopping():
            return
        if not self._is_active:
            cursors.activate(self._alias, registry.all())
            self._is_active = True
        made = self._scheduler.run()
        if made.jobs:
            self._fired()
        self._wait = 0.0 if made.more else made.seconds_left + MARGIN_SECONDS

    def interval(self) -> float:
        """Nothing while a catch-up goes on, else the poll interval or the rest of the minute."""
        return min(float(settings.POLL_SECONDS), self._wait)
