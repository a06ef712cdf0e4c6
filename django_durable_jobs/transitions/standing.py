"""Why a job is where it is, for people: from its row, its limit and what holds its queue up."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.utils.translation import gettext as _

from .. import states
from ..dialects import dialect_for
from ..instants import exact, from_microseconds
from ..models import Job, QueuePause, ScheduleCursor
from ._lanes import lane_of
from .control import alias_of
from .places import Holder, limit_of
from .workers import live_capabilities


def standing(job: Job) -> list[str]:
    """Say where the job stands and, if it is not running, why."""
    if job.status == states.RUNNING:
        return _running(job)
    if job.status == states.BLOCKED:
        return [_blocked(job)]
    if job.status in states.TERMINAL:
        return [_ended(job)]
    return _waiting(job, from_microseconds(dialect_for(alias_of(job)).instant(alias_of(job))))


def _running(job: Job) -> list[str]:
    said = {
        "current": _("It is running: attempt %(number)d, its lease ends at %(lease)s."),
        "expired": _(
            "Attempt %(number)d lost its lease at %(lease)s: its worker died or stalled. The next"
            " pass of a worker recovers the job."
        ),
        "unknown": _(
            "It reads as running, but its lease or token is missing, so nobody can tell whether"
            " its attempt lives. It needs an operator's recover."
        ),
    }
    ownership = job.ownership
    lease = "" if job.lease_expires_at is None else exact(job.lease_expires_at)
    found = [said[ownership] % {"number": job.attempt_count, "lease": lease}]
    if job.cancel_requested_at is not None:
        when = exact(job.cancel_requested_at)
        found.append(
            _("Its cancel was requested at %(when)s; the handler is asked to stop.")
            % {"when": when}
        )
    return found


def _blocked(job: Job) -> str:
    said = {
        states.UNKNOWN_HANDLER: _(
            "It is blocked: no live worker knows its handler and version. It goes on by itself"
            " once one does."
        ),
        states.SCHEMA_MISMATCH: _(
            "It is blocked: the handler's payload type has changed since it was submitted. It goes"
            " on by itself once a worker with the old type lives."
        ),
        states.CORRUPT_PAYLOAD: _(
            "It is blocked: the stored payload does not match its hash or its type. No worker"
            " releases it by itself."
        ),
        states.INVALID_POLICY: _(
            "It is blocked: its timeout cannot hold on this database under the configured lease."
        ),
    }
    return said.get(job.blocked_reason or "", _("It is blocked, for a reason not known here."))


def _ended(job: Job) -> str:
    if job.status == states.SUCCEEDED:
        return _("It has succeeded.")
    if job.status == states.CANCELLED:
        return _("It was cancelled. A retry queues it again.")
    if executions_left(job) <= 0:
        return _("It has ended, and its executions are used up: a retry must grant more.")
    return _("It has ended. A retry queues it again.")


def _waiting(job: Job, now: datetime) -> list[str]:
    """Every reason that holds a scheduled or queued job up, the nearest first."""
    found = []
    if executions_left(job) <= 0:
        found.append(_("No executions are left: the next pass of a worker ends it as failed."))
    if job.cancel_requested_at is not None:
        found.append(_("Its cancel was requested; it is not claimed."))
    if job.run_at > now:
        found.append(_due_later(job))
    if job.limit_waiting:
        found += _at_limit(job)
    found += _queue(job)
    found = found or [_("It is due and waits for a free slot of a worker.")]
    return found + _schedule(job)


def _at_limit(job: Job) -> list[str]:
    """Tell the limit that a job waits under, and whose attempts hold its places."""
    limit = limit_of(job)
    if limit is None:
        return []
    said = {"key": limit.key, "number": limit.number, "running": limit.running}
    if limit.number is None:
        first = _("The limit of its concurrency key %(key)s is reached; %(running)d run with it.")
    elif limit.running < limit.number:
        first = _(
            "It waits for its concurrency key %(key)s, of which %(running)d of %(number)d run:"
            " the next pass of a worker lets it in, or those before it."
        )
    else:
        first = _("%(running)d of %(number)d places of its concurrency key %(key)s are taken.")
    return [first % said, *map(_holder, limit.holders)]


def _holder(holder: Holder) -> str:
    return _("Job %(job_id)s (%(job)d) holds a place since %(since)s, on worker %(worker)s.") % {
        "job_id": holder.job_id,
        "job": holder.job,
        "since": exact(holder.since),
        "worker": holder.worker,
    }


def _due_later(job: Job) -> str:
    when = {"when": exact(job.run_at), "number": job.attempt_count}
    if job.attempt_count and job.error_category:
        return _("Attempt %(number)d has failed; it is tried again at %(when)s.") % when
    return _("It is due later, at %(when)s.") % when


def _queue(job: Job) -> list[str]:
    """Tell a paused queue, and one that no live worker serves for this handler."""
    alias = alias_of(job)
    found = []
    if QueuePause.objects.using(alias).filter(queue=job.queue).exists():
        found.append(_("Its queue %(queue)s is paused.") % {"queue": job.queue})
    lane = lane_of(job)
    if not any(served.runs(lane) for served in live_capabilities(alias)):
        found.append(
            _("No live worker serves its queue %(queue)s and its handler %(handler)s.")
            % {"queue": job.queue, "handler": job.handler}
        )
    return found


def _schedule(job: Job) -> list[str]:
    """Tell that its schedule is paused, which holds up no job that is made."""
    cursors = ScheduleCursor.objects.using(alias_of(job))
    if job.schedule is None or not cursors.filter(name=job.schedule, paused=True).exists():
        return []
    said = _("Its schedule %(schedule)s is paused: it makes no more jobs, and this one runs still.")
    return [said % {"schedule": job.schedule}]


def executions_left(job: Any) -> int:
    return int(job.max_attempts + job.granted_attempts - job.attempt_count)
