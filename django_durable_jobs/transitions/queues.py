"""An operator's moves on queues: pause and resume. They join an open transaction (CONTRACT 6)."""

from __future__ import annotations

from ..dialects import dialect_for
from ..instants import from_microseconds
from ..models import QueuePause
from ..payloads import check_text
from .operators import UNCHANGED

PAUSED, RESUMED = "paused", "resumed"


def pause_queue(alias: str, queue: str) -> str:
    """Have no job of the queue claimed until it is resumed: ``"paused"``, or ``"unchanged"``.

    What runs goes on. ``InvalidSubmission`` for what cannot be the name of a queue.
    """
    check_text("queue", queue, 1, 100)
    dialect = dialect_for(alias)

    def work() -> str:
        now = from_microseconds(dialect.instant(alias))
        pauses = QueuePause.objects.using(alias)
        _, is_new = pauses.get_or_create(queue=queue, defaults={"paused_at": now})
        return PAUSED if is_new else UNCHANGED

    return dialect.joined(alias, work)


def resume_queue(alias: str, queue: str) -> str:
    """Let the queue's jobs be claimed again: ``"resumed"``, or ``"unchanged"``."""

    def work() -> str:
        deleted, _ = QueuePause.objects.using(alias).filter(queue=queue).delete()
        return RESUMED if deleted else UNCHANGED

    return dialect_for(alias).joined(alias, work)
