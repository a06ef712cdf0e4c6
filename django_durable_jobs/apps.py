"""The app's start-up: checks are registered and ``jobs.py`` modules imported; no query is made."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class DurableJobsConfig(AppConfig):
    name = "django_durable_jobs"
    label = "django_durable_jobs"
    verbose_name = _("Durable jobs")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import checks  # noqa: F401 (registers the system checks)
        from .handlers import autodiscover

        # What a handler gets wrong is told by the checks and by the start of a worker.
        autodiscover(validate=False)
