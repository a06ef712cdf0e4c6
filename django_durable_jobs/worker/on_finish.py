"""``on_finish``: what a project adds to a job's end, in the transaction that writes it (3.8)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from django.db import connections as django_connections

from .. import states
from ..events import FinishEvent
from ..handlers import registry
from ..payloads import decode_json_text
from ..transactions import doom
from ..transitions._fence import GONE, standings
from ..transitions.claims import ClaimedJob
from ..transitions.outcomes import FinishReport, Outcome, finish_beside
from . import connections
from .supervised import is_transient

OnFinish = Callable[[FinishEvent], object]


class OnFinishFailed(Exception):
    """``on_finish`` raised or undid its transaction: the job's end is not written."""


def on_finish_of(job: ClaimedJob) -> OnFinish | None:
    """Give what the job's handler declares, None without any."""
    handler = registry.get(job.handler, job.handler_version)
    return None if handler is None else handler.on_finish


def completed(alias: str, job: ClaimedJob, result: str | None) -> None:
    """Call it in the handler's transaction, where ``ctx.complete()`` has ended the job.

    Its error is raised to the handler, and rolls that transaction back whoever catches it.
    """
    on_finish = on_finish_of(job)
    if on_finish is None:
        return
    event = _event(job, status=states.SUCCEEDED, outcome=states.RETURNED, result=result)
    try:
        on_finish(event)
    except BaseException:
        doom(django_connections[alias])
        raise


@contextmanager
def left_clean() -> Iterator[None]:
    """Let nothing that was left open be taken for committed."""
    try:
        yield
    finally:
        connections.undo()


def finish_announced(
    alias: str,
    job: ClaimedJob,
    outcome: Outcome,
    on_finish: OnFinish,
    *,
    lock_timeout: float | None = None,
    guard: Callable[[], AbstractContextManager[None]] = left_clean,
) -> FinishReport:
    """Write one end, and call ``on_finish`` in the same transaction if the job ends by it.

    One try: raises ``OnFinishFailed``, or the database's own error where another try may help.
    Whether the end stands is read from the rows, once ``guard`` has left the connection clean.
    """
    called = False

    def announce(status: str) -> None:
        nonlocal called
        called = True
        is_cancelled = status == states.CANCELLED
        event = _event(
            job,
            status=status,
            outcome=outcome.outcome,
            result=None if is_cancelled else outcome.result,
            error_category=None if is_cancelled else outcome.error_category,
        )
        _call(alias, on_finish, event)

    with guard():
        report = finish_beside(alias, outcome, announce, lock_timeout=lock_timeout)
    if called and not standings(alias, [(job.id, job.token)]).get(job.token, GONE).ended:
        raise OnFinishFailed("its transaction was rolled back")
    return report


def _call(alias: str, on_finish: OnFinish, event: FinishEvent) -> None:
    process = os.getpid()
    try:
        on_finish(event)
    except BaseException as error:
        # A connection that it closed itself is closed at the next try, too.
        closed = django_connections[alias].closed_in_transaction
        if is_transient(alias, error) and not closed:
            raise
        raise OnFinishFailed("it raised") from error
    finally:
        if os.getpid() != process:
            # It forked and its child came back here: the transaction is the parent's.
            os._exit(1)


def _event(
    job: ClaimedJob,
    *,
    status: str,
    outcome: str,
    result: str | None,
    error_category: str | None = None,
) -> FinishEvent:
    return FinishEvent(
        job_id=job.job_id,
        scope=job.scope,
        handler=job.handler,
        attempt=job.attempt_count,
        status=status,
        outcome=outcome,
        result=decode_json_text(result),
        error_category=error_category,
    )
