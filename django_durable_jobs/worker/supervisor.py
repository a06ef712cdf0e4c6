"""A parent that keeps P worker processes alive and passes signals on to them."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable

from .loop import CRASHED, DRAINED, GAVE_UP
from .signals import stop_on_signal

logger = logging.getLogger("django_durable_jobs.worker")

TICK_SECONDS = 0.2
RESTART_SECONDS = 1.0


class Supervisor:
    """Fork ``count`` children that each run ``work``; replace the dead until told to stop.

    It forks before any connection or thread exists in this process.
    """

    def __init__(self, count: int, work: Callable[[int], int]) -> None:
        self._count = count
        self._work = work
        self._children: dict[int, int] = {}
        self._stopping = False

    def run(self) -> int:
        with stop_on_signal(self.stop):
            for number in range(self._count):
                self._spawn(number)
            worst = DRAINED
            while self._children:
                worst = max(worst, self._reap())
                time.sleep(TICK_SECONDS)
        return worst

    def stop(self) -> None:
        self._stopping = True
        for pid in list(self._children):
            _kill(pid, signal.SIGTERM)

    def _spawn(self, number: int) -> None:
        pid = os.fork()
        if pid == 0:
            _run_child(self._work, number)
        self._children[pid] = number
        if self._stopping:
            _kill(pid, signal.SIGTERM)

    def _reap(self) -> int:
        """Collect the children that have ended; give the exit code that counts."""
        worst = DRAINED
        for pid, number in list(self._children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del self._children[pid]
            code = os.waitstatus_to_exitcode(status)
            if self._stopping:
                worst = max(worst, code if code >= 0 else GAVE_UP)
                continue
            if code == DRAINED:
                continue
            logger.error("worker process %d ended with %d and is replaced", pid, code)
            time.sleep(RESTART_SECONDS)
            self._spawn(number)
        return worst


def _run_child(work: Callable[[int], int], number: int) -> None:
    """Run in the child and leave without the parent's clean-up."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = CRASHED
    try:
        code = work(number)
    except BaseException:
        logger.exception("worker process crashed")
    finally:
        os._exit(code)


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
