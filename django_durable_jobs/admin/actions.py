"""An operator's actions: a confirmation page, then the move on each chosen row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.utils import quote
from django.db import connections, transaction
from django.http import HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..transitions.operators import Done
from .base import ModelAdmin
from .operations import Report, operate

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse
    from django.urls import URLPattern

# So many rows at most are changed by one action; the confirmation page says so.
MAX_ROWS = 500
LISTED = 20
ERRORS_SHOWN = 10


class NoOptions(forms.Form):
    """An action that asks nothing but the confirmation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One action: its permission, its words, where it is offered, and the move it makes."""

    name: str
    permission: str
    question: Any
    button: Any
    explanation: Any
    applies: Callable[[Any], bool]
    move: Callable[..., Done]
    options: type[forms.Form] = NoOptions


class OperatorActions(ModelAdmin):
    """Actions of operators, each with a permission of its own.

    A subclass names its ``operations``, has a method for each in ``actions``, and for each
    ``has_<word>_permission``: Django offers an action, and accepts its POST, only where that
    holds. ``described`` are the columns of the confirmation page.
    """

    operations: tuple[Operation, ...] = ()
    described: tuple[tuple[Any, Callable[[Any], Any]], ...] = ()

    def may(self, request: HttpRequest, operation: Operation) -> bool:
        return bool(request.user.has_perm(f"{self.opts.app_label}.{operation.permission}"))

    def operations_for(self, request: HttpRequest, row: Any) -> list[Operation]:
        """Give the moves that the user may make and that the row allows."""
        return [one for one in self.operations if one.applies(row) and self.may(request, one)]

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        # The object tools of our template.
        context["operations"] = self.operations_for(request, context["original"])
        return super().render_change_form(request, context, *args, **kwargs)

    def get_urls(self) -> list[URLPattern]:
        """Take the list out of ATOMIC_REQUESTS: an action is a transaction for each row."""
        urls = super().get_urls()
        for url in urls:
            if (getattr(url, "name", None) or "").endswith("_changelist"):
                # On every alias: our settings are not read while URLs load, or a bad one
                # would end manage.py check with a traceback.
                for alias in connections:
                    transaction.non_atomic_requests(using=alias)(url.callback)
        return urls

    def operate(
        self, request: HttpRequest, queryset: QuerySet[Any], operation: Operation
    ) -> HttpResponse:
        """Ask first; once confirmed, make the move on each job and report."""
        confirmed = request.POST.get("confirm") == "yes"
        if confirmed:
            queryset = self._confirmed(request, queryset)
        rows = list(queryset[: MAX_ROWS + 1])
        options = operation.options(request.POST if confirmed else None)
        if not rows:
            self.message_user(request, _("None of these is there any more."), messages.WARNING)
        elif not confirmed or not options.is_valid():
            return self._ask(request, operation, rows, options)
        else:
            move = partial(operation.move, **options.cleaned_data)
            operator = request.user.get_username()
            report = operate(rows[:MAX_ROWS], move, action=operation.name, operator=operator)
            self._log(request, operation, report)
            self._tell(request, report)
        return HttpResponseRedirect(self._back(request))

    def _confirmed(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Take the rows that the page listed, also those that have left the list's filter since."""
        if request.POST.get("select_across", "0") != "0":
            return queryset
        return self.get_queryset(request).filter(pk__in=request.POST.getlist(ACTION_CHECKBOX_NAME))

    def _ask(
        self, request: HttpRequest, operation: Operation, rows: list[Any], options: forms.Form
    ) -> HttpResponse:
        """Show the confirmation page; it posts the list's own fields again, and ``confirm``.

        The rows are named one by one, so that what is confirmed is what was seen.
        """
        chosen = rows[:MAX_ROWS]
        hidden = [("action", operation.name), ("select_across", "0"), ("confirm", "yes")]
        hidden += [("from_page", "1")] if "from_page" in request.POST else []
        hidden += [(ACTION_CHECKBOX_NAME, str(row.pk)) for row in chosen]
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "media": self.media,
            "title": operation.question,
            "operation": operation,
            "options": options,
            "hidden": hidden,
            "count": len(chosen),
            "columns": [label for label, _cell in self.described],
            "listed": [[cell(row) for _label, cell in self.described] for row in chosen[:LISTED]],
            "unlisted": len(chosen) - len(chosen[:LISTED]),
            "cut_at": MAX_ROWS if len(rows) > MAX_ROWS else None,
            "back": self._back(request),
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "django_durable_jobs/admin/confirm.html", context)

    def _back(self, request: HttpRequest) -> str:
        """Give the page that the action was started from: the list as it was, or the row's."""
        chosen = request.POST.getlist(ACTION_CHECKBOX_NAME)
        if "from_page" not in request.POST or len(chosen) != 1:
            return request.get_full_path()
        return reverse(
            f"admin:{self.opts.app_label}_{self.opts.model_name}_change",
            args=(quote(chosen[0]),),
            current_app=self.admin_site.name,
        )

    def _log(self, request: HttpRequest, operation: Operation, report: Report) -> None:
        """Write Django's own log as well, which the history page of a row shows."""
        user: Any = request.user
        for outcome, rows in report.changed.items():
            LogEntry.objects.log_actions(
                user.pk,
                rows,
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
        "paused": _("paused"),
        "resumed": _("resumed"),
        "run now": _("run now"),
    }[outcome]
