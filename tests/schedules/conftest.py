from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from django_durable_jobs import JobContext, job
from django_durable_jobs.handlers import registry as handlers
from django_durable_jobs.schedules import passes
from django_durable_jobs.schedules.declaration import registry
from django_durable_jobs.testing import FakeClock
from tests.racing import PATIENT

from .support import START


@pytest.fixture(autouse=True)
def own_declarations() -> Iterator[None]:
    """What a test declares is forgotten afterwards, and nothing else is declared meanwhile."""
    with handlers.temporary(), registry.temporary():
        for known in registry.all():
            registry.remove(known.name)
        yield


@pytest.fixture(autouse=True)
def _patience(settings: Any) -> None:
    """Slow machines: nobody gives up on a lock, but where a test wants it."""
    settings.DURABLE_JOBS = PATIENT


@pytest.fixture
def tick() -> Any:
    """A handler that a schedule may name."""

    @job("tests.tick")
    def tick(ctx: JobContext) -> None: ...

    return tick


@pytest.fixture
def resting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of rests stands still: what has been put aside stays so, however slow we are."""
    monkeypatch.setattr(passes, "time", SimpleNamespace(monotonic=lambda: 0.0))


@pytest.fixture
def clock() -> Iterator[FakeClock]:
    """The clock of this process, at ``START``."""
    with FakeClock(START) as clock:
        yield clock
