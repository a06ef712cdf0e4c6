"""Block a job that its dispatch refused: nothing of it has run (CONTRACT 2.3)."""

from __future__ import annotations

import logging
import time

from ..transitions.claims import block_claimed
from . import connections
from .held import Held
from .supervised import backoff, is_transient

logger = logging.getLogger("django_durable_jobs.worker")


def block(alias: str, held: Held, reason: str) -> None:
    """Undo the claim and say why; try again while the database is away and the lease holds."""
    failures = 0
    while not (held.lost or held.overdue):
        try:
            row = (held.job.id, held.job.token, reason)
            if block_claimed(alias, [row], wait=True):
                logger.warning("job %d is blocked: %s", held.job.id, reason)
            else:
                logger.warning("job %d cannot be blocked; it is left unchanged", held.job.id)
            return
        except Exception as error:
            if not is_transient(alias, error):
                raise
            failures += 1
            connections.clean()
            time.sleep(backoff(failures))
