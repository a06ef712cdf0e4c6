"""A job that waits for a place and that the database refuses to change holds up nobody (3.3)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import connection, transaction

from django_durable_jobs.handlers import registry
from django_durable_jobs.models import Job
from django_durable_jobs.transitions import _refused, completion, limits, outcomes
from django_durable_jobs.worker.passes import Serving, own_capabilities, run_passes
from tests._rows import attempt_row
from tests.racing import racing

from .live import check_rows, done
from .poison import poisoned
from .test_limits import ENDS, claim, declare, end, ids, waiting

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_refused, "_refused", {})
    monkeypatch.setattr(_refused, "REFUSED_SECONDS", 600)
    limits._looked_at.clear()
    with registry.temporary():
        yield
    check_rows()


def serving() -> Serving:
    return Serving(handlers=own_capabilities())


@pytest.mark.parametrize(
    "name", ["success", "beside on_finish", "complete", "recover, expired", "recover, not again"]
)
def test_it_undoes_no_end_and_the_one_behind_it_gets_the_place(name):
    keyed = declare(1, max_attempts=1)
    first, refused, behind = (keyed.submit("a") for _ in range(3))
    [one] = claim()
    assert one.id == first.pk and waiting() == [refused.pk, behind.pk]
    with poisoned([refused.pk]):
        ENDS[name](one)
        assert Job.objects.get(pk=first.pk).is_terminal
        limits.let_in_free("default", serving())
        assert waiting() == [refused.pk]
        assert ids(claim()) == [behind.pk]
    _refused._refused.clear()
    assert waiting() == [refused.pk]


def test_it_takes_no_other_end_of_a_group_with_it():
    keyed, free = declare(1), declare(None, name="limits.free")
    first, refused = (keyed.submit("a") for _ in range(2))
    [one] = claim()
    others = [free.submit(None) for _ in range(3)]
    group = [one, *claim()]
    assert waiting() == [refused.pk]
    with poisoned([refused.pk]):
        report = outcomes.finish(
            "default", [done(each, is_keyed=each.concurrency_key is not None) for each in group]
        )
    assert set(report.written) == {first.pk, *(other.pk for other in others)}


def test_it_stops_neither_the_pass_nor_other_keys():
    keyed = declare(1)
    refused, behind, other = keyed.submit("a"), keyed.submit("a"), keyed.submit("b")
    Job.objects.update(limit_waiting=True)
    with poisoned([refused.pk]):
        run_passes("default", serving(), patient=False)
        assert waiting() == [refused.pk]
        assert set(ids(claim())) == {behind.pk, other.pk}


def test_one_pass_gets_past_several_that_are_refused():
    keyed = declare(1)
    *refused, behind = (keyed.submit("a") for _ in range(6))
    Job.objects.update(limit_waiting=True)
    with poisoned([one.pk for one in refused]):
        assert limits.let_in_free("default", serving()) == 1
        assert waiting() == [one.pk for one in refused]
        assert ids(claim()) == [behind.pk]


def test_one_that_cannot_be_sent_to_wait_stops_no_claim():
    keyed, free = declare(1), declare(None, name="limits.free")
    keyed.submit("a")
    assert len(claim()) == 1
    full = [keyed.submit("a") for _ in range(30)]
    refused, last = full[10], free.submit(None)
    with poisoned([refused.pk]):
        assert ids(claim(4)) == [last.pk]
        assert waiting() == [one.pk for one in full if one is not refused]
        assert claim(4) == []


def test_a_claim_that_can_send_nobody_to_wait_comes_to_an_end():
    keyed = declare(1)
    running, refused = keyed.submit("a"), keyed.submit("a")
    assert ids(claim(1)) == [running.pk]
    with poisoned([refused.pk]):
        assert claim() == []
    assert waiting() == []


def test_one_let_in_that_cannot_be_claimed_keeps_nobody_out():
    """Its attempt row is there already, as after an import."""
    keyed = declare(1)
    first, refused, behind = (keyed.submit("a") for _ in range(3))
    [one] = claim()
    assert one.id == first.pk
    ended = {"status": "interrupted", "outcome": "lost", "finished_at": refused.created_at}
    attempt_row(refused, number=1, started_at=refused.created_at, **ended).save()
    assert end(one).written
    assert waiting() == [behind.pk]
    with pytest.raises(Exception, match=r"(?i)unique"):
        claim()
    limits.let_in_free("default", serving())
    assert ids(claim()) == [behind.pk]
    refused.attempts.all().delete()


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one isolation level")
def test_an_older_snapshot_of_who_waits_undoes_no_completion():
    """After ``ctx.fence()`` only its own row is to decide (CONTRACT 3.8)."""
    keyed = declare(2)
    mine, other, third, fourth = (keyed.submit("a") for _ in range(4))
    one, two = claim()
    assert (one.id, two.id) == (mine.pk, other.pk) and waiting() == [third.pk, fourth.pk]
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        completion.fence("default", one.id, one.token)
        with racing(lambda: end(two)) as [ending]:
            assert ending.result().written
        completion.complete("default", one.id, one.token, "1", is_keyed=True)
    assert Job.objects.get(pk=mine.pk).status == "succeeded"
    assert waiting() == [], "the fourth is let in after the commit"
