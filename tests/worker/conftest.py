from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from django_durable_jobs.handlers import Registry, registry
from django_durable_jobs.worker.heartbeat import Heartbeat
from django_durable_jobs.worker.overdue import HardLimit

from .support import QUICK, Gate, Process, Recorder, environment_with

StartWorker = Callable[..., Process]


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


@pytest.fixture
def start_worker(child_environment: dict[str, str], tmp_path: Path) -> Iterator[StartWorker]:
    """Start ``runjobs`` with arguments, from any thread; ``durable_jobs`` are its settings.

    The processes and their children are gone when the test is over.
    """
    started: list[Process] = []
    numbers = count()

    def start(
        *arguments: str,
        durable_jobs: dict[str, Any] = QUICK,
        variables: dict[str, str] | None = None,
        module: str = "django",
    ) -> Process:
        environment = environment_with(child_environment, durable_jobs, **(variables or {}))
        log = tmp_path / f"worker-{next(numbers)}.log"
        process = Process(environment, list(arguments), log, module=module)
        started.append(process)
        return process

    yield start
    for process in started:
        process.end_now()


@pytest.fixture
def handlers() -> Iterator[Registry]:
    """What the test registers with ``@job`` is forgotten afterwards."""
    with registry.temporary():
        yield registry


@pytest.fixture
def durable_jobs(settings: Any) -> Callable[..., None]:
    """Change keys of ``DURABLE_JOBS`` in this process."""

    def set_keys(**keys: Any) -> None:
        settings.DURABLE_JOBS = {**settings.DURABLE_JOBS, **keys}

    return set_keys


@pytest.fixture
def renewed_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of this process renew like those of short leases: nobody waits, nothing is lost."""
    monkeypatch.setattr(Heartbeat, "interval", lambda self: 0.2)


@pytest.fixture
def limited_from(monkeypatch: pytest.MonkeyPatch) -> Callable[[threading.Event], None]:
    """Let the hard limit of workers of this process wait for an event.

    What is to be stuck in one place is not taken for stuck while it is on the way there.
    """

    def hold(event: threading.Event) -> None:
        step = HardLimit.step
        monkeypatch.setattr(HardLimit, "step", lambda self: event.is_set() and step(self))

    return hold


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()
