"""Whoever frees a key dies at each of its statements in turn: those who wait run all the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from typing import Any

import pytest

from django_durable_jobs import states
from django_durable_jobs.models import Job
from django_durable_jobs.testing import drain, expire_lease
from django_durable_jobs.testing.life import Life
from django_durable_jobs.transitions import blocking, claims, maintenance, recovery
from django_durable_jobs.transitions._lanes import lane_of
from django_durable_jobs.transitions.claims import ClaimedJob
from django_durable_jobs.worker.on_finish import finish_announced

from .cast import ACTS, Cast, Key, claim, returns
from .overlap import overshoots, running, stays

pytestmark = pytest.mark.django_db(transaction=True)

Free = Callable[[Cast, ClaimedJob], Any]


def of(held: ClaimedJob) -> Job:
    return Job.objects.get(pk=held.id)


# Ways to end the attempt that has the only place.
PLACES: dict[str, Free] = {
    **{act.__name__: lambda cast, held, act=act: cast.end([held], lambda: act) for act in ACTS},  # type: ignore[misc]
    "give back": lambda cast, held: claims.give_back("default", [(held.id, held.token)]),
    "block at dispatch": lambda cast, held: claims.block_claimed(
        "default", [(held.id, held.token, states.UNKNOWN_HANDLER)]
    ),
    "recover": lambda cast, held: of(held).recover(held.token),
    "recover expired": lambda cast, held: recovery.recover_expired("default"),
    "on_finish": lambda cast, held: finish_announced(
        "default", held, cast.play(held, returns), lambda event: None, guard=nullcontext
    ),
}
# Ways to leave for the one that was let in and has not been claimed.
TURNS: dict[str, Callable[[Job], Any]] = {
    "cancel": lambda job: job.request_cancel(),
    "block": lambda job: blocking.block_lane(
        "default", lane_of(job), states.UNKNOWN_HANDLER, patience=0
    ),
    "exhaust": lambda job: maintenance.exhaust("default"),
}


def die_everywhere(cast: Cast, prepare: Callable[[], Callable[[], Any]]) -> None:
    """Let what ``prepare`` gives die at each of its statements, and see what becomes of it."""
    # Every other point: just after a statement is just before the next one, a COMMIT too.
    for number in count(1, 2):
        Job.objects.all().delete()
        move = prepare()
        with Life(number) as life:
            move()
        assert max(running(cast.limits).values(), default=0) <= 1, life.point
        for job in Job.objects.filter(status="running"):
            expire_lease(job)
        drain()
        left = Job.objects.exclude(status__in=states.TERMINAL)
        assert not left.exists(), (life.point, left.values("job_id", "status", "limit_waiting"))
        assert overshoots(stays(cast.limits)) == [], life.point
        if life.point is None:
            assert number > 8, "it did too little to die of"
            return


@pytest.fixture
def cast() -> Cast:
    return Cast(keyed=1)


def submit(cast: Cast, jobs: int) -> list[Job]:
    return [cast.handlers["keyed"].submit(Key("a")) for _ in range(jobs)]


# One in any case; the others take their time.
@pytest.mark.parametrize(
    "name",
    [one if one == "returns" else pytest.param(one, marks=pytest.mark.long) for one in PLACES],
)
def test_the_next_runs_wherever_the_one_that_frees_its_place_dies(cast: Cast, name: str) -> None:
    def prepare() -> Callable[[], Any]:
        submit(cast, 3)
        # It takes the one place, and lets the others wait for it.
        [held] = claim(3)
        if name == "recover expired":
            expire_lease(Job.objects.get(pk=held.id))
        return lambda: PLACES[name](cast, held)

    die_everywhere(cast, prepare)


@pytest.mark.long
@pytest.mark.parametrize("name", TURNS)
def test_the_next_runs_wherever_the_one_that_gives_up_its_turn_dies(cast: Cast, name: str) -> None:
    def prepare() -> Callable[[], Any]:
        submit(cast, 3)
        held = claim(3)
        cast.end(held, lambda: returns)
        turn = Job.objects.get(status="queued", limit_waiting=False)
        if name == "exhaust":
            Job.objects.filter(pk=turn.pk).update(attempt_count=1000)
        return lambda: TURNS[name](turn)

    die_everywhere(cast, prepare)


@pytest.mark.long
def test_all_run_wherever_a_claim_dies(cast: Cast) -> None:
    def prepare() -> Callable[[], Any]:
        submit(cast, 3)
        return lambda: claim(3)

    die_everywhere(cast, prepare)
