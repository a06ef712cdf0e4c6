"""``drain()``: run what is due in this thread, by the production claim, dispatch and finish."""

from __future__ import annotations

from .. import states
from ..conf import settings
from ..dialects.base import refuse_open_transaction
from ..models import JobAttempt
from ..transitions.claims import claim
from ..worker.execution import context_for
from ..worker.passes import Serving, run_passes
from .attempts import LEASE_SECONDS, run_claimed

WORKER = "testing.drain"


def drain(
    max_jobs: int = 1000, *, raises: bool = False, using: str | None = None
) -> list[JobAttempt]:
    """Promote, recover, claim and run until nothing is due; give the finished attempts.

    Each has its ``job`` with it as that is in the end, without a query, for async tests too.

    It never sleeps, fires no schedules and enforces no timeout. At most ``max_jobs`` attempts
    are run, so that jobs which stage each other come to an end. With ``raises`` the first
    exception of a handler comes out, once the end of its attempt is written. Works in
    ``TestCase`` and ``TransactionTestCase``; raises ``TransactionActive`` inside an
    ``atomic()`` of the test (CONTRACT 7.2).
    """
    alias = using or settings.DATABASE
    refuse_open_transaction(alias)
    serving = Serving.everything()
    tokens: list[str] = []
    while len(tokens) < max_jobs:
        lanes = run_passes(alias, serving, patient=False, lease_seconds=LEASE_SECONDS)
        jobs = claim(alias, lanes, limit=1, worker=WORKER, lease_seconds=LEASE_SECONDS)
        if not jobs:
            break
        for job in jobs:
            tokens.append(job.token)
            ctx = context_for(alias, job, enforce_timeout=False)
            run_claimed(alias, job, ctx, raises=raises)
    return _finished(alias, tokens)


def _finished(alias: str, tokens: list[str]) -> list[JobAttempt]:
    """Read attempts and jobs in the order they ran; one that lost its lease may still be open."""
    attempts = JobAttempt.objects.using(alias).select_related("job").filter(token__in=tokens)
    found = {one.token: one for one in attempts.exclude(status=states.RUNNING)}
    return [found[token] for token in tokens if token in found]
