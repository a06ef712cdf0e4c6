"""Hear of new work before the next poll (CONTRACT 4.4)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..announcements import QUIET_SECONDS
from ..dialects import Listener
from .passes import Serving

logger = logging.getLogger("django_durable_jobs.worker")

# Work that comes while an announcement is fresh is not announced again: look once more then.
SECOND_LOOK_SECONDS = 2 * QUIET_SECONDS
# How long a stop may wait for the thread that listens.
SLICE_SECONDS = 0.5


class WakeUp:
    """The step of the listening loop: ``heard()`` for what this worker serves."""

    def __init__(self, listener: Listener, serving: Serving, heard: Callable[[], None]) -> None:
        self._listener = listener
        self._serving = serving
        self._heard = heard
        self._is_tried = False

    def step(self) -> None:
        if not self._is_tried:
            self._try()
        queues = self._listener.wait(SLICE_SECONDS)
        if queues is None or any(self._serving.serves(queue) for queue in queues):
            self._heard()

    def _try(self) -> None:
        hears = self._listener.hears()
        self._is_tried = True
        # What was announced meanwhile was taken for the trial.
        self._heard()
        if not hears:
            logger.warning(
                "announcements of new work do not arrive, as behind a pooler of transactions:"
                " jobs are found by polling. Connect the worker to the server itself, or set"
                ' DURABLE_JOBS["NOTIFY"] = False.'
            )
