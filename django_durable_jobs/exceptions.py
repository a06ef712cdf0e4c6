"""Every error this package raises: one base class, one sentence each."""

from __future__ import annotations

from datetime import timedelta

from django.core.exceptions import ImproperlyConfigured


class DurableJobsError(Exception):
    """Base of every error of this package that a caller may catch."""


class InvalidSubmission(DurableJobsError, ValueError):
    """A submission holds a value that is refused; nothing was written."""


class InvalidHandler(DurableJobsError, ImproperlyConfigured):
    """A handler is declared in a way that cannot work; the process must not start."""


class InvalidSchedule(DurableJobsError, ValueError):
    """A schedule cannot be declared, or its stored cursor belongs to another cron."""


class IdentityConflict(DurableJobsError):
    """The identity is taken by a different request; the caller's transaction is doomed."""


class TransactionRequired(DurableJobsError):
    """The call must be made inside ``transaction.atomic()`` on the jobs' database."""


class TransactionActive(DurableJobsError):
    """The call makes its own transaction and was made inside an open one."""


class InvalidTransition(DurableJobsError):
    """The job's status does not allow the move that was asked for; nothing was changed."""


class AttemptsExhausted(DurableJobsError):
    """The job has no executions left; grant some with ``extra_attempts``."""


class LockTimeout(DurableJobsError):
    """A row or the database stayed locked longer than ``LOCK_TIMEOUT_SECONDS``; nothing changed."""


class InvalidCursor(DurableJobsError, ValueError):
    """A page cursor is damaged or belongs to another query."""


class RetryLater(DurableJobsError):
    """Raised by a handler: try again after ``delay`` (seconds or a timedelta).

    It uses up an execution like any failure. ``message`` is stored as the error's summary.
    """

    def __init__(self, delay: float | timedelta, message: str = "") -> None:
        super().__init__(message)
        self.delay = delay
        self.message = message


class PermanentError(DurableJobsError):
    """Raised by a handler: fail now, without a retry. ``message`` is stored as the summary."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message


class JobInterrupt(BaseException):
    """Base of what stops a handler; not an ``Exception``, so that nobody swallows it."""


class JobCancelled(JobInterrupt):
    """A cancel of this job was requested."""


class JobTimeout(JobInterrupt):
    """The attempt has passed its deadline."""


class LeaseLost(JobInterrupt):
    """The attempt does not own its job any more; nothing was written."""


class WorkerStopping(JobInterrupt):
    """The worker is shutting down and asks the handler to stop."""
