"""System checks, and the worker's refusal to start: one sentence that says what to write."""

from __future__ import annotations

import inspect
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.core import checks
from django.core.checks import Error
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import override_settings

from django_durable_jobs import checks as our_checks
from django_durable_jobs import job
from django_durable_jobs.dialects import dialect_for
from django_durable_jobs.handlers import registry
from django_durable_jobs.worker.options import InvalidOptions, build_options

from ._processes import environment, manage

TRACEBACK = "Traceback (most recent call last)"


def ours(identifier: str | None = None) -> list[Error]:
    """Give what our checks tell, what is silenced only by its id."""
    found = [one for one in checks.run_checks(tags=["durable_jobs"]) if "django_durable" in one.id]
    if identifier is not None:
        return [one for one in found if one.id == identifier]
    return [one for one in found if not one.is_silenced()]


class Router:
    """Send models of ours where a test wants them; None: no opinion."""

    def __init__(self, **targets: str | None) -> None:
        self._targets = targets

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return self._targets.get(model.__name__)

    db_for_read = db_for_write


@contextmanager
def routed(*routers: Router, database: str = "default") -> Iterator[None]:
    with override_settings(DATABASE_ROUTERS=list(routers), DURABLE_JOBS={"DATABASE": database}):
        yield


# E001: settings -------------------------------------------------------------------------------


def test_good_settings_pass_every_check() -> None:
    assert ours() == []


@override_settings(DURABLE_JOBS={"LEASE_SECONDS": "long", "COLOUR": "red"})
def test_each_bad_setting_is_an_error_of_its_own() -> None:
    first, second = ours()
    assert first.id == second.id == "django_durable_jobs.E001"
    assert "COLOUR" in first.msg
    assert '["LEASE_SECONDS"] must be a number of seconds' in second.msg
    assert first.obj == "DURABLE_JOBS"


# E002: handlers -------------------------------------------------------------------------------


def test_a_handler_that_the_settings_cannot_run() -> None:
    with registry.temporary():

        @job("tests.slow", timeout=60)
        def slow(ctx: Any) -> None: ...

        assert ours("django_durable_jobs.E002") == []
        with override_settings(DURABLE_JOBS={"MAX_TIMEOUT_SECONDS": 59}):
            [error] = ours("django_durable_jobs.E002")
    assert error.id == "django_durable_jobs.E002"
    assert "'tests.slow'" in error.msg and "MAX_TIMEOUT_SECONDS" in error.msg


def test_bad_settings_are_told_alone() -> None:
    """Handlers and routers are judged by settings; the checks do not fall over bad ones."""
    with registry.temporary(), override_settings(DURABLE_JOBS={"MAX_TIMEOUT_SECONDS": "x"}):

        @job("tests.slow", timeout=60)
        def slow(ctx: Any) -> None: ...

        assert [error.id for error in ours()] == ["django_durable_jobs.E001"]


# E003: routers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        ({"Job": "other", "JobAttempt": "other"}, ["Job", "JobAttempt"]),
        ({"Job": "other"}, ["Job"]),
        ({"Job": "default", "JobAttempt": "other"}, ["JobAttempt"]),
    ],
    ids=str,
)
def test_a_router_that_sends_our_rows_elsewhere(targets: dict[str, str], told: list[str]) -> None:
    with routed(Router(**targets)):
        errors = ours()
    assert [error.id for error in errors] == ["django_durable_jobs.E003"] * len(told)
    for error, name in zip(errors, told, strict=True):
        assert error.msg.startswith(f"{name} is routed to database 'other'")
        assert error.hint is not None and "'default'" in error.hint


@pytest.mark.parametrize(
    "routers",
    [
        (),
        (Router(),),
        (Router(Job="default", JobAttempt="default"),),
        (Router(Business="other"), Router(Job="default")),
    ],
    ids=len,
)
def test_a_router_that_leaves_our_rows_together(routers: tuple[Router, ...]) -> None:
    with routed(*routers):
        assert ours() == []


def test_the_first_router_decides() -> None:
    with routed(Router(Job="default", JobAttempt="default"), Router(Job="other")):
        assert ours() == []


# E004: the database ---------------------------------------------------------------------------


def test_a_database_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections["default"], "vendor", "oracle", raising=False)
    [error] = ours()
    assert error.id == "django_durable_jobs.E004"
    assert error.msg == "Durable jobs live in PostgreSQL or SQLite, not in oracle."
    with pytest.raises(InvalidOptions, match="not in oracle: point"):
        build_options()


