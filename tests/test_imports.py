"""Importing the package needs nothing and does nothing; its public names are there."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import django_durable_jobs
from tests._processes import SECONDS

PACKAGE = Path(django_durable_jobs.__file__).parent
NAMES = {
    "job",
    "schedule",
    "unschedule",
    "JobContext",
    "JobSubmission",
    "ModelId",
    "RetryLater",
    "PermanentError",
    "DurableJobsError",
    "InvalidSubmission",
    "IdentityConflict",
    "TransactionRequired",
    "TransactionActive",
    "InvalidTransition",
    "AttemptsExhausted",
    "InvalidSchedule",
    "LockTimeout",
    "InvalidCursor",
    "JobInterrupt",
    "JobCancelled",
    "JobTimeout",
    "LeaseLost",
    "WorkerStopping",
}
INTERRUPTS = {"JobCancelled", "JobTimeout", "LeaseLost", "WorkerStopping"}


def alone(code: str, *options: str) -> str:
    """Run code in a process without any settings; give its output."""
    env = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    result = subprocess.run(
        [sys.executable, "-W", "error", *options, "-c", code],
        cwd=PACKAGE.parent,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_needs_no_settings_and_has_no_effects() -> None:
    code = """
import sys, threading, signal, logging
before = (threading.enumerate(), signal.getsignal(signal.SIGTERM), sys.excepthook)
loggers = logging.getLogger(), logging.getLogger("django_durable_jobs")
handlers = [list(logger.handlers) for logger in loggers]
import django_durable_jobs
from django.apps import apps
from django.conf import settings
from django.db import connections
assert (threading.enumerate(), signal.getsignal(signal.SIGTERM), sys.excepthook) == before
assert [list(logger.handlers) for logger in loggers] == handlers
assert not settings.configured and not apps.ready and not apps.app_configs
assert list(vars(connections._connections)) in ([], ["_storage"]), vars(connections._connections)
assert "django_durable_jobs.models" not in sys.modules
for name in django_durable_jobs.__all__:
    getattr(django_durable_jobs, name)
print("done")
"""
    assert alone(code) == "done"


def test_a_handler_can_be_declared_without_settings() -> None:
    code = """
from django_durable_jobs import job, JobContext
@job("tests.alone", queue="mails", max_attempts=5, timeout=3)
def handler(ctx: JobContext, payload: dict[str, int]) -> int:
    return payload["a"]
assert handler(None, {"a": 5}) == 5
print("done")
"""
    assert alone(code) == "done"


def test_psycopg_is_not_needed() -> None:
    """Neither for importing the package nor for a project on SQLite."""
    code = """
import sys
for name in ("psycopg", "psycopg2", "psycopg_pool"):
    sys.modules[name] = None
import django_durable_jobs
from django.conf import settings
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    INSTALLED_APPS=["django_durable_jobs"],
)
import django
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
import django_durable_jobs.management.commands.runjobs
from django_durable_jobs import job
from django_durable_jobs.models import Job
@job("tests.alone")
def handler(ctx): ...
assert handler.submit().newly_created
assert Job.objects.get().status == "queued"
from django.db import connection
connection.close()
print("done")
"""
    assert alone(code) == "done"


def test_the_project_start_makes_no_query_and_no_connection() -> None:
    code = """
from django.db.backends.base.base import BaseDatabaseWrapper
def refuse(self):
    raise AssertionError("connected")
BaseDatabaseWrapper.connect = refuse
from django.conf import settings
settings.configure(
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": ":memory:",
            "OPTIONS": {"transaction_mode": "IMMEDIATE"},
        }
    },
    INSTALLED_APPS=["django_durable_jobs"],
)
import threading
import django
django.setup()
from django.core.checks import run_checks
assert run_checks(tags=["durable_jobs"]) == []
assert threading.active_count() == 1
print("done")
"""
    assert alone(code) == "done"


def test_the_public_names_are_there() -> None:
    assert set(django_durable_jobs.__all__) >= NAMES
    for name in django_durable_jobs.__all__:
        assert getattr(django_durable_jobs, name).__doc__, name


def test_the_models_are_where_they_are_looked_for() -> None:
    models = importlib.import_module("django_durable_jobs.models")
    for name in ("Job", "JobAttempt", "ScheduleCursor"):
        assert getattr(models, name)._meta.app_label == "django_durable_jobs"


@pytest.mark.parametrize("name", sorted(NAMES))
def test_errors_have_one_base_and_interrupts_another(name: str) -> None:
    thing = getattr(django_durable_jobs, name)
    if not (inspect.isclass(thing) and issubclass(thing, BaseException)):
        return
    if name in INTERRUPTS | {"JobInterrupt"}:
        assert issubclass(thing, django_durable_jobs.JobInterrupt)
        assert not issubclass(thing, Exception), "except Exception would swallow it"
    else:
        assert issubclass(thing, Exception)
    if name not in INTERRUPTS | {"JobInterrupt", "RetryLater", "PermanentError"}:
        assert issubclass(thing, django_durable_jobs.DurableJobsError)


def test_the_package_is_typed_and_has_a_version() -> None:
    assert (PACKAGE / "py.typed").exists()
    assert django_durable_jobs.__version__
