"""The pytest fixtures of django-durable-jobs; pytest finds them by the entry point.

A module of its own: pytest imports it in every project of an environment where the package is
installed, so it must import nothing of Django, nor of the package, until a fixture is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from django_durable_jobs.handlers import Registry
    from django_durable_jobs.models import JobAttempt
    from django_durable_jobs.testing import FakeClock


@pytest.fixture
def durable_clock_start() -> datetime:
    """What ``durable_clock`` shows at first: this second. Override or parametrize it."""
    return datetime.now(UTC).replace(microsecond=0)


@pytest.fixture
def durable_clock(durable_clock_start: datetime) -> Iterator[FakeClock]:
    """A ``FakeClock`` that is in force for the whole test."""
    from django_durable_jobs.testing import FakeClock

    with FakeClock(durable_clock_start) as clock:
        yield clock


@pytest.fixture
def durable_drain(db: None) -> Callable[..., list[JobAttempt]]:
    """``django_durable_jobs.testing.drain``, with pytest-django's database.

    That is ``db``, unless the test asks for a transactional one.
    """
    from django_durable_jobs.testing import drain

    return drain


@pytest.fixture
def durable_handlers() -> Iterator[Registry]:
    """The registry of handlers; those that the test declares are forgotten at its end."""
    from django_durable_jobs.handlers import registry

    with registry.temporary():
        yield registry
