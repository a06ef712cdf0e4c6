"""A TCP proxy in front of a server, which can stop forwarding without closing anything."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Proxy:
    """Forward connections to a port of the loopback interface.

    ``freeze()`` swallows what comes on the connections that there are, for good; with
    ``newcomers`` also on those that come until ``thaw()``. Nobody is told: they stay open.
    Until it is ``opened`` its port is its own, and refuses connections.
    """

    def __init__(self, port: int, *, opened: bool = True) -> None:
        self._target = port
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._frozen: set[int] = set()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._freezes_newcomers = False
        if opened:
            self.open()

    def open(self) -> None:
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self, *, newcomers: bool = False) -> None:
        # First, or one that comes just now would be neither.
        self._freezes_newcomers = newcomers
        self._frozen.update(range(len(self._pairs)))

    def thaw(self) -> None:
        self._freezes_newcomers = False

    @property
    def connections(self) -> int:
        return len(self._pairs)

    def close(self) -> None:
        for one in (self._listener, *(end for pair in self._pairs for end in pair)):
            # Shut down, or a thread that reads it keeps it open.
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                number = len(self._pairs)
                self._pairs.append((near, far))
                if self._freezes_newcomers:
                    self._frozen.add(number)
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(number, *ends), daemon=True).start()

    def _pump(self, number: int, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if number not in self._frozen:
                    target.sendall(data)
            if number not in self._frozen:
                target.shutdown(socket.SHUT_WR)
