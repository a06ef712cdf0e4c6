"""System checks: everything that ``DURABLE_JOBS``, handlers or routers can get wrong."""

from __future__ import annotations

from typing import Any

from django.core import checks
from django.db import connections, router

from . import conf
from .dialects import version_problems
from .handlers import registry
from .policies import lease_problems
from .schedules.declaration import registry as schedules

TAG = "durable_jobs"
# Those that take SQLite's write lock before the first read.
WRITING_MODES = ("IMMEDIATE", "EXCLUSIVE")


@checks.register(TAG)
def check_settings(**kwargs: Any) -> list[checks.CheckMessage]:
    """E001: a key of ``DURABLE_JOBS`` is unknown, of the wrong type or out of range."""
    return [
        checks.Error(problem, id="django_durable_jobs.E001", obj=conf.SETTING)
        for problem in conf.problems()
    ]


@checks.register(TAG)
def check_handlers(**kwargs: Any) -> list[checks.CheckMessage]:
    """E002: a handler cannot run with these settings."""
    if conf.problems():
        return []
    return [checks.Error(problem, id="django_durable_jobs.E002") for problem in registry.problems()]


@checks.register(TAG)
def check_routers(**kwargs: Any) -> list[checks.CheckMessage]:
    """E003: a router sends jobs elsewhere than ``DATABASE``, or attempts elsewhere than jobs."""
    if conf.problems():
        return []
    from .models import Job, JobAttempt

    alias = conf.settings.DATABASE
    return [
        checks.Error(
            f"{model.__name__} is routed to database {target!r}, and the jobs live in {alias!r}.",
            hint=f'Route the models of django_durable_jobs to {alias!r}, or set "DATABASE".',
            id="django_durable_jobs.E003",
        )
        for model in (Job, JobAttempt)
        for target in (router.db_for_write(model),)
        if target != alias and _has_routers()
    ]


@checks.register(TAG)
def check_database(**kwargs: Any) -> list[checks.CheckMessage]:
    """E004: the jobs' database is of a kind that we do not know, or too old."""
    if conf.problems():
        return []
    alias = conf.settings.DATABASE
    if connections[alias].vendor in ("postgresql", "sqlite"):
        return [
            checks.Error(problem, id="django_durable_jobs.E004")
            for problem in version_problems(alias)
        ]
    return [
        checks.Error(
            f"Durable jobs live in PostgreSQL or SQLite, not in {connections[alias].vendor}.",
            hint=f'Point {conf.SETTING}["DATABASE"] to such a database.',
            id="django_durable_jobs.E004",
        )
    ]


@checks.register(TAG)
def check_leases(**kwargs: Any) -> list[checks.CheckMessage]:
    """E005: on SQLite the lease is not longer than a timeout, so that no worker would start."""
    if conf.problems():
        return []
    alias = conf.settings.DATABASE
    if connections[alias].vendor not in ("postgresql", "sqlite"):
        return []
    return [
        checks.Error(problem, id="django_durable_jobs.E005") for problem in lease_problems(alias)
    ]


@checks.register(TAG)
def check_schedules(**kwargs: Any) -> list[checks.CheckMessage]:
    """E006: a schedule's job would be refused. W001: allowed, and rarely meant."""
    if conf.problems():
        return []
    return [
        *(checks.Error(one, id="django_durable_jobs.E006") for one in schedules.problems()),
        *(checks.Warning(one, id="django_durable_jobs.W001") for one in schedules.warnings()),
    ]


@checks.register(TAG)
def check_not_built(**kwargs: Any) -> list[checks.CheckMessage]:
    """W004: ``PRUNE_AFTER_DAYS`` is given, and nothing acts on it."""
    if conf.problems() or conf.settings.PRUNE_AFTER_DAYS is None:
        return []
    return [
        checks.Warning(
            f'{conf.SETTING}["PRUNE_AFTER_DAYS"] is set, and nothing prunes by itself in this'
            " version: ended jobs stay.",
            hint=f"Run: manage.py jobs prune --days {conf.settings.PRUNE_AFTER_DAYS:g}",
            id="django_durable_jobs.W004",
        )
    ]


@checks.register(TAG)
def check_transaction_mode(**kwargs: Any) -> list[checks.CheckMessage]:
    """W003: on SQLite the project's transactions begin deferred, and may fail beside a worker."""
    if conf.problems():
        return []
    connection = connections[conf.settings.DATABASE]
    options = connection.settings_dict.get("OPTIONS", {})
    if connection.vendor != "sqlite" or options.get("transaction_mode") in WRITING_MODES:
        return []
    return [
        checks.Warning(
            f"The transactions of database {conf.settings.DATABASE!r} begin deferred: one that"
            ' reads before it writes fails at once with "database is locked" where a worker has'
            " written meanwhile, whatever its timeout.",
            hint=f'Write "transaction_mode": "IMMEDIATE" in'
            f' DATABASES[{conf.settings.DATABASE!r}]["OPTIONS"].',
            id="django_durable_jobs.W003",
        )
    ]


def _has_routers() -> bool:
    return bool(router.routers)
