"""The list's filters. Their choices are fixed: none is read from the table."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.utils.translation import gettext_lazy as _

from .. import states
from ..conf import settings
from .search import created_within

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest

STATUS_PARAMETER = "status__exact"
AT_LIMIT = "at_limit"


class StatusFilter(admin.SimpleListFilter):
    """By status. Queued jobs that wait for a concurrency limit are a choice of their own.

    So each choice but ``succeeded`` is served by a small partial index.
    """

    title = _("status")
    parameter_name = STATUS_PARAMETER

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        choices: list[tuple[str, Any]] = [(status, status) for status in states.JOB_STATUSES]
        choices.insert(2, (AT_LIMIT, _("queued, at a limit")))
        return choices

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value()
        if value is None:
            return queryset
        if value in (states.QUEUED, AT_LIMIT):
            return queryset.filter(status=states.QUEUED, limit_waiting=value == AT_LIMIT)
        return queryset.filter(status=value)


SPANS: dict[str, tuple[timedelta, Any]] = {
    "hour": (timedelta(hours=1), _("the last hour")),
    "day": (timedelta(days=1), _("the last 24 hours")),
    "week": (timedelta(days=7), _("the last 7 days")),
    "month": (timedelta(days=30), _("the last 30 days")),
}


class CreatedFilter(admin.SimpleListFilter):
    """By the time of creation, in fixed spans up to now."""

    title = _("created in")
    parameter_name = "created"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(name, label) for name, (_span, label) in SPANS.items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = SPANS.get(self.value() or "")
        if chosen is None:
            return queryset
        return created_within(queryset, settings.DATABASE, chosen[0])
