"""Races over the places of a concurrency limit (CONTRACT 3.12; FAULTS 20).

Each proves that it took place: the one move stands right before its commit while the other is
seen waiting for it. Where a test is of two claims, it has been seen to fail with the key's lock
taken out, and with the count in one statement with the lock (``tests.mutations``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection
from django.test import override_settings

from django_durable_jobs import job
from django_durable_jobs.dialects import dialect_for
from django_durable_jobs.dialects.base import LimitKey
from django_durable_jobs.handlers import registry
from django_durable_jobs.models import Job
from django_durable_jobs.transitions import _let_in, _limits, claims, outcomes
from django_durable_jobs.transitions.claims import ClaimedJob
from tests.racing import LIMIT, PATIENT, held, racing, together
from tests.transitions.live import check_rows, done

from .paused import paused

pytestmark = pytest.mark.django_db(transaction=True)
POSTGRES = connection.vendor == "postgresql"
only_postgres = pytest.mark.skipif(not POSTGRES, reason="SQLite has one writer, and no key locks")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Slow machines: what is tested here is who wins, not how long it may take.
    monkeypatch.setattr(_limits, "LINE_SECONDS", LIMIT)
    monkeypatch.setattr(_let_in, "LINE_SECONDS", LIMIT)
    with registry.temporary(), override_settings(DURABLE_JOBS=PATIENT):
        yield
    check_rows()


def declare(concurrency: int) -> Any:
    @job("races.keyed", concurrency=concurrency, concurrency_key=lambda key: key, timeout=0.01)
    def keyed(ctx: Any, key: str) -> None: ...

    return keyed


def claim(limit: int = 1) -> list[ClaimedJob]:
    lanes = claims.queued_lanes("default")
    return claims.claim("default", lanes, limit=limit, worker="w", lease_seconds=600)


def end(one: ClaimedJob) -> outcomes.FinishReport:
    return outcomes.finish("default", [done(one, is_keyed=True)], wait=True)


def running() -> int:
    return Job.objects.filter(status="running").count()


def waiting() -> list[int]:
    return list(Job.objects.filter(limit_waiting=True).values_list("pk", flat=True))


@pytest.mark.parametrize("places", [1, 2])
def test_a_rival_claim_counts_what_the_first_has_taken(places):
    """It met the key locked, and counts in a statement that began after that commit."""
    keyed = declare(places)
    jobs = [keyed.submit("a").pk for _ in range(3)]
    with paused(claim) as first, racing(claim) as [second]:
        second.wait_until_blocked()
        [one] = first.go_on()
        taken = [other.id for other in second.result()]
    assert one.id == jobs[0]
    assert taken == jobs[1:places]
    assert running() == places


@only_postgres
def test_a_key_that_another_claim_has_locked_hides_no_other_job():
    keyed = declare(1)
    jobs = [keyed.submit(key).pk for key in ("a", "a", "b", "a", "c")]
    with paused(claim) as first, racing(lambda: claim(2)) as [second]:
        # It ends while the first stands: it takes what it can get, and waits for nothing.
        assert [one.id for one in second.result()] == [jobs[2], jobs[4]]
        [one] = first.go_on()
    assert one.id == jobs[0] and waiting() == []


def test_an_end_beside_a_claim_that_counted_before_it_loses_nobody():
    """The claim is about to send a job to wait, for a place that is free by now."""
    keyed = declare(1)
    keyed.submit("a")
    [one] = claim()
    later = keyed.submit("a")
    with paused(claim) as first, racing(lambda: end(one)) as [second]:
        second.wait_until_blocked()
        if POSTGRES:
            assert Job.objects.get(pk=one.id).status == "succeeded", "it waits after its commit"
        # (It goes on after it has sent a job to wait, and may find it let in.)
        taken = first.go_on()
        assert second.result().written == {one.id: "succeeded"}
    assert waiting() == []
    assert [one.id for one in taken + claim()] == [later.pk]


def test_a_claim_beside_an_end_that_has_not_committed_is_let_in_by_it():
    keyed = declare(1)
    keyed.submit("a")
    [one] = claim()
    later = keyed.submit("a")
    with paused(lambda: end(one)) as first, racing(claim) as [second]:
        if POSTGRES:
            assert second.result() == [] and waiting() == [later.pk]
        else:
            second.wait_until_blocked()
        first.go_on()
        second.join()
    assert waiting() == []
    assert running() == 0 if POSTGRES else [one.id for one in second.result()] == [later.pk]


@only_postgres
def test_an_end_waits_for_no_claim_and_no_finish_of_its_key():
    """Its row is written at once; who is let in comes after, or by the next pass."""
    keyed = declare(2)
    [keyed.submit("a"), keyed.submit("a")]
    first, second = claim(2)
    waits = keyed.submit("a")
    assert claim() == [] and waiting() == [waits.pk]
    _let_in.LINE_SECONDS = 0.05
    with held(lambda: lock_key("a")):
        assert end(first).written == {first.id: "succeeded"}
        assert waiting() == [waits.pk], "the key was not to be had"
    end(second)
    assert waiting() == []


@only_postgres
def test_a_claim_stands_in_line_for_a_bounded_time():
    keyed = declare(1)
    keyed.submit("a")
    _limits.LINE_SECONDS = 0.05
    with held(lambda: lock_key("a")):
        assert claim() == []
    assert len(claim()) == 1


def lock_key(key: str) -> None:
    assert dialect_for("default").try_keys("default", [LimitKey("races.keyed", key)])


def test_eight_claimers_of_three_keys_overlap_within_the_limit_and_run_all():
    keyed = declare(2)
    jobs = {keyed.submit(key).pk for key in "abc" * 16}
    taken: list[int] = []
    most: dict[str, int] = {}

    def work(number: int) -> None:
        while Job.objects.exclude(status="succeeded").exists():
            for one in claim(1 + number % 3):
                taken.append(one.id)
                end(one)
            rows = Job.objects.filter(status="running").values_list("concurrency_key", flat=True)
            for key in (now := list(rows)):
                most[key] = max(most.get(key, 0), now.count(key))

    for racer in together(work, 8):
        racer.result()
    assert sorted(taken) == sorted(jobs), "each once"
    assert all(count <= 2 for count in most.values()), most
    assert waiting() == []
