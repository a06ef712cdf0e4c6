"""The pages of jobs: the list, and one job with its attempts and what operators did to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.admin.utils import flatten_fieldsets
from django.db.models import F, Value
from django.db.models.functions import Left, Length
from django.utils.safestring import SafeString
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from .. import redaction, states
from ..conf import settings
from ..fields import ReadableTextField
from ..handlers import registry
from ..instants import exact
from ..models import Job, JobAttempt, OperatorAction
from ..transitions.standing import standing
from . import displays
from .base import ReadOnly, ReadOnlyAdmin
from .filters import STATUS_PARAMETER, CreatedFilter, StatusFilter
from .job_actions import JobActions
from .search import HANDLER_WINDOW, search

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest

    TabularInline = admin.TabularInline[Any, Any]
else:
    TabularInline = admin.TabularInline

# Columns that may be long: no list reads them, a page of one job reads their heads.
LONG = (*redaction.PARTS, "error_traceback")
ATTEMPTS_SHOWN = 20
OPERATOR_ACTIONS_SHOWN = 20


def heads(names: tuple[str, ...], cut: int = displays.TEXT_CAP) -> dict[str, Any]:
    """Give annotations: the head of each column as plain text, and its length in characters."""
    readable = ReadableTextField()
    return {f"{name}_head": Left(name, Value(cut), output_field=readable) for name in names} | {
        f"{name}_size": Length(name) for name in names
    }


def _heads_of(job: Job) -> dict[str, Any] | None:
    """Read the heads of a job's long columns, redacted where the project declares it."""
    redacts = registry.may_be_redacted(job.handler)
    # A redaction judges the whole, and one character more tells what is too long for it.
    cut = redaction.limit() + 1 if redacts else displays.TEXT_CAP
    wanted = heads(redaction.PARTS, cut) | heads(("error_traceback",))
    rows = Job.objects.using(settings.DATABASE).filter(pk=job.pk).values(**wanted)
    found: dict[str, Any] | None = rows.first()
    if found is None or not redacts:
        return found
    for part in redaction.PARTS:
        text = redaction.shown(job.handler, part, found[f"{part}_head"])
        found |= {f"{part}_head": text, f"{part}_size": len(text or "")}
    return found


class JobAttemptInline(ReadOnly, TabularInline):
    """The newest attempts of a job; who may view the job may view them."""

    model = JobAttempt
    fields = (
        "number",
        "status_shown",
        "outcome",
        "worker",
        "started_shown",
        "finished_shown",
        "progress_shown",
        "error_shown",
    )
    readonly_fields = fields
    ordering = ("-number",)
    can_delete = False
    extra = 0
    max_num = 0
    verbose_name_plural = format_lazy(_("attempts (the newest {shown})"), shown=ATTEMPTS_SHOWN)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self.admin_site.get_model_admin(self.parent_model).has_view_permission(request, obj)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        attempts: QuerySet[Any] = super().get_queryset(request)
        first_shown = F("job__attempt_count") - ATTEMPTS_SHOWN
        newest = attempts.using(settings.DATABASE).filter(number__gt=first_shown)
        with_heads: QuerySet[Any] = newest.annotate(**heads(("error_traceback",)))
        return with_heads.defer("error_traceback")

    @admin.display(description=_("status"))
    def status_shown(self, attempt: JobAttempt) -> SafeString:
        return displays.badge(attempt)

    @admin.display(description=_("started"))
    def started_shown(self, attempt: JobAttempt) -> SafeString | str:
        return displays.instant_with_seconds(attempt.started_at)

    @admin.display(description=_("finished"))
    def finished_shown(self, attempt: JobAttempt) -> SafeString | str:
        return displays.instant_with_seconds(attempt.finished_at)

    @admin.display(description=_("progress"))
    def progress_shown(self, attempt: JobAttempt) -> SafeString:
        return displays.progress(attempt.progress)

    @admin.display(description=_("error"))
    def error_shown(self, attempt: Any) -> SafeString | str:
        return displays.error(attempt, attempt.error_traceback_head, attempt.error_traceback_size)


