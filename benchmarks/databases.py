"""The databases under measurement: an empty one for each probe, as durable for either side."""

from __future__ import annotations

import abc
import itertools
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg

_numbers = itertools.count(1)


class NotDurable(Exception):
    """The server does not sync: its figures would compare with nothing."""


class Database(abc.ABC):
    """One kind of database. A place is the URL of one database of that kind."""

    name: str

    @abc.abstractmethod
    def create(self, base: str | None = None) -> str:
        """Make an empty database, or a copy of ``base``; give its URL."""

    @abc.abstractmethod
    def drop(self, place: str) -> None: ...

    @abc.abstractmethod
    def settle(self, place: str) -> None:
        """Write out what is still in memory or in the log, so that no run pays for another."""

    @abc.abstractmethod
    def connect(self, place: str) -> Any:
        """Give a context manager: a function that runs a statement and gives its first value."""

    @abc.abstractmethod
    def describe(self) -> dict[str, str]:
        """Give version and settings."""


class SQLite(Database):
    name = "sqlite"

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def create(self, base: str | None = None) -> str:
        path = self._directory / f"{next(_numbers)}.sqlite3"
        if base is not None:
            self.settle(base)
            shutil.copyfile(_path(base), path)
        return f"sqlite:///{path}"

    def drop(self, place: str) -> None:
        for suffix in ("", "-wal", "-shm"):
            Path(f"{_path(place)}{suffix}").unlink(missing_ok=True)

    def settle(self, place: str) -> None:
        with closing(sqlite3.connect(_path(place))) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    @contextmanager
    def connect(self, place: str) -> Iterator[Any]:
        with closing(sqlite3.connect(_path(place), timeout=20)) as connection:
            yield lambda sql: connection.execute(sql).fetchone()[0]

    def describe(self) -> dict[str, str]:
        return {
            "version": sqlite3.sqlite_version,
            "journal_mode": "WAL",
            "synchronous": "NORMAL",
            "transaction_mode": "IMMEDIATE",
        }


class Postgres(Database):
    name = "postgres"

    def __init__(self, url: str) -> None:
        self._url = url
        settings = self.describe()
        if "off" in (settings["fsync"], settings["synchronous_commit"]):
            raise NotDurable(f"this PostgreSQL does not sync: {settings}")

    def create(self, base: str | None = None) -> str:
        name = f"benchmark_{next(_numbers)}"
        copied = f" TEMPLATE {_database(base)} STRATEGY file_copy" if base else ""
        self._administer(f"CREATE DATABASE {name}{copied}")
        return urlunsplit(urlsplit(self._url)._replace(path=f"/{name}"))

    def drop(self, place: str) -> None:
        self._administer(f"DROP DATABASE IF EXISTS {_database(place)} WITH (FORCE)")

    def settle(self, place: str) -> None:
        self._administer("CHECKPOINT")

    @contextmanager
    def connect(self, place: str) -> Iterator[Any]:
        with psycopg.connect(place, autocommit=True) as connection:
            yield lambda sql: connection.execute(sql).fetchone()[0]

    def describe(self) -> dict[str, str]:
        names = ("fsync", "synchronous_commit", "full_page_writes", "shared_buffers")
        with self.connect(self._url) as first:
            found = {name: first(f"SHOW {name}") for name in names}
            return {"version": first("SHOW server_version"), **found}

    def _administer(self, sql: str) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute(sql)


def _path(place: str) -> str:
    return place.removeprefix("sqlite:///")


def _database(place: str) -> str:
    return urlsplit(place).path.removeprefix("/")
