"""Durable jobs for Django, in the application's own database.

Importing this package needs no loaded apps and has no effects.
"""

from __future__ import annotations

from .events import FinishEvent
from .exceptions import (
    AttemptsExhausted,
    DurableJobsError,
    IdentityConflict,
    InvalidCursor,
    InvalidHandler,
    InvalidSchedule,
    InvalidSubmission,
    InvalidTransition,
    JobCancelled,
    JobInterrupt,
    JobTimeout,
    LeaseLost,
    LockTimeout,
    PermanentError,
    RetryLater,
    TransactionActive,
    TransactionRequired,
    WorkerStopping,
)
from .handlers import job
from .model_id import ModelId
from .schedules.declaration import schedule, unschedule
from .submission import JobSubmission
from .worker.context import JobContext

__version__ = "0.1.0"

__all__ = [
    "AttemptsExhausted",
    "DurableJobsError",
    "FinishEvent",
    "IdentityConflict",
    "InvalidCursor",
    "InvalidHandler",
    "InvalidSchedule",
    "InvalidSubmission",
    "InvalidTransition",
    "JobCancelled",
    "JobContext",
    "JobInterrupt",
    "JobSubmission",
    "JobTimeout",
    "LeaseLost",
    "LockTimeout",
    "ModelId",
    "PermanentError",
    "RetryLater",
    "TransactionActive",
    "TransactionRequired",
    "WorkerStopping",
    "job",
    "schedule",
    "unschedule",
]
