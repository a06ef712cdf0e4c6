from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.test import override_settings

from django_durable_jobs.handlers import registry
from tests.racing import PATIENT

from .handlers import HANDLERS


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Register the handlers of ``handlers.py`` for one test, in which locks are waited for."""
    with registry.temporary(), override_settings(DURABLE_JOBS=PATIENT):
        for handler in HANDLERS:
            registry.register(handler)
        yield
