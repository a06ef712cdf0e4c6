from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from django_durable_jobs.testing import FakeClock


@pytest.fixture
def clock() -> Iterator[FakeClock]:
    """The clock of this process, for leases that are over once the test says so.

    For moves alone that wait for no lock when it is advanced: it is read as they are sent.
    """
    with FakeClock(datetime.now(UTC)) as clock:
        yield clock