def test_a_sqlite_that_is_too_old(monkeypatch: pytest.MonkeyPatch, is_postgres: bool) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    if is_postgres:
        assert ours() == []
        return
    [error] = ours()
    assert error.id == "django_durable_jobs.E004"
    assert "need SQLite 3.35.0 or later" in error.msg and "3.34.1" in error.msg
    with pytest.raises(InvalidOptions, match=r"need SQLite 3\.35\.0"):
        build_options()


# Warnings -------------------------------------------------------------------------------------


def test_a_pruning_that_does_not_come_is_told() -> None:
    with override_settings(DURABLE_JOBS={"PRUNE_AFTER_DAYS": 30}):
        [warning] = ours()
    assert warning.id == "django_durable_jobs.W004"
    assert warning.hint == "Run: manage.py jobs prune --days 30"


@pytest.mark.parametrize("mode", [None, "DEFERRED", "IMMEDIATE", "EXCLUSIVE"])
def test_deferred_transactions_on_sqlite_are_told(
    mode: str | None, monkeypatch: pytest.MonkeyPatch, is_postgres: bool
) -> None:
    options = {} if mode is None else {"transaction_mode": mode}
    monkeypatch.setitem(connections["default"].settings_dict, "OPTIONS", options)
    found = ours("django_durable_jobs.W003")
    if is_postgres or mode in ("IMMEDIATE", "EXCLUSIVE"):
        assert found == []
    else:
        [warning] = found
        assert "begin deferred" in warning.msg
        assert '"transaction_mode": "IMMEDIATE"' in str(warning.hint)


def test_every_check_is_documented() -> None:
    root = Path(__file__).parent.parent
    page = (root / "docs" / "checks.md").read_text()
    used = set(re.findall(r"django_durable_jobs\.[EW]\d{3}", inspect.getsource(our_checks)))
    assert used == set(re.findall(r"^\| `(django_durable_jobs\.[EW]\d{3})`", page, re.MULTILINE))


# Silencing, and the command -------------------------------------------------------------------


def test_a_silenced_check_is_not_told() -> None:
    with override_settings(
        DURABLE_JOBS={"COLOUR": "red"}, SILENCED_SYSTEM_CHECKS=["django_durable_jobs.E001"]
    ):
        [error] = ours("django_durable_jobs.E001")
        assert error.is_silenced()
        call_command("check", tags=["durable_jobs"])


def test_manage_check_prints_the_sentence() -> None:
    result = manage("check", env=environment(DURABLE_JOBS={"LEASE_SECONDS": "long"}))
    assert result.returncode == 1
    assert 'DURABLE_JOBS["LEASE_SECONDS"] must be a number of seconds' in result.stderr
    assert "django_durable_jobs.E001" in result.stderr
    assert TRACEBACK not in result.stderr


# The worker's start ---------------------------------------------------------------------------


def refusal(**options: Any) -> str:
    with pytest.raises(InvalidOptions) as caught:
        build_options(**options)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".")
    return sentence


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"database": "elsewhere"}, '--database "elsewhere" is not in DATABASES: use one of'),
        ({"drain": True, "once": True}, "give --drain or --once, not both"),
        ({"processes": -1}, "--processes must be a whole number from 0 to 1000"),
        ({"processes": 1001}, "--processes must be a whole number from 0 to 1000"),
        ({"threads": 0}, "--threads must be a whole number from 1 to 1000"),
        ({"threads": True}, "--threads must be a whole number from 1 to 1000"),
        ({"threads": 1001}, "--threads must be a whole number from 1 to 1000"),
        ({"max_jobs": 0}, "--max-jobs must be a whole number from 1"),
        ({"name": " "}, "--name must not be blank"),
        ({"name": "a\x1b[31m"}, "--name must be printable text"),
        ({"name": "n" * 191}, "--name must have 1 to 190 characters"),
        ({"queues": ""}, "--queues must have 1 to 100 characters"),
        ({"queues": "a,,b"}, "Write queue names with commas between them"),
        ({"exclude_queues": "q" * 101}, "--exclude-queues must have 1 to 100 characters"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options: dict[str, Any], told: str) -> None:
    assert told in refusal(**options)


def test_options_win_over_settings() -> None:
    with override_settings(DURABLE_JOBS={"QUEUES": ["a"], "THREADS": 3, "PROCESSES": 2}):
        plain = build_options()
        chosen = build_options(
            queues="b, c", exclude_queues="c", threads=1, processes=0, name="me", max_jobs=5
        )
    assert (plain.alias, plain.queues, plain.threads, plain.processes) == ("default", ("a",), 3, 2)
    assert plain.name and plain.max_jobs is None and not plain.until_idle
    assert (chosen.queues, chosen.threads, chosen.processes) == (("b", "c"), 1, 0)
    assert (chosen.name, chosen.max_jobs) == ("me", 5)
    assert chosen.excluded_queues == ("c",)


