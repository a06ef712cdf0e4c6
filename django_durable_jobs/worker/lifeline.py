"""The line between a supervisor and one of its worker processes: beats up, the stop down.

A child is told to stop by the end of its line, never by a signal: one that reaches the whole
process group (a terminal's Ctrl-C, a service manager) would count twice with ours. The line
ends as well when the supervisor dies, so that no child outlives it by more than its jobs.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

_BEAT = b"."
_RETIRE = b"r"


class ChildEnd:
    """What a worker process holds of its line."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._word = _BEAT

    def beat(self) -> None:
        """Say that we live; whoever calls it must depend on no database and no handler."""
        self._send(self._word)

    def retire(self) -> None:
        """Say that we claim nothing more: a successor may begin while we finish what we hold.

        Each beat says so from now on: a full line takes no word.
        """
        self._word = _RETIRE
        self.beat()

    def watch(self, stop: Callable[[], None]) -> None:
        """Call ``stop`` once the supervisor tells us so or is gone, from a thread of its own."""

        def wait() -> None:
            with suppress(ConnectionError):
                self._line.recv(1)
            stop()

        threading.Thread(target=wait, name="durable-parent-watch", daemon=True).start()

    def _send(self, word: bytes) -> None:
        # Never waits: a supervisor that is stopped reads nothing, and one that is gone neither.
        with suppress(OSError):
            self._line.send(word, socket.MSG_DONTWAIT)


class ParentEnd:
    """What the supervisor holds of a child's line: one descriptor."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    def heard(self) -> tuple[bool, bool]:
        """Tell whether there was any word since the last look, and whether one was to retire."""
        try:
            words = self._line.recv(4096, socket.MSG_DONTWAIT)
        except OSError:
            return False, False
        return bool(words), _RETIRE in words

    def tell_to_stop(self) -> None:
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._line.close()


def lifeline() -> tuple[ParentEnd, socket.socket]:
    """Make a line before a fork; the child wraps its socket, the parent closes that one."""
    ours, theirs = socket.socketpair()
    return ParentEnd(ours), theirs
