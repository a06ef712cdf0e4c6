"""The tables. What must always hold is a named constraint here, in the database.

Methods delegate in one line each: the doors are in ``submission``, the moves in
``transitions``. ``docs/architecture.md`` says who writes each column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Cast
from django.utils.translation import gettext_lazy as _

from . import states
from .fields import InstantField, JSONTextField, ReadableCharField, ReadableTextField
from .managers import DurableManager, JobManager
from .pages import NEEDS_ATTENTION, SCOPED
from .submission import PRIORITY_MAX, PRIORITY_MIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .transitions.places import Limit

_HOLDS_KEY = Q(status__in=[states.SCHEDULED, states.QUEUED, states.RUNNING]) | (
    Q(status=states.BLOCKED) & ~Q(blocked_reason=states.CORRUPT_PAYLOAD)
)


def _choices(values: Sequence[str]) -> list[tuple[str, str]]:
    return [(value, value.replace("_", " ")) for value in values]


class Job(models.Model):
    """One operation a caller wants done (CONTRACT 1, 3, 8)."""

    # Identity, and the request as it was submitted: never written again.
    scope = ReadableCharField(max_length=200, blank=True, default="")
    scope_hash = ReadableCharField(max_length=64)
    job_id = ReadableCharField(max_length=200)
    handler = ReadableCharField(max_length=100)
    handler_version = models.IntegerField(default=1)
    payload = ReadableTextField()
    payload_sha256 = ReadableCharField(max_length=64)
    fingerprint = ReadableCharField(max_length=64)
    submitted_queue = ReadableCharField(max_length=100)
    submitted_priority = models.SmallIntegerField()
    dedupe_key = ReadableCharField(max_length=200, null=True, blank=True)
    concurrency_key = ReadableCharField(max_length=200, null=True, blank=True)
    schedule = ReadableCharField(max_length=200, null=True, blank=True)
    scheduled_for = InstantField(null=True, blank=True)
    initial_run_at = InstantField(null=True, blank=True)
    max_attempts = models.IntegerField()
    timeout = models.FloatField(help_text=_("seconds"))
    retry_on_interrupt = models.BooleanField(default=True)
    created_at = InstantField()

    # Where the job stands.
    queue = ReadableCharField(max_length=100)
    priority = models.SmallIntegerField(default=0)
    status = models.CharField(max_length=12, choices=_choices(states.JOB_STATUSES))
    blocked_reason = ReadableCharField(
        max_length=32, null=True, blank=True, choices=_choices(states.BLOCKED_REASONS)
    )
    limit_waiting = models.BooleanField(default=False)
    run_at = InstantField()
    attempt_count = models.IntegerField(default=0)
    granted_attempts = models.IntegerField(default=0)
    cancel_requested_at = InstantField(null=True, blank=True)
    lease_token = ReadableCharField(max_length=32, null=True, blank=True)
    lease_expires_at = InstantField(null=True, blank=True)
    finished_at = InstantField(null=True, blank=True)

    # What the handler reported.
    progress = models.FloatField(default=0.0)
    progress_message = ReadableCharField(max_length=500, blank=True, default="")
    checkpoint = JSONTextField(null=True, blank=True)
    result = JSONTextField(null=True, blank=True)
    error_category = ReadableCharField(max_length=32, null=True, blank=True)
    error_summary = ReadableTextField(null=True, blank=True)
    error_traceback = ReadableTextField(null=True, blank=True)

    objects = JobManager()

    newly_created = False
    if TYPE_CHECKING:
        attempts: models.Manager[JobAttempt]

    class Meta:
        verbose_name = _("job")
        verbose_name_plural = _("jobs")
        default_permissions = ("view",)
        permissions = [
            ("cancel_job", "Can request the cancel of a job"),
            ("retry_job", "Can retry a job"),
            ("release_job", "Can release a blocked job"),
        ]
        constraints = [
            models.UniqueConstraint(fields=["scope_hash", "job_id"], name="durable_job_identity"),
            models.UniqueConstraint(
                fields=["scope_hash", "handler", "dedupe_key"],
                condition=Q(dedupe_key__isnull=False) & _HOLDS_KEY,
                name="durable_job_live_dedupe_key",
            ),
            models.UniqueConstraint(
                fields=["schedule", "scheduled_for"],
                condition=Q(schedule__isnull=False),
                name="durable_job_occurrence",
            ),
            models.CheckConstraint(
                condition=Q(status__in=states.JOB_STATUSES), name="durable_job_status_known"
            ),
            models.CheckConstraint(
                condition=Q(status=states.RUNNING)
                | Q(lease_token__isnull=True, lease_expires_at__isnull=True),
                name="durable_job_lease_only_running",
            ),
            models.CheckConstraint(
                condition=Q(status__in=states.TERMINAL, finished_at__isnull=False)
                | (~Q(status__in=states.TERMINAL) & Q(finished_at__isnull=True)),
                name="durable_job_finished_terminal",
            ),
            models.CheckConstraint(
                condition=Q(limit_waiting=False)
                | Q(status=states.QUEUED, concurrency_key__isnull=False),
                name="durable_job_waiting_queued",
            ),
            models.CheckConstraint(
                condition=Q(priority__range=(PRIORITY_MIN, PRIORITY_MAX)),
                name="durable_job_priority_range",
            ),
            models.CheckConstraint(
                condition=Q(progress__range=(0, 1)), name="durable_job_progress_range"
            ),
            models.CheckConstraint(
                condition=Q(max_attempts__range=(1, 1000))
                & Q(attempt_count__gte=0)
                & Q(granted_attempts__gte=0),
                name="durable_job_attempts_range",
            ),
        ]
        indexes = [
            # What a claim selects on, then exactly the claim's order; only claimable rows.
            models.Index(
                "queue",
                "handler",
                "handler_version",
                "fingerprint",
                F("priority").desc(),
                "run_at",
                "id",
                condition=Q(status=states.QUEUED, limit_waiting=False),
                name="durable_job_claim",
            ),
            models.Index(
                fields=["queue", "handler", "handler_version", "fingerprint", "id"],
                condition=Q(status=states.BLOCKED),
                name="durable_job_blocked",
            ),
            models.Index(
                fields=["run_at", "id"],
                condition=Q(status=states.SCHEDULED),
                name="durable_job_promote",
            ),
            # What a limit counts. Not by lease: each renewal would write index pages.
            models.Index(
                fields=["handler", "concurrency_key", "id"],
                condition=Q(status=states.RUNNING),
                name="durable_job_running",
            ),
            # Queued jobs with a key, those that wait for a place apart, and each key's next first.
            # By a number, so that what is asked of it does not also fit the claim's index.
            models.Index(
                Cast("limit_waiting", models.IntegerField()),
                "handler",
                "concurrency_key",
                F("priority").desc(),
                "run_at",
                "id",
                condition=Q(status=states.QUEUED, concurrency_key__isnull=False),
                name="durable_job_limit",
            ),
            # Almost always empty: waiting rows without executions left (imported, damaged).
            models.Index(
                fields=["id"],
                condition=Q(
                    status=states.QUEUED,
                    attempt_count__gte=F("max_attempts") + F("granted_attempts"),
                ),
                name="durable_job_exhausted",
            ),
            models.Index(
                fields=["status", "-id"],
                condition=NEEDS_ATTENTION,
                name="durable_job_attention",
            ),
            # Not those of the empty scope, which are all of them where no scopes are used.
            models.Index(
                fields=["scope_hash", "-id"],
                condition=SCOPED,
                name="durable_job_scope",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.handler} {self.job_id}"

    @property
    def is_terminal(self) -> bool:
        return self.status in states.TERMINAL

    @property
    def ownership(self) -> str:
        """One of ``unclaimed``, ``current``, ``expired``, ``unknown``, ``terminal`` (3.7)."""
        from .transitions.recovery import ownership

        return ownership(self)

    def request_cancel(self) -> str:
        """Ask for the job's end: ``"cancelled"``, ``"requested"`` or ``"unchanged"`` (3.5)."""
        from .transitions.control import request_cancel

        return request_cancel(self)

    def retry(self, extra_attempts: int = 0) -> Job:
        """Queue an ended job again, now (3.6)."""
        from .transitions.control import retry

        return retry(self, extra_attempts=extra_attempts)

    def release(self) -> str:
        """Let a blocked job go on; gives the new status (2.3)."""
        from .transitions.control import release

        return release(self)

    def limit(self) -> Limit | None:
        """Say which limit the job counts under and who holds its places (3.12).

        ``None`` for a job without a concurrency key. Three indexed queries.
        """
        from .transitions.places import limit_of

        return limit_of(self)

    def recover(self, token: str | None, requeue: bool | None = None) -> str:
        """End an attempt that the caller vouches is dead; gives the new status (3.7)."""
        from .transitions.recovery import recover

        return recover(self, token, requeue=requeue)


