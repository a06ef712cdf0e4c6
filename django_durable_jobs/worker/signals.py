"""Signals of a worker process: the first one drains, the second one ends it now."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .loop import KILLED

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_on_signal(
    stop: Callable[[], None], *, end_now: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Call ``stop`` on SIGTERM or SIGINT; exit at once with code 5 on the second (4.7).

    ``end_now`` comes before that exit. Does nothing outside the main thread, where Python
    allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = 0

    def handle(signum: int, frame: Any) -> None:
        nonlocal received
        received += 1
        if received > 1:
            end_now()
            os._exit(KILLED)
        stop()

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
