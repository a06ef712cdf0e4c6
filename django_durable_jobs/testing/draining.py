"""``drain()``: run what is due in this thread, by the production claim, dispatch and finish."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from asgiref.sync import async_to_sync
from django.db import DatabaseError, connections

from ..conf import settings
from ..dialects.base import refuse_open_transaction
from ..handlers import Handler
from ..models import JobAttempt
from ..transactions import in_test_wrapper
from ..transitions.claims import ClaimedJob, block_claimed, claim, queued_lanes
from ..transitions.outcomes import finish
from ..worker.connections import clean
from ..worker.context import JobContext
from ..worker.execution import Dispatch, context_for, execute, prepare
from ..worker.passes import Serving, run_passes

# The longest lease that settings allow, so that every legal timeout also runs on SQLite.
LEASE_SECONDS = 7200
WORKER = "testing.drain"


def drain(max_jobs: int = 1000, *, using: str | None = None) -> list[JobAttempt]:
    """Promote, recover, claim and run until nothing is due; give the finished attempts.

    It never sleeps, fires no schedules and enforces no timeout. At most ``max_jobs`` attempts
    are run, so that jobs which stage each other come to an end. Works in ``TestCase`` and
    ``TransactionTestCase``; raises ``TransactionActive`` inside an ``atomic()`` of the test.
    """
    alias = using or settings.DATABASE
    refuse_open_transaction(alias)
    serving = Serving.everything()
    tokens: list[str] = []
    while len(tokens) < max_jobs:
        run_passes(alias, serving, patient=False)
        lanes = [lane for lane in queued_lanes(alias) if serving.runs(lane)]
        jobs = claim(alias, lanes, limit=1, worker=WORKER, lease_seconds=LEASE_SECONDS)
        if not jobs:
            break
        for job in jobs:
            _run(alias, job)
            tokens.append(job.token)
    found = {
        attempt.token: attempt
        for attempt in JobAttempt.objects.using(alias).filter(token__in=tokens)
    }
    return [found[token] for token in tokens if token in found]


def _run(alias: str, job: ClaimedJob) -> None:
    dispatch = prepare(job)
    if not isinstance(dispatch, Dispatch):
        block_claimed(alias, [(job.id, job.token, dispatch)])
        return
    ctx = context_for(alias, job, enforce_timeout=False)
    process = os.getpid()
    if in_test_wrapper(connections[alias]):
        outcome = execute(dispatch, ctx, partial(_call_in_test_case, alias))
    else:
        try:
            outcome = execute(dispatch, ctx, _call)
        finally:
            clean()
    if os.getpid() != process:
        # The handler forked and its child came back here: the test is its parent's.
        os._exit(1)
    if outcome is not None:
        finish(alias, [outcome], wait=True)


def _call_in_test_case(
    alias: str, handler: Handler[..., Any], ctx: JobContext, *payload: Any
) -> Any:
    """Call inside a savepoint of the test's wrapper, and leave the wrapper as it was.

    A handler that broke the transaction or left one open loses what it wrote, and no more.
    """
    connection = connections[alias]
    blocks, savepoints = len(connection.atomic_blocks), len(connection.savepoint_ids)
    _execute(alias, f"SAVEPOINT {_MARK}")
    try:
        return _call(handler, ctx, *payload)
    finally:
        broken = len(connection.atomic_blocks) > blocks or connection.needs_rollback
        del connection.atomic_blocks[blocks:], connection.savepoint_ids[savepoints:]
        connection.needs_rollback = False
        if broken or not _answers(alias):
            _execute(alias, f"ROLLBACK TO SAVEPOINT {_MARK}")
        _execute(alias, f"RELEASE SAVEPOINT {_MARK}")


def _answers(alias: str) -> bool:
    """Tell whether the transaction takes another statement; a failed one on PostgreSQL does not."""
    try:
        _execute(alias, "SELECT 1")
    except DatabaseError:
        return False
    return True


# Our own: Django knows nothing of it, so the handler starts outside any atomic() of its own.
_MARK = "durable_jobs_drain"


def _execute(alias: str, sql: str) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql)


def _call(handler: Handler[..., Any], ctx: JobContext, *payload: Any) -> Any:
    if handler.is_async:
        return async_to_sync(handler.func)(ctx, *payload)
    return handler.func(ctx, *payload)
