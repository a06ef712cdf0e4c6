from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator

import django
import pytest
from django.db import connection
from hypothesis import HealthCheck, settings

# A project of its own, whose tests are run there (testing/test_kit_project.py).
collect_ignore = ["kit_project"]

# How long a property takes says more about the machine than about the property. Each run draws
# the same examples and keeps none, so that it neither fails by a draw nor writes to the checkout.
settings.register_profile(
    "any machine",
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def vendor() -> str:
    """The name Django gives the database of this run: "sqlite" or "postgresql"."""
    return connection.vendor


@pytest.fixture(scope="session")
def is_postgres(vendor: str) -> bool:
    return vendor == "postgresql"


@pytest.fixture
def child_environment(transactional_db: None) -> dict[str, str]:
    """The environment for a process that is to work in this test's database.

    Such a process sees committed rows only, hence the transactional database.
    """
    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "TEST_DATABASE_NAME": str(connection.settings_dict["NAME"]),
    }


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [_environment_line()]


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Iterator[None]:
    result = yield
    # Quiet runs print no header, and the log of a matrix must say what ran.
    if config.get_verbosity() < 0:
        terminalreporter.write_line(_environment_line())
    return result


def _environment_line() -> str:
    return f"database: {_database_version()}; Django {django.get_version()}"


def _database_version() -> str:
    if connection.vendor == "sqlite":
        journal = os.environ.get("TEST_SQLITE_JOURNAL", "wal")
        return f"SQLite {sqlite3.sqlite_version} (files, journal mode {journal})"
    # Past Django's connection, which pytest-django guards, and in a database
    # that exists before the test database does.
    import psycopg

    with psycopg.connect(os.environ["DATABASE_URL"]) as server:
        return f"PostgreSQL {server.info.parameter_status('server_version')}"


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable(
    report: pytest.CollectReport | pytest.TestReport,
) -> Iterator[dict[str, object] | None]:
    """Make captured logs fit to be sent from a test process: some hold lone surrogates."""
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return (yield)
