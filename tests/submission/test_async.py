"""The async twins of the doors (CONTRACT 1.4)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db import transaction

from django_durable_jobs import (
    IdentityConflict,
    InvalidSubmission,
    TransactionActive,
    TransactionRequired,
)
from django_durable_jobs.models import Job
from tests.testapp.models import Business

from .handlers import Order, order, ship

in_both = pytest.mark.parametrize(
    "_",
    [
        pytest.param("TestCase", marks=pytest.mark.django_db),
        pytest.param("committed", marks=pytest.mark.django_db(transaction=True)),
    ],
)
TWINS: dict[str, Callable[..., Any]] = {
    "asubmit": lambda one: Job.objects.asubmit(one),
    "aenqueue": lambda one: Job.objects.aenqueue(one),
    "asubmit_many": lambda one: Job.objects.asubmit_many([one]),
    "aenqueue_many": lambda one: Job.objects.aenqueue_many([one]),
    "handler asubmit_many": lambda one: ship.asubmit_many([one]),
    "handler aenqueue_many": lambda one: ship.aenqueue_many([one]),
}
twins = pytest.mark.parametrize("twin", TWINS)


def call(twin: str, one: Any) -> Job:
    async def run() -> Any:
        return await TWINS[twin](one)

    answer = async_to_sync(run)()
    return answer[0] if isinstance(answer, list) else answer


@in_both
@twins
def test_a_twin_answers_as_its_door_does(twin: str, _: str) -> None:
    job = call(twin, order("a", dedupe_key="k"))
    assert job.newly_created and Job.objects.get() == job
    again = call(twin, order("a", dedupe_key="k"))
    assert again == job and not again.newly_created
    assert call(twin, order("b", 2, dedupe_key="k")) == job
    with pytest.raises(IdentityConflict):
        call(twin, order("a", 2))
    assert Job.objects.count() == 1


@in_both
@pytest.mark.parametrize("name", ["asubmit", "aenqueue"])
def test_a_handler_has_the_twins_of_one(name: str, _: str) -> None:
    job = async_to_sync(getattr(ship, name))(Order(1), job_id="a", queue="q")
    assert (job.job_id, job.queue, job.newly_created) == ("a", "q", True)
    with pytest.raises(InvalidSubmission):
        async_to_sync(getattr(ship, name))(Order(1), job_id="")
    with pytest.raises(InvalidSubmission):
        async_to_sync(getattr(Job.objects, name))(ship, None)


@in_both
@pytest.mark.parametrize("name", ["asubmit_many", "aenqueue_many"])
def test_the_twins_for_many_keep_order(name: str, _: str) -> None:
    given = [order(str(number)) for number in (3, 1, 2, 3)]
    jobs = async_to_sync(getattr(Job.objects, name))(given)
    assert [job.job_id for job in jobs] == ["3", "1", "2", "3"]
    assert [job.newly_created for job in jobs] == [True, True, True, False]
    with pytest.raises(IdentityConflict):
        async_to_sync(getattr(Job.objects, name))([order("4"), order("1", 2)])
    assert Job.objects.count() == 3


@in_both
@twins
def test_inside_a_transaction_the_twins_of_submit_refuse_and_the_others_join(
    twin: str, _: str
) -> None:
    # Async code called from inside atomic() works on the caller's connection.
    with transaction.atomic():
        Business.objects.create(name="order")
        if "submit" in twin:
            with pytest.raises(TransactionActive):
                call(twin, order("a"))
        else:
            assert call(twin, order("a")).newly_created
        transaction.set_rollback(True)
    assert not Job.objects.exists() and not Business.objects.exists()


@in_both
def test_a_conflict_of_aenqueue_dooms_the_transaction(_: str) -> None:
    Job.objects.submit(order("taken"))
    with transaction.atomic():
        Business.objects.create(name="order")
        with transaction.atomic(), pytest.raises(IdentityConflict):
            call("aenqueue", order("taken", 2))
    assert not Business.objects.exists()


@in_both
def test_many_at_once_make_one_job(_: str) -> None:
    async def gather() -> list[Job]:
        return await asyncio.gather(*(Job.objects.asubmit(order("a")) for _ in range(50)))

    jobs = async_to_sync(gather)()
    assert len({job.pk for job in jobs}) == 1
    assert sum(job.newly_created for job in jobs) == 1


@pytest.mark.django_db(transaction=True)
def test_the_doors_themselves_are_refused_in_async_code() -> None:
    async def wrong(door: Callable[..., Any], argument: Any) -> None:
        door(argument)

    for door, argument in (
        (Job.objects.submit, order("a")),
        (Job.objects.enqueue, order("a")),
        (Job.objects.submit_many, [order("a")]),
    ):
        with pytest.raises(SynchronousOnlyOperation):
            async_to_sync(wrong)(door, argument)
    with pytest.raises(TransactionRequired):
        async_to_sync(wrong)(Job.objects.stage, order("a"))
    assert not Job.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_async_code_stages_in_a_function_of_its_own() -> None:
    # There is no astage, as there are no async transactions: this is what to write.
    @transaction.atomic
    def place(number: int) -> Job:
        Business.objects.create(name=f"order {number}")
        return ship.stage(Order(number))

    assert not hasattr(Job.objects, "astage") and not hasattr(ship, "astage")
    job = async_to_sync(sync_to_async(place))(1)
    assert Job.objects.get() == job and Business.objects.count() == 1
