"""The operator's actions: a confirmation page, then the move on each chosen job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.utils import quote
from django.http import HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.text import format_lazy
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from .. import states
from ..models import Job
from .base import ModelAdmin
from .operations import Move, Report, operate

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse

# So many jobs at most are changed by one action; the confirmation page says so.
MAX_JOBS = 500
LISTED = 20
ERRORS_SHOWN = 10
EXTRA_ATTEMPTS_MAX = 10


class NoOptions(forms.Form):
    """An action that asks nothing but the confirmation."""


class RetryOptions(forms.Form):
    extra_attempts = forms.IntegerField(
        label=gettext_lazy("Extra attempts"),
        min_value=0,
        max_value=EXTRA_ATTEMPTS_MAX,
        initial=0,
        help_text=format_lazy(
            gettext_lazy(
                "Granted to each job beside what it has left, up to {max}. A job that has used"
                " all its executions needs 1 at least."
            ),
            max=EXTRA_ATTEMPTS_MAX,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One action of the admin: its permission, its words, and the move it makes."""

    name: str
    permission: str
    question: Any
    button: Any
    explanation: Any
    sources: tuple[str, ...]
    move: Callable[..., str]
    options: type[forms.Form] = NoOptions


def _retried(job: Job, extra_attempts: int) -> str:
    job.retry(extra_attempts=extra_attempts)
    return "retried"


def _released(job: Job) -> str:
    job.release()
    return "released"


CANCEL = Operation(
    name="request_cancel",
    permission="cancel",
    question=gettext_lazy("Request the cancel of these jobs?"),
    button=gettext_lazy("Request cancel"),
    explanation=gettext_lazy(
        "A job that waits is cancelled at once. A running one is asked to stop; its handler"
        " decides when it does. An ended one stays as it is."
    ),
    sources=states.LIVE,
    move=lambda job: job.request_cancel(),
)
RETRY = Operation(
    name="retry",
    permission="retry",
    question=gettext_lazy("Retry these jobs?"),
    button=gettext_lazy("Retry"),
    explanation=gettext_lazy(
        "A failed, cancelled or interrupted job is queued again, due now. It keeps its attempts"
        " and its checkpoint. Others are refused."
    ),
    sources=states.TRANSITIONS["retry"].sources,
    move=_retried,
    options=RetryOptions,
)
RELEASE = Operation(
    name="release",
    permission="release",
    question=gettext_lazy("Release these jobs?"),
    button=gettext_lazy("Release"),
    explanation=gettext_lazy(
        "A blocked job waits for a worker again, and is blocked anew if none can run it."
        " Others are refused."
    ),
    sources=states.TRANSITIONS["release"].sources,
    move=_released,
)
OPERATIONS = (CANCEL, RETRY, RELEASE)


