"""The places under limits that this worker has freed, and who of those it serves gets them (3.12).

The end of an attempt has let in the first in line, whoever serves that one: its queue may be
paused, and its worker busy. This worker has a slot free, and lets in whom it could run too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from ..dialects.base import LimitKey
from ..transitions.claims import ClaimedJob
from ..transitions.limits import KEYS, let_in_of
from .passes import Serving


class FreedPlaces:
    """The keys of the jobs that have ended since the last look; safe between threads."""

    def __init__(self, alias: str, serving: Serving) -> None:
        self._alias = alias
        self._serving = serving
        self._lock = threading.Lock()
        self._keys: set[LimitKey] = set()

    def add(self, jobs: Iterable[ClaimedJob]) -> None:
        keys = {
            LimitKey(job.handler, job.concurrency_key)
            for job in jobs
            if job.concurrency_key is not None
        }
        if keys:
            with self._lock:
                self._keys |= keys

    def let_in(self) -> None:
        """Look at some keys; what is beyond them, or fails, is left to the passes."""
        if not self._keys:
            return
        with self._lock:
            keys, self._keys = self._keys, set()
        let_in_of(self._alias, sorted(keys)[:KEYS], self._serving)
