"""``drain()``: run what is due in this thread, by the production claim, dispatch and finish."""

from __future__ import annotations

from typing import Any

from asgiref.sync import async_to_sync
from django.db import connections

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
    try:
        outcome = execute(dispatch, ctx, _call)
    finally:
        if not in_test_wrapper(connections[alias]):
            clean()
    if outcome is not None:
        finish(alias, [outcome], wait=True)


def _call(handler: Handler[..., Any], ctx: JobContext, *payload: Any) -> Any:
    if handler.is_async:
        return async_to_sync(handler.func)(ctx, *payload)
    return handler.func(ctx, *payload)
