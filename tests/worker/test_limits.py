"""Concurrency limits in whole workers: what a drain runs, and what it leaves (3.12, 4.9)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.core.management import call_command
from django.db import transaction

from django_durable_jobs import FinishEvent, JobContext, job
from django_durable_jobs.handlers import registry
from django_durable_jobs.models import Job, QueuePause
from django_durable_jobs.testing import drain
from django_durable_jobs.transitions import _limits, claims
from django_durable_jobs.transitions.workers import register
from django_durable_jobs.worker import loop
from tests._rows import NOW

from .support import PATIENCE, Serving, until

pytestmark = pytest.mark.django_db(transaction=True)


class Places:
    """How many handlers are inside at once, and how many were at most."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = self.most = self.ended = 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        with self._lock:
            self._inside += 1
            self.most = max(self.most, self._inside)
        yield
        with self._lock:
            self._inside -= 1

    def end(self, event: FinishEvent) -> None:
        self.ended += 1


@pytest.fixture
def places() -> Iterator[Places]:
    with registry.temporary():
        yield Places()


def declare(places: Places, way: str, number: int = 2) -> Any:
    on_finish = places.end if way == "on_finish" else None

    @job("limits.worker", concurrency=number, timeout=50, on_finish=on_finish)
    def limited(ctx: JobContext) -> None:
        with places.taken():
            if way == "complete":
                with transaction.atomic():
                    ctx.complete()

    return limited


@pytest.mark.parametrize("way", ["return", "complete", "on_finish"])
def test_a_drain_runs_all_that_its_own_ends_let_in(places: Places, way: str) -> None:
    limited = declare(places, way)
    limited.submit_many([None] * 12)
    call_command("runjobs", drain=True, threads=6, verbosity=0)
    assert set(Job.objects.values_list("status", "attempt_count")) == {("succeeded", 1)}
    assert 1 <= places.most <= 2
    assert places.ended == (12 if way == "on_finish" else 0)


def test_a_drain_leaves_what_waits_for_another_workers_job(places: Places) -> None:
    limited = declare(places, "return", number=1)
    [limited.submit(), limited.submit()]
    lanes = claims.queued_lanes("default")
    [held] = claims.claim("default", lanes, limit=1, worker="other", lease_seconds=600)
    call_command("runjobs", drain=True, threads=2, verbosity=0)
    assert places.most == 0
    assert Job.objects.get(limit_waiting=True).pk != held.id


@pytest.mark.parametrize("kit", [False, True])
def test_a_drain_finds_what_is_due_behind_however_many_that_must_wait(
    places: Places, monkeypatch: pytest.MonkeyPatch, kit: bool
) -> None:
    """Also where that takes more than one claim of a worker, which ends none too soon."""
    monkeypatch.setattr(loop, "LONGEST_CLAIM_SECONDS", -1)
    monkeypatch.setattr(_limits, "ROUNDS", 1)
    limited = declare(places, "return", number=1)

    @job("limits.behind")
    def behind(ctx: JobContext) -> None: ...

    limited.submit_many([None] * 30)
    lanes = claims.queued_lanes("default")
    assert len(claims.claim("default", lanes, limit=1, worker="other", lease_seconds=600)) == 1
    last = behind.submit()
    if kit:
        assert [attempt.job_id for attempt in drain()] == [last.pk]
    else:
        call_command("runjobs", drain=True, threads=2, verbosity=0)
    assert Job.objects.get(pk=last.pk).status == "succeeded"
    assert Job.objects.filter(limit_waiting=True).count() == 29


@pytest.mark.parametrize("spread", ["one queue", "many queues", "other code"])
@pytest.mark.parametrize("number", [1, 2])
def test_who_is_not_taken_holds_up_no_queue_that_is_served(
    places: Places, durable_jobs: Callable[..., None], number: int, spread: str
) -> None:
    """Their queue is paused, or their code elsewhere: the others go on without a poll."""
    durable_jobs(POLL_SECONDS=2 * PATIENCE)
    limited = declare(places, "return", number=number)
    if spread == "other code":
        limited.submit_many([None] * (number + 2), priority=5)
        ahead = Job.objects.filter(handler=limited.name)
        ahead.update(handler_version=2)
        capability = (limited.name, 2, limited.fingerprint)
        register("default", name="w", queues=None, excluded_queues=(), capabilities=[capability])
    else:
        limited.submit_many([None] * (number + 2), priority=5, queue="paused")
        QueuePause.objects.create(queue="paused", paused_at=NOW)
    queues = [f"q{one if spread == 'many queues' else 0}" for one in range(12)]
    worker = Serving(threads=3)
    for queue in queues:
        limited.submit(queue=queue)
    until(lambda: Job.objects.filter(status="succeeded").count() == len(queues), "all served")
    assert worker.stop() == 0
    assert 1 <= places.most <= number


def test_one_pass_claims_once(places: Places) -> None:
    limited = declare(places, "return", number=1)
    for _ in range(3):
        limited.submit()
    call_command("runjobs", once=True, threads=3, verbosity=0)
    states = Job.objects.order_by("pk").values_list("status", "limit_waiting")
    assert list(states) == [("succeeded", False), ("queued", False), ("queued", True)]
