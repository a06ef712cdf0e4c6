"""Races of submission, by threads on connections of their own (CONTRACT 1.4, 1.5; FAULTS 19).

Each test proves that its race took place: all at one barrier, or the loser seen waiting for
the other's lock while the other's transaction was still open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from django.test import override_settings

from django_durable_jobs import IdentityConflict, doors
from django_durable_jobs.dialects import dialect_for
from django_durable_jobs.handlers import registry
from django_durable_jobs.models import Job
from tests.racing import PATIENT, Signal, barrier, held, racing, together
from tests.submission.handlers import HANDLERS, order
from tests.testapp.models import Business

pytestmark = pytest.mark.django_db(transaction=True)
only_postgres = pytest.mark.skipif(
    connection.vendor != "postgresql", reason="SQLite has one writer, so no two hold locks"
)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    # Slow machines: what is tested here is who wins, not how long it may take.
    with registry.temporary(), override_settings(DURABLE_JOBS=PATIENT):
        for handler in HANDLERS:
            registry.register(handler)
        yield


def stage(one: Any) -> Job:
    with transaction.atomic():
        Business.objects.create(name="order")
        return Job.objects.stage(one)


def stage_first(one: Any) -> Job:
    with transaction.atomic():
        return Job.objects.stage(one)


def enqueue_inside(one: Any) -> Job:
    with transaction.atomic():
        return Job.objects.enqueue(one)


def stage_many(one: Any) -> Job:
    with transaction.atomic():
        return Job.objects.stage_many([order("a first one"), one])[1]


def submit(one: Any) -> Job:
    return Job.objects.submit(one)


def enqueue(one: Any) -> Job:
    return Job.objects.enqueue(one)


def submit_many(one: Any) -> Job:
    return Job.objects.submit_many([one, order("another")])[0]


WAYS: list[Callable[[Any], Job]] = [
    stage,
    stage_first,
    enqueue_inside,
    stage_many,
    submit,
    enqueue,
    submit_many,
]
ways = pytest.mark.parametrize("way", WAYS)
many_at_once = pytest.mark.parametrize("way", [submit, submit_many, stage_first])


# Rivals whose transaction is still open -----------------------------------------------------------


@ways
@pytest.mark.parametrize("commit", [True, False])
def test_the_loser_of_an_equal_rival_waits_and_is_answered(way: Any, commit: bool) -> None:
    with held(lambda: Job.objects.stage(order("a"))) as rival:
        with racing(lambda: way(order("a"))) as [loser]:
            loser.wait_until_blocked()
            rival.commit() if commit else rival.rollback()
        job = loser.result()
    assert Job.objects.get(job_id="a").pk == job.pk
    assert job.newly_created is not commit
    if commit:  # (SQLite gives the id of a rolled back row again.)
        assert job.pk == rival.value.pk


@ways
@pytest.mark.parametrize("commit", [True, False])
def test_the_loser_of_a_different_rival_waits_and_is_told(way: Any, commit: bool) -> None:
    with held(lambda: Job.objects.stage(order("a", 2))) as rival:
        with racing(lambda: way(order("a"))) as [loser]:
            loser.wait_until_blocked()
            rival.commit() if commit else rival.rollback()
        error = loser.error()
    if commit:
        assert isinstance(error, IdentityConflict)
        assert list(Job.objects.all()) == [rival.value] and not Business.objects.exists()
    else:
        assert error is None and Job.objects.get(job_id="a").payload == order("a").payload


@ways
@pytest.mark.parametrize("commit", [True, False])
def test_the_loser_of_a_key_waits_and_gets_the_live_job(way: Any, commit: bool) -> None:
    with held(lambda: Job.objects.stage(order("rival", 2, dedupe_key="k"))) as rival:
        with racing(lambda: way(order("a", dedupe_key="k"))) as [loser]:
            loser.wait_until_blocked()
            rival.commit() if commit else rival.rollback()
        job = loser.result()
    assert job.newly_created is not commit
    assert job.job_id == ("rival" if commit else "a")
    assert Job.objects.filter(dedupe_key="k").count() == 1


@pytest.mark.parametrize("way", [stage, stage_first, enqueue_inside, stage_many])
def test_a_conflict_that_was_waited_for_dooms_the_transaction(way: Any) -> None:
    def swallow() -> None:
        with transaction.atomic():
            Business.objects.create(name="order")
            with pytest.raises(IdentityConflict), transaction.atomic():
                way(order("a"))

    with held(lambda: Job.objects.stage(order("a", 2))) as rival:
        with racing(swallow) as [loser]:
            loser.wait_until_blocked()
            rival.commit()
        loser.result()
    assert list(Job.objects.all()) == [rival.value] and not Business.objects.exists()


@many_at_once
def test_one_of_five_losers_of_a_rolled_back_rival_wins(way: Any) -> None:
    with held(lambda: Job.objects.stage(order("a"))) as first:
        with racing(*[lambda: way(order("a"))] * 5) as losers:
            losers[0].wait_until_blocked()
            losers[-1].wait_until_blocked()
            first.rollback()
        jobs = [loser.result() for loser in losers]
    assert len({job.pk for job in jobs}) == 1
    assert sum(job.newly_created for job in jobs) == 1


@only_postgres
@pytest.mark.parametrize("commits", [True, False])
def test_after_a_rollback_the_second_in_line_is_waited_for_in_turn(commits: bool) -> None:
    staged, inserted = Signal(), barrier(2)

    def second_stages() -> Job:
        with transaction.atomic():
            job = Job.objects.stage(order("a"))
            staged.set()
            inserted.wait()
            transaction.set_rollback(not commits)
            return job

    with held(lambda: Job.objects.stage(order("a"))) as first, racing(second_stages) as [second]:
        second.wait_until_blocked()
        first.rollback()
        staged.wait()
        with racing(lambda: Job.objects.submit(order("a"))) as [third]:
            third.wait_until_blocked()
            inserted.wait()
    assert second.result().newly_created
    assert third.result().newly_created is not commits
    assert Job.objects.get() == third.result()


# All at once --------------------------------------------------------------------------------------


@many_at_once
def test_fifty_equal_ones_make_one_job_and_all_are_answered(
    way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    original = doors._existing
    monkeypatch.setattr(doors, "_existing", lambda *a: looked.append("") or original(*a))
    jobs = [racer.result() for racer in together(lambda number: way(order("a")), 50)]
    assert len({job.pk for job in jobs}) == 1
    assert sum(job.newly_created for job in jobs) == 1
    assert Job.objects.filter(job_id="a").count() == 1
    assert len(looked) >= 49, "49 have lost their insert"


@many_at_once
def test_of_fifty_different_ones_one_wins_and_all_are_told(way: Any) -> None:
    racers = together(lambda number: way(order("a", number)), 50)
    errors = [racer.error() for racer in racers]
    assert errors.count(None) == 1
    assert all(isinstance(error, IdentityConflict) for error in errors if error is not None)
    [winner] = [number for number, error in enumerate(errors) if error is None]
    assert Job.objects.get(job_id="a").payload == order("a", winner).payload


@many_at_once
def test_fifty_of_one_key_make_one_job(way: Any) -> None:
    racers = together(lambda number: way(order(f"{number}", number, dedupe_key="k")), 50)
    jobs = [racer.result() for racer in racers]
    assert len({job.pk for job in jobs}) == 1
    assert sum(job.newly_created for job in jobs) == 1
    assert Job.objects.filter(dedupe_key="k").count() == 1


@many_at_once
@pytest.mark.parametrize("commit", [True, False])
def test_fifty_of_one_key_while_its_holder_ends(way: Any, commit: bool) -> None:
    holder = Job.objects.submit(order("holder", dedupe_key="k"))
    with held(lambda: Job.objects.get(pk=holder.pk).request_cancel()) as ending:
        works = [
            lambda number=number: way(order(f"{number}", number, dedupe_key="k"))
            for number in range(50)
        ]
        with racing(*works) as racers:
            racers[0].wait_until_blocked()
            racers[-1].wait_until_blocked()
            ending.commit() if commit else ending.rollback()
        jobs = [racer.result() for racer in racers]
    assert len({job.pk for job in jobs}) == 1
    assert (jobs[0].pk != holder.pk) is commit
    assert sum(job.newly_created for job in jobs) == commit
    assert Job.objects.filter(dedupe_key="k", status="queued").count() == 1


def test_submitters_of_a_key_beside_holders_that_end_all_the_time() -> None:
    # No order is forced here: whatever it is, each is answered and one job at most is live.
    def submit_and_end(number: int) -> list[bool]:
        created = []
        for turn in range(10):
            job = Job.objects.submit(order(f"{number}-{turn}", dedupe_key="k"))
            created.append(job.newly_created)
            job.request_cancel()
        return created

    created = [one for racer in together(submit_and_end, 8) for one in racer.result()]
    assert Job.objects.count() == sum(created) >= 10
    assert set(Job.objects.values_list("status", flat=True)) == {"cancelled"}


# Deadlocks ----------------------------------------------------------------------------------------


def test_two_calls_for_the_same_ids_in_opposite_order_do_not_deadlock() -> None:
    ids = [f"{number:04}" for number in range(5_000)]

    def stage_all(given: list[str]) -> list[Job]:
        with transaction.atomic():
            return Job.objects.stage_many(order(one) for one in given)

    # A third holds one in the middle until both wait: each has inserted what comes before.
    with held(lambda: Job.objects.stage(order(ids[2_500]))) as middle:
        with racing(lambda: stage_all(ids), lambda: stage_all(ids[::-1])) as [up, down]:
            up.wait_until_blocked()
            down.wait_until_blocked()
            middle.rollback()
        jobs = up.result(), down.result()[::-1]
    assert [job.job_id for job in jobs[0]] == ids
    assert [job.pk for job in jobs[0]] == [job.pk for job in jobs[1]]
    assert Job.objects.count() == 5_000
    for all_of_one in zip(*jobs, strict=True):
        assert sum(job.newly_created for job in all_of_one) == 1
    ascending = [job.pk for job in jobs[0]]
    assert ascending in (sorted(ascending), sorted(ascending, reverse=True))


def crossed(door: Callable[[list[Any]], list[Job]]) -> list[Any]:
    """Run two calls that take the keys "one" and "two" in opposite order; give the racers.

    A third holds an identity in the middle of each until both wait: each has one key then,
    and goes on to the other's.
    """
    calls = (
        [order("a", dedupe_key="one"), order("m1"), order("z", dedupe_key="two")],
        [order("b", dedupe_key="two"), order("m2"), order("y", dedupe_key="one")],
    )
    with (
        held(lambda: Job.objects.stage_many([order("m1"), order("m2")])) as middle,
        racing(*(lambda call=call: door(call) for call in calls)) as racers,
    ):
        for racer in racers:
            racer.wait_until_blocked()
        middle.rollback()
    return racers


@only_postgres
def test_crossed_keys_are_tried_again_in_a_transaction_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conflicts: list[BaseException] = []
    dialect = dialect_for("default")
    original = dialect.is_conflict

    def is_conflict(error: BaseException) -> bool:
        if original(error):
            conflicts.append(error)
        return original(error)

    monkeypatch.setattr(dialect, "is_conflict", is_conflict)
    one, two = (racer.result() for racer in crossed(Job.objects.submit_many))
    # And another one, where the victim is back before the other has taken what it let go.
    assert conflicts, "a deadlock took place"
    assert {one[0].pk, one[2].pk} == {two[2].pk, two[0].pk}
    assert Job.objects.filter(dedupe_key__isnull=False).count() == 2


@only_postgres
def test_crossed_keys_are_the_databases_error_in_the_callers_transaction() -> None:
    def door(call: list[Any]) -> list[Job]:
        with transaction.atomic():
            return Job.objects.stage_many(call)

    racers = crossed(door)
    [victim] = [error for racer in racers if (error := racer.error()) is not None]
    assert isinstance(victim, OperationalError)
    assert victim.__cause__.sqlstate == "40P01"  # type: ignore[union-attr]
    assert Job.objects.count() == 3
