"""The token of an attempt: random, and beginning with the claim's millisecond (CONTRACT 3.1)."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest

from django_durable_jobs.instants import to_microseconds
from django_durable_jobs.models import JobAttempt
from django_durable_jobs.testing import FakeClock
from django_durable_jobs.transitions.claims import claim, queued_lanes
from tests.testapp.jobs import Line, line

pytestmark = pytest.mark.django_db

JOBS = 50


def tokens_of_a_claim() -> list[str]:
    line.submit_many(Line("", 0) for _ in range(JOBS))
    claimed = claim("default", queued_lanes("default"), limit=JOBS, worker="w", lease_seconds=60)
    return [one.token for one in claimed]


@pytest.mark.parametrize("year", [1, 1969, 2026, 9999])
def test_a_token_is_random_behind_the_instant(year: int) -> None:
    with FakeClock(datetime(year, 1, 1, tzinfo=UTC)):
        tokens = tokens_of_a_claim()
    assert all(re.fullmatch("[0-9a-f]{32}", token) for token in tokens)
    # Some of the digits before these are fixed in a UUID.
    assert len({token[-15:] for token in tokens}) == JOBS
    for place in range(-15, 0):
        assert len({token[place] for token in tokens}) > 1, place
    assert set(JobAttempt.objects.values_list("token", flat=True)) == set(tokens)


def test_later_tokens_stand_at_the_end_of_the_index() -> None:
    with FakeClock(datetime(2026, 1, 1, tzinfo=UTC)) as clock:
        first = tokens_of_a_claim()
        milliseconds = to_microseconds(clock.now) // 1000
        clock.advance(0.001)
        second = tokens_of_a_claim()
    assert max(first) < min(second)
    assert {int(token[:11], 16) for token in first} == {milliseconds}
