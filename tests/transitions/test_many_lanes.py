"""Claims over many lanes, such as a queue for each tenant: order and effort (CONTRACT 4.1)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_durable_jobs import JobSubmission, job
from django_durable_jobs.dialects.base import JOBS
from django_durable_jobs.handlers import registry
from django_durable_jobs.models import Job
from django_durable_jobs.transitions import claims
from tests.racing import held

pytestmark = pytest.mark.django_db(transaction=True)
BATCH = 16
# More heads than a claim on PostgreSQL looks at together.
LOCKED = 150


def free() -> Any:
    @job("lanes.free", timeout=0.01)
    def handler(ctx: Any, payload: str) -> None: ...

    return handler


def keyed() -> Any:
    @job("lanes.keyed", timeout=0.01, concurrency=1, concurrency_key=lambda payload: payload)
    def handler(ctx: Any, payload: str) -> None: ...

    return handler


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    with registry.temporary():
        yield


# Claimed by one statement, or picked and locked in a transaction.
each_handler = pytest.mark.parametrize("declare", [free, keyed])


def submit(handler: Any, lanes: int, *, each: int = 1) -> list[int]:
    """Submit jobs of any priority, a queue for each lane; give their ids in the claim's order."""
    chosen = random.Random(lanes)  # noqa: S311 (only an order)
    jobs = Job.objects.submit_many(
        [
            JobSubmission.create(
                handler, f"{lane}-{number}", queue=f"tenant-{lane}", priority=chosen.randint(0, 99)
            )
            for lane in range(lanes)
            for number in range(each)
        ]
    )
    assert len(jobs) == lanes * each
    return list(Job.objects.order_by("-priority", "run_at", "id").values_list("pk", flat=True))


def claim(limit: int = BATCH) -> list[int]:
    lanes = claims.queued_lanes("default")
    found = claims.claim("default", lanes, limit=limit, worker="w", lease_seconds=600)
    return [one.id for one in found]


@each_handler
@pytest.mark.parametrize(("lanes", "each"), [(200, 3), (3000, 1)])
def test_the_first_jobs_of_all_lanes_are_claimed_in_order(
    declare: Callable[[], Any], lanes: int, each: int
) -> None:
    expected = submit(declare(), lanes, each=each)
    for first in range(0, 5 * BATCH, BATCH):
        assert claim() == expected[first : first + BATCH]
    rest = expected[5 * BATCH :]
    assert claim(100) == rest[:100], "also where more are wanted than lanes are looked at"


def test_ten_thousand_lanes_are_claimed_from() -> None:
    expected = submit(free(), 10_000)
    assert claim() == expected[:BATCH]


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite asks 200 lanes at a time")
@each_handler
def test_no_statement_is_sent_for_each_lane(declare: Callable[[], Any]) -> None:
    handler = declare()
    counts = []
    for lanes in (200, 2000):
        submit(handler, lanes)
        wanted = claims.queued_lanes("default")
        with CaptureQueriesContext(connection) as sent:
            assert claims.claim("default", wanted, limit=BATCH, worker="w", lease_seconds=600)
        counts.append(len(sent))
        Job.objects.all().delete()
    assert counts[0] == counts[1] < 20


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite locks no rows")
@each_handler
def test_what_others_have_locked_hides_no_other_lane(declare: Callable[[], Any]) -> None:
    expected = submit(declare(), 300)

    def lock() -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT 1 FROM {JOBS} WHERE id = ANY(%s) FOR UPDATE", [expected[:LOCKED]]
            )

    with held(lock):
        assert claim() == expected[LOCKED : LOCKED + BATCH]
        assert set(claim(300)) <= set(expected[LOCKED:])
        while claim(300):
            pass
        assert not Job.objects.filter(pk__in=expected[LOCKED:]).exclude(status="running").exists()
    assert claim() == expected[:BATCH]


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite asks 200 lanes at a time")
@each_handler
def test_many_lanes_of_which_nothing_is_due_cost_one_statement(
    declare: Callable[[], Any],
) -> None:
    submit(declare(), 300)
    wanted = claims.queued_lanes("default")
    Job.objects.all().delete()
    with CaptureQueriesContext(connection) as sent:
        assert not claims.claim("default", wanted, limit=BATCH, worker="w", lease_seconds=600)
    assert sum("unnest" in one["sql"] for one in sent) == 1
    assert not any("SKIP LOCKED" in one["sql"] for one in sent)
