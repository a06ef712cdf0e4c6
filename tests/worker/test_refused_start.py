"""A database that lets nobody in refuses the start; one that may come is waited for (4.8, 4.10)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connection, connections

from django_durable_jobs.dialects import dialect_for
from django_durable_jobs.worker.loop import Worker
from django_durable_jobs.worker.options import build_options
from django_durable_jobs.worker.run import run_worker
from django_durable_jobs.worker.signals import Stop

from .conftest import StartWorker
from .support import until

pytestmark = pytest.mark.django_db(transaction=True)

postgres = pytest.mark.skipif(connection.vendor == "sqlite", reason="a file knows no roles")
sqlite = pytest.mark.skipif(connection.vendor != "sqlite", reason="a server, and no file")

ROLES = {
    "durable_test": "LOGIN PASSWORD 'right'",
    "durable_test_full": "LOGIN PASSWORD 'right' CONNECTION LIMIT 0",
    "durable_test_none": "NOLOGIN PASSWORD 'right'",
}


def execute(*statements: str) -> None:
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


@pytest.fixture
def roles(transactional_db: None) -> Iterator[None]:
    execute(*(f"CREATE ROLE {name} {options}" for name, options in ROLES.items()))
    yield
    execute(*(f"DROP ROLE {name}" for name in ROLES))


@pytest.fixture
def foreign(transactional_db: None) -> Iterator[str]:
    """A database that nobody but its owner may use."""
    name = f"durable_test_{os.getpid()}"
    execute(f"CREATE DATABASE {name}", f"REVOKE CONNECT ON DATABASE {name} FROM PUBLIC")
    yield name
    execute(f"DROP DATABASE {name}")


def refusal(**changes: Any) -> str | None:
    """Connect with other settings, which fails, and give what the dialect makes of that."""
    other = connections["default"].copy()
    other.settings_dict |= changes
    with pytest.raises(OperationalError) as failed:
        other.ensure_connection()
    assert dialect_for("default").is_transient(failed.value), "while it runs, it waits"
    return dialect_for("default").refusal(failed.value)


@postgres
def test_what_does_not_pass_is_told_from_what_may_by_the_code_alone(
    roles: None, foreign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"USER": "durable_test", "PASSWORD": "right"}
    assert refusal(**{**known, "PASSWORD": "wrong"}) == "SQLSTATE 28P01"
    assert refusal(**{**known, "PASSWORD": ""}) == "SQLSTATE 28P01"
    assert refusal(**{**known, "USER": "durable_test_nobody"}) == "SQLSTATE 28P01"
    assert refusal(**{**known, "USER": "durable_test_none"}) == "SQLSTATE 28000"
    assert refusal(NAME="durable_test_nothing") == "SQLSTATE 3D000"
    assert refusal(**known, NAME=foreign) == "SQLSTATE 42501"
    # Too many connections, nobody there, nobody known by that name.
    assert refusal(**{**known, "USER": "durable_test_full"}) is None
    assert refusal(PORT="1") is None
    assert refusal(HOST="durable-test.invalid") is None
    # Of two servers one is not there and may be the one that is meant; here the other refuses.
    both = {"HOST": "127.0.0.1,127.0.0.1", "PORT": f"1,{connection.settings_dict['PORT']}"}
    assert refusal(**both, **{**known, "PASSWORD": "wrong"}) == "SQLSTATE 28P01"
    # Where the code cannot be learned, there is no guess.
    monkeypatch.delattr(os, "memfd_create")
    assert refusal(**{**known, "PASSWORD": "wrong"}) is None


@postgres
def test_a_server_that_refuses_ends_the_start_with_2(start_worker: StartWorker) -> None:
    url = re.sub("//[^@]*@", "//durable_test_nobody:secret@", os.environ["DATABASE_URL"])
    worker = start_worker("--processes=1", variables={"DATABASE_URL": url})
    assert worker.ends() == 2, worker.output()
    (line,) = worker.output().splitlines()
    assert 'database "default" does not let this worker in: connection failed' in line
    assert line.endswith("(SQLSTATE 28P01)")
    assert "secret" not in line


@postgres
def test_from_the_start_to_the_end_no_connection_is_waited_for_without_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []
    wrapper = type(connections["default"])
    connect = wrapper.get_new_connection

    def get_new_connection(self: Any, conn_params: dict[str, Any]) -> Any:
        asked.append(conn_params)
        return connect(self, conn_params)

    monkeypatch.setattr(wrapper, "get_new_connection", get_new_connection)
    connections.close_all()
    stop = Stop()
    options = build_options(processes=0, threads=1)
    started: list[Worker] = []

    def work(worker: Worker) -> None:
        until(lambda: worker._presence._key is not None, "the worker's row")
        started.append(worker)

    monkeypatch.setattr(Worker, "_work", work)
    assert run_worker(options, owns_process=False, started=lambda options: None, stop=stop) == 0
    assert len(started) == 1
    assert [one for one in asked if one.get("connect_timeout") != 10] == []


@sqlite
@pytest.mark.parametrize(
    ("name", "code"), [("gone/file", "SQLITE_CANTOPEN"), ("text", "SQLITE_NOTADB")]
)
def test_a_file_that_is_no_database_ends_the_start_with_2(
    start_worker: StartWorker, tmp_path: Path, name: str, code: str
) -> None:
    (tmp_path / "text").write_text("no database " * 100)
    worker = start_worker(variables={"TEST_DATABASE_NAME": str(tmp_path / name)})
    assert worker.ends() == 2, worker.output()
    line, *others = worker.output().splitlines()
    # Python 3.13 in development mode finds the connection that Django left when it failed.
    assert all("ResourceWarning" in one for one in others), others
    assert 'database "default" does not let this worker in: ' in line
    assert line.endswith(f"({code})")
