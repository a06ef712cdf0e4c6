"""One first migration: without drift under any settings, forwards and back on both databases."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import django_durable_jobs

from ._processes import environment, manage, python, succeeded

APP = "django_durable_jobs"
FOLDER = Path(django_durable_jobs.__file__).parent / "migrations"
TABLES = [
    "django_durable_jobs_job",
    "django_durable_jobs_jobattempt",
    "django_durable_jobs_liveworker",
    "django_durable_jobs_operatoraction",
    "django_durable_jobs_queuepause",
    "django_durable_jobs_schedulecursor",
]
LIST_TABLES = """
import django, json
django.setup()
from django.db import connection
names = connection.introspection.table_names()
print(json.dumps(sorted(name for name in names if name.startswith("django_durable_jobs"))))
"""
WORK = """
import django
django.setup()
from tests._rows import attempt_row, job_row
job = job_row()
job.save()
attempt_row(job).save()
print(job.pk)
"""


@pytest.fixture
def empty_database(tmp_path: Path, is_postgres: bool) -> Iterator[str]:
    """Give the name of a database without any table, beside the suite's own."""
    if not is_postgres:
        yield str(tmp_path / "empty.sqlite3")
        return
    import psycopg

    name = f"durable_jobs_empty_{os.getpid()}"
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as server:
        server.execute(f'CREATE DATABASE "{name}"')
        try:
            yield name
        finally:
            server.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.mark.parametrize(
    "changes",
    [
        {"DEFAULT_AUTO_FIELD": "django.db.models.AutoField", "USE_TZ": False},
        {"DEFAULT_AUTO_FIELD": "django.db.models.SmallAutoField", "LANGUAGE_CODE": "de"},
        {"DEFAULT_AUTO_FIELD": "django.db.models.BigAutoField", "TIME_ZONE": "Asia/Kathmandu"},
        {"LANGUAGE_CODE": "ar", "USE_I18N": True, "USE_TZ": False},
        {"USE_I18N": False},
    ],
    ids=str,
)
def test_the_models_need_no_migration_under_any_settings(changes: dict[str, Any]) -> None:
    result = manage("makemigrations", "--check", "--dry-run", APP, env=environment(**changes))
    assert succeeded(result) == f"No changes detected in app '{APP}'\n"


def test_there_is_one_first_migration() -> None:
    names = sorted(path.stem for path in FOLDER.glob("[0-9]*.py"))
    assert names == ["0001_initial"]


def test_forwards_and_back_and_forwards_again(empty_database: str) -> None:
    env = environment(database=empty_database)
    migrate = ("migrate", APP)
    succeeded(manage(*migrate, "-v0", env=env))
    assert succeeded(python("-c", LIST_TABLES, env=env)) == f"{TABLES}\n".replace("'", '"')
    assert int(succeeded(python("-c", WORK, env=env))) == 1
    succeeded(manage(*migrate, "zero", "-v0", env=env))
    assert succeeded(python("-c", LIST_TABLES, env=env)) == "[]\n"
    succeeded(manage(*migrate, "-v0", env=env))
    assert int(succeeded(python("-c", WORK, env=env))) == 1


def test_a_worker_refuses_a_database_without_our_tables(empty_database: str) -> None:
    result = manage("runjobs", "--drain", env=environment(database=empty_database))
    assert (result.returncode, result.stdout) == (3, "")
    [line] = result.stderr.splitlines()
    assert line == (
        f'CommandError: database "default" lacks 0001_initial of {APP}:'
        " run manage.py migrate --database default."
    )
