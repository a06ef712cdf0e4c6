"""Tell waiting workers, after the commit, that a queue has new work (CONTRACT 4.4).

Only a hint: a worker that misses it finds the job at its next poll. So an announcement is
never part of a transaction, never raises, and is left out where one was just made: a worker
that hears one looks again ``QUIET_SECONDS`` later.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from functools import partial

from django.db import Error, connections, transaction

from .conf import settings
from .dialects import dialect_for
from .transactions import in_callers_transaction

logger = logging.getLogger("django_durable_jobs")

QUIET_SECONDS = 0.005
# Queue names may be made up without end; forgetting them only costs an announcement.
_REMEMBERED = 1000
_announced: dict[tuple[str, str], float] = {}


def announce(alias: str, queues: Iterable[str]) -> None:
    """Announce work of these queues: once the caller's transaction has committed, else now."""
    wanted = frozenset(queues)
    if not wanted or not settings.NOTIFY or not dialect_for(alias).announces:
        return
    connection = connections[alias]
    if any(getattr(block, "_from_testcase", False) for block in connection.atomic_blocks):
        return  # It will never commit.
    if in_callers_transaction(connection):
        transaction.on_commit(partial(_announce, alias, wanted), using=alias, robust=True)
    else:
        _announce(alias, wanted)


def _announce(alias: str, queues: Iterable[str]) -> None:
    connection = connections[alias]
    if connection.in_atomic_block or not connection.get_autocommit():
        return
    now = time.monotonic()
    due = [one for one in queues if now - _announced.get((alias, one), -math.inf) >= QUIET_SECONDS]
    if not due:
        return
    if len(_announced) > _REMEMBERED:
        _announced.clear()
    _announced.update(((alias, one), now) for one in due)
    try:
        dialect_for(alias).announce(alias, due)
    except Error:
        logger.warning("new work was not announced; workers find it at their next poll")
