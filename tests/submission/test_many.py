"""The doors for many: order, repeats, conflicts, and few round trips (CONTRACT 1.4)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_durable_jobs import IdentityConflict, JobSubmission, TransactionRequired
from django_durable_jobs.models import Job
from django_durable_jobs.transitions.claims import claim, queued_lanes

from .handlers import Order, order, ship

pytestmark = pytest.mark.django_db


@contextmanager
def for_stage() -> Iterator[Callable[..., list[Job]]]:
    with transaction.atomic():
        yield Job.objects.stage_many


@contextmanager
def for_enqueue_inside() -> Iterator[Callable[..., list[Job]]]:
    with transaction.atomic():
        yield Job.objects.enqueue_many


@contextmanager
def for_enqueue() -> Iterator[Callable[..., list[Job]]]:
    yield Job.objects.enqueue_many


@contextmanager
def for_submit() -> Iterator[Callable[..., list[Job]]]:
    yield Job.objects.submit_many


WAYS = [for_stage, for_submit, for_enqueue, for_enqueue_inside]
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


@ways
def test_jobs_come_back_in_order_with_ascending_ids(way: Any) -> None:
    numbers = list(range(50))
    random.shuffle(numbers)
    with way() as door:
        jobs = door(order(f"{number}") for number in numbers)
    assert [job.job_id for job in jobs] == [str(number) for number in numbers]
    assert [job.pk for job in jobs] == sorted(job.pk for job in jobs)
    assert all(job.newly_created for job in jobs)
    assert {job.created_at for job in jobs} == {jobs[0].created_at}
    stored = {job.pk: job.job_id for job in Job.objects.all()}
    assert stored == {job.pk: job.job_id for job in jobs}


def test_they_are_claimed_in_the_order_given() -> None:
    numbers = list(range(20))
    random.shuffle(numbers)
    given = [order(f"{number}") for number in numbers]
    jobs = Job.objects.submit_many(given[:10]) + Job.objects.submit_many(given[10:])
    claimed = claim("default", queued_lanes("default"), limit=20, worker="w", lease_seconds=60)
    assert [one.job_id for one in claimed] == [job.job_id for job in jobs]


@ways
def test_new_and_existing_keep_their_places(way: Any) -> None:
    old = Job.objects.submit_many([order("1"), order("3")])
    keyed = Job.objects.submit(order("key", dedupe_key="k"))
    given = [
        order("0"),
        order("1"),
        order("2", 9, dedupe_key="k"),
        order("3"),
        order("4"),
        order("0"),
        order("1"),
    ]
    with way() as door:
        jobs = door(given)
    assert [job.job_id for job in jobs] == ["0", "1", "key", "3", "4", "0", "1"]
    assert [job.newly_created for job in jobs] == [True, False, False, False, True, False, False]
    assert (jobs[1], jobs[3], jobs[2]) == (*old, keyed)
    assert jobs[5].pk == jobs[0].pk and jobs[5] is not jobs[0]
    assert Job.objects.count() == 5


@ways
@pytest.mark.parametrize(
    "given",
    [
        lambda: [order("new"), order("taken", 2), order("newer")],
        lambda: [order("new"), order("new", 2)],
        lambda: [order("new"), order("taken"), order("new", queue="other")],
    ],
)
def test_one_conflict_stores_nothing_of_the_call(way: Any, given: Any) -> None:
    Job.objects.submit(order("taken"))
    with way() as door, pytest.raises(IdentityConflict):
        door(given())
    assert [job.job_id for job in Job.objects.all()] == ["taken"]


def test_a_clash_within_the_call_is_told_as_such() -> None:
    with pytest.raises(IdentityConflict, match="given twice in this call"):
        Job.objects.submit_many([order("a"), order("a", 2)])


@ways
def test_a_key_twice_in_one_call_makes_one_job(way: Any) -> None:
    given = [
        order("a", 1, dedupe_key="k"),
        order("b", 2, dedupe_key="k"),
        order("c", 3, dedupe_key="k", scope="elsewhere"),
        JobSubmission.create(("submission.bill", 1), Order(4), job_id="d", dedupe_key="k"),
    ]
    with way() as door:
        jobs = door(given)
    assert [job.job_id for job in jobs] == ["a", "a", "c", "d"]
    assert [job.newly_created for job in jobs] == [True, False, True, True]


@ways
def test_a_key_whose_first_asker_exists_goes_to_the_next(way: Any) -> None:
    ended = Job.objects.submit(order("a", dedupe_key="k"))
    assert ended.request_cancel() == "cancelled"
    with way() as door:
        jobs = door(order(name, dedupe_key="k") for name in "abc")
    assert [job.job_id for job in jobs] == ["a", "b", "b"]
    assert [job.newly_created for job in jobs] == [False, True, False]


@ways
def test_nothing_given_is_nothing_done(way: Any, django_assert_num_queries: Any) -> None:
    with way() as door, django_assert_num_queries(0):
        assert door([]) == []
        assert door(iter(())) == []


def test_stage_many_of_nothing_still_needs_a_transaction() -> None:
    with pytest.raises(TransactionRequired):
        Job.objects.stage_many([])


def test_a_handler_makes_one_job_of_each_payload() -> None:
    kept = order("kept", queue="kept")
    jobs = ship.submit_many([Order(1), kept, Order(2)], queue="all", scope="s")
    assert [(job.queue, job.scope) for job in jobs] == [("all", "s"), ("kept", ""), ("all", "s")]
    assert [ship.codec.decode(job.payload).number for job in jobs] == [1, 1, 2]


@pytest.mark.parametrize("way", [for_stage, for_submit], ids=lambda way: way.__name__)
def test_ten_thousand_cost_as_many_queries_as_ten(way: Any) -> None:
    counts = []
    for number, count in enumerate((10, 10_000)):
        given = [order(f"{number}-{index}") for index in range(count)]
        random.shuffle(given)
        with way() as door, CaptureQueriesContext(connection) as queries:
            jobs = door(given)
        assert [job.job_id for job in jobs] == [one.job_id for one in given]
        assert [job.pk for job in jobs] == sorted(job.pk for job in jobs)
        counts.append(len(queries))
    assert counts[0] == counts[1] <= 6
    assert Job.objects.count() == 10_010


def test_repeating_ten_thousand_costs_as_many_queries_as_ten() -> None:
    counts = []
    for number, count in enumerate((10, 10_000)):
        given = [order(f"{number}-{index}") for index in range(count // 2)]
        keyed = [
            order(None, number, scope=f"{index}", dedupe_key=f"{number}-{index}")
            for index in range(count // 2)
        ]
        first = Job.objects.submit_many(given + keyed)
        others = [
            order(None, 99, scope=f"{index}", dedupe_key=f"{number}-{index}")
            for index in range(count // 2)
        ]
        with CaptureQueriesContext(connection) as queries:
            again = Job.objects.submit_many(others + given)
        assert [job.pk for job in again] == [
            job.pk for job in first[count // 2 :] + first[: count // 2]
        ]
        assert not any(job.newly_created for job in again)
        counts.append(len(queries))
    assert counts[0] == counts[1] <= 8


@ways
def test_a_held_back_key_does_not_change_the_order_of_claims(way: Any) -> None:
    """The first asker of the key exists and has ended, so the second is inserted late."""
    ended = Job.objects.submit(order("a", dedupe_key="k"))
    assert ended.request_cancel() == "cancelled"
    with way() as door:
        jobs = door([order("a", dedupe_key="k"), order("b", dedupe_key="k"), order("c")])
    assert [job.newly_created for job in jobs] == [False, True, True]
    claimed = claim("default", queued_lanes("default"), limit=5, worker="w", lease_seconds=60)
    assert [one.job_id for one in claimed] == ["b", "c"]