class JobAttempt(models.Model):
    """One actual execution of a job, marked by its own random token."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="attempts", db_index=False)
    number = models.IntegerField()
    token = ReadableCharField(max_length=32)
    worker = ReadableCharField(max_length=200)
    status = models.CharField(max_length=12, choices=_choices(states.ATTEMPT_STATUSES))
    outcome = ReadableCharField(
        max_length=12, null=True, blank=True, choices=_choices(states.OUTCOMES)
    )
    started_at = InstantField()
    finished_at = InstantField(null=True, blank=True)
    progress = models.FloatField(default=0.0)
    cancel_requested_at = InstantField(null=True, blank=True)
    error_category = ReadableCharField(max_length=32, null=True, blank=True)
    error_summary = ReadableTextField(null=True, blank=True)
    error_traceback = ReadableTextField(null=True, blank=True)

    objects = DurableManager()

    class Meta:
        verbose_name = _("attempt")
        verbose_name_plural = _("attempts")
        default_permissions = ("view",)
        constraints = [
            models.UniqueConstraint(fields=["job", "number"], name="durable_attempt_number"),
            models.UniqueConstraint(fields=["token"], name="durable_attempt_token"),
            models.CheckConstraint(
                condition=Q(status__in=states.ATTEMPT_STATUSES), name="durable_attempt_status_known"
            ),
            models.CheckConstraint(
                condition=Q(status=states.RUNNING, finished_at__isnull=True)
                | (~Q(status=states.RUNNING) & Q(finished_at__isnull=False)),
                name="durable_attempt_finished_ended",
            ),
            models.CheckConstraint(
                condition=Q(progress__range=(0, 1)), name="durable_attempt_progress_range"
            ),
        ]

    def __str__(self) -> str:
        return f"attempt {self.number}"


class ScheduleCursor(models.Model):
    """How far a schedule has come (CONTRACT 5.2)."""

    name = ReadableCharField(max_length=200, unique=True)
    fingerprint = ReadableCharField(max_length=64)
    last_minute = InstantField()
    next_minute = InstantField(null=True, blank=True)
    paused = models.BooleanField(default=False)
    problem = ReadableTextField(null=True, blank=True)
    updated_at = InstantField()

    objects = DurableManager()

    class Meta:
        verbose_name = _("schedule")
        verbose_name_plural = _("schedules")
        default_permissions = ("view",)
        permissions = [
            ("pause_schedule", "Can pause and resume a schedule"),
            ("run_schedule", "Can run a schedule now"),
        ]
        # What is due, asked by each worker at each poll.
        indexes = [models.Index(fields=["next_minute"], name="durable_cursor_due")]

    def __str__(self) -> str:
        return f"{self.name}"


class LiveWorker(models.Model):
    """One living worker process, what it serves and when it was last seen (CONTRACT 4.9)."""

    name = ReadableCharField(max_length=200)
    host = ReadableCharField(max_length=255)
    pid = models.IntegerField()
    queues = JSONTextField(null=True, blank=True)
    excluded_queues = JSONTextField(default=list, blank=True)
    capabilities = JSONTextField(default=list, blank=True)
    longest_timeout = models.FloatField(null=True, blank=True, help_text=_("seconds"))
    health = JSONTextField(default=dict, blank=True)
    started_at = InstantField()
    last_seen_at = InstantField()

    objects = DurableManager()

    class Meta:
        verbose_name = _("live worker")
        verbose_name_plural = _("live workers")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.name}"


class QueuePause(models.Model):
    """A queue whose jobs are not claimed for now."""

    queue = ReadableCharField(max_length=100, unique=True)
    paused_at = InstantField()

    objects = DurableManager()

    class Meta:
        verbose_name = _("queue pause")
        verbose_name_plural = _("queue pauses")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.queue}"


class OperatorAction(models.Model):
    """Who did what to which job, and when (CONTRACT 6); outlives the job."""

    operator = ReadableCharField(max_length=255)
    action = ReadableCharField(max_length=32)
    job_key = models.BigIntegerField(null=True, blank=True, db_index=True)
    detail = ReadableTextField(blank=True, default="")
    happened_at = InstantField()

    objects = DurableManager()

    class Meta:
        verbose_name = _("operator action")
        verbose_name_plural = _("operator actions")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.action} by {self.operator}"


__all__ = [
    "Job",
    "JobAttempt",
    "LiveWorker",
    "OperatorAction",
    "QueuePause",
    "ScheduleCursor",
]
