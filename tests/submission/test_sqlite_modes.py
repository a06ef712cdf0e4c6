"""How transactions begin on SQLite, and what a caller meets beside another writer (4.1)."""

from __future__ import annotations

import os
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from django_durable_jobs import LockTimeout
from django_durable_jobs.models import Job
from tests.racing import another_alias, held, racing
from tests.testapp.models import Business

from .handlers import order

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "sqlite", reason="PostgreSQL has no transaction modes"),
]


def stage(one: Any, alias: str = "default") -> Job:
    with transaction.atomic(using=alias):
        return Job.objects.stage(one, using=alias)


@pytest.mark.parametrize("mode", [None, "DEFERRED", "IMMEDIATE", "EXCLUSIVE"])
@pytest.mark.parametrize("many", [False, True])
def test_our_transactions_begin_immediate_whatever_the_options_say(
    mode: str | None, many: bool
) -> None:
    options = {**connection.settings_dict["OPTIONS"], "transaction_mode": mode}
    with another_alias(OPTIONS=options) as other:
        for _ in range(2):
            with CaptureQueriesContext(connections[other]) as queries:
                if many:
                    Job.objects.submit_many([order("a")], using=other)
                else:
                    Job.objects.submit(order("a"), using=other)
            begun = [one["sql"] for one in queries if one["sql"].startswith("BEGIN")]
            assert begun and set(begun) == {"BEGIN IMMEDIATE"}
        with CaptureQueriesContext(connections[other]) as queries, transaction.atomic(using=other):
            pass
        assert queries[0]["sql"] == f"BEGIN {mode or ''}".strip()


@pytest.mark.parametrize("commit", [True, False])
def test_a_transaction_that_begins_by_stage_waits_for_the_writer(commit: bool) -> None:
    with held(lambda: Business.objects.create(name="writer")) as writer:
        with racing(lambda: stage(order("a"))) as [waiter]:
            waiter.wait_until_blocked()
            writer.commit() if commit else writer.rollback()
        assert waiter.result().newly_created
    assert Business.objects.exists() is commit


def test_a_door_never_reads_before_it_inserts() -> None:
    Job.objects.submit(order("a", dedupe_key="k"))
    for one in (order("a", dedupe_key="k"), order("b", dedupe_key="k"), order("c")):
        with CaptureQueriesContext(connection) as queries:
            stage(one)
        assert queries[0]["sql"] == "BEGIN"
        assert queries[1]["sql"].startswith("INSERT INTO django_durable_jobs_job")


def test_stage_beyond_the_callers_timeout_gets_the_databases_own_error() -> None:
    options = {**connection.settings_dict["OPTIONS"], "timeout": 0.1}
    with another_alias(OPTIONS=options) as impatient:
        with (
            held(lambda: Business.objects.create(name="writer")),
            pytest.raises(OperationalError, match="locked"),
        ):
            stage(order("a"), impatient)
        assert stage(order("a"), impatient).newly_created


@pytest.mark.skipif(
    os.environ.get("TEST_SQLITE_JOURNAL") == "delete",
    reason="there the other writer waits for who has read: tests/worker/test_journal_mode.py",
)
def test_a_transaction_that_read_first_gets_the_databases_own_error() -> None:
    with pytest.raises(OperationalError, match="locked") as caught, transaction.atomic():
        assert not Business.objects.exists()
        with racing(lambda: Business.objects.create(name="writer")) as [writer]:
            writer.result()
        Job.objects.stage(order("a"))
    assert caught.value.__cause__.sqlite_errorname == "SQLITE_BUSY_SNAPSHOT"  # type: ignore[union-attr]
    assert stage(order("a")).newly_created


def test_submit_waits_for_the_writer_and_reads_nothing_before() -> None:
    with held(lambda: Job.objects.stage(order("a"))) as writer:
        with racing(
            lambda: Job.objects.submit(order("a")), lambda: Job.objects.submit_many([order("b")])
        ) as [one, many]:
            one.wait_until_blocked()
            many.wait_until_blocked()
            writer.commit()
        assert not one.result().newly_created and many.result()[0].newly_created


def test_another_process_that_writes_too_long_is_a_lock_timeout() -> None:
    with (
        held(lambda: Business.objects.create(name="writer")),
        override_settings(DURABLE_JOBS={"LOCK_TIMEOUT_SECONDS": 0.1}),
        pytest.raises(LockTimeout),
    ):
        Job.objects.submit(order("a"))
