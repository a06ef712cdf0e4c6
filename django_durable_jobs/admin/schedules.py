"""The pages of schedules: when each fires, what is wrong with it; pause, resume and run now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..conf import settings
from ..instants import exact
from ..models import ScheduleCursor
from ..schedules import operations
from ..schedules.overview import Overview, overview
from ..transitions.control import alias_of
from ..transitions.operators import Done
from . import displays
from .actions import Operation, OperatorActions
from .base import IndexedChangeList, ReadOnlyAdmin

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse


def _paused(cursor: ScheduleCursor) -> Done:
    return _done(cursor, operations.pause(alias_of(cursor), cursor.name))


def _resumed(cursor: ScheduleCursor) -> Done:
    return _done(cursor, operations.resume(alias_of(cursor), cursor.name))


def _run_now(cursor: ScheduleCursor) -> Done:
    job = operations.run_now(alias_of(cursor), cursor.name)
    subject = f"schedule {cursor.name}: {job}"
    return Done(outcome=operations.RUN_NOW, subject=subject, job_key=job.pk)


def _done(cursor: ScheduleCursor, outcome: str) -> Done:
    return Done(outcome=outcome, subject=f"schedule {cursor.name}")


PAUSE = Operation(
    name="pause_schedule",
    permission="pause_schedule",
    question=gettext_lazy("Pause these schedules?"),
    button=gettext_lazy("Pause"),
    explanation=gettext_lazy(
        "A paused schedule fires nothing until it is resumed. Its jobs that are queued already run."
    ),
    applies=lambda cursor: not cursor.paused,
    move=_paused,
)
RESUME = Operation(
    name="resume_schedule",
    permission="pause_schedule",
    question=gettext_lazy("Resume these schedules?"),
    button=gettext_lazy("Resume"),
    explanation=gettext_lazy(
        "A resumed schedule goes on from the current minute: what the pause has passed over is"
        " not fired."
    ),
    applies=lambda cursor: cursor.paused,
    move=_resumed,
)
RUN_NOW = Operation(
    name="run_schedule",
    permission="run_schedule",
    question=gettext_lazy("Run these schedules now?"),
    button=gettext_lazy("Run now"),
    explanation=gettext_lazy(
        "One job of each is made now, apart from the minutes at which it fires by itself."
    ),
    applies=lambda cursor: True,
    move=_run_now,
)


class ScheduleList(IndexedChangeList):
    """Works out what is to be said of all schedules of the page at once."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        self.result_list = list(self.result_list)
        _look(self.result_list)


def _look(cursors: list[Any]) -> None:
    """Give each row its ``overview``, by two queries for all of them."""
    found = {one.name: one for one in overview(settings.DATABASE, cursors)}
    for cursor in cursors:
        cursor.overview = found[cursor.name]


class ScheduleCursorAdmin(OperatorActions, ReadOnlyAdmin):
    """The schedules that a worker has seen: everything read-only, three actions."""

    actions = [one.name for one in (PAUSE, RESUME, RUN_NOW)]
    operations = (PAUSE, RESUME, RUN_NOW)
    described = (
        (gettext_lazy("schedule"), lambda cursor: cursor.name),
        (gettext_lazy("next minute"), lambda cursor: displays.instant(cursor.next_minute)),
    )
    list_display = ("name", "state_shown", "cron_shown", "last_shown", "next_shown", "lag_shown")
    ordering = ("name",)
    sortable_by = ("name",)
    search_fields = ("name",)
    fields = (
        "name",
        "state_shown",
        "cron_shown",
        "handler_shown",
        "description_shown",
        "next_times_shown",
        "last_times_shown",
        "lag_shown",
        "last_minute_shown",
        "next_minute_shown",
        "fingerprint",
        "updated_shown",
    )
    readonly_fields = fields

    def has_pause_permission(self, request: HttpRequest) -> bool:
        return self.may(request, PAUSE)

    def has_run_permission(self, request: HttpRequest) -> bool:
        return self.may(request, RUN_NOW)

    @admin.action(permissions=["pause"], description=PAUSE.button)
    def pause_schedule(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse:
        return self.operate(request, queryset, PAUSE)

    @admin.action(permissions=["pause"], description=RESUME.button)
    def resume_schedule(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse:
        return self.operate(request, queryset, RESUME)

    @admin.action(permissions=["run"], description=RUN_NOW.button)
    def run_schedule(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse:
        return self.operate(request, queryset, RUN_NOW)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return ScheduleList

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Any | None:
        cursor: Any = super().get_object(request, object_id, from_field)
        if cursor is not None:
            _look([cursor])
        return cursor

    @admin.display(description=gettext_lazy("state"))
    def state_shown(self, cursor: Any) -> SafeString | str:
        return displays.lines(_state(cursor.overview))

    @admin.display(description=gettext_lazy("cron"))
    def cron_shown(self, cursor: Any) -> str:
        declared = cursor.overview.declared
        if declared is None:
            return displays.EMPTY
        return str(_("%(cron)s in %(timezone)s")) % {
            "cron": declared.cron,
            "timezone": declared.timezone,
        }

    @admin.display(description=gettext_lazy("handler"))
    def handler_shown(self, cursor: Any) -> str:
        declared = cursor.overview.declared
        return displays.EMPTY if declared is None else declared.handler_name

    @admin.display(description=gettext_lazy("description"))
    def description_shown(self, cursor: Any) -> str:
        declared = cursor.overview.declared
        return (declared and declared.description) or displays.EMPTY

    @admin.display(description=gettext_lazy("last"))
    def last_shown(self, cursor: Any) -> SafeString | str:
        times = cursor.overview.last_times
        return displays.instant(times[-1] if times else None)

    @admin.display(description=gettext_lazy("next"))
    def next_shown(self, cursor: Any) -> SafeString | str:
        times = cursor.overview.next_times
        return displays.instant(times[0] if times else None)

    @admin.display(description=gettext_lazy("last five times"))
    def last_times_shown(self, cursor: Any) -> SafeString | str:
        return displays.lines([exact(one) for one in cursor.overview.last_times])

    @admin.display(description=gettext_lazy("next five times"))
    def next_times_shown(self, cursor: Any) -> SafeString | str:
        return displays.lines([exact(one) for one in cursor.overview.next_times])

    @admin.display(description=gettext_lazy("lag"))
    def lag_shown(self, cursor: Any) -> str:
        return str(_("%(seconds)d s")) % {"seconds": cursor.overview.lag}

    @admin.display(description=gettext_lazy("last processed minute"))
    def last_minute_shown(self, cursor: ScheduleCursor) -> SafeString | str:
        return displays.instant_with_seconds(cursor.last_minute)

    @admin.display(description=gettext_lazy("next minute"))
    def next_minute_shown(self, cursor: ScheduleCursor) -> SafeString | str:
        return displays.instant_with_seconds(cursor.next_minute)

    @admin.display(description=gettext_lazy("updated"))
    def updated_shown(self, cursor: ScheduleCursor) -> SafeString | str:
        return displays.instant_with_seconds(cursor.updated_at)


def _state(one: Overview) -> list[str]:
    """Say why a schedule does not fire, if it does not."""
    found = []
    if one.is_paused:
        found.append(_("It is paused."))
    if one.declared is None:
        found.append(_("It is not declared by the code that shows this page."))
    if one.runs_another_cron:
        found.append(_("It runs with another cron than that of the code that shows this page."))
    if one.cursor is not None and one.cursor.problem:
        found.append(_("It could not fire: %(problem)s") % {"problem": one.cursor.problem})
    return found or [_("active")]
