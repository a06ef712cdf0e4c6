"""How long a worker process may live, and the file that says that it lives."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger("django_durable_jobs.worker")

MEBIBYTE = 1024 * 1024


class Lifetime:
    """Over once the process has run for ``seconds``, or uses more than ``mebibytes``."""

    def __init__(self, *, seconds: float | None, mebibytes: int | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._mebibytes = mebibytes
        self._is_over = False

    def look(self, *, has_worked: bool = True) -> bool:
        """Look at the clock and the memory; once over, it stays over.

        The memory of a process that has claimed nothing yet does not count: a limit that is too
        low must not keep it from all work.
        """
        if not self._is_over:
            reason = self._reason(has_worked)
            if reason is not None:
                self._is_over = True
                logger.info("the worker claims nothing more: it %s", reason)
        return self._is_over

    @property
    def is_over(self) -> bool:
        return self._is_over

    def _reason(self, has_worked: bool) -> str | None:
        if self._end is not None and time.monotonic() >= self._end:
            return "has run for its time"
        if self._mebibytes is None or not has_worked:
            return None
        used = resident_bytes() // MEBIBYTE
        return f"uses {used} MiB of memory" if used > self._mebibytes else None


def resident_bytes() -> int:
    """Give the memory that this process holds now; where that cannot be told, its most so far."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        import resource
        import sys

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")


class HeartbeatFile:
    """A file whose time of change says when the worker was last known to be well."""

    EVERY_SECONDS = 1.0

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next = 0.0
        self._failed = False

    def touch(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self.EVERY_SECONDS
        try:
            self._path.touch()
            self._failed = False
        except OSError as error:
            if not self._failed:
                self._failed = True
                logger.error("the heartbeat file cannot be written: %s", error.strerror)

    def remove(self) -> None:
        """Leave no file of a worker that has ended."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
