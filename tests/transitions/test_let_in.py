"""The pass that lets in who waits for a place where nobody else did (CONTRACT 3.12)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_durable_jobs import JobSubmission, states
from django_durable_jobs.dialects.base import LimitKey
from django_durable_jobs.exceptions import InvalidTransition
from django_durable_jobs.handlers import registry
from django_durable_jobs.models import Job, QueuePause
from django_durable_jobs.testing import claim as claim_exactly
from django_durable_jobs.testing import drain
from django_durable_jobs.transitions import claims, limits, maintenance
from django_durable_jobs.transitions.workers import deregister, register
from django_durable_jobs.worker.passes import Serving, own_capabilities, run_passes
from tests._rows import NOW

from .live import check_rows
from .test_limits import claim, declare, end, ids, waiting

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    limits._looked_at.clear()
    with registry.temporary():
        yield
    check_rows()


def serving(**changes: Any) -> Serving:
    return Serving(handlers=own_capabilities(), **changes)


def let_in(**changes: Any) -> int:
    return limits.let_in_free("default", serving(**changes))


def stuck(*jobs: Job) -> None:
    """Have jobs wait as after a crash: nobody is on the way to let them in."""
    Job.objects.filter(pk__in=[one.pk for one in jobs]).update(limit_waiting=True)


def test_where_a_place_is_free_and_nobody_comes_the_next_are_let_in():
    keyed, full = declare(4), declare(1, name="limits.full")
    [keyed.submit("a"), full.submit("a")]
    assert len(claim()) == 2
    comes, low, high, higher = (keyed.submit("a", priority=priority) for priority in (3, 0, 1, 2))
    stuck(low, high, higher, full.submit("a"))
    assert maintenance.waiting("default").let_in
    assert let_in() == 2, "beside one that runs and one that is on the way"
    assert let_in() == 0
    assert ids(claim()) == [comes.pk, higher.pk, high.pk]
    assert let_in() == 0 and len(waiting()) == 2


def test_nothing_waits_is_seen_in_the_one_question_of_a_poll():
    declare().submit("a")
    assert not maintenance.waiting("default").let_in
    with CaptureQueriesContext(connection) as caught:
        run_passes("default", serving(), recover=False)
    assert not any("RECURSIVE keys" in one["sql"] for one in caught.captured_queries)


def test_what_a_crash_has_left_is_let_in_by_a_pass_and_by_a_drain():
    """The process that freed the place died before it could let the next in."""
    keyed = declare()
    jobs = [keyed.submit("a") for _ in range(3)]
    stuck(*jobs)
    [lane] = run_passes("default", serving())
    assert lane.handler == "limits.keyed"
    assert waiting() == [one.pk for one in jobs[1:]]
    stuck(jobs[0])
    assert [one.job_id for one in drain()] == [one.pk for one in jobs]


@pytest.mark.parametrize("where", ["paused", "not served", "excluded", "other code"])
def test_jobs_that_nobody_takes_do_not_keep_out_those_behind_them(where):
    keyed, other = declare(2), declare(2, version=2)
    place = {"queue": "elsewhere", "priority": 9}
    ahead = [(other if where == "other code" else keyed).submit("a", **place) for _ in range(4)]
    behind = [keyed.submit("a") for _ in range(3)]
    stuck(*ahead, *behind)
    if where == "paused":
        QueuePause.objects.create(queue="elsewhere", paused_at=NOW)
    queues: dict[str, Any] = {
        "not served": {"queues": ("default", "x")},
        "excluded": {"excluded_queues": ("elsewhere",)},
    }.get(where, {})
    mine = {one for one in own_capabilities() if where != "other code" or one[1] == 1}
    serves = Serving(handlers=frozenset(mine), **queues)
    assert limits.let_in_free("default", serves) == 4
    assert limits.let_in_free("default", serves) == 0
    assert waiting() == [one.pk for one in (*ahead[2:], behind[2])]


def test_who_frees_a_place_lets_in_whom_it_serves():
    """Else each of its jobs would wait for a pass: the next is of a queue that nobody serves."""
    key = LimitKey("limits.keyed", "a")
    keyed = declare(1)
    ahead = [keyed.submit("a", queue="elsewhere", priority=9) for _ in range(3)]
    behind = [keyed.submit("a") for _ in range(4)]
    stuck(*ahead, *behind)
    serves = serving(queues=("default",))
    assert limits.let_in_free("default", serves) == 2, "the next of all, and one of ours"
    lanes = [lane for lane in claims.queued_lanes("default") if lane.queue == "default"]
    for job in behind:
        [one] = claims.claim("default", lanes, limit=9, worker="w", lease_seconds=60)
        assert one.id == job.pk
        assert end(one).written
        found = limits.let_in_of("default", [key], serves)
        assert found == (0 if job is behind[-1] else 1), "where one of ours waits"
    assert waiting() == [one.pk for one in ahead[1:]]
    [one] = claim()
    assert one.id == ahead[0].pk and end(one).written
    assert ids(claim()) == [ahead[1].pk]


def test_those_who_cannot_come_are_passed_over_in_one_look():
    """Let in they are for the passes to end; the place is for the first who can start."""
    keyed = declare(1)
    spent = [keyed.submit("a") for _ in range(3)]
    last = keyed.submit("a")
    stuck(*spent, last)
    spent_jobs = Job.objects.filter(pk__in=[one.pk for one in spent])
    spent_jobs.update(attempt_count=9, max_attempts=9)
    assert let_in() == 4 and waiting() == []
    spent_jobs.delete()  # they have no attempts


def test_one_on_the_way_of_two_places_keeps_nobody_of_another_queue_out():
    keyed = declare(2)
    first, second, third = (keyed.submit("a") for _ in range(3))
    fourth = keyed.submit("a", queue="elsewhere")
    held = claim()
    assert ids(held) == [first.pk, second.pk] and waiting() == [third.pk, fourth.pk]
    for one in held:
        assert end(one).written
    assert waiting() == [], "nobody has taken the third yet, and there is a place for the fourth"


@pytest.mark.parametrize("places", [1, 2])
def test_who_waits_is_not_overtaken_by_those_behind_it_that_never_waited(places):
    keyed = declare(places)
    held = [keyed.submit("a") for _ in range(places)] and claim()
    first = keyed.submit("a", priority=9)
    assert claim(1) == [] and waiting() == [first.pk]
    for _ in range(places):
        keyed.submit("a")
    assert end(held[0]).written
    assert ids(claim(1)) == [first.pk]


@pytest.mark.parametrize("priority", [5, 0])
def test_nor_where_one_that_nobody_takes_has_the_turn(priority):
    keyed = declare(1)
    keyed.submit("a")
    [one] = claim()
    keyed.submit("a", queue="elsewhere", priority=9)
    first = keyed.submit("a", priority=priority)
    assert claim() == [] and len(waiting()) == 2
    QueuePause.objects.create(queue="elsewhere", paused_at=NOW)
    keyed.submit("a")
    assert end(one).written
    limits.let_in_of("default", [LimitKey("limits.keyed", "a")], serving())
    assert ids(claim(1)) == [first.pk]


def test_a_pass_lets_in_by_the_order_of_claims_too():
    keyed = declare(2)
    low = [keyed.submit("a") for _ in range(3)]
    high = [keyed.submit("a", priority=priority) for priority in (7, 9, 8)]
    stuck(*high)
    assert let_in() == 2
    assert waiting() == [high[0].pk]
    assert let_in() == 0
    assert ids(claim()) == [high[1].pk, high[2].pk]
    assert set(waiting()) == {high[0].pk, *(one.pk for one in low)}


def test_a_greater_number_lets_more_in_and_none_lets_in_all():
    keyed = declare(1)
    jobs = [keyed.submit("a") for _ in range(9)]
    assert len(claim()) == 1 and len(waiting()) == 8
    registry.unregister("limits.keyed", 1)
    declare(4)
    assert let_in() == 3
    registry.unregister("limits.keyed", 1)
    declare(None)
    assert let_in() == 5 and waiting() == []
    assert ids(claim()) == [one.pk for one in jobs[1:]]


def test_a_smaller_number_is_held_by_the_claim():
    keyed = declare(3)
    jobs = [keyed.submit("a") for _ in range(5)]
    first, second, third = claim()
    assert len(waiting()) == 2
    registry.unregister("limits.keyed", 1)
    declare(1)
    end(first)
    assert claim() == [] and len(waiting()) == 2
    end(second), end(third)
    assert ids(claim()) == [jobs[3].pk]
    assert claim() == [] and waiting() == [jobs[4].pk]


def test_a_handler_that_is_gone_is_left_to_who_has_it_and_else_blocked():
    keyed = declare()
    jobs = [keyed.submit("a") for _ in range(3)]
    stuck(*jobs)
    capability = ("limits.keyed", 1, keyed.fingerprint)
    registry.unregister("limits.keyed", 1)
    key = register("default", name="w", queues=None, excluded_queues=(), capabilities=[capability])
    assert let_in() == 0 and len(waiting()) == 3
    deregister("default", key)
    run_passes("default", serving(), patient=False)
    assert set(Job.objects.values_list("status", "blocked_reason")) == {
        (states.BLOCKED, states.UNKNOWN_HANDLER)
    }


def test_many_keys_are_looked_at_page_by_page(monkeypatch):
    monkeypatch.setattr(limits, "KEYS", 3)
    keyed = declare()
    keys = [f"k{number}" for number in range(7)]
    jobs = Job.objects.submit_many(JobSubmission.create(keyed, key) for key in keys)
    stuck(*jobs)
    assert [let_in() for _ in range(4)] == [3, 3, 1, 0]
    stuck(*jobs)
    assert let_in() == 3, "begun anew"
    stuck(*jobs)
    assert limits.let_in_free("default", serving(), whole=True) == 7


def test_a_pass_that_finds_nothing_free_writes_nothing():
    keyed = declare()
    for number in range(3):
        [keyed.submit(f"k{number}"), keyed.submit(f"k{number}")]
    claim(), claim()
    with CaptureQueriesContext(connection) as caught:
        assert let_in() == 0
    assert all(one["sql"].startswith(("SELECT", "WITH")) for one in caught.captured_queries)
    assert len(caught) == 2


def test_a_drain_runs_what_its_own_ends_let_in_and_leaves_what_another_holds():
    keyed = declare(1)
    held = keyed.submit("theirs")
    assert ids(claim()) == [held.pk]
    waits = keyed.submit("theirs")
    mine = [keyed.submit("mine") for _ in range(4)]
    assert [one.job_id for one in drain()] == [one.pk for one in mine]
    assert waiting() == [waits.pk]


def test_a_claim_by_hand_says_that_the_limit_is_reached():
    keyed = declare()
    first, second = keyed.submit("a"), keyed.submit("a")
    attempt = claim_exactly(first)
    with pytest.raises(InvalidTransition, match="it waits for a place under its concurrency key a"):
        claim_exactly(second)
    attempt.run()
    assert claim_exactly(second).run().status == "succeeded"


def test_an_operator_is_told_which_limit_it_is_and_who_holds_its_places():
    keyed = declare(2)
    jobs = [keyed.submit("a") for _ in range(3)]
    held = claim()
    assert claim() == []
    found = Job.objects.get(pk=jobs[2].pk).limit()
    assert found is not None
    assert (found.key, found.number, found.running) == ("a", 2, 2)
    assert [(one.job, one.job_id, one.worker) for one in found.holders] == [
        (one.id, one.job_id, "w") for one in held
    ]
    registry.unregister("limits.keyed", 1)
    assert jobs[0].limit().number is None
    assert declare(None, name="limits.free").submit(None).limit() is None
