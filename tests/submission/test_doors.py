"""The three doors: whose transaction, and what they refuse (CONTRACT 1.4, 7.5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import override_settings

from django_durable_jobs import JobSubmission, TransactionActive, TransactionRequired
from django_durable_jobs.models import Job
from tests.racing import another_alias
from tests.testapp.models import Business

from .handlers import Order, order, ship

REQUIRED = 'stage() belongs inside transaction.atomic(using="default")'
Door = Callable[..., Any]
ONE = {
    "manager": lambda door: lambda **o: getattr(Job.objects, door)(ship, Order(1), **o),
    "submission": lambda door: (
        lambda using=None: getattr(Job.objects, door)(
            JobSubmission.create(ship, Order(1)), using=using
        )
    ),
    "name": lambda door: lambda **o: getattr(Job.objects, door)("submission.ship", Order(1), **o),
    "handler": lambda door: lambda **o: getattr(ship, door)(Order(1), **o),
    "many": lambda door: (
        lambda using=None: getattr(Job.objects, f"{door}_many")([order(None)], using=using)[0]
    ),
    "handler many": lambda door: lambda **o: getattr(ship, f"{door}_many")([Order(1)], **o)[0],
}
every_way = pytest.mark.parametrize("way", ONE)
ways = pytest.mark.parametrize("way", ["manager", "handler", "many", "handler many"])
committed = pytest.mark.django_db(transaction=True)


class Undo(Exception):
    pass


# Without a TestCase ----------------------------------------------------------------------------


@committed
@ways
@pytest.mark.parametrize("door", ["stage", "enqueue"])
def test_a_staged_job_commits_with_the_business_rows(door: str, way: str) -> None:
    with transaction.atomic():
        Business.objects.create(name="order")
        job = ONE[way](door)()
        assert job.newly_created
    assert Job.objects.get() == job
    assert Business.objects.count() == 1


@committed
@ways
@pytest.mark.parametrize("door", ["stage", "enqueue"])
def test_a_staged_job_rolls_back_with_the_business_rows(door: str, way: str) -> None:
    with pytest.raises(Undo), transaction.atomic():
        Business.objects.create(name="order")
        ONE[way](door)()
        raise Undo
    with transaction.atomic():
        ONE[way](door)()
        Business.objects.create(name="order")
        transaction.set_rollback(True)
    assert not Job.objects.exists() and not Business.objects.exists()


@committed
@ways
@pytest.mark.parametrize("door", ["submit", "enqueue"])
def test_a_submitted_job_is_committed_at_once(door: str, way: str) -> None:
    job = ONE[way](door)()
    assert job.newly_created and not connection.in_atomic_block
    with another_alias() as other:
        assert Job.objects.using(other).get() == job


@committed
@ways
def test_stage_needs_a_transaction(way: str, django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(0), pytest.raises(TransactionRequired) as caught:
        ONE[way]("stage")()
    assert REQUIRED in str(caught.value)
    assert "use submit() for a transaction of its own" in str(caught.value)


@committed
@ways
def test_submit_refuses_inside_a_transaction_which_stays_usable(
    way: str, django_assert_num_queries: Any
) -> None:
    with transaction.atomic():
        with django_assert_num_queries(0), pytest.raises(TransactionActive) as caught:
            ONE[way]("submit")()
        Business.objects.create(name="order")
    assert "call it outside transaction.atomic()" in str(caught.value)
    assert Business.objects.count() == 1 and not Job.objects.exists()


@committed
@ways
@pytest.mark.parametrize("door", ["submit", "enqueue"])
def test_autocommit_off_is_refused_without_a_query(
    door: str, way: str, django_assert_num_queries: Any
) -> None:
    transaction.set_autocommit(False)
    try:
        with django_assert_num_queries(0), pytest.raises(TransactionActive) as caught:
            ONE[way](door)()
        assert "autocommit is off" in str(caught.value) and "turn it on" in str(caught.value)
        with pytest.raises(TransactionRequired):
            ONE[way]("stage")()
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert not Job.objects.exists()


@committed
@ways
@pytest.mark.parametrize("door", ["submit", "enqueue"])
def test_a_plain_begin_is_refused_without_a_query_and_stays_open(
    door: str, way: str, django_assert_num_queries: Any
) -> None:
    """Django does not know of it, and a COMMIT of ours would end it."""
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")
        Business.objects.create(name="undone")
        with django_assert_num_queries(0), pytest.raises(TransactionActive, match="plain BEGIN"):
            ONE[way](door)()
        cursor.execute("ROLLBACK")
    assert not Business.objects.exists() and not Job.objects.exists()
    assert ONE[way](door)().newly_created


@committed
@pytest.mark.parametrize("commit", [True, False])
def test_an_atomic_block_without_autocommit_is_the_callers(commit: bool) -> None:
    transaction.set_autocommit(False)
    try:
        # SQLite begins the transaction at the first write outside a savepoint.
        Business.objects.create(name="order")
        with transaction.atomic():
            ship.stage(Order(1))
        with transaction.atomic(), pytest.raises(TransactionActive):
            ship.submit(Order(1))
        transaction.commit() if commit else transaction.rollback()
    finally:
        transaction.set_autocommit(True)
    assert Job.objects.count() == Business.objects.count() == commit


@committed
def test_a_transaction_on_another_database_is_not_the_jobs() -> None:
    with another_alias() as other, transaction.atomic(using=other):
        with pytest.raises(TransactionRequired) as caught:
            ship.stage(Order(1))
        assert REQUIRED in str(caught.value)
        with pytest.raises(TransactionRequired):
            Job.objects.stage_many([order("a")])
        # No transaction is open on the jobs' own database: these make one.
        job = ship.submit(Order(1))
        enqueued = ship.enqueue(Order(1))
        transaction.set_rollback(True, using=other)
    assert set(Job.objects.all()) == {job, enqueued}


@committed
@ways
@pytest.mark.parametrize("door", ["submit", "enqueue", "stage"])
def test_using_names_the_database(door: str, way: str) -> None:
    with another_alias() as other:
        with transaction.atomic(using=other if door == "stage" else "default"):
            job = ONE[way](door)(using=other)
        assert job._state.db == other
        assert job.request_cancel() == "cancelled"
    assert Job.objects.get().status == "cancelled"


@committed
@ways
def test_the_setting_names_the_database_and_using_wins(way: str) -> None:
    with another_alias() as other:
        with override_settings(DURABLE_JOBS={"DATABASE": other}):
            assert ONE[way]("submit")()._state.db == other
            assert ONE[way]("submit")(using="default")._state.db == "default"
            with transaction.atomic(), pytest.raises(TransactionRequired, match=f'using="{other}"'):
                ONE[way]("stage")()
            with transaction.atomic(using=other):
                assert ONE[way]("stage")()._state.db == other
                assert ONE[way]("enqueue")()._state.db == other
        assert Job.objects.db_manager(other).submit(ship, Order(1))._state.db == other


@committed
def test_a_savepoint_takes_the_job_with_it() -> None:
    with transaction.atomic():
        Business.objects.create(name="outer")
        with pytest.raises(Undo), transaction.atomic():
            ship.stage(Order(1), job_id="inner")
            raise Undo
        ship.stage(Order(1), job_id="outer")
    assert [job.job_id for job in Job.objects.all()] == ["outer"]
    assert Business.objects.count() == 1


@committed
def test_a_job_staged_and_rolled_back_can_be_staged_again_in_the_transaction() -> None:
    with transaction.atomic():
        sid = getattr(transaction, "savepoint_create", transaction.savepoint)()
        ship.stage(Order(1), job_id="a", dedupe_key="k")
        transaction.savepoint_rollback(sid)
        again = ship.stage(Order(2), job_id="a", dedupe_key="k")
        assert again.newly_created
    assert Job.objects.get() == again


@committed
def test_a_repeat_is_answered_by_every_door() -> None:
    request = order("a")
    first = Job.objects.submit(request)
    answers = [
        Job.objects.submit(request),
        Job.objects.enqueue(request),
        *Job.objects.submit_many([request]),
        *Job.objects.enqueue_many([request]),
    ]
    with transaction.atomic():
        answers += [Job.objects.stage(request), *Job.objects.stage_many([request])]
        answers += [Job.objects.enqueue(request), *Job.objects.enqueue_many([request])]
    assert {job.pk for job in answers} == {first.pk}
    assert not any(job.newly_created for job in answers)


@committed
def test_a_new_job_costs_one_statement(
    django_assert_num_queries: Any, is_postgres: bool, settings: Any
) -> None:
    """Besides the announcement, which is left out where one was just made."""
    settings.DURABLE_JOBS = {"NOTIFY": False}
    with transaction.atomic(), django_assert_num_queries(1):
        ship.stage(Order(1))
    with django_assert_num_queries(1 if is_postgres else 3):  # BEGIN IMMEDIATE, INSERT, COMMIT
        ship.submit(Order(1))


# Inside a TestCase, whose wrapper is not the caller's transaction ------------------------------


@pytest.mark.django_db
@every_way
def test_the_test_wrapper_is_not_the_callers_transaction(
    way: str, django_assert_num_queries: Any
) -> None:
    with django_assert_num_queries(0), pytest.raises(TransactionRequired):
        ONE[way]("stage")()
    assert ONE[way]("submit")().newly_created
    assert ONE[way]("enqueue")().newly_created
    with transaction.atomic():
        assert ONE[way]("stage")().newly_created
        assert ONE[way]("enqueue")().newly_created
        with pytest.raises(TransactionActive):
            ONE[way]("submit")()
    assert Job.objects.count() == 4


@pytest.mark.django_db
def test_a_durable_block_is_the_callers_in_a_test_too() -> None:
    with transaction.atomic(durable=True):
        ship.stage(Order(1))
    assert Job.objects.count() == 1