class OperatorActions(ModelAdmin):
    """``request_cancel``, ``retry`` and ``release``, each with a permission of its own.

    Django offers an action, and accepts its POST, only where ``has_<name>_permission`` holds.
    """

    actions = [operation.name for operation in OPERATIONS]

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        return self._may(request, CANCEL)

    def has_retry_permission(self, request: HttpRequest) -> bool:
        return self._may(request, RETRY)

    def has_release_permission(self, request: HttpRequest) -> bool:
        return self._may(request, RELEASE)

    def _may(self, request: HttpRequest, operation: Operation) -> bool:
        permission = f"{self.opts.app_label}.{operation.permission}_job"
        return bool(request.user.has_perm(permission))

    def operations_for(self, request: HttpRequest, job: Job) -> list[Operation]:
        """Give the moves that the user may make and the job's status allows."""
        return [
            operation
            for operation in OPERATIONS
            if job.status in operation.sources and self._may(request, operation)
        ]

    @admin.action(permissions=["cancel"], description=gettext_lazy("Request cancel"))
    def request_cancel(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse:
        return self._operate(request, queryset, CANCEL)

    @admin.action(permissions=["retry"], description=gettext_lazy("Retry"))
    def retry(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse:
        return self._operate(request, queryset, RETRY)

    @admin.action(permissions=["release"], description=gettext_lazy("Release blocked jobs"))
    def release(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse:
        return self._operate(request, queryset, RELEASE)

    def _operate(
        self, request: HttpRequest, queryset: QuerySet[Any], operation: Operation
    ) -> HttpResponse:
        """Ask first; once confirmed, make the move on each job and report."""
        confirmed = request.POST.get("confirm") == "yes"
        if confirmed:
            queryset = self._confirmed_jobs(request, queryset)
        jobs = list(queryset[: MAX_JOBS + 1])
        options = operation.options(request.POST if confirmed else None)
        if not jobs:
            self.message_user(request, _("None of these jobs is there any more."), messages.WARNING)
        elif not confirmed or not options.is_valid():
            return self._ask(request, operation, jobs, options)
        else:
            move: Move = partial(operation.move, **options.cleaned_data)
            operator = request.user.get_username()
            report = operate(jobs[:MAX_JOBS], move, action=operation.name, operator=operator)
            self._log(request, operation, report)
            self._tell(request, report)
        return HttpResponseRedirect(self._back(request))

    def _confirmed_jobs(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Take the jobs that the page listed, also those that have left the list's filter since."""
        if request.POST.get("select_across", "0") != "0":
            return queryset
        return self.get_queryset(request).filter(pk__in=request.POST.getlist(ACTION_CHECKBOX_NAME))

    def _ask(
        self, request: HttpRequest, operation: Operation, jobs: list[Job], options: forms.Form
    ) -> HttpResponse:
        """Show the confirmation page; it posts the list's own fields again, and ``confirm``.

        The jobs are named one by one, so that what is confirmed is what was seen.
        """
        chosen = jobs[:MAX_JOBS]
        hidden = [("action", operation.name), ("select_across", "0"), ("confirm", "yes")]
        hidden += [("from_job", "1")] if "from_job" in request.POST else []
        hidden += [(ACTION_CHECKBOX_NAME, str(job.pk)) for job in chosen]
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "media": self.media,
            "title": operation.question,
            "operation": operation,
            "options": options,
            "hidden": hidden,
            "count": len(chosen),
            "listed": chosen[:LISTED],
            "unlisted": len(chosen) - len(chosen[:LISTED]),
            "cut_at": MAX_JOBS if len(jobs) > MAX_JOBS else None,
            "back": self._back(request),
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "django_durable_jobs/admin/confirm.html", context)

    def _back(self, request: HttpRequest) -> str:
        """Give the page that the action was started from: the list as it was, or the job."""
        chosen = request.POST.getlist(ACTION_CHECKBOX_NAME)
        if "from_job" not in request.POST or len(chosen) != 1:
            return request.get_full_path()
        return reverse(
            f"admin:{self.opts.app_label}_{self.opts.model_name}_change",
            args=(quote(chosen[0]),),
            current_app=self.admin_site.name,
        )

    def _log(self, request: HttpRequest, operation: Operation, report: Report) -> None:
        """Write Django's own log as well, which the history page of a job shows."""
        user: Any = request.user
        for outcome, jobs in report.changed.items():
            LogEntry.objects.log_actions(
                user.pk,
                jobs,
                CHANGE,
                f"{operation.button}: {_word(outcome)}",
            )

    def _tell(self, request: HttpRequest, report: Report) -> None:
        counted = [f"{number} {_word(outcome)}" for outcome, number in report.outcomes.items()]
        if report.refused:
            counted.append(f"{len(report.refused)} {_('refused')}")
        level = messages.WARNING if report.refused else messages.SUCCESS
        self.message_user(request, ", ".join(counted) + ".", level)
        for text in report.refused[:ERRORS_SHOWN]:
            self.message_user(request, text, messages.ERROR)
        more = len(report.refused) - ERRORS_SHOWN
        if more > 0:
            said = ngettext("%d more was refused.", "%d more were refused.", more) % more
            self.message_user(request, said, messages.ERROR)


def _word(outcome: str) -> str:
    return {
        "cancelled": _("cancelled"),
        "requested": _("asked to stop"),
        "unchanged": _("unchanged"),
        "retried": _("retried"),
        "released": _("released"),
    }[outcome]
