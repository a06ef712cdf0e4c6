"""The slots: threads that run handlers, fed without polling."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from django.utils import timezone, translation

from . import connections
from .held import Held

logger = logging.getLogger("django_durable_jobs.worker")


def refresh() -> None:
    """Make this thread fit for the project's next code: nothing that the last one left is there."""
    connections.undo()
    timezone.deactivate()
    translation.deactivate()


class Slots:
    """``count`` threads; each runs one handler at a time on connections of its own."""

    def __init__(
        self, count: int, run: Callable[[Held], None], *, freed: Callable[[], None]
    ) -> None:
        self.count = count
        self._run = run
        self._freed = freed
        self._feed: queue.SimpleQueue[Held | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._busy = 0
        self._threads = [
            threading.Thread(target=self._work, name=f"durable-slot-{number}", daemon=True)
            for number in range(1, count + 1)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def free(self) -> int:
        return self.count - self._busy

    def give(self, jobs: list[Held]) -> None:
        with self._lock:
            self._busy += len(jobs)
        for held in jobs:
            self._feed.put(held)

    def stop(self, timeout: float) -> None:
        for _ in self._threads:
            self._feed.put(None)
        for thread in self._threads:
            thread.join(timeout)

    def _work(self) -> None:
        try:
            while (held := self._feed.get()) is not None:
                try:
                    self._run(held)
                except BaseException:
                    # Nothing may end the thread: its slot would be gone for good.
                    logger.exception("a slot failed around job %s", held.job.job_id)
                finally:
                    refresh()
                    connections.clean()
                    with self._lock:
                        self._busy -= 1
                    self._freed()
        finally:
            connections.close_all()
