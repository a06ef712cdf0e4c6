"""The admin: thin pages over the rows, and actions that call ``transitions`` and ``schedules``.

Viewing changes nothing. Everything is read-only, for superusers too (CONTRACT 6).
"""

from __future__ import annotations

from django.contrib import admin

from ..models import Job, LiveWorker, OperatorAction, QueuePause, ScheduleCursor
from .jobs import JobAdmin
from .others import LiveWorkerAdmin, OperatorActionAdmin, QueuePauseAdmin
from .schedules import ScheduleCursorAdmin

admin.site.register(Job, JobAdmin)
admin.site.register(ScheduleCursor, ScheduleCursorAdmin)
admin.site.register(LiveWorker, LiveWorkerAdmin)
admin.site.register(QueuePause, QueuePauseAdmin)
admin.site.register(OperatorAction, OperatorActionAdmin)

__all__ = [
    "JobAdmin",
    "LiveWorkerAdmin",
    "OperatorActionAdmin",
    "QueuePauseAdmin",
    "ScheduleCursorAdmin",
]
