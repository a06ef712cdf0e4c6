"""What a worker was asked to do: options over settings, checked before anything starts."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from .. import conf
from ..clock import host_now
from ..conf import settings
from ..dialects import dialect_for, version_problems
from ..exceptions import InvalidSubmission
from ..handlers import registry
from ..payloads import check_text
from ..policies import lease_problems
from ..schedules.declaration import registry as schedules

# Queue names: text with commas between them or, from Python, a list or tuple.
QueueNames = str | list[str] | tuple[str, ...]


class InvalidOptions(Exception):
    """An option or a setting cannot be used; the text says what to write (exit code 2)."""


class MigrationsMissing(Exception):
    """A migration of ours is not applied (exit code 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """A worker's options; durations in seconds."""

    alias: str
    name: str
    queues: tuple[str, ...] | None
    excluded_queues: tuple[str, ...]
    processes: int
    threads: int
    drain: bool = False
    once: bool = False
    max_jobs: int | None = None
    max_runtime: float | None = None
    max_memory: int | None = None
    heartbeat_file: Path | None = None
    reload: bool = False
    schedules: bool = True

    @property
    def until_idle(self) -> bool:
        return self.drain or self.once

    @property
    def banner(self) -> str:
        """Who serves what, in one line."""
        processes = 0 if self.until_idle or self.reload else self.processes
        return (
            f"Worker {self.name} on database {self.alias}: {self._served};"
            f" {max(processes, 1)} x {self.threads} slots."
        )

    @property
    def _served(self) -> str:
        if self.queues is not None:
            return ", ".join(one for one in self.queues if one not in self.excluded_queues)
        but = f" but {', '.join(self.excluded_queues)}" if self.excluded_queues else ""
        return f"all queues{but}"

    @property
    def fires_schedules(self) -> bool:
        """Whether a schedule is declared, and this is a worker that stays."""
        return self.schedules and not self.until_idle and bool(schedules.all())


def on_the_command_line(argument: str) -> str:
    """Write an argument as an option."""
    return f"--{argument.replace('_', '-')}"


def in_python(argument: str) -> str:
    """Write an argument as a keyword argument."""
    return argument


def build_options(
    *,
    database: str | None = None,
    name: str | None = None,
    queues: QueueNames | None = None,
    exclude_queues: QueueNames | None = None,
    processes: int | None = None,
    threads: int | None = None,
    drain: bool = False,
    once: bool = False,
    max_jobs: int | None = None,
    max_runtime: float | None = None,
    max_memory: int | None = None,
    heartbeat_file: str | None = None,
    reload: bool = False,
    no_schedules: bool = False,
    written: Callable[[str], str] = on_the_command_line,
) -> WorkerOptions:
    """Check options and settings; raise ``InvalidOptions`` with one sentence.

    ``written`` says how whoever gave them has written an argument's name.
    """
    # Handlers are judged by settings, so only by good ones, and schedules by good handlers.
    for problem in conf.problems() or registry.problems() or schedules.problems():
        raise InvalidOptions(problem)
    if drain and once:
        raise InvalidOptions("give --drain or --once, not both.")
    if reload and (drain or once):
        raise InvalidOptions("--reload is for a worker that stays: not with --drain or --once.")
    options = WorkerOptions(
        alias=_alias(written("database"), settings.DATABASE if database is None else database),
        name=_own_name() if name is None else _name(written("name"), name),
        queues=_queues(written("queues"), queues) or _configured_queues(),
        excluded_queues=_queues(written("exclude_queues"), exclude_queues) or (),
        processes=_whole("--processes", _first(processes, settings.PROCESSES), 0, 1000),
        threads=_threads(written("threads"), _first(threads, settings.THREADS)),
        drain=drain,
        once=once,
        max_jobs=None if max_jobs is None else _whole("--max-jobs", max_jobs, 1, 2**63 - 1),
        max_runtime=None if max_runtime is None else _runtime(max_runtime),
        max_memory=None if max_memory is None else _whole("--max-memory", max_memory, 1, 2**40),
        heartbeat_file=None if heartbeat_file is None else _heartbeat_file(heartbeat_file),
        reload=reload,
        schedules=not no_schedules,
    )
    if options.queues is not None and not set(options.queues) - set(options.excluded_queues):
        raise InvalidOptions(
            f"{written('exclude_queues')} leaves no queue of {written('queues')}:"
            " name one to serve."
        )
    _check_database(options)
    return options


def check_arguments(
    *,
    queues: QueueNames | None = None,
    exclude_queues: QueueNames | None = None,
    threads: int | None = None,
    name: str | None = None,
    database: str | None = None,
    schedules: bool = True,
) -> None:
    """Check what was given from Python, before anything else may be known."""
    if database is not None:
        _alias(in_python("database"), database)
    if name is not None:
        _name(in_python("name"), name)
    if threads is not None:
        _threads(in_python("threads"), threads)
    _queues(in_python("queues"), queues)
    _queues(in_python("exclude_queues"), exclude_queues)
    if not isinstance(schedules, bool):
        raise InvalidOptions("schedules must be True or False.")


def _alias(option: str, alias: Any) -> str:
    if not isinstance(alias, str) or alias not in connections.databases:
        raise InvalidOptions(
            f'{option} "{alias}" is not in DATABASES: use one of'
            f" {', '.join(sorted(connections.databases))}."
        )
    return alias


def _own_name() -> str:
    return f"{socket.gethostname()[:150]}:{os.getpid()}:{host_now() % 1_000_000:06d}"


def _name(option: str, name: str) -> str:
    try:
        check_text(option, name, 1, 190)
    except InvalidSubmission as error:
        raise InvalidOptions(str(error)) from None
    if not name.isprintable():
        raise InvalidOptions(f"{option} must be printable text: terminals and logs show it.")
    return name


def _queues(option: str, given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    if not isinstance(given, str | list | tuple) or given in ([], ()):
        raise InvalidOptions(f"{option} must name queues: text with commas, or a list of names.")
    names = [part.strip() for part in given.split(",")] if isinstance(given, str) else given
    try:
        return tuple(check_text(option, one, 1, 100) for one in names)
    except InvalidSubmission as error:
        hint = " Write queue names with commas between them." if names is not given else ""
        raise InvalidOptions(f"{error}{hint}") from None


def _threads(option: str, threads: Any) -> int:
    return _whole(option, threads, 1, 1000)


def _configured_queues() -> tuple[str, ...] | None:
    configured: Sequence[str] | None = settings.QUEUES
    return None if configured is None else tuple(configured)


def _first(given: int | None, configured: int) -> int:
    return configured if given is None else given


def _whole(option: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidOptions(f"{option} must be a whole number from {low} to {high}.")
    return value


def _runtime(seconds: float) -> float:
    if not 0 < seconds < math.inf:
        raise InvalidOptions("--max-runtime must be a number of seconds above 0.")
    return seconds


def _heartbeat_file(path: str) -> Path:
    file = Path(path).absolute()
    if file.is_dir():
        raise InvalidOptions(f'--heartbeat-file "{path}" is a folder: name a file in it.')
    try:
        file.touch()
    except OSError as error:
        raise InvalidOptions(
            f'--heartbeat-file "{path}" cannot be written ({error.strerror}): name a file in a'
            " folder that this user may write to."
        ) from None
    return file


def _check_database(options: WorkerOptions) -> None:
    """Refuse what cannot hold on this database (CONTRACT 4.1, 4.6)."""
    try:
        dialect = dialect_for(options.alias)
    except ImproperlyConfigured as error:
        raise InvalidOptions(str(error)) from None
    for problem in version_problems(options.alias):
        raise InvalidOptions(problem)
    if dialect.vendor != "sqlite":
        return
    connection = connections[options.alias]
    database = str(connection.settings_dict["NAME"])
    # In a test that file was swapped for the test database's.
    if not connection.in_atomic_block and (":memory:" in database or "mode=memory" in database):
        raise InvalidOptions(
            f'database "{options.alias}" is SQLite in memory, which other threads cannot see:'
            ' give it a file (in tests by "TEST": {"NAME": ...} of that database).'
        )
    if Path(database).is_dir():
        raise InvalidOptions(f'the NAME of database "{options.alias}" is a folder: name a file.')
    for problem in lease_problems(options.alias):
        raise InvalidOptions(problem)
