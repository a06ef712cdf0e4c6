"""A walk through every move of jobs under limits: nobody too many, and nobody left behind."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

import pytest

from django_durable_jobs import states
from django_durable_jobs.models import Job
from django_durable_jobs.testing import FakeClock
from django_durable_jobs.transitions import claims
from django_durable_jobs.transitions.claims import ClaimedJob
from django_durable_jobs.transitions.maintenance import promote_due
from django_durable_jobs.transitions.recovery import recover_expired
from django_durable_jobs.worker.passes import Serving, run_passes

from .._rows import NOW
from ..transitions.live import check_rows
from .cast import ACTS, Cast, Key, claim, returns
from .overlap import running

ROOM = 1000


class Walk:
    """What is held, and one method for each step; the clock steps too."""

    def __init__(self, seed: int, clock: FakeClock) -> None:
        self.draw = random.Random(seed)
        self.clock = clock
        self.cast = Cast(whole=2, scoped=1, keyed=2)
        self.held: list[ClaimedJob] = []
        self.steps: list[Callable[[], Any]] = [
            *[self.submit] * 6,
            *[self.claim_some] * 3,
            *[self.end_some] * 3,
            *[self.claim_all] * 2,
            self.give_back,
            self.block_claimed,
            self.release,
            self.cancel,
            self.cancel,
            self.retry,
            self.recover_by_hand,
            self.lose,
            self.step,
            self.renumber,
        ]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.draw.choice(self.steps)()
        self.let_end()

    def some(self) -> list[ClaimedJob]:
        """Give a few of those held, which are not held any more."""
        self.draw.shuffle(self.held)
        count = self.draw.randint(1, 3)
        some, self.held = self.held[:count], self.held[count:]
        return some

    def any_job(self, *statuses: str) -> Job | None:
        found = Job.objects.filter(status__in=statuses).order_by("pk")
        ids = list(found.values_list("pk", flat=True))
        return Job.objects.get(pk=self.draw.choice(ids)) if ids else None

    # -- the steps

    def submit(self) -> None:
        handler = self.draw.choice(list(self.cast.handlers.values()))
        for _ in range(self.draw.randint(1, 4)):
            handler.submit(
                Key(self.draw.choice(["a", "b", None])),
                scope=self.draw.choice("xy"),
                priority=self.draw.randint(-1, 1),
            )

    def claim_some(self, room: int | None = None) -> list[ClaimedJob]:
        new = claim(room or self.draw.randint(1, 4))
        self.held += new
        limits = self.cast.limits
        now = running(limits)
        for one in new:
            limit = limits[one.handler]
            key = limit.key(Job.objects.get(pk=one.id))
            assert key is None or now[one.handler, key] <= limit.number, (one, now)
        return new

    def claim_all(self) -> None:
        """Whoever is due and has a place is claimed, whatever waits before him."""
        # A number that was raised, and queues that nobody was let in of, are for the passes.
        run_passes("default", Serving.everything(), patient=False, recover=False)
        wanted = self._places()
        while self.claim_some(ROOM):
            continue
        now = running(self.cast.limits)
        assert {key: now[key] for key in wanted} == wanted

    def _places(self) -> dict[Hashable, int]:
        """Give how many of each key must be running once all have been claimed."""
        limits, now = self.cast.limits, running(self.cast.limits)
        queued: dict[tuple[str, Any], list[bool]] = defaultdict(list)
        for job in Job.objects.filter(status="queued"):
            queued[job.handler, limits[job.handler].key(job)].append(job.run_at <= self.clock.now)
        return {
            (handler, key): max(
                now[handler, key], min(limits[handler].number, now[handler, key] + len(due))
            )
            for (handler, key), due in queued.items()
            # After a step back of the clock the next one may not be due.
            if key is not None and all(due)
        }

    def end_some(self) -> None:
        self.cast.end(self.some(), lambda: self.draw.choice(ACTS))

    def give_back(self) -> None:
        claims.give_back("default", [(one.id, one.token) for one in self.some()])

    def block_claimed(self) -> None:
        reason = states.CORRUPT_PAYLOAD
        claims.block_claimed("default", [(one.id, one.token, reason) for one in self.some()])

    def release(self) -> None:
        if job := self.any_job("blocked"):
            job.release()

    def cancel(self) -> None:
        if job := self.any_job("queued", "scheduled", "running", "blocked"):
            job.request_cancel()

    def retry(self) -> None:
        if job := self.any_job("failed", "cancelled", "interrupted"):
            job.retry(extra_attempts=1)

    def recover_by_hand(self) -> None:
        if job := self.any_job("running"):
            job.recover(job.lease_token, requeue=self.draw.random() < 0.7)

    def lose(self) -> None:
        """The leases of some are over; what runs on holds its place until it is recovered."""
        lost = [one.token for one in self.some()]
        Job.objects.filter(lease_token__in=lost).update(lease_expires_at=self.clock.now)
        self.claim_some(ROOM)
        recover_expired("default")

    def step(self) -> None:
        """The clock steps back, or on past every lease."""
        self.clock.advance(self.draw.choice([-120, -1, 1, 3600]))
        promote_due("default")

    def renumber(self) -> None:
        self.cast.renumber(self.draw.choice(list(self.cast.numbers)), self.draw.randint(1, 3))

    # -- the end

    def let_end(self) -> None:
        """Nobody who waits is forgotten, once places are free."""
        self.clock.advance(7200)
        recover_expired("default")
        self.held = []
        while job := self.any_job("blocked"):
            job.release()
        for _ in range(ROOM):
            promote_due("default")
            self.claim_all()
            if not self.held:
                break
            held, self.held = self.held, []
            self.cast.end(held, lambda: returns)
        assert not Job.objects.filter(status__in=states.LIVE).exists()
        check_rows()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_walk(seed: int) -> None:
    with FakeClock(NOW) as clock:
        Walk(seed, clock).run(100)


@pytest.mark.long
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_a_long_walk(seed: int) -> None:
    with FakeClock(NOW) as clock:
        Walk(seed, clock).run(300)
