"""A parent that keeps P worker processes alive and tells them when to stop."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from .loop import CRASHED, DRAINED, GAVE_UP
from .signals import SIGNALS, stop_on_signal

logger = logging.getLogger("django_durable_jobs.worker")

TICK_SECONDS = 0.2
RESTART_SECONDS = 1.0


class Supervisor:
    """Fork ``count`` children that each run ``work``; replace the dead until told to stop.

    It forks before any connection or thread exists in this process. A child is told to stop
    by the end of its pipe, never by a signal: one that reaches the whole process group (a
    terminal's Ctrl-C, a service manager) would count twice with ours. The pipe ends as well
    when this process dies, so that no child outlives it by more than its jobs.
    """

    def __init__(self, count: int, work: Callable[[int, int], int]) -> None:
        self._count = count
        self._work = work
        self._children: dict[int, int] = {}
        self._pipes: dict[int, int] = {}
        self._stopping = False

    def run(self) -> int:
        with stop_on_signal(self.stop, end_now=self._kill):
            for number in range(self._count):
                self._spawn(number)
            worst = DRAINED
            told = False
            while self._children:
                if self._stopping and not told:
                    told = True
                    logger.info("stopping %d worker processes", len(self._children))
                worst = max(worst, self._reap())
                time.sleep(TICK_SECONDS)
        return worst

    def stop(self) -> None:
        self._stopping = True
        for pid in list(self._pipes):
            self._close_pipe(pid)

    def _kill(self) -> None:
        for pid in list(self._children):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _spawn(self, number: int) -> None:
        # A signal handler that ran in the child between here and there would be our own.
        with _signals_held_back():
            if self._stopping:
                return
            theirs, ours = os.pipe()
            pid = os.fork()
            if pid == 0:
                _run_child(self._work, number, theirs, [ours, *self._pipes.values()])
            os.close(theirs)
            self._children[pid] = number
            self._pipes[pid] = ours

    def _close_pipe(self, pid: int) -> None:
        pipe = self._pipes.pop(pid, None)
        if pipe is not None:
            os.close(pipe)

    def _reap(self) -> int:
        """Collect the children that have ended; give the exit code that counts."""
        worst = DRAINED
        for pid, number in list(self._children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del self._children[pid]
            self._close_pipe(pid)
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


@contextmanager
def _signals_held_back() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_child(
    work: Callable[[int, int], int], number: int, pipe: int, others: Iterable[int]
) -> None:
    """Run in the child and leave without the parent's clean-up."""
    code = CRASHED
    try:
        # Nothing is lost by it: whoever signals us so early signals the parent too.
        for one in SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for other in others:
            os.close(other)
        code = work(number, pipe)
    except BaseException:
        logger.exception("worker process crashed")
    finally:
        os._exit(code)
