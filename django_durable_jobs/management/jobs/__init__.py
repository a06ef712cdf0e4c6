"""The subcommands of ``manage.py jobs``, one module for each group of them.

A subcommand is a ``Subcommand``: it parses, calls inward, and gives one value that is shown as
lines of text or, with ``--json``, as it is.
"""

from __future__ import annotations

from .base import Subcommand
from .celery_beat import SUBCOMMANDS as CELERY_BEAT
from .moves import SUBCOMMANDS as MOVES
from .queues import SUBCOMMANDS as QUEUES
from .schedules import SUBCOMMANDS as SCHEDULES
from .workers import SUBCOMMANDS as WORKERS

SUBCOMMANDS: tuple[Subcommand, ...] = MOVES + QUEUES + SCHEDULES + WORKERS + CELERY_BEAT

__all__ = ["SUBCOMMANDS", "Subcommand"]
