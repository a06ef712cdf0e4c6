"""What a worker asks all day costs the same beside history, future work and a long backlog.

Each statement is caught as the package sends it, then explained in the same database.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_durable_jobs import job, pages
from django_durable_jobs.clock import host_now
from django_durable_jobs.dialects.base import ATTEMPTS, JOBS, Lane
from django_durable_jobs.handlers import registry
from django_durable_jobs.models import Job
from django_durable_jobs.submission import scope_digest
from django_durable_jobs.transitions import blocking, claims, leases, maintenance, recovery

pytestmark = pytest.mark.django_db

ROWS = 20_000
DUE = 20
# Fewer than visiting a row takes, so that the rows are rather counted too high.
STEPS_PER_ROW = 5
# Above the jobs that run, far below those that have ended, wait or are due later.
LIMIT = 3000
LANE = Lane(queue="default", handler="plans.main", version=1, fingerprint="f" * 64)
SIDE_LANES = [
    Lane(queue=queue, handler="plans.side", version=1, fingerprint="f" * 64)
    for queue in ("default", "mails", "reports")
]
# More than a claim on PostgreSQL reads together.
EMPTY_LANES = [
    Lane(queue=f"tenant-{n}", handler="plans.side", version=1, fingerprint="f" * 64)
    for n in range(100)
]
# Jobs that nobody can run, as many as all others, and before all others.
UNKNOWN = Lane(queue="default", handler="plans.gone", version=1, fingerprint="f" * 64)
HOUR = 3_600_000_000


@contextmanager
def undone() -> Iterator[None]:
    """Take back what happens inside, in a way that the package takes for a TestCase's."""
    block = transaction.atomic()
    block._from_testcase = True  # type: ignore[attr-defined]
    with block:
        yield
        transaction.set_rollback(True)


def insert(count: int, *, lane: Lane = LANE, **columns: Any) -> None:
    """Insert jobs by one statement; ``columns`` are SQL over ``n``, the row's number."""
    values = {
        "scope": "''",
        "scope_hash": f"'{scope_digest('')}'",
        "job_id": f"'{columns['status'][1:-1]}-{lane.queue}-{lane.handler}-' || n",
        "handler": f"'{lane.handler}'",
        "handler_version": str(lane.version),
        "payload": "'null'",
        "payload_sha256": "'p'",
        "fingerprint": f"'{lane.fingerprint}'",
        "submitted_queue": f"'{lane.queue}'",
        "submitted_priority": "0",
        "max_attempts": "3",
        "timeout": "1",
        "retry_on_interrupt": "true",
        "created_at": str(host_now()),
        "queue": f"'{lane.queue}'",
        "priority": "n % 5",
        "limit_waiting": "false",
        "run_at": f"{host_now() - HOUR} + n",
        "attempt_count": "0",
        "granted_attempts": "0",
        "progress": "0",
        "progress_message": "''",
        **columns,
    }
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {JOBS} ({', '.join(values)})"
            f" WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers"
            f" WHERE n < {count}) SELECT {', '.join(values.values())} FROM numbers"
        )


def fill() -> None:
    now = host_now()
    # The oldest jobs are one scope's.
    mine = {"scope": "'tenant'", "scope_hash": f"'{scope_digest('tenant')}'"}
    insert(1000, status="'succeeded'", finished_at=f"{now - HOUR} + n", **mine)
    insert(ROWS, status="'succeeded'", finished_at=f"{now - HOUR} + n")
    insert(DUE, status="'failed'", finished_at=f"{now - HOUR} + n")
    # Due later, and before everything else once it is.
    insert(ROWS, status="'scheduled'", priority="100", run_at=f"{now + HOUR} + n")
    insert(DUE, lane=SIDE_LANES[0], status="'scheduled'", run_at=f"{now - HOUR} + n")
    insert(ROWS, status="'queued'")
    first = {"lane": UNKNOWN, "priority": "100", "run_at": f"{now - 2 * HOUR} + n"}
    insert(ROWS, status="'queued'", **first)
    insert(ROWS, status="'blocked'", blocked_reason="'unknown_handler'", **first)
    for lane in SIDE_LANES:
        insert(200, lane=lane, status="'queued'")
    for lane in SIDE_LANES:
        insert(DUE, lane=lane, status="'blocked'", blocked_reason="'unknown_handler'")
    held = {"lease_token": "'t' || n", "attempt_count": "1"}
    insert(500, status="'running'", lease_expires_at=f"{now + HOUR}", **held)
    expired = {"lease_token": "'x' || n", "attempt_count": "1"}
    insert(DUE, lane=SIDE_LANES[1], status="'running'", lease_expires_at=f"{now - HOUR}", **expired)
    insert(5, lane=SIDE_LANES[2], status="'running'", attempt_count="1")
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {ATTEMPTS} (job_id, number, token, worker, status, started_at, progress)"
            f" SELECT id, 1, lease_token, 'w', 'running', {now}, 0 FROM {JOBS}"
            " WHERE status = 'running' AND lease_token IS NOT NULL"
        )
        cursor.execute(
            f"INSERT INTO {ATTEMPTS} (job_id, number, token, worker, status, outcome, started_at,"
            f" finished_at, progress) SELECT id, 1, 's' || id, 'w', 'succeeded', 'returned',"
            f" finished_at, finished_at, 1 FROM {JOBS} WHERE status = 'succeeded'"
        )


