"""Twenty claimers at once, who end, lose, give back and cancel what they claim (FAULTS 20)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from django_durable_jobs import states
from django_durable_jobs.exceptions import LockTimeout
from django_durable_jobs.models import Job, JobAttempt
from django_durable_jobs.transitions import claims
from django_durable_jobs.transitions.claims import ClaimedJob
from django_durable_jobs.worker.passes import Serving, run_passes

from ..racing import together
from ..transitions.live import check_rows
from .cast import ACTS, Cast, Key, claim, returns
from .overlap import overshoots, stays, watched

CLAIMERS, JOBS = 20, 120
SECONDS = 110
NUMBERS = {"whole": 2, "scoped": 1, "keyed": 3}


class Claimer:
    """Claims some, does something with them, until all jobs have ended."""

    def __init__(self, cast: Cast, number: int) -> None:
        self._cast = cast
        self._name = f"claimer {number}"
        self._draw = random.Random(number)
        self._ways: list[Callable[[list[ClaimedJob]], Any]] = [
            *[self._end] * 5,
            self._give_back,
            self._cancel,
            self._lose,
        ]

    def run(self) -> None:
        end = time.monotonic() + SECONDS
        while Job.objects.filter(status__in=states.LIVE).exists():
            assert time.monotonic() < end, "they never come to an end"
            try:
                self._step()
            except LockTimeout:
                continue

    def _step(self) -> None:
        # As a worker's passes, which take turns with its claims.
        if self._draw.random() < 0.1:
            run_passes("default", Serving.everything(), patient=False)
        way = self._draw.choice(self._ways)
        lease = 0.1 if way == self._lose else 60
        if held := claim(self._draw.randint(1, 4), worker=self._name, lease=lease):
            # What the others do meanwhile must not find a place of theirs.
            time.sleep(self._draw.choice([0, 0.002, 0.01]))
            way(held)
        else:
            time.sleep(0.01)

    def _end(self, held: list[ClaimedJob]) -> None:
        self._cast.end(held, lambda: self._draw.choice([returns, *ACTS]))

    def _give_back(self, held: list[ClaimedJob]) -> None:
        claims.give_back("default", [(one.id, one.token) for one in held], wait=True)

    def _cancel(self, held: list[ClaimedJob]) -> None:
        """Some that runs, and some that waits or was let in."""
        Job.objects.get(pk=held[0].id).request_cancel()
        if (queued := Job.objects.filter(status="queued").order_by("?").first()) is not None:
            queued.request_cancel()
        self._end(held)

    def _lose(self, held: list[ClaimedJob]) -> None:
        """Go away, as a worker that was killed; their leases are over soon."""


@pytest.mark.django_db(transaction=True)
def test_twenty_claimers_never_exceed_a_limit_and_leave_nobody_waiting(
    durable_jobs: Callable[..., None],
) -> None:
    # An end that is given up would keep its place for the whole lease.
    durable_jobs(LOCK_TIMEOUT_SECONDS=SECONDS)
    cast = Cast(**NUMBERS)
    draw = random.Random(1)
    for _ in range(JOBS):
        cast.handlers[draw.choice(list(NUMBERS))].submit(
            Key(draw.choice(["a", "b", None])),
            scope=draw.choice("xyz"),
            priority=draw.randint(0, 1),
        )
    with watched(cast.limits) as seen:
        for racer in together(lambda number: Claimer(cast, number).run(), CLAIMERS):
            racer.result()
    check_rows()
    assert overshoots(stays(cast.limits)) == []
    outcomes = set(JobAttempt.objects.values_list("outcome", flat=True))
    assert outcomes == {"returned", "raised", "stopped", "lost"}
    assert max(seen.values()) > 1, "nobody was beside anybody"
