"""The admin's queries on a large table: each walks an index (FAULTS 24)."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_durable_jobs.admin import search
from django_durable_jobs.models import Job
from tests._admin import job_url, list_url, staff

pytestmark = pytest.mark.django_db

ROWS = 20_000
TABLE = "django_durable_jobs_job"
COLUMNS = {
    "scope": "'s' || (n.i % 20)",
    "scope_hash": "'hash' || (n.i % 20)",
    "job_id": "'o-' || n.i",
    "handler": "CASE WHEN n.i % 997 = 0 THEN 'rare.one' ELSE 'orders.ship' END",
    "handler_version": "1",
    "payload": "'null'",
    "payload_sha256": "'x'",
    "fingerprint": "'f'",
    "submitted_queue": "'default'",
    "submitted_priority": "0",
    "max_attempts": "3",
    "timeout": "30",
    "retry_on_interrupt": "true",
    "created_at": "%(newest)s - (%(rows)s - n.i) * CAST(10000000 AS bigint)",
    "queue": "'default'",
    "priority": "0",
    "status": (
        "CASE WHEN n.i % 1000 = 1 THEN 'failed' WHEN n.i % 1000 = 2 THEN 'blocked'"
        " WHEN n.i % 500 = 3 THEN 'scheduled' WHEN n.i % 1000 = 4 THEN 'queued'"
        " WHEN n.i % 2000 = 5 THEN 'running' ELSE 'succeeded' END"
    ),
    "limit_waiting": "false",
    "run_at": "%(newest)s - (%(rows)s - n.i) * CAST(10000000 AS bigint)",
    "attempt_count": "1",
    "granted_attempts": "0",
    "progress": "0",
    "progress_message": "''",
}


@pytest.fixture
def many_jobs() -> None:
    """Store 20,000 jobs, one each ten seconds up to now, most of them succeeded."""
    numbers = {"newest": time.time_ns() // 1000, "rows": ROWS}
    values = [
        expression % numbers if "(newest)" in expression else expression
        for expression in COLUMNS.values()
    ]
    status = COLUMNS["status"]
    finished = f"CASE WHEN {status} IN ('failed', 'succeeded') THEN 1 END"
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            # A new file: what other tests have left dead in the old one would make it look dear.
            cursor.execute(f"TRUNCATE {TABLE} CASCADE")
        cursor.execute(
            f"INSERT INTO {TABLE} ({', '.join(COLUMNS)}, finished_at)"
            f" WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {ROWS})"
            f" SELECT {', '.join(values)}, {finished} FROM n"
        )
        cursor.execute(f"ANALYZE {TABLE}")


def plans(captured: CaptureQueriesContext) -> list[str]:
    """Give the plan of each captured query that reads jobs."""
    explain = "EXPLAIN" if connection.vendor == "postgresql" else "EXPLAIN QUERY PLAN"
    queries = [one["sql"] for one in captured if TABLE in one["sql"]]
    found = []
    with connection.cursor() as cursor:
        for sql in queries:
            cursor.execute(f"{explain} {sql}")
            found.append("\n".join(str(row[-1]) for row in cursor.fetchall()))
    assert found
    return found


def assert_walks_an_index(plan: str) -> None:
    if connection.vendor == "postgresql":
        assert not re.search(rf"Seq Scan on {TABLE}\b", plan), plan
        return
    # SQLite calls the walk along the primary key a scan as well. What it sorts must come out
    # of a partial index, which holds few rows; ours are the only ones with a name.
    assert "TEMP B-TREE FOR ORDER BY" not in plan or "INDEX durable_job_" in plan, plan


@pytest.mark.usefixtures("many_jobs")
@pytest.mark.parametrize(
    "query",
    [
        {},
        {"p": "3"},
        {"status__exact": "succeeded"},
        {"status__exact": "failed"},
        {"status__exact": "blocked"},
        {"status__exact": "running"},
        {"status__exact": "scheduled"},
        {"status__exact": "queued"},
        {"created": "hour"},
        {"created": "day"},
        {"created": "hour", "status__exact": "failed"},
        {"q": "o-77"},
        {"q": "12345678"},
        {"q": "orders."},
        {"q": "rare."},
        {"q": "nothing"},
        {"o": "1"},
    ],
)
def test_the_list_never_reads_the_whole_table(
    query: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "HANDLER_WINDOW", 1000)
    client = staff("view_job")
    with CaptureQueriesContext(connection) as captured:
        response = client.get(list_url(), query)
    assert response.status_code == 200
    assert response.context["cl"].result_list.ordered
    for plan in plans(captured):
        assert_walks_an_index(plan)


@pytest.mark.usefixtures("many_jobs")
def test_a_job_is_read_by_its_keys() -> None:
    client = staff("view_job")
    one = Job.objects.filter(status="queued").latest("pk")
    with CaptureQueriesContext(connection) as captured:
        assert client.get(job_url(one)).status_code == 200
    for plan in plans(captured):
        assert_walks_an_index(plan)


@pytest.mark.usefixtures("many_jobs")
def test_what_is_found_is_right_in_a_large_table() -> None:
    client = staff("view_job")

    def count(**query: str) -> int:
        return int(client.get(list_url(), query).context["cl"].result_count)

    # One job each ten seconds; the clock has gone on, by five minutes at most.
    assert 330 <= count(created="hour") <= 360
    assert 8610 <= count(created="day") <= 8640
    assert count(created="week") == 10_001
    assert count(q="o-77") == 1
    assert count(q="rare.") == ROWS // 997
    assert count(status__exact="failed") == ROWS // 1000
