"""Jobs that cannot be dispatched: none is claimed in vain, none is lost (CONTRACT 2.3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from django.db import OperationalError, connection

from django_durable_jobs import JobContext, job
from django_durable_jobs.exceptions import LockTimeout
from django_durable_jobs.handlers import Handler, Registry
from django_durable_jobs.models import Job
from django_durable_jobs.worker import blocking, loop

from .support import attempts, change, drain, fresh

pytestmark = pytest.mark.django_db(transaction=True)


@dataclasses.dataclass
class Number:
    number: int


@pytest.fixture
def count(handlers: Registry) -> Handler[..., Any]:
    @job("dispatch.count")
    def count(ctx: JobContext, payload: Number) -> int:
        return payload.number

    return count


def request_of(one: Job) -> tuple[Any, ...]:
    kept = fresh(one)
    return (kept.handler, kept.handler_version, kept.payload, kept.payload_sha256, kept.fingerprint)


def assert_unspent(one: Job) -> None:
    kept = fresh(one)
    assert (kept.attempt_count, kept.lease_token, kept.lease_expires_at) == (0, None, None)
    assert (kept.progress, kept.error_category) == (0, None)
    assert attempts(one) == []


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"handler": "dispatch.gone"}, "unknown_handler"),
        ({"handler_version": 2}, "unknown_handler"),
        ({"fingerprint": "0" * 64}, "schema_mismatch"),
    ],
    ids=["handler", "version", "fingerprint"],
)
def test_what_this_code_cannot_run_is_not_claimed_and_not_lost(
    count: Handler[..., Any], columns: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking, "block_claimed", _must_not_be_called)
    foreign = count.submit(Number(1))
    change(foreign, **columns)
    own = count.submit(Number(2))
    before = request_of(foreign)
    drain()
    assert (fresh(own).status, fresh(own).result) == ("succeeded", 2)
    assert (fresh(foreign).status, fresh(foreign).blocked_reason) == ("blocked", reason)
    assert_unspent(foreign)
    assert request_of(foreign) == before

    # A worker that has the code takes it up by itself.
    Job.objects.filter(pk=foreign.pk).update(
        handler="dispatch.count", handler_version=1, fingerprint=count.fingerprint
    )
    drain()
    assert (fresh(foreign).status, fresh(foreign).attempt_count) == ("succeeded", 1)


def _must_not_be_called(*arguments: Any, **options: Any) -> Any:
    raise AssertionError("such a job must not be claimed")


def damaged_hash(one: Job) -> None:
    change(one, payload_sha256="0" * 64)


def damaged_text(one: Job) -> None:
    change(one, payload='{"number": 8}')


def other_type(one: Job) -> None:
    _with_hash(one, '{"number": "five"}')


def more_fields(one: Job) -> None:
    _with_hash(one, '{"number": 5, "more": 1}')


def not_json(one: Job) -> None:
    _with_hash(one, "{")


def too_deep(one: Job) -> None:
    _with_hash(one, "[" * 100_000)


def _with_hash(one: Job, text: str) -> None:
    from django_durable_jobs.payloads import payload_sha256

    change(one, payload=text, payload_sha256=payload_sha256(text))


def _not_unicode(one: Job, column: str) -> None:
    if connection.vendor != "sqlite":
        pytest.skip("PostgreSQL's text is always Unicode")
    with connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE django_durable_jobs_job SET {column} = CAST(X'FF00FE' AS TEXT) WHERE id = %s",
            [one.pk],
        )


def not_unicode(one: Job) -> None:
    _not_unicode(one, "payload")


def unreadable_job_id(one: Job) -> None:
    _not_unicode(one, "job_id")


def unreadable_queue(one: Job) -> None:
    _not_unicode(one, "queue")


DAMAGES = [damaged_hash, damaged_text, other_type, more_fields, not_json, too_deep, not_unicode]
DAMAGES += [unreadable_job_id, unreadable_queue]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("threads", [1, 10])
def test_one_poisoned_payload_among_ten_stops_none_of_the_others(
    count: Handler[..., Any], damage: Callable[[Job], None], threads: int, caplog: Any
) -> None:
    ten = [count.submit(Number(number)) for number in range(10)]
    poisoned = ten.pop(5)
    damage(poisoned)
    drain(threads=threads)
    assert [(fresh(one).status, fresh(one).result) for one in ten] == [
        ("succeeded", number) for number in range(10) if number != 5
    ]
    assert [fresh(one).attempt_count for one in ten] == [1] * 9
    found = fresh(poisoned)
    assert f"job {poisoned.pk} is blocked: corrupt_payload" in caplog.text or found.queue is None
    assert (found.status, found.blocked_reason) == ("blocked", "corrupt_payload")
    assert (found.attempt_count, found.lease_token) == (0, None)
    assert attempts(poisoned) == []
    # No worker takes it up by itself.
    drain()
    assert Job.objects.filter(pk=poisoned.pk, status="blocked", attempt_count=0).exists()


@pytest.mark.parametrize("error", [LockTimeout("locked"), OperationalError("away")])
def test_a_block_that_the_database_refuses_once_is_tried_again(
    count: Handler[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    if isinstance(error, OperationalError) and connection.vendor == "sqlite":
        pytest.skip("SQLite has no connection to lose")
    block_claimed = blocking.block_claimed
    errors = [error]

    def refused(*arguments: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return block_claimed(*arguments, **options)

    monkeypatch.setattr(blocking, "block_claimed", refused)
    poisoned = count.submit(Number(1))
    damaged_hash(poisoned)
    drain()
    assert (fresh(poisoned).status, fresh(poisoned).blocked_reason) == (
        "blocked",
        "corrupt_payload",
    )
    assert_unspent(poisoned)


def test_a_fault_in_the_slot_lets_the_job_go_to_its_lease(
    count: Handler[..., Any], monkeypatch: pytest.MonkeyPatch, durable_jobs: Callable[..., None]
) -> None:
    durable_jobs(POLL_SECONDS=0.05)
    prepare = loop.prepare
    faults = [RuntimeError("a fault of ours")]

    def faulty(claimed: Any) -> Any:
        if faults:
            raise faults.pop()
        return prepare(claimed)

    monkeypatch.setattr(loop, "prepare", faulty)
    first, second = (count.submit(Number(number)) for number in range(2))
    # The first drain ends: it does not hold the job for ever, nor renew it.
    drain()
    assert fresh(second).status == "succeeded"
    assert fresh(first).status == "running"
    change(first, lease_expires_at=1)
    drain()
    assert (fresh(first).status, fresh(first).attempt_count) == ("succeeded", 2)
