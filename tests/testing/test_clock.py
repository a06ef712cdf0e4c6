"""FakeClock: the one clock of this process, in every decision and every stored instant."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.apps import apps

from django_durable_jobs import job
from django_durable_jobs.fields import InstantField
from django_durable_jobs.testing import FakeClock, context, drain
from django_durable_jobs.transitions import workers

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def test_one_fake_clock_at_a_time():
    with FakeClock(START), pytest.raises(RuntimeError), FakeClock(START):
        pass


def test_it_moves_by_seconds_and_by_timedeltas_and_gives_the_new_instant():
    clock = FakeClock(START)
    assert clock.now == START
    assert clock.advance(1.5) == clock.now == START + timedelta(seconds=1.5)
    assert clock.advance(-timedelta(microseconds=1)) == START + timedelta(microseconds=1_499_999)
    before = clock.now
    for impossible in (float("nan"), 1e18, timedelta.max):
        with pytest.raises((ValueError, OverflowError)):
            clock.advance(impossible)
    for nothing in ("60", None, True):
        with pytest.raises(TypeError, match=r"takes a timedelta or seconds, not (str|None|bool)"):
            clock.advance(nothing)
    assert clock.now == before, "a refused step moves nothing"


def test_it_takes_an_instant_only():
    with pytest.raises(ValueError, match="naive"):
        FakeClock(datetime(2026, 3, 1))


@pytest.mark.django_db
def test_every_instant_stored_meanwhile_is_its_own():
    @job("testing.fails", backoff=60)
    def fails(ctx) -> None:
        ctx.progress(0.5)
        raise ValueError

    with FakeClock(START) as clock:
        failed = fails.submit()
        drain()
        fails.submit(run_at=timedelta(hours=1)).request_cancel()
        workers.register("default", name="w", queues=None, excluded_queues=[], capabilities=[])
        clock.advance(60)
        fails.submit(priority=-1)
        drain(max_jobs=1)
        failed.request_cancel()
        failed.retry()
    stored = {
        value
        for model in apps.get_app_config("django_durable_jobs").get_models()
        for field in model._meta.get_fields()
        if isinstance(field, InstantField)
        for value in model.objects.values_list(field.name, flat=True)
        if value is not None
    }
    assert stored == {START + timedelta(seconds=seconds) for seconds in (0, 60, 3600)}


def test_a_context_of_no_job_reads_it():
    with FakeClock(START):
        assert context().deadline == START + timedelta(hours=1)


@pytest.mark.django_db
def test_the_deadline_is_by_the_clock_of_all_instants():
    seen = []

    @job("testing.deadline", timeout=30)
    def deadline(ctx) -> None:
        seen.append(ctx.deadline)

    with FakeClock(START):
        deadline.submit()
        drain()
    assert seen == [START + timedelta(seconds=30)]
