"""What is seen of a worker's loops from outside: their last success and their failures."""

from __future__ import annotations

import time
from typing import Any


class Pulse:
    """When a part of the worker last succeeded, and how often it has failed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.failures = 0
        self.last_success = time.monotonic()
        self._rests = False

    def succeeded(self) -> None:
        self.last_success = time.monotonic()

    def failed(self) -> None:
        self.failures += 1

    def rest(self) -> None:
        """There is nothing to do, which is no failure however long it lasts."""
        self._rests = True

    def begin(self) -> None:
        if self._rests:
            self._rests = False
            self.succeeded()

    def pace(self) -> float:
        """Give the seconds between two successes, if all goes well."""
        return 0.0

    def health(self) -> dict[str, Any]:
        """Describe it as JSON: seconds since the last success, how often it is due, failures."""
        age = 0.0 if self._rests else time.monotonic() - self.last_success
        return {"age": round(age, 1), "pace": round(self.pace(), 1), "failures": self.failures}
