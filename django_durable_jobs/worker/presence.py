"""This process's row among the live workers: written at the start, beaten, removed at the end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ..dialects import dialect_for
from ..transitions.workers import BEAT_SECONDS, beat, deregister, register
from .options import WorkerOptions
from .passes import Serving
from .supervised import Loop

logger = logging.getLogger("django_durable_jobs.worker")


class Presence:
    """What others see of this worker (CONTRACT 4.9)."""

    def __init__(
        self, options: WorkerOptions, serving: Serving, health: Callable[[], dict[str, Any]]
    ) -> None:
        self._options = options
        self._serving = serving
        self._health = health
        self._key: int | None = None
        self.loop = Loop("presence", options.alias, self.beat, interval=lambda: BEAT_SECONDS)

    def beat(self) -> None:
        """Register, or say that we live; a row that somebody removed is written again."""
        health = self._health()
        if self._key is not None and beat(self._options.alias, self._key, health):
            return
        self._key = register(
            self._options.alias,
            name=self._options.name,
            queues=self._serving.queues,
            excluded_queues=self._serving.excluded_queues,
            capabilities=self._serving.handlers,
            longest_timeout=dialect_for(self._options.alias).longest_timeout(),
            health=health,
        )

    def leave(self, *, patience: float) -> None:
        """Remove the row; whoever locks it is waited for so many seconds."""
        if self._key is None:
            return
        try:
            deregister(self._options.alias, self._key, lock_timeout=patience)
        except Exception as error:
            # The row goes silent and is forgotten by another worker.
            logger.warning("the worker's row stays behind: %s", type(error).__name__)
