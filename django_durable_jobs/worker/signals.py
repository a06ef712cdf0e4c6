"""Signals of a worker process: the first one drains, the second one ends it now."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from .loop import KILLED

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """That a stop was asked for, also before there is anybody whom it could be told.

    ``ask()`` may be called from any thread, from a signal handler, and more than once.
    """

    def __init__(self) -> None:
        self._asked = False
        self._tell: Callable[[], None] = lambda: None
        self._end_now: Callable[[], None] = lambda: None
        # Put to, never locked: a signal handler may interrupt the very thread that waits.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def is_asked(self) -> bool:
        return self._asked

    def ask(self) -> None:
        self._asked = True
        self._wake.put(None)
        self._tell()

    def hand_to(
        self, tell: Callable[[], None], *, end_now: Callable[[], None] = lambda: None
    ) -> None:
        """Have ``tell`` called once it is asked for, or at once if it was.

        ``end_now`` comes before the exit by a second signal.
        """
        self._end_now = end_now
        # In this order: whoever asks meanwhile sees the one, or is seen by the other.
        self._tell = tell
        if self._asked:
            tell()

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until it is asked for; tell whether it was. For one thread alone."""
        if not self._asked:
            with suppress(queue.Empty):
                self._wake.get(timeout=seconds)
        return self._asked

    def end_now(self) -> None:
        """Exit at once with code 5; leases bring the work back."""
        self._end_now()
        os._exit(KILLED)


@contextmanager
def stop_on_signal(*, for_good: bool = False) -> Iterator[Stop]:
    """Give a ``Stop`` that SIGTERM and SIGINT ask for; the second signal exits with 5 (4.7).

    Signals that were held back until now are let through. ``for_good`` leaves the handlers to
    a process that ends soon. Outside the main thread Python allows none, and no signal asks.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    received = 0

    def handle(signum: int, frame: Any) -> None:
        nonlocal received
        received += 1
        if received > 1:
            stop.end_now()
        stop.ask()

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    mask = _mask("SIG_UNBLOCK", SIGNALS)
    try:
        yield stop
    finally:
        if not for_good:
            for number, handler in before.items():
                signal.signal(number, handler)
            _mask("SIG_SETMASK", mask)


@contextmanager
def held_back() -> Iterator[None]:
    """Hold signals back from a process that is about to change, for its next handlers."""
    mask = _mask("SIG_BLOCK", SIGNALS)
    try:
        yield
    finally:
        _mask("SIG_SETMASK", mask)


@contextmanager
def children_waited_for() -> Iterator[None]:
    """Have children that end wait for us, where whoever started us has their end ignored."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def _mask(how: str, numbers: Iterable[int]) -> set[int]:
    """Change this thread's mask and give the one before; Windows has none."""
    change = getattr(signal, "pthread_sigmask", None)
    return set() if change is None else set(change(getattr(signal, how), numbers))
