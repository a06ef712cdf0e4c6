"""What limits ask costs the same beside any number of full keys and of jobs that wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection

from django_durable_jobs import job
from django_durable_jobs.clock import host_now
from django_durable_jobs.dialects.base import ATTEMPTS, JOBS, Lane
from django_durable_jobs.handlers import registry
from django_durable_jobs.models import Job
from django_durable_jobs.transitions import claims, limits, maintenance, places, recovery
from django_durable_jobs.worker.passes import Serving

from .test_query_plans import (
    FULL_SCAN,
    HOUR,
    LIMIT,
    STATISTICS,
    assert_walks,
    filled,
    insert,
    plan,
    statements,
)

pytestmark = pytest.mark.django_db

KEYS = 400
EACH = 50


def keyed(ctx: Any, key: str) -> None: ...


def lane() -> Lane:
    handler = registry.get("plans.keyed", 1)
    assert handler is not None
    return Lane(queue="default", handler=handler.name, version=1, fingerprint=handler.fingerprint)


def fill() -> None:
    """Full keys with many jobs that wait, before all others; keys of history; a few to claim."""
    now = host_now()
    of_key = {"lane": lane(), "concurrency_key": f"'k' || (n % {KEYS})"}
    ended = f"{now - HOUR} + n"
    insert(KEYS * EACH, status="'succeeded'", finished_at=ended, **of_key)
    ahead = {"priority": "100", "limit_waiting": "true"}
    insert(KEYS * EACH, status="'queued'", job_id="'w' || n", **ahead, **of_key)
    runs = {"lease_token": "'t' || n", "attempt_count": "1", "lease_expires_at": f"{now + HOUR}"}
    insert(KEYS, status="'running'", **runs, **of_key)
    insert(40, status="'queued'", lane=lane(), concurrency_key="'free' || (n % 20)")
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {ATTEMPTS} (job_id, number, token, worker, status, started_at, progress)"
            f" SELECT id, 1, lease_token, 'w', 'running', {now}, 0 FROM {JOBS}"
            " WHERE status = 'running'"
        )


@pytest.fixture(scope="module", params=STATISTICS)
def crowd(
    request: pytest.FixtureRequest, django_db_setup: None, django_db_blocker: Any
) -> Iterator[str]:
    """Fill the tables once for this module."""
    with registry.temporary(), django_db_blocker.unblock():
        job("plans.keyed", concurrency=1, concurrency_key=lambda key: key, timeout=1)(keyed)
        with filled(fill, request.param):
            yield request.param


def claim(limit: int = 16) -> list[claims.ClaimedJob]:
    return claims.claim("default", [lane()], limit=limit, worker="w", lease_seconds=60)


def claims_some() -> None:
    assert len(claim()) == 16


def claims_all_that_is_free() -> None:
    """Twenty are taken; those that are sent to wait are the twenty others."""
    assert len(claim(64)) == 20


def finishes() -> None:
    held = Job.objects.filter(status="running").order_by("handler", "concurrency_key", "id")[:16]
    rows = [(one.pk, one.lease_token) for one in held]
    assert len(claims.give_back("default", rows)) == 16


def looks_who_waits() -> None:
    assert maintenance.waiting("default", recover=False).let_in


def lets_in() -> None:
    limits._looked_at.clear()
    assert limits.let_in_free("default", Serving.everything()) == 0


def recovers() -> None:
    assert recovery.recover_expired("default") == 0


def tells() -> None:
    found = Job.objects.in_scope("").get(job_id="w7").limit()
    assert found is not None and found.running == 1


def counts_who_waits() -> None:
    assert places.waiting_at_limits("default").jobs == KEYS * EACH


# A pass looks at so many keys, each by a few descents; SQLite's steps count them too high.
LIMITS = {
    lets_in: 50 * limits.KEYS,
    claims_all_that_is_free: 2 * LIMIT,
    finishes: 2 * LIMIT,
}

WORK: list[tuple[Callable[[], None], tuple[str, ...]]] = [
    (claims_some, ("durable_job_claim", "durable_job_running")),
    (claims_all_that_is_free, ("durable_job_claim", "durable_job_running", "durable_job_limit")),
    (finishes, ("durable_job_limit",)),
    (looks_who_waits, ("durable_job_limit",)),
    (lets_in, ("durable_job_limit", "durable_job_running")),
    (recovers, ("durable_job_running",)),
    (tells, ("durable_job_running",)),
]


@pytest.mark.parametrize(("work", "indexes"), WORK, ids=lambda one: getattr(one, "__name__", ""))
def test_no_statement_of_limits_reads_who_waits(
    crowd: str, work: Callable[[], None], indexes: tuple[str, ...]
) -> None:
    limit = LIMITS.get(work, LIMIT)
    assert limit <= KEYS * EACH / 2
    assert_walks(indexes, work, limit=limit)


def test_an_index_counts_who_waits(crowd: str) -> None:
    [text] = [plan(sql) for sql in statements(counts_who_waits)]
    assert "durable_job_limit" in text and not FULL_SCAN.search(text), text
