"""Whether the database has the tables that this code works on."""

from __future__ import annotations

from django.db import connections
from django.db.migrations.executor import MigrationExecutor

from .options import MigrationsMissing

APP = "django_durable_jobs"


def require_migrations(alias: str) -> None:
    """Raise ``MigrationsMissing``, whose text names what is not applied and the command."""
    executor = MigrationExecutor(connections[alias])
    targets = [key for key in executor.loader.graph.leaf_nodes() if key[0] == APP]
    missing = [migration.name for migration, _ in executor.migration_plan(targets)]
    if missing:
        raise MigrationsMissing(
            f'database "{alias}" lacks {", ".join(missing)} of {APP}:'
            f" run manage.py migrate --database {alias}."
        )
