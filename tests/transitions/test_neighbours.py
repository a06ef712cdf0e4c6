"""One bad row never costs its neighbours: claims, renewals and ends (CONTRACT 3.3, 4.3)."""

from __future__ import annotations

import time

import pytest

from django_durable_jobs.models import Job
from django_durable_jobs.transitions import claims
from django_durable_jobs.worker.context import JobContext
from django_durable_jobs.worker.finisher import Finisher
from django_durable_jobs.worker.heartbeat import Heartbeat
from django_durable_jobs.worker.held import Held, HeldJobs
from django_durable_jobs.worker.shutdown import end_stuck
from tests.racing import LIMIT
from tests.racing import held as held_open
from tests.testapp.models import Business

from . import live
from .moves import outcome
from .poison import poisoned

pytestmark = pytest.mark.django_db(transaction=True)


def held(jobs: list[claims.ClaimedJob]) -> list[Held]:
    contexts = [
        JobContext(
            store=None,  # type: ignore[arg-type]
            job_id=one.job_id,
            scope="",
            queue=one.queue,
            token=one.token,
            attempt=1,
            max_attempts=3,
            timeout=30,
        )
        for one in jobs
    ]
    return [Held(job=one, ctx=ctx) for one, ctx in zip(jobs, contexts, strict=True)]


def test_many_lanes_are_claimed_in_one_order():
    """A queue for each tenant: SQLite takes 500 terms in a compound SELECT at most."""
    for number in range(520):
        live.queued(queue=f"tenant-{number:03}", priority=number % 3)
    lanes = claims.queued_lanes("default")
    assert len(lanes) == 520
    taken = claims.claim("default", lanes, limit=600, worker="w", lease_seconds=60)
    assert len(taken) == 520
    order = [(-one.priority, one.run_at, one.id) for one in taken]
    assert order == sorted(order)


def test_a_row_that_refuses_renewal_costs_no_other_lease(is_postgres):
    if not is_postgres:
        pytest.skip("the poison of SQLite is on the status, which a renewal does not change")
    mine = live.claimed(5, lease=20)
    jobs = HeldJobs()
    jobs.add(held(mine))
    before = dict(Job.objects.values_list("pk", "lease_expires_at"))
    with poisoned([mine[2].id]):
        Heartbeat("default", jobs).renew()
    after = dict(Job.objects.values_list("pk", "lease_expires_at"))
    prolonged = {pk for pk in before if after[pk] > before[pk]}
    assert prolonged == {one.id for one in mine} - {mine[2].id}


def test_a_stuck_handler_whose_row_is_refused_costs_no_other_requeue():
    mine = live.claimed(3)
    with poisoned([mine[1].id]):
        end_stuck(
            "default",
            held(mine),
            lambda one, outcome: pytest.fail("it has no on_finish"),
            until=time.monotonic() + LIMIT,
        )
    found = dict(Job.objects.values_list("pk", "status"))
    assert [found[one.id] for one in mine] == ["queued", "running", "queued"]


def test_a_fault_of_ours_loses_no_end_that_was_to_be_tried_again():
    busy, arrived = (outcome(Job(pk=one.id), one.token) for one in live.claimed(2))
    faults = [RuntimeError("of ours")]

    def settled(ended, report):
        if faults:
            raise faults.pop()

    finisher = Finisher("default", settled)
    finisher._busy = [busy]
    finisher.put(arrived)
    finisher.start()
    assert finisher.stop(LIMIT)
    assert not faults
    assert {one.status for one in Job.objects.all()} == {"succeeded"}


def test_an_end_that_waits_in_a_trigger_holds_up_no_other(is_postgres, settings):
    """The row itself is free; what its update touches is locked by a stranger."""
    if not is_postgres:
        pytest.skip("SQLite has one writer, and no locks of rows")
    from django.db import connection

    settings.DURABLE_JOBS = {"LEASE_SECONDS": 6}
    mine = live.claimed(3)
    business = Business.objects.create(name="audited")
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION tests_audit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            f" UPDATE {Business._meta.db_table} SET value = value + 1 WHERE id = {business.pk};"
            " RETURN NEW; END $$;"
            " CREATE TRIGGER tests_audit BEFORE UPDATE ON django_durable_jobs_job FOR EACH ROW"
            f" WHEN (NEW.id = {mine[0].id} AND NEW.status = 'succeeded')"
            " EXECUTE FUNCTION tests_audit()"
        )
    finisher = Finisher("default", lambda ended, report: None)
    try:
        with held_open(lambda: Business.objects.select_for_update().get(pk=business.pk)) as lock:
            finisher._write([outcome(Job(pk=one.id), one.token) for one in mine])
            found = dict(Job.objects.values_list("pk", "status"))
            assert [found[one.id] for one in mine] == ["running", "succeeded", "succeeded"]
            lock.rollback()
        finisher._write([])
        assert Job.objects.get(pk=mine[0].id).status == "succeeded"
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP TRIGGER tests_audit ON django_durable_jobs_job")
            cursor.execute("DROP FUNCTION tests_audit()")
