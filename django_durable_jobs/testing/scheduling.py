"""``run_schedules()``: one scheduling pass in this thread, by the production code."""

from __future__ import annotations

from ..conf import settings
from ..dialects.base import refuse_open_transaction
from ..models import Job
from ..schedules import cursors
from ..schedules.declaration import registry
from ..schedules.passes import Scheduler


def run_schedules(*, using: str | None = None) -> list[Job]:
    """Check and activate as a worker's start does, make one scheduling pass, give the new jobs.

    A schedule that is seen for the first time fires nothing yet: the current minute counts as
    processed. One that cannot fire is logged and holds up no other. Works in ``TestCase`` and
    ``TransactionTestCase``. Raises ``InvalidSchedule`` for a schedule whose stored cursor
    belongs to another cron, and ``TransactionActive`` inside an ``atomic()`` of the test
    (CONTRACT 7.2).
    """
    alias = using or settings.DATABASE
    refuse_open_transaction(alias)
    cursors.require_adopted(alias, registry.all())
    cursors.activate(alias, registry.all())
    return Scheduler(alias).run().jobs