def test_bad_settings_refuse_the_start_whatever_handlers_there_are() -> None:
    with registry.temporary(), override_settings(DURABLE_JOBS={"MAX_TIMEOUT_SECONDS": "x"}):

        @job("tests.slow", timeout=60)
        def slow(ctx: Any) -> None: ...

        assert '["MAX_TIMEOUT_SECONDS"] must be a number' in refusal()


def test_a_handler_that_cannot_run_refuses_the_start() -> None:
    with registry.temporary(), override_settings(DURABLE_JOBS={"MAX_TIMEOUT_SECONDS": 59}):

        @job("tests.slow", timeout=60)
        def slow(ctx: Any) -> None: ...

        assert "tests.slow" in refusal()


@pytest.mark.parametrize("lease", [30, 29.9])
def test_on_sqlite_a_lease_outlasts_the_timeout(lease: float, is_postgres: bool) -> None:
    with override_settings(DURABLE_JOBS={"LEASE_SECONDS": lease, "TIMEOUT_SECONDS": 30}):
        if is_postgres:
            build_options()
        else:
            assert 'must be longer than "TIMEOUT_SECONDS" (30) on SQLite' in refusal()
    with override_settings(DURABLE_JOBS={"LEASE_SECONDS": 30.001, "TIMEOUT_SECONDS": 30}):
        build_options()


def test_on_sqlite_a_lease_outlasts_each_handler(is_postgres: bool) -> None:
    with registry.temporary(), override_settings(DURABLE_JOBS={"LEASE_SECONDS": 60}):

        @job("tests.slow", timeout=60)
        def slow(ctx: Any) -> None: ...

        if is_postgres:
            build_options()
        else:
            assert '"tests.slow" has a timeout of 60 s' in refusal()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (":memory:", "SQLite in memory"),
        ("file:memorydb_default?mode=memory&cache=shared", "SQLite in memory"),
        (str(Path(__file__).parent), "is a folder: name a file"),
    ],
)
def test_the_worker_needs_a_file(
    name: str, told: str, monkeypatch: pytest.MonkeyPatch, is_postgres: bool
) -> None:
    if is_postgres:
        assert dialect_for("default").vendor == "postgresql"
        pytest.skip("only SQLite has databases in memory")
    monkeypatch.setitem(connections["default"].settings_dict, "NAME", name)
    assert told in refusal()


def test_the_command_gives_the_sentence_and_the_code() -> None:
    with pytest.raises(CommandError) as caught:
        call_command("runjobs", threads=0)
    assert caught.value.returncode == 2
    assert "--threads must be a whole number" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "durable_jobs", "told"),
    [
        (["--drain"], {"LEASE_SECONDS": "long"}, 'DURABLE_JOBS["LEASE_SECONDS"] must be a number'),
        (["--drain"], {"COLOUR": "red"}, "DURABLE_JOBS has no key 'COLOUR'"),
        (["--drain", "--threads", "0"], {}, "--threads must be a whole number from 1 to 1000"),
        (["--database", "elsewhere"], {}, '--database "elsewhere" is not in DATABASES'),
    ],
    ids=str,
)
def test_a_worker_with_bad_options_ends_with_2(
    arguments: list[str], durable_jobs: dict[str, Any], told: str
) -> None:
    result = manage("runjobs", *arguments, env=environment(DURABLE_JOBS=durable_jobs))
    assert (result.returncode, result.stdout) == (2, "")
    [line] = result.stderr.splitlines()
    assert line.startswith("CommandError: ") and told in line


def test_an_option_that_is_no_number_ends_with_2() -> None:
    result = manage("runjobs", "--threads", "many", env=environment())
    assert result.returncode == 2
    assert "argument --threads: invalid int value: 'many'" in result.stderr
    assert TRACEBACK not in result.stderr


# E005: leases ---------------------------------------------------------------------------------


def test_a_lease_that_cannot_hold_a_timeout_is_told_before_a_worker_starts(
    is_postgres: bool,
) -> None:
    with registry.temporary(), override_settings(DURABLE_JOBS={"LEASE_SECONDS": 20}):

        @job("tests.slow", timeout=20)
        def slow(ctx: Any) -> None: ...

        found = [error.msg for error in ours("django_durable_jobs.E005")]
    if is_postgres:
        assert found == []
    else:
        by_setting, by_handler = found
        assert "TIMEOUT_SECONDS" in by_setting
        assert '"tests.slow"' in by_handler
