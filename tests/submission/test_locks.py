"""Waits for locks are bounded in our own transactions, and the caller's are his (3.15)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.test import override_settings

from django_durable_jobs import LockTimeout, doors
from django_durable_jobs.dialects import dialect_for
from django_durable_jobs.dialects._writer import writers
from django_durable_jobs.models import Job
from tests.racing import LIMIT, PATIENT, Signal, another_alias, held, racing

from .handlers import order

pytestmark = pytest.mark.django_db(transaction=True)
BOUND = 0.15
OWN: dict[str, Callable[[Any, str], Any]] = {
    "submit": lambda one, using: Job.objects.submit(one, using=using),
    "enqueue": lambda one, using: Job.objects.enqueue(one, using=using),
    "submit_many": lambda one, using: Job.objects.submit_many([one], using=using),
    "enqueue_many": lambda one, using: Job.objects.enqueue_many([one], using=using),
}
own_doors = pytest.mark.parametrize("door", OWN)


def only(vendor: str, reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(connection.vendor != vendor, reason=reason)


@pytest.fixture(
    params=[
        "as configured",
        pytest.param("server_side_binding", marks=only("postgresql", "SQLite has no such option")),
    ]
)
def using(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways in which the PostgreSQL dialect sends a transaction of its own."""
    if request.param == "as configured":
        yield "default"
        return
    options = {**connection.settings_dict["OPTIONS"], "server_side_binding": True}
    with another_alias(OPTIONS=options) as alias:
        yield alias


def wait_setting(alias: str) -> Any:
    postgres = connections[alias].vendor == "postgresql"
    with connections[alias].cursor() as cursor:
        cursor.execute("SHOW lock_timeout" if postgres else "PRAGMA busy_timeout")
        return cursor.fetchone()[0]


def is_clean(alias: str) -> None:
    """No transaction is open and the next one works."""
    checked = connections[alias]
    assert checked.get_autocommit() and not checked.in_atomic_block
    if checked.vendor == "postgresql":
        assert checked.connection.info.transaction_status.name == "IDLE"
    else:
        assert not checked.connection.in_transaction
    assert Job.objects.submit(order("clean"), using=alias).newly_created


@own_doors
def test_our_own_transaction_waits_a_bounded_time(door: str, using: str) -> None:
    before = wait_setting(using)
    with held(lambda: Job.objects.stage(order("a"))):
        began = time.monotonic()
        with (
            override_settings(DURABLE_JOBS={"LOCK_TIMEOUT_SECONDS": BOUND}),
            pytest.raises(LockTimeout, match="nothing was changed. Try again") as caught,
        ):
            OWN[door](order("a"), using)
        waited = time.monotonic() - began
    assert BOUND * 0.9 <= waited < LIMIT / 2
    assert isinstance(caught.value.__cause__, OperationalError)
    assert not Job.objects.exists()
    assert wait_setting(using) == before
    is_clean(using)


@own_doors
def test_a_success_leaves_the_sessions_setting_alone(door: str, using: str) -> None:
    before = wait_setting(using)
    with override_settings(DURABLE_JOBS=PATIENT):
        for _ in range(2):  # a new job, and a repeat of it
            OWN[door](order("a"), using)
            assert wait_setting(using) == before
    is_clean(using)


# (The doors for many look in the transaction that inserted, whose lock they hold already.)
@only("postgresql", "SQLite has no lock of a table")
@pytest.mark.parametrize("door", ["submit", "enqueue"])
def test_the_look_at_who_was_there_is_bounded_too(
    door: str, using: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    OWN[door](order("a"), using)
    original = doors._existing

    def lock_table() -> None:
        with connection.cursor() as cursor:
            cursor.execute("LOCK TABLE django_durable_jobs_job IN ACCESS EXCLUSIVE MODE")

    def look_while_locked(*args: Any) -> Any:
        with held(lock_table):
            return original(*args)

    monkeypatch.setattr(doors, "_existing", look_while_locked)
    with (
        override_settings(DURABLE_JOBS={"LOCK_TIMEOUT_SECONDS": BOUND}),
        pytest.raises(LockTimeout),
    ):
        OWN[door](order("a"), using)
    is_clean(using)


STAGE: list[Callable[[Any, str], Any]] = [
    lambda one, using: Job.objects.stage(one, using=using),
    lambda one, using: Job.objects.enqueue_many([one], using=using),
]


@pytest.mark.parametrize("stage", STAGE)
def test_in_the_callers_transaction_no_setting_is_changed(stage: Any, using: str) -> None:
    before = wait_setting(using)
    with transaction.atomic(using=using):
        for number in (1, 1, 2):
            stage(order(f"{number}"), using)
            assert wait_setting(using) == before
    assert Job.objects.count() == 2


@only("postgresql", "see test_sqlite_modes")
@pytest.mark.parametrize("stage", STAGE)
def test_in_the_callers_transaction_his_own_bound_counts(stage: Any, using: str) -> None:
    with (
        held(lambda: Job.objects.stage(order("a"))),
        override_settings(DURABLE_JOBS={"LOCK_TIMEOUT_SECONDS": 3600}),
        pytest.raises(OperationalError) as caught,
        transaction.atomic(using=using),
    ):
        with connections[using].cursor() as cursor:
            cursor.execute("SET LOCAL lock_timeout = 150")
        stage(order("a"), using)
    assert caught.value.__cause__.sqlstate == "55P03"  # type: ignore[union-attr]
    is_clean(using)


def test_an_error_of_the_database_leaves_the_connection_clean(
    using: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(doors._COLUMNS, "no_such_column", "text")
    original = doors._values
    monkeypatch.setattr(doors, "_values", lambda one: (*original(one), "x"))
    for door in OWN.values():
        with pytest.raises(Exception, match="no_such_column"):
            door(order("a"), using)
    monkeypatch.undo()
    assert not Job.objects.exists()
    is_clean(using)


@only("postgresql", "SQLite has no server to lose")
def test_a_lost_connection_is_replaced(using: str) -> None:
    Job.objects.submit(order("before"), using=using)
    backend = connections[using].connection.info.backend_pid
    with another_alias("killer") as killer, connections[killer].cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s, 120000)", [backend])
    with pytest.raises(OperationalError):
        Job.objects.submit(order("lost"), using=using)
    connections[using].close_if_unusable_or_obsolete()
    is_clean(using)
    assert not Job.objects.filter(job_id="lost").exists()


@only("sqlite", "only SQLite's writers stand in line")
def test_the_wait_in_line_counts() -> None:
    began, end = Signal(), Signal()

    def first() -> None:
        with writers.turn("a file", 600_000):
            began.set()
            end.wait()

    def second() -> int:
        began.wait()
        with writers.turn("a file", 600_000) as left:
            return left

    with racing(first, second) as [_, waiter]:
        try:
            waiter.wait_until_blocked()  # which takes a tenth of a second at least
        finally:
            end.set()
        assert 0 < waiter.result() <= 599_900


@only("sqlite", "only SQLite's writers stand in line")
def test_the_line_is_bounded() -> None:
    begun, end = Signal(), Signal()

    def slow() -> None:
        with dialect_for("default").own("default"):
            begun.set()
            end.wait()

    with racing(slow) as [writer]:
        begun.wait()
        try:
            with (
                override_settings(DURABLE_JOBS={"LOCK_TIMEOUT_SECONDS": BOUND}),
                pytest.raises(LockTimeout, match="another thread of this process"),
            ):
                Job.objects.submit(order("a"))
        finally:
            end.set()
    writer.result()
    is_clean("default")
