"""A supervised loop: a thread that takes one step after another and never dies quietly."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from ..dialects import dialect_for
from . import connections
from .pulse import Pulse
from .stalls import Watched, longest_answer

logger = logging.getLogger("django_durable_jobs.worker")

BACKOFF_MAX_SECONDS = 5.0


def is_transient(alias: str, error: BaseException) -> bool:
    """Tell what a worker waits out: lost connections, deadlocks, locks, a busy database."""
    return dialect_for(alias).may_pass(error)


def backoff(failures: int) -> float:
    """Give the seconds to wait after so many failures in a row: bounded, with jitter."""
    return min(BACKOFF_MAX_SECONDS, 0.05 * 2.0 ** min(failures, 10)) * random.uniform(0.5, 1)  # noqa: S311


class Loop(Pulse):
    """Run ``step`` every ``interval`` seconds in a thread of its own, with its own connections.

    What a database may do to us is waited out with bounded backoff. Anything else is a
    fault of ours: logged whole, counted in ``failures``, and the loop goes on.
    """

    def __init__(
        self,
        name: str,
        alias: str,
        step: Callable[[], object],
        *,
        interval: Callable[[], float],
        longest_backoff: float = BACKOFF_MAX_SECONDS,
        longest_answer: Callable[[], float] = longest_answer,
    ) -> None:
        super().__init__(name)
        self._longest_backoff = longest_backoff
        self.watched = Watched(name, alias, longest_answer)
        self._alias = alias
        self._step = step
        self._interval = interval
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"durable-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    def tell_to_stop(self) -> None:
        self._stopping = True
        self._wake.set()

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def pace(self) -> float:
        return self._interval()

    def _run(self) -> None:
        in_a_row = 0
        try:
            with connections.own(self._alias):
                while not self._stopping:
                    in_a_row = 0 if self._try_step() else in_a_row + 1
                    self._wake.wait(self._pause(in_a_row))
                    self._wake.clear()
        finally:
            connections.close_all()

    def _pause(self, failures: int) -> float:
        if not failures:
            return self._interval()
        return min(backoff(failures), self._longest_backoff)

    def _try_step(self) -> bool:
        try:
            with self.watched.waiting():
                self._step()
        except Exception as error:
            self.failed()
            if is_transient(self._alias, error):
                logger.warning("%s waits for the database: %s", self.name, type(error).__name__)
            else:
                logger.exception("%s failed and goes on", self.name)
            connections.clean()
            return False
        self.succeeded()
        return True


def stop_all(loops: list[Loop], timeout: float = 5.0) -> None:
    """Stop loops together; one that hangs in the database is left behind after ``timeout``."""
    end = time.monotonic() + timeout
    for loop in loops:
        loop.tell_to_stop()
    for loop in loops:
        loop.join(max(0.0, end - time.monotonic()))