class JobAdmin(JobActions, ReadOnlyAdmin):
    """Jobs: everything read-only, three actions, each page in few indexed queries."""

    list_display = (
        "id",
        "job_id",
        "handler",
        "queue",
        "status_shown",
        "progress_shown",
        "attempts_used",
        "run_at_shown",
        "created_at_shown",
        "cancel_shown",
    )
    list_filter = (StatusFilter, CreatedFilter)
    # Makes Django show the box; what is searched is in get_search_results.
    search_fields = ("job_id",)
    search_help_text = format_lazy(
        _(
            "A job id or a row's number, exactly; else the beginning of a handler's name, looked"
            " for among the newest {window} jobs."
        ),
        window=f"{HANDLER_WINDOW:,}",
    )
    inlines = (JobAttemptInline,)
    fieldsets = (
        (
            None,
            {
                "fields": (
                    "standing_shown",
                    "status_shown",
                    "progress_detail",
                    "attempts_used",
                    "run_at_exact",
                    "cancel_requested_exact",
                    "finished_at_exact",
                    "error_shown",
                    "result_shown",
                )
            },
        ),
        (
            _("The request"),
            {
                "fields": (
                    "id",
                    "job_id",
                    "scope",
                    "handler",
                    "handler_version",
                    "payload_shown",
                    "queue",
                    "priority",
                    "initial_run_at_exact",
                    "dedupe_key",
                    "concurrency_key",
                    "max_attempts",
                    "granted_attempts",
                    "timeout",
                    "retry_on_interrupt",
                    "schedule",
                    "scheduled_for_exact",
                    "created_at_exact",
                )
            },
        ),
        (
            _("For the expert"),
            {
                "classes": ("collapse",),
                "fields": (
                    "payload_sha256",
                    "fingerprint",
                    "submitted_queue",
                    "submitted_priority",
                    "blocked_reason",
                    "lease_token",
                    "lease_expires_at_exact",
                    "checkpoint_shown",
                ),
            },
        ),
        (_("Operators"), {"fields": ("operator_actions",)}),
    )

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        return flatten_fieldsets(self.fieldsets)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).defer(*LONG)

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        # The index of scheduled jobs is in the order in which they fall due.
        if request.GET.get(STATUS_PARAMETER) == states.SCHEDULED:
            return ("run_at", "id")
        return ("-id",)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        term = search_term.strip()
        return (search(queryset, settings.DATABASE, term) if term else queryset), False

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Any | None:
        job: Any = super().get_object(request, object_id, from_field)
        if job is None:
            return None
        job.heads = _heads_of(job)
        return None if job.heads is None else job

    @admin.display(description=_("status"))
    def status_shown(self, job: Job) -> SafeString:
        return displays.badge(job)

    @admin.display(description=_("progress"))
    def progress_shown(self, job: Job) -> SafeString:
        return displays.progress(job.progress)

    @admin.display(description=_("attempts"))
    def attempts_used(self, job: Job) -> str:
        return f"{job.attempt_count} / {job.max_attempts + job.granted_attempts}"

    @admin.display(description=_("run at"))
    def run_at_shown(self, job: Job) -> SafeString | str:
        return displays.instant(job.run_at)

    @admin.display(description=_("created"))
    def created_at_shown(self, job: Job) -> SafeString | str:
        return displays.instant(job.created_at)

    @admin.display(description=_("cancel"))
    def cancel_shown(self, job: Job) -> Any:
        return displays.EMPTY if job.cancel_requested_at is None else _("requested")

    @admin.display(description=_("why it is there"))
    def standing_shown(self, job: Job) -> SafeString | str:
        return displays.lines(standing(job))

    @admin.display(description=_("progress"))
    def progress_detail(self, job: Job) -> SafeString:
        return displays.progress_with_message(job.progress, job.progress_message)

    @admin.display(description=_("run at"))
    def run_at_exact(self, job: Job) -> SafeString | str:
        return displays.instant_with_seconds(job.run_at)

    @admin.display(description=_("run at, as submitted"))
    def initial_run_at_exact(self, job: Job) -> SafeString | str:
        return displays.instant_with_seconds(job.initial_run_at)

    @admin.display(description=_("cancel requested"))
    def cancel_requested_exact(self, job: Job) -> SafeString | str:
        return displays.instant_with_seconds(job.cancel_requested_at)

    @admin.display(description=_("finished"))
    def finished_at_exact(self, job: Job) -> SafeString | str:
        return displays.instant_with_seconds(job.finished_at)

    @admin.display(description=_("created"))
    def created_at_exact(self, job: Job) -> SafeString | str:
        return displays.instant_with_seconds(job.created_at)

    @admin.display(description=_("scheduled for"))
    def scheduled_for_exact(self, job: Job) -> SafeString | str:
        return displays.instant_with_seconds(job.scheduled_for)

    @admin.display(description=_("lease expires"))
    def lease_expires_at_exact(self, job: Job) -> SafeString | str:
        return displays.instant_with_seconds(job.lease_expires_at)

    @admin.display(description=_("payload"))
    def payload_shown(self, job: Any) -> SafeString | str:
        return displays.long_text(job.heads["payload_head"], job.heads["payload_size"])

    @admin.display(description=_("checkpoint"))
    def checkpoint_shown(self, job: Any) -> SafeString | str:
        return displays.long_text(job.heads["checkpoint_head"], job.heads["checkpoint_size"])

    @admin.display(description=_("result"))
    def result_shown(self, job: Any) -> SafeString | str:
        return displays.long_text(job.heads["result_head"], job.heads["result_size"])

    @admin.display(description=_("error"))
    def error_shown(self, job: Any) -> SafeString | str:
        return displays.error(
            job, job.heads["error_traceback_head"], job.heads["error_traceback_size"]
        )

    @admin.display(description=_("what operators did"))
    def operator_actions(self, job: Job) -> SafeString | str:
        done = OperatorAction.objects.using(settings.DATABASE).filter(job_key=job.pk)
        newest = done.order_by("-id")[:OPERATOR_ACTIONS_SHOWN]
        return displays.lines(
            [f"{exact(one.happened_at)} {one.operator}: {one.detail}" for one in newest]
        )
