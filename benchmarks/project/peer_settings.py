"""django-tasks-db, as its documentation sets it up."""

from common_settings import *  # noqa: F403

INSTALLED_APPS = ["django_tasks", "django_tasks_db", "peer_app"]
TASKS = {
    "default": {
        "BACKEND": "django_tasks_db.DatabaseBackend",
        # "other" and "served" are queues of the claim's figure.
        "QUEUES": ["default", "other", "served"],
    }
}