# A plan must be good before the first ANALYZE, too: a queue fills faster than that comes.
STATISTICS = ["with statistics", "without statistics"]


@contextmanager
def filled(fill: Callable[[], None], statistics: str) -> Iterator[None]:
    """Fill the tables inside a transaction that looks like a TestCase's."""
    with undone(), connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            # New files and no statistics: those that other tests have left make it look otherwise.
            cursor.execute(f"TRUNCATE {JOBS} CASCADE")
            for table in (JOBS, ATTEMPTS):
                cursor.execute(f"DELETE FROM pg_statistic WHERE starelid = '{table}'::regclass")
        fill()
        if statistics == "with statistics":
            cursor.execute(f"ANALYZE {JOBS}")
            cursor.execute(f"ANALYZE {ATTEMPTS}")
        yield


@pytest.fixture(scope="module", params=STATISTICS)
def volume(
    request: pytest.FixtureRequest, django_db_setup: None, django_db_blocker: Any
) -> Iterator[str]:
    """Fill the tables once for this module."""
    with django_db_blocker.unblock(), filled(fill, request.param):
        yield request.param


def statements(work: Callable[[], Any]) -> list[str]:
    """Give the statements on jobs that some work sends."""
    with undone(), CaptureQueriesContext(connection) as caught:
        work()
    return [query["sql"] for query in caught.captured_queries if JOBS in query["sql"]]


def plan(sql: str) -> str:
    word = "EXPLAIN QUERY PLAN" if connection.vendor == "sqlite" else "EXPLAIN (COSTS OFF)"
    with connection.cursor() as cursor:
        cursor.execute(f"{word} {sql}")
        return "\n".join(row[-1] for row in cursor.fetchall())


def rows_read(work: Callable[[], Any]) -> int:
    """Count the rows that some work really visits, those that a filter drops included."""
    if connection.vendor == "sqlite":
        return _steps(work) // STEPS_PER_ROW
    total = 0
    for sql in statements(work):
        with undone(), connection.cursor() as cursor:
            cursor.execute(f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {sql}")
            total += sum(map(_visited, _nodes(cursor.fetchone()[0][0]["Plan"])))
    return total


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", ()):
        yield from _nodes(child)


def _visited(node: dict[str, Any]) -> int:
    if "Scan" not in node["Node Type"] or node.get("Relation Name") not in (JOBS, ATTEMPTS):
        return 0
    dropped = sum(value for key, value in node.items() if key.startswith("Rows Removed by"))
    return int((node["Actual Rows"] + dropped) * node["Actual Loops"])


def _steps(work: Callable[[], Any]) -> int:
    """Count the steps of SQLite's virtual machine, in tens."""
    ticks = itertools.count()
    raw = connection.connection
    raw.set_progress_handler(lambda: next(ticks) and 0, 10)
    try:
        with undone():
            work()
    finally:
        raw.set_progress_handler(None, 10)
    return 10 * next(ticks)


def held() -> list[tuple[int, str]]:
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT id, lease_token FROM {JOBS} WHERE status = 'running'"
            " AND lease_token LIKE 't%' ORDER BY handler, concurrency_key, id LIMIT 16"
        )
        return cursor.fetchall()


def claim(*lanes: Lane) -> None:
    claimed = claims.claim("default", lanes, limit=16, worker="w", lease_seconds=60)
    assert len(claimed) == 16


def lanes() -> None:
    assert set(claims.queued_lanes("default")) == {LANE, UNKNOWN, *SIDE_LANES}


def blocked_lanes() -> None:
    assert set(blocking.blocked_lanes("default")) == {UNKNOWN, *SIDE_LANES}


def unholdable() -> None:
    assert not blocking.has_unholdable("default", LANE, 60.0)


def release() -> None:
    assert blocking.release_lane("default", SIDE_LANES[0]) == DUE


def waiting() -> None:
    found = maintenance.waiting("default")
    assert (found.promote, found.recover, found.exhaust) == (True, True, False)


def promote() -> None:
    assert maintenance.promote_due("default") == DUE


def recover() -> None:
    assert recovery.recover_expired("default") == DUE


def exhaust() -> None:
    assert maintenance.exhaust("default") == 0


def renew() -> None:
    assert len(leases.renew("default", held(), lease_seconds=60)) == 16


def cancel_requests() -> None:
    assert leases.cancel_requests("default", held()) == set()


def submit_again() -> None:
    with registry.temporary():

        @job(LANE.handler)
        def handler(ctx: Any) -> None: ...

        for _ in range(2):
            Job.objects.submit(handler, job_id="again", dedupe_key="key")
        assert not Job.objects.submit(handler, dedupe_key="key").newly_created


