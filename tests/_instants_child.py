"""Instants in a process with ``USE_TZ=False``; started by ``test_instants``, fails by raising.

The clock of London stands still for an hour on 25 October 2026: 01:30 comes twice.
Sessions of PostgreSQL begin in New York's time, by a setting of the role.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import django
from django.conf import settings
from django.db import connection
from django.db.models import F, Max, Min

LONDON = ZoneInfo("Europe/London")
FIRST = datetime(2026, 10, 25, 1, 30, 0, 123456, tzinfo=LONDON)
SECOND = FIRST.replace(fold=1)
FIRST_UTC = datetime(2026, 10, 25, 0, 30, 0, 123456, tzinfo=UTC)
SECOND_UTC = datetime(2026, 10, 25, 1, 30, 0, 123456, tzinfo=UTC)
HOUR = timedelta(hours=1)
STEP = timedelta(microseconds=1)


def main() -> None:
    django.setup()
    assert not settings.USE_TZ and settings.TIME_ZONE == "Europe/London"
    check_session()
    for work in (fields, naive_values, jobs, moves):
        work()
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SET TIME ZONE 'America/New_York'")
        for work in (fields, naive_values, jobs, moves):
            work()
    sys.stdout.write("done")


def check_session() -> None:
    if connection.vendor != "postgresql":
        return
    import psycopg

    parameters = {
        name: value
        for name, value in connection.get_connection_params().items()
        if name in ("dbname", "user", "password", "host", "port")
    }
    with psycopg.connect(**parameters) as session:
        assert session.execute("SHOW TimeZone").fetchone() == ("America/New_York",)


def same(found: datetime | None, expected: datetime) -> None:
    assert found == expected, (found, expected)
    assert found is not None and found.tzinfo is UTC, found


def fields() -> None:
    from django_durable_jobs.models import ScheduleCursor

    cursors = ScheduleCursor.objects
    cursors.all().delete()
    common = {"fingerprint": "f", "updated_at": FIRST}
    first = cursors.create(name="first", last_minute=FIRST, **common)
    second, later = cursors.bulk_create(
        [
            ScheduleCursor(name="second", last_minute=SECOND, **common),
            ScheduleCursor(name="later", last_minute=SECOND_UTC + STEP, **common),
        ]
    )
    in_order = cursors.order_by("last_minute").values_list("last_minute", flat=True)
    found = list(in_order)
    for one, expected in zip(found, [FIRST_UTC, SECOND_UTC, SECOND_UTC + STEP], strict=True):
        same(one, expected)
    assert found[1] - found[0] == HOUR
    assert [one.name for one in cursors.filter(last_minute=FIRST)] == ["first"]
    assert [one.name for one in cursors.filter(last_minute=SECOND)] == ["second"]
    assert cursors.filter(last_minute__gt=SECOND).count() == 1
    assert cursors.filter(last_minute__range=(FIRST, SECOND)).count() == 2
    assert cursors.filter(last_minute__in=[FIRST_UTC, SECOND_UTC]).count() == 2
    ends = cursors.aggregate(Min("last_minute"), Max("last_minute"))
    same(ends["last_minute__min"], FIRST_UTC)
    same(ends["last_minute__max"], SECOND_UTC + STEP)
    # Written back as it was read, it has not moved.
    for cursor in (first, second, later):
        cursor.refresh_from_db()
        before = cursor.last_minute
        cursor.save()
        cursor.refresh_from_db()
        same(cursor.last_minute, before)
    cursors.filter(name="first").update(next_minute=SECOND, updated_at=F("last_minute"))
    first.refresh_from_db()
    same(first.next_minute, SECOND_UTC)
    same(first.updated_at, FIRST_UTC)
    second.last_minute = FIRST
    cursors.bulk_update([second], ["last_minute"])
    second.refresh_from_db()
    same(second.last_minute, FIRST_UTC)


def naive_values() -> None:
    """A naive value is TIME_ZONE's, its ``fold`` included."""
    from django_durable_jobs.models import ScheduleCursor

    cursors = ScheduleCursor.objects
    cursors.all().delete()
    naive = FIRST.replace(tzinfo=None)
    for name, value in {"first": naive, "second": naive.replace(fold=1)}.items():
        cursors.create(name=name, fingerprint="f", last_minute=value, updated_at=naive)
    found = dict(cursors.values_list("name", "last_minute"))
    same(found["first"], FIRST_UTC)
    same(found["second"], SECOND_UTC)
    assert cursors.filter(last_minute__gt=naive).count() == 1
    assert cursors.filter(last_minute=SECOND.replace(tzinfo=None)).count() == 1
    # 29 March, 01:30 to 01:59 does not exist: taken by the offset from before the gap.
    gap = datetime(2026, 3, 29, 1, 30)
    cursors.filter(name="first").update(last_minute=gap)
    same(cursors.get(name="first").last_minute, datetime(2026, 3, 29, 1, 30, tzinfo=UTC))


