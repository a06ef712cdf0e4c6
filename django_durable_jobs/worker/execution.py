"""From a claimed job to the outcome of its attempt: a pipeline without SQL."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from django.db import connections as django_connections

from .. import states
from ..conf import settings
from ..dialects import dialect_for
from ..exceptions import (
    JobCancelled,
    JobInterrupt,
    JobTimeout,
    LeaseLost,
    PermanentError,
    RetryLater,
    WorkerStopping,
)
from ..handlers import Handler, registry
from ..instants import from_microseconds, seconds_to_microseconds
from ..payloads import (
    CorruptPayload,
    NotStorable,
    decode_json_text,
    encode_return,
    payload_sha256,
)
from ..retry import backoff_seconds, retry_later_seconds
from ..transactions import in_test_wrapper
from ..transitions.claims import ClaimedJob
from ..transitions.completion import complete, completion_stands, fence
from ..transitions.outcomes import Outcome, record_checkpoint, record_progress
from . import connections
from .context import JobContext, Store
from .described import (
    CompletionRolledBack,
    log_on_purpose,
    log_raised,
    named,
    stored_traceback,
    summary,
)
from .on_finish import completed
from .supervised import backoff, is_transient

logger = logging.getLogger("django_durable_jobs.worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """A claimed job that may run: its handler and its decoded payload."""

    job: ClaimedJob
    handler: Handler[..., Any]
    payload: Any


def context_for(alias: str, job: ClaimedJob, *, enforce_timeout: bool = True) -> JobContext:
    """Make the handler's context, bound to its job and token."""
    return JobContext(
        store=Store(
            progress=partial(record_progress, alias, job.id, job.token),
            checkpoint=partial(record_checkpoint, alias, job.id, job.token),
            fence=partial(fence, alias, job.id, job.token),
            complete=partial(
                complete, alias, job.id, job.token, is_keyed=job.concurrency_key is not None
            ),
            completed=partial(completed, alias, job),
            completion_stands=partial(_completion_stands, alias, job.token),
        ),
        job_id=job.job_id,
        scope=job.scope,
        queue=job.queue,
        token=job.token,
        attempt=job.attempt_count,
        max_attempts=job.max_attempts + job.granted_attempts,
        timeout=job.timeout,
        started_at=from_microseconds(job.claimed_at),
        spent=dialect_for(alias).seconds_since(job.claimed_at),
        enforce_timeout=enforce_timeout,
        grace=_grace(alias, job.timeout),
        scheduled_for=None if job.scheduled_for is None else from_microseconds(job.scheduled_for),
        checkpoint_value=None if job.checkpoint is None else decode_json_text(job.checkpoint),
    )


def _completion_stands(alias: str, token: str) -> bool:
    """Read the rows once the handler has ended, as soon as the database answers (4.8)."""
    failures = 0
    while True:
        if not in_test_wrapper(django_connections[alias]):
            # What it left open is neither committed nor to be read.
            connections.undo()
        try:
            return completion_stands(alias, token)
        except Exception as error:
            if not is_transient(alias, error):
                raise
            failures += 1
            logger.warning("a completion waits for the database: %s", type(error).__name__)
            time.sleep(backoff(failures))


def _grace(alias: str, timeout: float) -> float:
    """Give the seconds after the deadline in which a handler's own end still counts.

    Where nothing may depend on renewals they end well before the lease does.
    """
    lease = dialect_for(alias).longest_timeout()
    grace = float(settings.TIMEOUT_GRACE_SECONDS)
    return grace if lease is None else max(0.0, min(grace, (lease - timeout) / 2))


def prepare(job: ClaimedJob) -> Dispatch | str:
    """Check handler, fingerprint, hash and payload; give the blocked reason otherwise (2.3).

    A job whose own names cannot be read is as corrupt as one whose payload cannot.
    """
    handler = registry.get(job.handler, job.handler_version)
    if handler is None:
        return states.UNKNOWN_HANDLER
    if handler.fingerprint != job.fingerprint:
        return states.SCHEMA_MISMATCH
    try:
        for name in (job.job_id, job.scope):
            name.encode()
        if payload_sha256(job.payload) != job.payload_sha256:
            return states.CORRUPT_PAYLOAD
        return Dispatch(job=job, handler=handler, payload=handler.codec.decode(job.payload))
    except (CorruptPayload, UnicodeError):
        return states.CORRUPT_PAYLOAD


def execute(dispatch: Dispatch, ctx: JobContext, call: Callable[..., Any]) -> Outcome | None:
    """Run the handler and say how it ended; None where there is nothing left to write.

    ``call(handler, ctx, *payload)`` runs the function, sync or async. A completion that stands
    is the end, whatever came after it: an error, a timeout or a lease that ran out.
    """
    handler = dispatch.handler
    arguments = (ctx, dispatch.payload) if handler.takes_payload else (ctx,)
    try:
        result = call(handler, *arguments)
    except LeaseLost as error:
        if ctx.completion_stands():
            logger.warning("%s lost its lease after it completed", named(dispatch.job))
            return None
        # Raised by the handler itself, it is an error like any other.
        return None if ctx.lost else _raised(dispatch, ctx, error)
    # Whatever leaves a handler ends its attempt, SystemExit and KeyboardInterrupt included:
    # they were raised by its code, in its thread, and the slot must be clean for the next job.
    except BaseException as error:
        if ctx.completion_stands():
            log_raised(named(dispatch.job), error)
            return None
        return _raised(dispatch, ctx, error)
    if ctx.completed:
        return None if ctx.completion_stands() else _rolled_back(dispatch, ctx)
    return _returned(dispatch, ctx, result)