# The unique index over an attempt's token, as either database's plan names it.
BY_TOKEN = "(token=?)" if connection.vendor == "sqlite" else "durable_attempt_token"
WAITING = (
    "durable_job_promote",
    "durable_job_running",
    "durable_job_exhausted",
    "durable_job_blocked",
    "durable_job_claim",
)
WORK: list[tuple[Callable[[], None], tuple[str, ...]]] = [
    (lanes, ("durable_job_claim",)),
    (lambda: claim(LANE), ("durable_job_claim",)),
    (lambda: claim(LANE, *SIDE_LANES), ("durable_job_claim",)),
    (lambda: claim(*EMPTY_LANES, LANE, *SIDE_LANES), ("durable_job_claim",)),
    (blocked_lanes, ("durable_job_blocked",)),
    (unholdable, ("durable_job_claim",)),
    (release, ("durable_job_blocked",)),
    (waiting, WAITING),
    (promote, ("durable_job_promote",)),
    (recover, ("durable_job_running",)),
    (exhaust, ("durable_job_exhausted",)),
    (renew, (BY_TOKEN,)),
    (cancel_requests, ()),
    (submit_again, ()),
]
NAMES = ["lanes", "claim", "claim of four lanes", "claim of many lanes"]
NAMES += ["blocked lanes", "unholdable"]
NAMES += [
    "release",
    "waiting",
    "promote",
    "recover",
    "exhaust",
    "renew",
    "cancel requests",
    "submit again",
]
# A whole table read, as either database says it.
FULL_SCAN = re.compile(
    rf"Seq Scan on (?:{JOBS}|{ATTEMPTS})\b|^SCAN (?:{JOBS}|{ATTEMPTS}|[ajn])$", re.MULTILINE
)


def assert_walks(indexes: Iterable[str], work: Callable[[], None], *, limit: int = LIMIT) -> None:
    """No statement reads a whole table; these indexes are taken, and few rows are visited."""
    plans = [plan(sql) for sql in statements(work)]
    for text in plans:
        assert not FULL_SCAN.search(text), text
    for index in indexes:
        assert any(index in text for text in plans), "\n\n".join(plans)
    assert rows_read(work) < limit, "\n\n".join(plans)


@pytest.mark.parametrize(("work", "indexes"), WORK, ids=NAMES)
def test_no_statement_reads_the_whole_table(
    volume: str, work: Callable[[], None], indexes: tuple[str, ...]
) -> None:
    assert_walks(indexes, work)


def test_nothing_due_reads_nothing_of_what_is_due_later(volume: str) -> None:
    """The question that every worker asks at each poll, beside any number of future jobs."""
    with connection.cursor() as cursor:
        cursor.execute(
            f"DELETE FROM {JOBS} WHERE status = 'scheduled' AND run_at < %s", [host_now()]
        )
    for work in (
        lambda: maintenance.waiting("default"),
        lambda: maintenance.promote_due("default"),
    ):
        plans = [plan(sql) for sql in statements(work)]
        assert rows_read(work) < LIMIT, "\n\n".join(plans)


def test_every_lane_is_found_once() -> None:
    def found() -> list[Lane]:
        # The rows of the fixture may be there or not.
        lanes = claims.queued_lanes("default")
        return [lane for lane in lanes if lane not in (LANE, UNKNOWN, *SIDE_LANES)]

    expected = [
        Lane(queue=queue, handler=handler, version=version, fingerprint=fingerprint)
        for queue in ("a", "b")
        for handler in ("x", "y", "z")
        for version in (1, 2, 10)
        for fingerprint in ("0", "1")
        if (queue, version) != ("b", 2)
    ]
    for number, lane in enumerate(reversed(expected)):
        insert(2, lane=lane, job_id=f"'{number}-' || n", status="'queued'")
    assert found() == expected
    Job.objects.filter(queue="a").delete()
    assert found() == [lane for lane in expected if lane.queue == "b"]
    Job.objects.filter(queue="b").delete()
    assert found() == []


# Pages of jobs ----------------------------------------------------------------------------------

# What is asked for, and the index that SQLite must take; PostgreSQL chooses by its statistics.
PAGES: list[tuple[dict[str, str], str]] = [
    ({}, ""),
    ({"scope": "tenant"}, "durable_job_scope"),
    ({"status": "failed"}, "durable_job_attention"),
    ({"status": "running"}, "durable_job_running"),
    ({"status": "succeeded"}, ""),
    ({"status": "queued"}, ""),
    ({"handler": "plans.none"}, ""),
    ({"scope": "tenant", "handler": "plans.none"}, "durable_job_scope"),
    ({"status": "failed", "handler": "plans.none"}, "durable_job_attention"),
]


@pytest.mark.parametrize(("asked", "index"), PAGES, ids=str)
def test_a_page_reads_few_rows_beside_any_number(
    volume: str, asked: dict[str, str], index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "WALKED", 1000)
    for after in (None, Job.objects.page(**asked).next_cursor):
        read = partial(Job.objects.page, after=after, **asked)
        plans = [plan(sql) for sql in statements(read)]
        assert not any(re.search(rf"Seq Scan on {JOBS}\b", text) for text in plans), plans
        if connection.vendor == "sqlite":
            assert any(index in text for text in plans), "\n\n".join(plans)
        assert rows_read(read) < LIMIT, "\n\n".join(plans)
