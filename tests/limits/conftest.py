from __future__ import annotations

from collections.abc import Iterator

import pytest

from django_durable_jobs.handlers import Registry, registry

from ..worker.conftest import durable_jobs, gate, start_worker

__all__ = ["durable_jobs", "gate", "start_worker"]


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[Registry]:
    """What a test registers with ``@job`` is forgotten afterwards."""
    with registry.temporary():
        yield registry