def jobs() -> None:
    from django_durable_jobs import JobSubmission, clock, job
    from django_durable_jobs.handlers import registry
    from django_durable_jobs.instants import to_microseconds
    from django_durable_jobs.models import Job

    noon = datetime(2026, 10, 24, 12, tzinfo=UTC)
    clock.replace(lambda: to_microseconds(noon))
    with registry.temporary():

        @job("tests.instants")
        def handler(ctx: object) -> None: ...

        Job.objects.all().delete()
        Job.objects.submit(handler, job_id="first", run_at=FIRST)
        Job.objects.submit(handler, job_id="second", run_at=SECOND)
        naive = FIRST.replace(tzinfo=None, fold=1)
        assert Job.objects.submit(handler, job_id="second", run_at=naive).newly_created is False
        delayed = JobSubmission.create(handler, run_at=HOUR)
        now = Job.objects.submit(handler, job_id="now")
    for name, expected in {"first": FIRST_UTC, "second": SECOND_UTC}.items():
        stored = Job.objects.get(job_id=name)
        same(stored.run_at, expected)
        same(stored.initial_run_at, expected)
        assert stored.status == "scheduled"
    same(delayed.run_at, noon + HOUR)
    now.refresh_from_db()
    assert now.initial_run_at is None
    same(now.run_at, noon)
    same(now.created_at, noon)
    clock.replace(None)
    with registry.temporary():
        job("tests.instants")(handler.func)
        real = Job.objects.submit("tests.instants")
    stored = Job.objects.get(pk=real.pk)
    same(stored.created_at, real.created_at)
    assert abs(real.created_at - datetime.now(UTC)) < timedelta(minutes=5)
    Job.objects.filter(pk__in=[now.pk, real.pk]).delete()


def moves() -> None:
    """Due and lease decisions in the repeated hour: between the two 01:30, one is due."""
    from django_durable_jobs import clock
    from django_durable_jobs.instants import to_microseconds
    from django_durable_jobs.models import Job, JobAttempt
    from django_durable_jobs.transitions.claims import claim, queued_lanes
    from django_durable_jobs.transitions.maintenance import promote_due
    from django_durable_jobs.transitions.recovery import recover_expired

    jobs = Job.objects
    clock.replace(lambda: to_microseconds(FIRST_UTC - STEP))
    assert promote_due("default") == 0
    clock.replace(lambda: to_microseconds(FIRST_UTC))
    assert promote_due("default") == 1
    lanes = queued_lanes("default")
    [claimed] = claim("default", lanes, limit=9, worker="w", lease_seconds=3600)
    first = jobs.get(job_id="first")
    assert claimed.id == first.id and first.status == "running"
    same(first.lease_expires_at, SECOND_UTC)
    same(JobAttempt.objects.get(job=first).started_at, FIRST_UTC)
    assert first.ownership == "current"
    clock.replace(lambda: to_microseconds(SECOND_UTC - STEP))
    assert recover_expired("default") == 0
    assert promote_due("default") == 0
    clock.replace(lambda: to_microseconds(SECOND_UTC))
    assert recover_expired("default") == 1
    assert promote_due("default") == 1
    same(JobAttempt.objects.get(job=first).finished_at, SECOND_UTC)
    clock.replace(None)


if __name__ == "__main__":
    main()
