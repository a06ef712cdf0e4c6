"""Which lanes this worker claims from: looked up again before they can be much out of date."""

from __future__ import annotations

import time

from ..dialects.base import Lane
from ..transitions.claims import queued_lanes
from .passes import Serving

FRESH_SECONDS = 0.05


class RunnableLanes:
    """The queued lanes that this worker serves and has the code for.

    While claims come back full, a look-up serves for ``FRESH_SECONDS``: a lane that is new
    waits that long at most. A claim that came short asks anew.
    """

    def __init__(self, alias: str, serving: Serving, *, fresh_seconds: float) -> None:
        self._alias = alias
        self._serving = serving
        self._fresh_seconds = fresh_seconds
        self._lanes: list[Lane] = []
        self._asked_at: float | None = None

    def get(self) -> list[Lane]:
        if not self.is_fresh():
            self.know([lane for lane in queued_lanes(self._alias) if self._serving.runs(lane)])
        return self._lanes

    def is_fresh(self) -> bool:
        """Tell whether ``get`` answers from what it knows."""
        if self._asked_at is None:
            return False
        return time.monotonic() - self._asked_at < self._fresh_seconds

    def know(self, runnable: list[Lane]) -> None:
        """Take what a pass has just looked up."""
        self._lanes = runnable
        self._asked_at = time.monotonic()

    def forget(self) -> None:
        self._asked_at = None
