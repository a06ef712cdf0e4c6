"""django-durable-jobs, with the defaults of every setting."""

from common_settings import *  # noqa: F403

INSTALLED_APPS = ["django_durable_jobs", "durable_app"]
