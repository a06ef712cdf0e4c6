"""An IdentityConflict dooms the caller's whole transaction, and nothing else does (1.4)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.transaction import TransactionManagementError
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path

from django_durable_jobs import (
    IdentityConflict,
    InvalidSubmission,
    TransactionActive,
    TransactionRequired,
)
from django_durable_jobs.models import Job
from tests.racing import another_alias
from tests.testapp.models import Business

from .handlers import Order, order, ship

in_both = pytest.mark.parametrize(
    "_",
    [
        pytest.param("TestCase", marks=pytest.mark.django_db),
        pytest.param("committed", marks=pytest.mark.django_db(transaction=True)),
    ],
)
DOORS: dict[str, Callable[[], Any]] = {
    "stage": lambda: Job.objects.stage(order("taken", 2)),
    "enqueue": lambda: ship.enqueue(Order(2), job_id="taken"),
    "stage_many": lambda: Job.objects.stage_many([order("new"), order("taken", 2)]),
    "enqueue_many": lambda: Job.objects.enqueue_many([order("taken", 2), order("new")]),
    "repeat": lambda: Job.objects.stage_many([order("new"), order("new", 2)]),
}
doors = pytest.mark.parametrize("door", DOORS)
two_doors = pytest.mark.parametrize("door", ["stage", "enqueue_many"])


def business(name: str) -> None:
    Business.objects.create(name=name)


def conflict(door: str = "stage") -> None:
    """Meet a conflict and swallow it."""
    with contextlib.suppress(IdentityConflict):
        DOORS[door]()
        raise AssertionError("no conflict")


def is_doomed() -> None:
    """Every later query raises, in a new block as well."""
    with pytest.raises(TransactionManagementError):
        business("later")
    with pytest.raises(TransactionManagementError):
        Job.objects.count()
    with pytest.raises(TransactionManagementError):
        Job.objects.stage(order("later"))
    with pytest.raises(TransactionManagementError), transaction.atomic():
        business("later")


def flat(door: str) -> None:
    with transaction.atomic():
        business("before")
        conflict(door)
        is_doomed()


def swallowed_inside_a_nested_block(door: str) -> None:
    with transaction.atomic():
        business("before")
        with transaction.atomic():
            business("inside")
            conflict(door)
            is_doomed()
        is_doomed()


def caught_outside_a_nested_block(door: str) -> None:
    with transaction.atomic():
        business("before")
        with contextlib.suppress(IdentityConflict), transaction.atomic():
            business("inside")
            DOORS[door]()
        is_doomed()


def caught_outside_by_nested_blocks_without_savepoint(door: str) -> None:
    with transaction.atomic():
        business("before")
        with contextlib.suppress(IdentityConflict), transaction.atomic(savepoint=False):
            business("inside")
            DOORS[door]()
        is_doomed()


def swallowed_deep_inside(door: str) -> None:
    with transaction.atomic():
        business("before")
        with transaction.atomic(), transaction.atomic(savepoint=False):
            business("inside")
            with transaction.atomic():
                business("deep")
                conflict(door)
            is_doomed()
        is_doomed()


def caught_halfway(door: str) -> None:
    with transaction.atomic():
        with transaction.atomic():
            business("before")
            with contextlib.suppress(IdentityConflict), transaction.atomic(), transaction.atomic():
                business("inside")
                DOORS[door]()
            is_doomed()
        is_doomed()


def after_blocks_that_went_well(door: str) -> None:
    with transaction.atomic():
        with transaction.atomic():
            business("released")
        with contextlib.suppress(ZeroDivisionError), transaction.atomic():
            business("rolled back")
            _ = 1 / 0
        with transaction.atomic():
            conflict(door)
        is_doomed()


def behind_a_savepoint_by_hand(door: str) -> None:
    with transaction.atomic():
        business("before")
        sid = getattr(transaction, "savepoint_create", transaction.savepoint)()
        business("inside")
        conflict(door)
        with pytest.raises(TransactionManagementError):
            transaction.savepoint_rollback(sid)
        is_doomed()


def in_a_durable_block(door: str) -> None:
    with transaction.atomic(durable=True):
        business("before")
        with transaction.atomic():
            conflict(door)
        is_doomed()


SHAPES = [
    flat,
    swallowed_inside_a_nested_block,
    caught_outside_a_nested_block,
    caught_outside_by_nested_blocks_without_savepoint,
    swallowed_deep_inside,
    caught_halfway,
    after_blocks_that_went_well,
    behind_a_savepoint_by_hand,
    in_a_durable_block,
]


@in_both
@pytest.mark.parametrize("shape", SHAPES)
def test_a_conflict_dooms_the_whole_transaction(shape: Any, _: str) -> None:
    _check_doomed(shape, "stage")


@pytest.mark.django_db
@doors
@pytest.mark.parametrize("shape", SHAPES)
def test_a_conflict_of_any_door_dooms_the_whole_transaction(shape: Any, door: str) -> None:
    _check_doomed(shape, door)


def _check_doomed(shape: Any, door: str) -> None:
    taken = Job.objects.submit(order("taken"))
    shape(door)
    assert not Business.objects.exists(), "a business row survived"
    assert Job.objects.get() == taken
    # The connection, and a TestCase around it, are as good as new.
    with transaction.atomic():
        business("after")
        Job.objects.stage(order("after"))
    assert Business.objects.count() == 1 and Job.objects.count() == 2


@pytest.mark.django_db(transaction=True)
@two_doors
def test_callbacks_of_a_doomed_transaction_never_run(door: str) -> None:
    Job.objects.submit(order("taken"))
    called: list[str] = []
    with transaction.atomic():
        transaction.on_commit(lambda: called.append("outer"))
        with transaction.atomic():
            transaction.on_commit(lambda: called.append("inner"))
            conflict(door)
    with transaction.atomic():
        business("after")
    assert called == []


@in_both
@two_doors
def test_an_uncaught_conflict_leaves_nothing_either(door: str, _: str) -> None:
    Job.objects.submit(order("taken"))
    with pytest.raises(IdentityConflict), transaction.atomic():
        business("before")
        with transaction.atomic():
            DOORS[door]()
    assert not Business.objects.exists() and Job.objects.count() == 1


@pytest.mark.django_db(transaction=True)
@two_doors
@pytest.mark.parametrize("nested", [False, True])
def test_without_autocommit_the_outermost_block_is_doomed(door: str, nested: bool) -> None:
    Job.objects.submit(order("taken"))
    transaction.set_autocommit(False)
    try:
        business("before the block")
        with transaction.atomic():
            business("in the block")
            with transaction.atomic() if nested else contextlib.nullcontext():
                business("inside")
                conflict(door)
            is_doomed()
        transaction.commit()
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert [row.name for row in Business.objects.all()] == ["before the block"]


@pytest.mark.django_db(transaction=True)
def test_the_transaction_of_the_jobs_database_is_doomed_and_no_other() -> None:
    Job.objects.submit(order("taken"))
    with another_alias() as other, transaction.atomic():
        with transaction.atomic(using=other):
            with contextlib.suppress(IdentityConflict):
                Job.objects.stage(order("taken", 2), using=other)
            with pytest.raises(TransactionManagementError):
                Business.objects.using(other).create(name="doomed")
        business("not doomed")
    assert [row.name for row in Business.objects.all()] == ["not doomed"]


# ATOMIC_REQUESTS -------------------------------------------------------------------------------


def view(request: HttpRequest, door: str, nested: int) -> HttpResponse:
    business("view")
    with transaction.atomic() if nested else contextlib.nullcontext():
        conflict(door)
    return HttpResponse("swallowed")


urlpatterns = [path("<str:door>/<int:nested>/", view)]


@in_both
@two_doors
@pytest.mark.urls(__name__)
@pytest.mark.parametrize("nested", [0, 1])
def test_a_view_under_atomic_requests_writes_nothing(
    door: str, nested: int, _: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    Job.objects.submit(order("taken"))
    response = Client().get(f"/{door}/{nested}/")
    assert response.content == b"swallowed"
    assert not Business.objects.exists() and Job.objects.count() == 1


# The other refusals ----------------------------------------------------------------------------


@in_both
@pytest.mark.parametrize(
    ("refused", "error"),
    [
        (lambda: ship.stage(Order(1), priority=1000), InvalidSubmission),
        (lambda: Job.objects.stage_many([order("b"), None]), InvalidSubmission),  # type: ignore[list-item]
        (lambda: ship.submit(Order(1)), TransactionActive),
        (lambda: Job.objects.submit_many([order("b")]), TransactionActive),
        (lambda: ship.stage(Order(1), using="other"), TransactionRequired),
    ],
)
def test_other_refusals_leave_the_transaction_usable(refused: Any, error: Any, _: str) -> None:
    with another_alias(), transaction.atomic():
        business("before")
        with pytest.raises(error):
            refused()
        with pytest.raises(error), transaction.atomic():
            refused()
        business("after")
    assert Business.objects.count() == 2 and not Job.objects.exists()


@in_both
def test_a_dedupe_hit_leaves_the_transaction_usable(_: str) -> None:
    live = Job.objects.submit(order("live", dedupe_key="k"))
    with transaction.atomic():
        assert Job.objects.stage(order("b", 2, dedupe_key="k")) == live
        assert Job.objects.stage_many([order("c", 3, dedupe_key="k")]) == [live]
        business("after")
    assert Business.objects.count() == 1


@in_both
def test_a_conflict_of_submit_leaves_nothing_open(_: str) -> None:
    Job.objects.submit(order("taken"))
    for refused in (
        lambda: Job.objects.submit(order("taken", 2)),
        lambda: Job.objects.enqueue(order("taken", 2)),
        lambda: Job.objects.submit_many([order("new"), order("taken", 2)]),
    ):
        with pytest.raises(IdentityConflict):
            refused()
        business("after")
    assert Business.objects.count() == 3 and Job.objects.count() == 1
