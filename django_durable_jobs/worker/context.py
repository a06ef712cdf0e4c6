"""``JobContext``: what a handler sees of its attempt, and how it reports."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from asgiref.sync import sync_to_async

from ..conf import settings
from ..exceptions import (
    InvalidTransition,
    JobCancelled,
    JobTimeout,
    LeaseLost,
    WorkerStopping,
)
from ..payloads import clean_text, encode_result, encode_return

MESSAGE_LIMIT = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """The fenced writes of a handler, bound to its job and token."""

    progress: Callable[[float, str], None]
    checkpoint: Callable[[str], None]
    fence: Callable[[], None]
    complete: Callable[[str | None], None]
    completed: Callable[[str | None], None]
    completion_stands: Callable[[], bool]


class JobContext:
    """One attempt, as its handler sees it (CONTRACT 3.9, 8).

    What stops the handler is not an ``Exception``: ``JobCancelled``, ``JobTimeout``,
    ``LeaseLost``, ``WorkerStopping``. ``check()`` raises each of them; the writes raise those
    that they name.
    """

    __slots__ = (
        "_cancel_requested",
        "_completed",
        "_deadline",
        "_grace",
        "_lost",
        "_stands",
        "_stop_requested",
        "_store",
        "attempt",
        "checkpoint_value",
        "deadline",
        "job_id",
        "max_attempts",
        "queue",
        "scheduled_for",
        "scope",
        "token",
    )

    def __init__(
        self,
        *,
        store: Store,
        job_id: str,
        scope: str,
        queue: str,
        token: str,
        attempt: int,
        max_attempts: int,
        timeout: float,
        started_at: datetime | None = None,
        spent: float = 0.0,
        enforce_timeout: bool = True,
        grace: float = 0.0,
        scheduled_for: datetime | None = None,
        checkpoint_value: Any = None,
    ) -> None:
        self._store = store
        self.job_id = job_id
        self.scope = scope
        self.queue = queue
        self.token = token
        self.attempt = attempt
        self.max_attempts = max_attempts
        self.scheduled_for = scheduled_for
        self.checkpoint_value = checkpoint_value
        # By the clock that gave the attempt its start; what is enforced is monotonic.
        self.deadline = (started_at or datetime.now(UTC)) + timedelta(seconds=timeout)
        # On SQLite a claim's commit may wait for readers, and its lease lasts no longer for it.
        self._deadline = time.monotonic() + timeout - spent if enforce_timeout else math.inf
        self._grace = grace
        self._cancel_requested = False
        self._completed = False
        self._stands = False
        self._stop_requested = False
        self._lost = False

    @property
    def cancel_requested(self) -> bool:
        """Whether a cancel has reached this worker; touches no database."""
        return self._cancel_requested

    @property
    def stop_requested(self) -> bool:
        """Whether the worker shuts down and asks the handler to end; touches no database."""
        return self._stop_requested

    def check(self) -> None:
        """Raise if the handler should stop; touches no database.

        Raises ``LeaseLost``, ``JobTimeout``, ``JobCancelled`` or ``WorkerStopping``.
        """
        self._refuse_late()
        if self._cancel_requested:
            raise JobCancelled("a cancel of this job was requested")
        if self._stop_requested:
            raise WorkerStopping("the worker is shutting down")

    def progress(self, fraction: float, message: str = "") -> None:
        """Report how far the work is, from 0 to 1, never below this attempt's last.

        Outside a transaction it commits at once; inside the handler's own it goes with it,
        and the job's row is held to its end (CONTRACT 3.9). ``message`` is never refused: it
        is cut to 500 UTF-8 bytes, and NUL and surrogates are replaced. Raises ``ValueError``,
        ``InvalidTransition`` (a step back), ``LeaseLost``, ``JobTimeout``, ``JobCancelled``,
        and outside a transaction ``LockTimeout``.
        """
        if isinstance(fraction, bool) or not isinstance(fraction, int | float):
            raise ValueError(f"progress takes a number from 0 to 1, not {type(fraction).__name__}")
        if not 0 <= fraction <= 1:  # false for NaN too
            raise ValueError(f"progress takes a number from 0 to 1, not {fraction!r:.30}")
        self._refuse_late()
        self._asking(self._store.progress, float(fraction), clean_text(message, MESSAGE_LIMIT))

    def checkpoint(self, value: Any) -> None:
        """Keep a JSON value for the next attempt, there ``ctx.checkpoint_value``.

        It commits as ``progress()`` does, and also while a cancel is requested (CONTRACT 3.9).
        Raises ``ValueError`` for what is not JSON or above ``MAX_RESULT_BYTES`` (UTF-8),
        ``LeaseLost``, ``JobTimeout``, and outside a transaction ``LockTimeout``.
        """
        text = encode_result(value, settings.MAX_RESULT_BYTES)
        self._refuse_late()
        self._asking(self._store.checkpoint, text)

    def fence(self) -> None:
        """Prove ownership inside the handler's own transaction, and hold it to its end.

        At REPEATABLE READ or above it must be the first statement. Keep such a transaction
        shorter than the lease. Raises ``TransactionRequired``, ``LeaseLost``,
        ``JobCancelled``, ``JobTimeout``, and ``InvalidTransition`` after ``complete()``.
        """
        self._refuse_late()
        self._joining(self._store.fence)

    def complete(self, result: Any = None) -> None:
        """End the job as succeeded inside the handler's own ``transaction.atomic()``.

        Domain writes, result and end commit together or not at all; a handler's ``on_finish``
        runs here, too. Raises ``ValueError`` for a result that is not JSON or above
        ``MAX_RESULT_BYTES``, ``TransactionRequired``, ``LeaseLost``, ``JobCancelled``,
        ``JobTimeout``, ``InvalidTransition`` if called twice, and what ``on_finish`` raises,
        which rolls the whole transaction back whoever catches it.
        """
        text = encode_return(result, settings.MAX_RESULT_BYTES, self.job_id)
        self._refuse_late()
        self._joining(self._store.complete, text)
        self._completed = True
        self._store.completed(text)

    def completion_stands(self) -> bool:
        """Used by the worker: tell whether ``complete()`` was called and its rows are there."""
        self._stands = self._completed and self._store.completion_stands()
        return self._stands

    @property
    def stands(self) -> bool:
        """Used by the worker: what ``completion_stands()`` has read."""
        return self._stands

    @property
    def completed(self) -> bool:
        """Whether ``complete()`` was called; its transaction may still roll back."""
        return self._completed

    async def aprogress(self, fraction: float, message: str = "") -> None:
        """Async twin of ``progress``."""
        await sync_to_async(self.progress)(fraction, message)

    async def acheckpoint(self, value: Any) -> None:
        """Async twin of ``checkpoint``."""
        await sync_to_async(self.checkpoint)(value)

    def _asking(self, write: Callable[..., None], *values: Any) -> None:
        """Write, and remember a cancel or a loss that the write was the first to meet."""
        try:
            write(*values)
        except JobCancelled:
            self._cancel_requested = True
            raise
        except LeaseLost:
            # After complete() the attempt has ended, unless that rolls back: the rows will tell.
            self._lost = not self._completed
            raise

    def _joining(self, write: Callable[..., None], *values: Any) -> None:
        """Write in the handler's transaction; what has ended without ``complete()`` is lost."""
        try:
            self._asking(write, *values)
        except InvalidTransition:
            if self._completed:
                raise
            self._lost = True
            raise LeaseLost("this attempt has ended; nothing was written") from None

    def _refuse_late(self) -> None:
        if self._lost:
            raise LeaseLost("this attempt does not own its job any more")
        if self.timed_out():
            raise JobTimeout("the attempt has passed its deadline")

    def timed_out(self) -> bool:
        """Tell whether the deadline has passed."""
        return time.monotonic() > self._deadline

    def overdue(self) -> bool:
        """Tell whether the grace after the deadline has passed too (CONTRACT 4.5)."""
        return time.monotonic() > self._deadline + self._grace

    def until_overdue(self) -> float:
        """Give the seconds until the grace after the deadline is over."""
        return self._deadline + self._grace - time.monotonic()

    def remaining(self) -> float:
        """Give the seconds until the deadline, below 0 after it."""
        return self._deadline - time.monotonic()

    def mark_cancel_requested(self) -> None:
        """Used by the worker: pass a cancel request on to the handler."""
        self._cancel_requested = True

    def mark_stop_requested(self) -> None:
        """Used by the worker: ask the handler to end."""
        self._stop_requested = True

    @property
    def lost(self) -> bool:
        """Used by the worker: whether the lease is known to be lost."""
        return self._lost

    def mark_lost(self) -> None:
        """Used by the worker: the lease is lost, every write will be refused."""
        self._lost = True
