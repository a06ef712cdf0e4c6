"""One attempt by hand: claim a job, run its handler or not, expire its lease (CONTRACT 7.2)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from .. import states
from ..exceptions import InvalidTransition
from ..models import Job, JobAttempt, QueuePause
from ..transitions._lanes import lane_of
from ..transitions.claims import ClaimedJob, block_claimed, claim_job, queued_lanes
from ..transitions.control import alias_of, operator_move
from ..transitions.leases import cancel_requests
from ..transitions.limits import let_in_free
from ..transitions.maintenance import promote_due
from ..transitions.outcomes import Outcome, finish
from ..worker.context import JobContext
from ..worker.described import log_raised, named
from ..worker.execution import Dispatch, context_for, execute, prepare
from ..worker.on_finish import OnFinishFailed, finish_announced, on_finish_of
from ..worker.passes import Serving
from .calling import TestCall, left_clean

# The longest lease that settings allow, so that every legal timeout also runs on SQLite.
LEASE_SECONDS = 7200
_PLAINLY: AbstractContextManager[Any] = nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldAttempt:
    """A running attempt that nobody works on until the test says ``run()``.

    ``ctx`` is the production context, bound to the attempt's token: its writes are fenced.
    """

    ctx: JobContext
    _alias: str = field(repr=False)
    _claimed: ClaimedJob = field(repr=False)

    @property
    def token(self) -> str:
        return self._claimed.token

    @property
    def row(self) -> JobAttempt:
        """The attempt with its job, as stored now; ``JobAttempt.DoesNotExist`` if it is gone."""
        attempts = JobAttempt.objects.using(self._alias).select_related("job")
        found: JobAttempt = attempts.get(token=self.token)
        return found

    def run(self, *, raises: bool = False) -> JobAttempt:
        """Run the handler now and write its end by the production finish; give the attempt.

        An attempt that has lost its lease meanwhile writes nothing: it is given as it stands.
        A cancel requested meanwhile is passed on to the handler first, as a worker does. With
        ``raises`` what the handler raised comes out, once its end is written. A payload that
        cannot be dispatched blocks the job, as in production: ``InvalidTransition``.
        """
        if cancel_requests(self._alias, [(self._claimed.id, self.token)]):
            self.ctx.mark_cancel_requested()
        blocked = run_claimed(self._alias, self._claimed, self.ctx, raises=raises)
        if blocked is not None:
            raise InvalidTransition(
                f"cannot run job {self._claimed.job_id}: its dispatch has found {blocked}."
            )
        return self.row


def claim(job: Job) -> HeldAttempt:
    """Claim exactly this job by the production claim, and hold its attempt without running it.

    So a test can play a worker that stalled: let the lease run out (``expire_lease``), recover
    (``drain``), and see what ``ctx`` or ``run()`` of the held attempt are told. The lease is
    the longest allowed and no timeout is enforced. Raises ``InvalidTransition`` that says why
    the job cannot be claimed now, and ``TransactionActive`` inside an ``atomic()`` of the test.
    """
    alias = alias_of(job)
    serving = Serving.everything()
    promote_due(alias)
    let_in_free(alias, serving, whole=True)
    job.refresh_from_db(using=alias)
    lane = lane_of(job)
    if serving.runs(lane) and lane in queued_lanes(alias):
        claimed = claim_job(
            alias, job.pk, lane, worker="testing.claim", lease_seconds=LEASE_SECONDS
        )
        job.refresh_from_db(using=alias)
        if claimed is not None:
            ctx = context_for(alias, claimed, enforce_timeout=False)
            return HeldAttempt(ctx=ctx, _alias=alias, _claimed=claimed)
    why = _why_not(alias, job, known=serving.runs(lane))
    raise InvalidTransition(f"cannot claim job {job.job_id}: {why}")


def run_within(attempt: HeldAttempt, within: AbstractContextManager[Any]) -> None:
    """Run a held attempt, ``within`` being entered around its handler and around its end."""
    run_claimed(attempt._alias, attempt._claimed, attempt.ctx, within=within)


def run_attempt(job: Job, *, raises: bool = False) -> JobAttempt:
    """Claim exactly this job, run its handler, write its end; give the attempt.

    Nothing else runs. With ``raises`` the handler's own exception comes out to the test, once
    the end is written. Raises ``InvalidTransition`` and ``TransactionActive`` as ``claim()``.
    """
    held = claim(job)
    try:
        return held.run(raises=raises)
    finally:
        job.refresh_from_db()


def expire_lease(job: Job) -> None:
    """Let the lease of a running job end now, by the clock in force.

    Its attempt owns nothing any more, and ``drain()`` or a worker recovers the job. Raises
    ``InvalidTransition`` unless it runs under a lease.
    """

    def expire(alias: str, row: Job, now: int) -> None:
        if row.lease_token is None or row.lease_expires_at is None:
            raise InvalidTransition(
                f"cannot expire the lease of job {row.job_id}: it is {row.status} and has none."
            )
        Job.objects.using(alias).filter(pk=row.pk).update(lease_expires_at=now)

    operator_move(job, expire)


def run_claimed(
    alias: str,
    claimed: ClaimedJob,
    ctx: JobContext,
    *,
    raises: bool = False,
    within: AbstractContextManager[Any] = _PLAINLY,
) -> str | None:
    """Dispatch, run, finish, as a worker does; give the blocked reason of what may not run."""
    dispatch = prepare(claimed)
    if not isinstance(dispatch, Dispatch):
        block_claimed(alias, [(claimed.id, claimed.token, dispatch)], wait=True)
        return dispatch
    call = TestCall(within)
    outcome = execute(dispatch, ctx, call)
    failed = None
    if outcome is not None:
        with within:
            failed = _finish(alias, claimed, outcome)
    if raises and (error := call.raised or failed) is not None:
        raise error
    return None


def _finish(alias: str, claimed: ClaimedJob, outcome: Outcome) -> BaseException | None:
    """Write the end; give what its ``on_finish`` raised, which leaves the job to its lease."""
    on_finish = on_finish_of(claimed)
    if on_finish is None:
        finish(alias, [outcome], wait=True)
        return None
    try:
        finish_announced(alias, claimed, outcome, on_finish, guard=left_clean)
    except OnFinishFailed as failed:
        error = failed.__cause__ or failed
        log_raised(f"the on_finish of {named(claimed)}", error)
        return error
    return None


_RUNNING = {
    "current": "it is running already; expire_lease() ends its lease.",
    "expired": "it is running and its lease has expired; drain() or job.recover() ends that.",
    "unknown": "it is running and its lease or token is missing; job.recover() ends that.",
}


def _why_not(alias: str, job: Job, *, known: bool) -> str:
    if job.status == states.RUNNING:
        return _RUNNING[job.ownership]
    if job.is_terminal:
        return f"it has ended as {job.status}; job.retry() queues it again."
    if job.status == states.BLOCKED:
        return f"it is blocked ({job.blocked_reason}); job.release() lets it go on."
    if not known:
        return (
            f"no handler {job.handler} version {job.handler_version} with its payload type is"
            " registered in this process."
        )
    if job.status == states.SCHEDULED:
        return f"it is due later, at {job.run_at.isoformat()}; FakeClock.advance() gets there."
    if QueuePause.objects.using(alias).filter(queue=job.queue).exists():
        return f"its queue {job.queue} is paused."
    if job.attempt_count >= job.max_attempts + job.granted_attempts:
        return "it has no executions left."
    if job.limit_waiting:
        return f"it waits for a place under its concurrency key {job.concurrency_key}."
    return "the claim passes it over (a timeout too long here, or a damaged row)."
