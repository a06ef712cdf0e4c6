"""The rows of live workers: complete, beaten, and removed by whoever notices (CONTRACT 4.9)."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from django.db import models

from django_durable_jobs import __version__
from django_durable_jobs.handlers import registry
from django_durable_jobs.models import JobAttempt, LiveWorker
from django_durable_jobs.testing import FakeClock
from django_durable_jobs.transitions import workers
from django_durable_jobs.worker import heartbeat, presence

from .support import Serving, until

pytestmark = pytest.mark.django_db(transaction=True)


def register(name: str) -> int:
    return workers.register(
        "default", name=name, queues=["b", "a"], excluded_queues=["c"], capabilities={("h", 1, "f")}
    )


def names() -> list[str]:
    return sorted(LiveWorker.objects.values_list("name", flat=True))


def test_whoever_beats_forgets_the_dead_by_the_clock_that_decides() -> None:
    with FakeClock(datetime(2026, 3, 14, tzinfo=UTC)) as clock:
        register("dead")
        clock.advance(workers.LIVE_SECONDS + 1)
        late, well = register("late"), register("well")
        assert workers.beat("default", well, {"held": 1})
        # Not live any more, and not forgotten yet.
        assert len(workers.live_capabilities("default")) == 2
        assert names() == ["dead", "late", "well"]
        clock.advance(workers.FORGET_SECONDS - workers.LIVE_SECONDS)
        assert workers.beat("default", well, {"held": 2})
        assert names() == ["late", "well"]
        assert LiveWorker.objects.get(pk=well).health == {"held": 2}
        assert LiveWorker.objects.get(pk=well).last_seen_at == clock.now
        clock.advance(workers.FORGET_SECONDS)
        assert workers.forget_dead("default") == 1
        assert not workers.beat("default", late)


def test_history_refers_to_no_worker_s_row() -> None:
    assert isinstance(JobAttempt._meta.get_field("worker"), models.CharField)
    related = [field.related_model for field in LiveWorker._meta.get_fields() if field.is_relation]
    assert related == []


@pytest.fixture
def serving(
    monkeypatch: pytest.MonkeyPatch, durable_jobs: Callable[..., None]
) -> Iterator[Serving]:
    monkeypatch.setattr(presence, "BEAT_SECONDS", 0.05)
    durable_jobs(POLL_SECONDS=0.05)
    one = Serving(threads=3)
    yield one
    one.stop()


def test_a_worker_s_row_says_all_of_it_and_comes_back(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = until(LiveWorker.objects.first, "the row")
    assert (row.host, row.pid) == (socket.gethostname(), os.getpid())
    assert (row.name, row.queues, row.excluded_queues) == (serving.worker.options.name, None, [])
    known = sorted([one.name, one.version, one.fingerprint] for one in registry.all())
    assert row.capabilities == known

    def health() -> dict[str, Any]:
        return LiveWorker.objects.get().health

    assert health().keys() == {"version", "slots", "lost_slots", "held", "finished", "loops"}
    assert (health()["version"], health()["slots"]) == (__version__, 3)
    loops = {"claim", "finish", "renewal", "cancel watch", "hard limit", "chores", "presence"}
    assert loops <= health()["loops"].keys()

    # A loop that fails is seen from outside, and the others are not late for it.
    def fails(*arguments: Any) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(heartbeat, "cancel_requests", fails)
    began = time.monotonic()
    until(lambda: health()["loops"]["cancel watch"]["failures"] > 1, "the failures")
    until(lambda: health()["loops"]["cancel watch"]["age"] > 0.4, "its age")
    assert health()["loops"]["claim"]["failures"] == 0
    until(
        lambda: health()["loops"]["claim"]["age"] <= time.monotonic() - began, "a claim since then"
    )

    # Somebody took us for dead.
    LiveWorker.objects.all().delete()
    again = until(LiveWorker.objects.first, "the row to be written again")
    assert (again.name, again.capabilities) == (row.name, known)
    serving.stop()
    assert names() == []
