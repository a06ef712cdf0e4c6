"""``context()``: what a handler needs to be called as the plain function that it is."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ..clock import host_now
from ..exceptions import JobCancelled
from ..instants import from_microseconds
from ..worker.context import JobContext, Store


@dataclass(slots=True)
class Reported:
    """What a handler reported to a context that writes to no database."""

    progress: list[tuple[float, str]] = field(default_factory=list)
    checkpoints: list[Any] = field(default_factory=list)
    completed: list[Any] = field(default_factory=list)


class TestContext(JobContext):
    """A ``JobContext`` of no job: it records what the handler reports, in ``reported``."""

    __test__ = False
    __slots__ = ("reported",)
    reported: Reported


def context(
    *,
    attempt: int = 1,
    max_attempts: int = 3,
    job_id: str = "test",
    scope: str = "",
    queue: str = "default",
    scheduled_for: datetime | None = None,
    checkpoint_value: Any = None,
    cancelled: bool = False,
) -> TestContext:
    """Make a context for a unit test that calls a handler as the plain function.

    Values are checked as in production; nothing is fenced and nothing times out.
    ``cancelled`` has the context behave as after a cancel: ``check()``, ``progress()``,
    ``fence()`` and ``complete()`` raise ``JobCancelled``.
    """
    reported = Reported()

    def written(record: Callable[[], object]) -> None:
        if cancelled:
            raise JobCancelled("a cancel of this job was requested")
        record()

    made = TestContext(
        store=Store(
            progress=lambda fraction, message: written(
                lambda: reported.progress.append((fraction, message))
            ),
            checkpoint=lambda text: reported.checkpoints.append(json.loads(text)),
            fence=lambda: written(lambda: None),
            complete=lambda text: written(
                lambda: reported.completed.append(text and json.loads(text))
            ),
            completed=lambda text: None,
            completion_stands=lambda: bool(reported.completed),
        ),
        job_id=job_id,
        scope=scope,
        queue=queue,
        token=secrets.token_hex(16),
        attempt=attempt,
        max_attempts=max_attempts,
        timeout=3600,
        started_at=from_microseconds(host_now()),
        enforce_timeout=False,
        scheduled_for=scheduled_for,
        checkpoint_value=checkpoint_value,
    )
    made.reported = reported
    if cancelled:
        made.mark_cancel_requested()
    return made
