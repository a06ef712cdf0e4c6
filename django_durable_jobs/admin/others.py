"""The small tables, to look at: live workers, pauses, and what operators did."""

from __future__ import annotations

from django.contrib import admin
from django.db.models import BooleanField, ExpressionWrapper, Q, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from ..models import LiveWorker, OperatorAction, QueuePause
from ..transitions.workers import LiveSince
from . import displays
from .base import ReadOnlyAdmin


class LiveWorkerAdmin(ReadOnlyAdmin):
    """The worker processes that say they live, and when they said so last."""

    list_display = (
        "id",
        "name",
        "is_live",
        "host",
        "pid",
        "queues_shown",
        "started_shown",
        "seen_shown",
    )
    fields = (
        "name",
        "host",
        "pid",
        "queues",
        "excluded_queues",
        "capabilities",
        "health",
        "started_shown",
        "seen_shown",
    )
    readonly_fields = fields

    def get_queryset(self, request: HttpRequest) -> QuerySet[LiveWorker]:
        workers = super().get_queryset(request)
        seen = Q(last_seen_at__gt=LiveSince())
        lives = ExpressionWrapper(seen, output_field=BooleanField())
        annotated: QuerySet[LiveWorker] = workers.annotate(lives=lives)
        return annotated

    @admin.display(description=_("live"), boolean=True)
    def is_live(self, worker: LiveWorker) -> bool:
        """By the clock that decides; another worker removes the row of a dead one."""
        return bool(worker.lives)  # type: ignore[attr-defined]

    @admin.display(description=_("queues"))
    def queues_shown(self, worker: LiveWorker) -> str:
        return str(_("any")) if worker.queues is None else ", ".join(worker.queues)

    @admin.display(description=_("started"))
    def started_shown(self, worker: LiveWorker) -> SafeString | str:
        return displays.instant_with_seconds(worker.started_at)

    @admin.display(description=_("last seen"))
    def seen_shown(self, worker: LiveWorker) -> SafeString | str:
        return displays.instant_with_seconds(worker.last_seen_at)


class QueuePauseAdmin(ReadOnlyAdmin):
    """The queues that are paused."""

    list_display = ("queue", "paused_shown")
    ordering = ("queue",)
    sortable_by = ("queue",)
    fields = ("queue", "paused_shown")
    readonly_fields = fields

    @admin.display(description=_("paused"))
    def paused_shown(self, pause: QueuePause) -> SafeString | str:
        return displays.instant_with_seconds(pause.paused_at)


class OperatorActionAdmin(ReadOnlyAdmin):
    """Who did what to which job, and when."""

    list_display = ("id", "happened_shown", "operator", "action", "job_shown", "detail")
    fields = ("happened_shown", "operator", "action", "job_shown", "detail")
    readonly_fields = fields

    @admin.display(description=_("happened"))
    def happened_shown(self, action: OperatorAction) -> SafeString | str:
        return displays.instant_with_seconds(action.happened_at)

    @admin.display(description=_("job"))
    def job_shown(self, action: OperatorAction) -> SafeString | str:
        if action.job_key is None:
            return displays.EMPTY
        url = reverse(
            f"admin:{action._meta.app_label}_job_change",
            args=(action.job_key,),
            current_app=self.admin_site.name,
        )
        return format_html('<a href="{}">{}</a>', url, action.job_key)
