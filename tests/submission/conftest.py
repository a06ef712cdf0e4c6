from __future__ import annotations

from collections.abc import Iterator

import pytest

from django_durable_jobs.handlers import registry

from .handlers import HANDLERS


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Register the handlers of ``handlers.py`` for one test."""
    with registry.temporary():
        for handler in HANDLERS:
            registry.register(handler)
        yield
