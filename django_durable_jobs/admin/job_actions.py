"""What operators do to jobs: request cancel, retry, release."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy

from .. import states
from ..models import Job
from ..transitions.operators import Done
from . import displays
from .actions import Operation, OperatorActions

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse

EXTRA_ATTEMPTS_MAX = 10


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


def _cancelled(job: Job) -> Done:
    return _done(job, job.request_cancel())


def _retried(job: Job, extra_attempts: int) -> Done:
    job.retry(extra_attempts=extra_attempts)
    return _done(job, "retried")


def _released(job: Job) -> Done:
    job.release()
    return _done(job, "released")


def _done(job: Job, outcome: str) -> Done:
    return Done(outcome=outcome, subject=str(job), job_key=job.pk)


CANCEL = Operation(
    name="request_cancel",
    permission="cancel_job",
    question=gettext_lazy("Request the cancel of these jobs?"),
    button=gettext_lazy("Request cancel"),
    explanation=gettext_lazy(
        "A job that waits is cancelled at once. A running one is asked to stop; its handler"
        " decides when it does. An ended one stays as it is."
    ),
    applies=lambda job: job.status in states.LIVE,
    move=_cancelled,
)
RETRY = Operation(
    name="retry",
    permission="retry_job",
    question=gettext_lazy("Retry these jobs?"),
    button=gettext_lazy("Retry"),
    explanation=gettext_lazy(
        "A failed, cancelled or interrupted job is queued again, due now. It keeps its attempts"
        " and its checkpoint. Others are refused."
    ),
    applies=lambda job: job.status in states.TRANSITIONS["retry"].sources,
    move=_retried,
    options=RetryOptions,
)
RELEASE = Operation(
    name="release",
    permission="release_job",
    question=gettext_lazy("Release these jobs?"),
    button=gettext_lazy("Release"),
    explanation=gettext_lazy(
        "A blocked job waits for a worker again, and is blocked anew if none can run it."
        " Others are refused."
    ),
    applies=lambda job: job.status in states.TRANSITIONS["release"].sources,
    move=_released,
)
OPERATIONS = (CANCEL, RETRY, RELEASE)


class JobActions(OperatorActions):
    """``request_cancel``, ``retry`` and ``release``."""

    operations = OPERATIONS
    described = (
        (gettext_lazy("ID"), lambda job: str(job.pk)),
        (gettext_lazy("job id"), lambda job: job.job_id),
        (gettext_lazy("handler"), lambda job: job.handler),
        (gettext_lazy("status"), displays.badge),
    )

    actions = [operation.name for operation in OPERATIONS]

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        return self.may(request, CANCEL)

    def has_retry_permission(self, request: HttpRequest) -> bool:
        return self.may(request, RETRY)

    def has_release_permission(self, request: HttpRequest) -> bool:
        return self.may(request, RELEASE)

    @admin.action(permissions=["cancel"], description=gettext_lazy("Request cancel"))
    def request_cancel(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse:
        return self.operate(request, queryset, CANCEL)

    @admin.action(permissions=["retry"], description=gettext_lazy("Retry"))
    def retry(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse:
        return self.operate(request, queryset, RETRY)

    @admin.action(permissions=["release"], description=gettext_lazy("Release blocked jobs"))
    def release(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse:
        return self.operate(request, queryset, RELEASE)
