"""At most one live job per scope, handler and dedupe key (CONTRACT 1.5)."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import pytest
from django.db import IntegrityError, transaction

from django_durable_jobs import IdentityConflict, InvalidTransition, doors, states
from django_durable_jobs.dialects import dialect_for
from django_durable_jobs.models import Job
from django_durable_jobs.worker.passes import Serving, run_passes

from ..test_query_plans import STATISTICS, filled, insert, plan
from .handlers import Order, bill, bill_again, order, ship

pytestmark = pytest.mark.django_db
PAST = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)

HOLDING: dict[str, dict[str, Any]] = {
    "scheduled": {"status": "scheduled"},
    "queued": {"status": "queued"},
    "running": {"status": "running", "lease_token": "t", "lease_expires_at": PAST},
    "running without a lease": {"status": "running"},
    **{
        f"blocked {reason}": {"status": "blocked", "blocked_reason": reason}
        for reason in states.BLOCKED_REASONS
        if reason != states.CORRUPT_PAYLOAD
    },
    "blocked for no reason": {"status": "blocked", "blocked_reason": None},
}
FREE: dict[str, dict[str, Any]] = {
    **{status: {"status": status, "finished_at": PAST} for status in states.TERMINAL},
    "corrupt": {"status": "blocked", "blocked_reason": states.CORRUPT_PAYLOAD},
}


def holder(name: str, values: dict[str, dict[str, Any]]) -> Job:
    job = Job.objects.submit(order("holder", dedupe_key="k"))
    Job.objects.filter(pk=job.pk).update(**values[name])
    return job


def by_submit() -> Job:
    return Job.objects.submit(order("second", 2, dedupe_key="k"))


def by_submit_many() -> Job:
    return Job.objects.submit_many([order("second", 2, dedupe_key="k")])[0]


def by_stage() -> Job:
    with transaction.atomic():
        return Job.objects.stage(order("second", 2, dedupe_key="k"))


def by_stage_many() -> Job:
    with transaction.atomic():
        return Job.objects.stage_many([order("second", 2, dedupe_key="k")])[0]


ways = pytest.mark.parametrize("way", [by_submit, by_submit_many, by_stage, by_stage_many])


@ways
@pytest.mark.parametrize("state", HOLDING)
def test_a_live_job_holds_its_key(state: str, way: Callable[[], Job]) -> None:
    live = holder(state, HOLDING)
    job = way()
    assert job == live and not job.newly_created
    assert ship.codec.decode(job.payload) == Order(1)
    assert Job.objects.count() == 1


@ways
@pytest.mark.parametrize("state", FREE)
def test_the_key_is_free_again(state: str, way: Callable[[], Job]) -> None:
    ended = holder(state, FREE)
    job = way()
    assert job != ended and job.newly_created
    assert way() == job
    # The live one holds the key now, whichever of the two is older.
    assert Job.objects.submit(order("third", 3, dedupe_key="k")) == job
    Job.objects.filter(pk=job.pk).update(**FREE[state])
    Job.objects.filter(pk=ended.pk).update(status="queued", finished_at=None, blocked_reason=None)
    assert Job.objects.submit(order("third", 3, dedupe_key="k")) == ended
    assert Job.objects.count() == 2


@pytest.mark.parametrize("state", HOLDING)
def test_the_database_holds_the_key(state: str) -> None:
    job = holder(state, HOLDING)
    job.refresh_from_db()
    job.pk, job.job_id, job._state.adding = None, "rival", True
    with pytest.raises(IntegrityError, match="dedupe|UNIQUE"), transaction.atomic():
        job.save(force_insert=True)


def test_the_key_belongs_to_its_scope_and_handler() -> None:
    jobs = [
        Job.objects.submit(ship, Order(1), dedupe_key="k"),
        Job.objects.submit(ship, Order(1), dedupe_key="K"),
        Job.objects.submit(ship, Order(1), dedupe_key="k", scope="s"),
        Job.objects.submit(bill, Order(1), dedupe_key="k"),
    ]
    assert all(job.newly_created for job in jobs)
    # A handler is its name: another version of it is the same one.
    assert Job.objects.submit(bill_again, Order(1), dedupe_key="k") == jobs[3]


def test_jobs_without_a_key_are_never_merged() -> None:
    assert ship.submit(Order(1)) != ship.submit(Order(1))


@ways
def test_identity_is_judged_first_and_the_key_second(way: Callable[[], Job]) -> None:
    mine = Job.objects.submit(order("second", 2, dedupe_key="k"))
    mine.request_cancel()
    live = Job.objects.submit(order("live", dedupe_key="k"))
    # The identity exists, ended, and the key is held by another: the identity answers.
    assert way() == mine
    assert Job.objects.submit(order("third", dedupe_key="k")) == live


@ways
def test_a_conflict_of_identity_is_judged_before_a_held_key(way: Callable[[], Job]) -> None:
    Job.objects.submit(order("second", 7))
    Job.objects.submit(order("live", dedupe_key="k"))
    with pytest.raises(IdentityConflict):
        way()


# The holder ends between the refused insert and the read -----------------------------------------


def before_first(monkeypatch: pytest.MonkeyPatch, name: str, work: Callable[[], Any]) -> list[int]:
    """Do ``work`` before the first call of a function of ``doors``; count its calls."""
    original = getattr(doors, name)
    calls: list[int] = []

    def wrapped(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            work()
        return original(*args, **options)

    monkeypatch.setattr(doors, name, wrapped)
    return calls


@ways
@pytest.mark.parametrize("name", ["_same_identity", "_same_key"])
def test_the_insert_is_tried_again_when_the_holder_ended(
    way: Callable[[], Job], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = holder("queued", HOLDING)
    gone = {"status": "succeeded", "finished_at": PAST}
    before_first(monkeypatch, name, lambda: Job.objects.filter(pk=ended.pk).update(**gone))
    job = way()
    assert job.newly_created and job != ended


@ways
def test_the_insert_is_tried_again_when_the_identity_was_pruned(
    way: Callable[[], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    pruned = Job.objects.submit(order("second", 7))
    before_first(monkeypatch, "_same_identity", lambda: Job.objects.filter(pk=pruned.pk).delete())
    job = way()
    assert job.newly_created and ship.codec.decode(job.payload) == Order(2)


@ways
@pytest.mark.parametrize("number", [2, 7])
def test_a_rival_of_the_identity_that_came_late_is_compared(
    way: Callable[[], Job], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its identity was not there when we looked for identities, its key is there now.
    ended = holder("queued", HOLDING)

    def swap() -> None:
        Job.objects.filter(pk=ended.pk).update(status="succeeded", finished_at=PAST)
        template = Job.objects.get(pk=ended.pk)
        template.pk, template.job_id, template._state.adding = None, "second", True
        template.status, template.finished_at = "queued", None
        template.payload = order("x", number).payload
        template.save(force_insert=True)

    before_first(monkeypatch, "_same_key", swap)
    if number == 2:
        assert not way().newly_created
    else:
        with pytest.raises(IdentityConflict):
            way()


@ways
def test_the_tries_are_bounded(way: Callable[[], Job], monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []
    dialect = dialect_for("default")

    def refused(*args: Any, **options: Any) -> list[Any]:
        tries.append(1)
        return []

    monkeypatch.setattr(dialect, "insert_job", refused)
    with pytest.raises(IntegrityError, match="try again"):
        way()
    assert len(tries) == doors.ROUNDS
    assert not Job.objects.exists()


# Moves of a job whose key another one holds ------------------------------------------------------


@pytest.mark.parametrize("state", ["failed", "cancelled", "interrupted"])
def test_retry_names_the_job_that_holds_the_key(state: str) -> None:
    ended = holder(state, FREE)
    live = by_submit()
    ended.refresh_from_db()
    for block in (transaction.atomic(), transaction.atomic(durable=True)):
        with block, pytest.raises(InvalidTransition, match="held by job second"):
            ended.retry(extra_attempts=1)
    with pytest.raises(InvalidTransition, match="held by job second"):
        ended.retry()
    ended.refresh_from_db()
    assert ended.status == state
    live.request_cancel()
    assert ended.retry().status == "queued"
    with pytest.raises(InvalidTransition, match="held by job holder"):
        live.retry()


def test_release_names_the_job_that_holds_the_key() -> None:
    corrupt = holder("corrupt", FREE)
    by_submit()
    corrupt.refresh_from_db()
    with pytest.raises(InvalidTransition, match="held by job second"):
        corrupt.release()
    corrupt.refresh_from_db()
    assert corrupt.status == "blocked"
    assert Job.objects.get(job_id="second").request_cancel() == "cancelled"
    assert corrupt.release() == "queued"


def test_the_workers_release_passes_over_what_it_cannot_release() -> None:
    corrupt = holder("corrupt", FREE)
    held = by_submit()
    Job.objects.filter(pk=held.pk).update(status="blocked", blocked_reason="unknown_handler")
    run_passes("default", Serving.everything(), patient=False)
    statuses = dict(Job.objects.values_list("pk", "status"))
    assert statuses == {corrupt.pk: "blocked", held.pk: "queued"}


@pytest.mark.parametrize("statistics", STATISTICS)
def test_the_reads_use_the_constraints_index(statistics: str) -> None:
    def fill() -> None:
        scope = {"scope": "'a'", "scope_hash": "'a'"}
        insert(3000, status="'queued'", dedupe_key="'k' || n", **scope)

    # In a table without rows any index is as good.
    with filled(fill, statistics):
        found = plan(
            "SELECT j.id FROM django_durable_jobs_job j WHERE j.scope_hash = 'a'"
            f" AND j.handler = 'plans.main' AND j.dedupe_key = 'k7'{doors.HOLDS_KEY}"
        )
    assert "durable_job_live_dedupe_key" in found