def overdue_outcome(job: ClaimedJob) -> Outcome:
    """End an attempt whose handler did not end within its grace; retried by policy."""
    handler = registry.get(job.handler, job.handler_version)
    if handler is None:
        raise LookupError(f"handler {job.handler} was forgotten while it ran")
    dispatch = Dispatch(job=job, handler=handler, payload=None)
    return _timed_out(dispatch, JobTimeout("the handler did not end within its grace time"))


def _returned(dispatch: Dispatch, ctx: JobContext, result: Any) -> Outcome:
    if ctx.overdue():
        return _timed_out(dispatch, JobTimeout("the handler returned after its grace time"))
    try:
        text = encode_return(result, settings.MAX_RESULT_BYTES, dispatch.job.job_id)
    except BaseException as error:
        # Encoding runs the result's own code, which may raise anything, SystemExit too.
        if isinstance(error, NotStorable):
            logger.error("%s returned what cannot be stored: %s", named(dispatch.job), error)
        else:
            log_raised(named(dispatch.job), error)
        return _failure(
            dispatch,
            # It was raised by code of ours: what is told is the handler.
            error.with_traceback(None),
            category=states.INVALID_RESULT,
            retryable=False,
            outcome=states.RETURNED,
        )
    return Outcome(
        job=dispatch.job.id,
        token=dispatch.job.token,
        is_keyed=dispatch.job.concurrency_key is not None,
        status=states.SUCCEEDED,
        outcome=states.RETURNED,
        final_status=states.SUCCEEDED,
        result=text,
    )


def _rolled_back(dispatch: Dispatch, ctx: JobContext) -> Outcome:
    """The handler returned as if it had completed, and its transaction did not commit."""
    error = CompletionRolledBack("the transaction of ctx.complete() was rolled back")
    if ctx.overdue():
        return _timed_out(dispatch, error)
    return _failure(
        dispatch,
        error,
        category=states.COMPLETION_ROLLED_BACK,
        retryable=True,
        outcome=states.RETURNED,
    )


def _raised(dispatch: Dispatch, ctx: JobContext, error: BaseException) -> Outcome:
    if isinstance(error, JobTimeout) and ctx.timed_out():
        return _timed_out(dispatch, error)
    if isinstance(error, JobCancelled) and ctx.cancel_requested:
        return _stopped(dispatch, error, status=states.CANCELLED)
    if isinstance(error, WorkerStopping) and ctx.stop_requested:
        return _stopped(dispatch, error, status=states.INTERRUPTED)
    if ctx.overdue():
        return _timed_out(dispatch, error)
    is_permanent = isinstance(error, PermanentError)
    if not isinstance(error, PermanentError | RetryLater):
        log_raised(named(dispatch.job), error)
    category = states.PERMANENT if is_permanent else states.HANDLER_ERROR
    outcome = _failure(dispatch, error, category=category, retryable=not is_permanent)
    if isinstance(error, PermanentError | RetryLater):
        log_on_purpose(named(dispatch.job), error, outcome.retry_delay)
    return outcome


def _stopped(dispatch: Dispatch, error: JobInterrupt, *, status: str) -> Outcome:
    by_worker = status == states.INTERRUPTED
    return Outcome(
        job=dispatch.job.id,
        token=dispatch.job.token,
        is_keyed=dispatch.job.concurrency_key is not None,
        status=status,
        outcome=states.STOPPED,
        final_status=status,
        stopped_by_worker=by_worker,
        error_category=states.STOPPED_CATEGORY if by_worker else None,
    )


def _timed_out(dispatch: Dispatch, error: BaseException) -> Outcome:
    return _failure(
        dispatch,
        error,
        category=states.TIMEOUT,
        retryable=True,
        status=states.TIMED_OUT,
        outcome=states.STOPPED,
    )


def _failure(
    dispatch: Dispatch,
    error: BaseException,
    *,
    category: str,
    retryable: bool,
    status: str = states.FAILED,
    outcome: str = states.RAISED,
) -> Outcome:
    return Outcome(
        job=dispatch.job.id,
        token=dispatch.job.token,
        is_keyed=dispatch.job.concurrency_key is not None,
        status=status,
        outcome=outcome,
        final_status=states.FAILED,
        retry_delay=_retry_delay(dispatch, error) if retryable else None,
        error_category=category,
        error_summary=summary(error, dispatch.handler.func),
        error_traceback=stored_traceback(error),
    )


def _retry_delay(dispatch: Dispatch, error: BaseException) -> int | None:
    """Give the delay in microseconds before the next execution, None for no retry (3.4)."""
    job = dispatch.job
    if job.attempt_count >= job.max_attempts + job.granted_attempts:
        return None
    if isinstance(error, RetryLater):
        # A subclass need not have called our __init__.
        asked = retry_later_seconds(getattr(error, "delay", None))
    else:
        asked = None
    if asked is None:
        asked = _backoff(dispatch, error)
    return None if asked is None else seconds_to_microseconds(asked)


def _backoff(dispatch: Dispatch, error: BaseException) -> float | None:
    attempt = dispatch.job.attempt_count
    bounds = {"base": settings.RETRY_BASE_SECONDS, "cap": settings.RETRY_MAX_SECONDS}
    try:
        return backoff_seconds(dispatch.handler.backoff, error, attempt, **bounds)
    except BaseException as worse:
        # Also an exit raised inside the project's function: the outcome comes first.
        log_raised(f"the backoff function of {dispatch.job.handler} (the default is used)", worse)
        return backoff_seconds(None, error, attempt, **bounds)
