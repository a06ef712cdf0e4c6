"""Instants: exact, UTC and aware, whatever the project's and the session's zones are."""

from __future__ import annotations

import io
import json
import types
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.contrib.admin.utils import display_for_field
from django.core import serializers
from django.core.exceptions import FieldError, ValidationError
from django.core.management import call_command
from django.db import connection
from django.db.models import Max, Min
from django.forms import modelform_factory
from django.test import override_settings
from django.utils import timezone as django_timezone

from django_durable_jobs import InvalidSubmission, JobSubmission, clock, instants, job
from django_durable_jobs.fields import InstantField
from django_durable_jobs.handlers import registry
from django_durable_jobs.models import Job, JobAttempt, ScheduleCursor
from django_durable_jobs.transitions.claims import claim, queued_lanes

from ._processes import environment, python, succeeded
from ._rows import NOW, attempt_row, job_row

LONDON = ZoneInfo("Europe/London")
FIRST = datetime(2026, 10, 25, 1, 30, 0, 123456, tzinfo=LONDON)
SECOND = FIRST.replace(fold=1)
NAIVE = datetime(2026, 10, 25, 1, 30)
STEP = timedelta(microseconds=1)
LATER = SECOND.astimezone(UTC) + STEP  # arithmetic in a local zone would forget `fold`


@pytest.fixture
def handler() -> Iterator[Any]:
    with registry.temporary():

        @job("tests.instants", timeout=0.2)
        def instants_handler(ctx: Any) -> None: ...

        yield instants_handler


def cursor_row(name: str, last_minute: Any) -> ScheduleCursor:
    return ScheduleCursor(
        name=name, fingerprint="f", last_minute=last_minute, updated_at=NOW, next_minute=None
    )


# The pure functions ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        datetime(1970, 1, 1, tzinfo=UTC),
        datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
        NOW,
    ],
)
def test_microseconds_round_trip(value: datetime) -> None:
    assert instants.from_microseconds(instants.to_microseconds(value)) == value


def test_one_microsecond_is_one() -> None:
    assert instants.to_microseconds(datetime(1970, 1, 1, tzinfo=UTC) - STEP) == -1
    assert instants.to_microseconds(NOW + STEP) - instants.to_microseconds(NOW) == 1


def test_the_same_instant_in_two_zones_is_one_number() -> None:
    there = NOW.astimezone(timezone(timedelta(hours=-11, minutes=-30)))
    assert instants.to_microseconds(there) == instants.to_microseconds(NOW)


def test_the_repeated_hour_is_two_hours() -> None:
    # Python itself calls the two equal, being of one zone: numbers tell them apart.
    between = instants.to_microseconds(SECOND) - instants.to_microseconds(FIRST)
    assert between == 3600 * instants.SECOND


def test_a_naive_value_names_no_instant_under_use_tz() -> None:
    with pytest.raises(ValueError, match="naive"):
        instants.to_microseconds(NAIVE)


@override_settings(USE_TZ=False, TIME_ZONE="Europe/London")
def test_a_naive_value_is_in_time_zone_without_use_tz() -> None:
    first = instants.to_microseconds(NAIVE)
    second = instants.to_microseconds(NAIVE.replace(fold=1))
    assert first == instants.to_microseconds(datetime(2026, 10, 25, 0, 30, tzinfo=UTC))
    assert second - first == 3600 * instants.SECOND


@pytest.mark.parametrize(("seconds", "expected"), [(0.1, 100_000), (7200, 7_200_000_000)])
def test_seconds_to_microseconds(seconds: float, expected: int) -> None:
    assert instants.seconds_to_microseconds(seconds) == expected


@pytest.mark.parametrize(
    ("zone", "instant", "shown"),
    [
        ("Asia/Tokyo", datetime.max, "9999-12-31 23:59:59 UTC"),
        ("America/New_York", datetime.min, "1-01-01 00:00:00 UTC"),
        ("America/New_York", datetime.max, "9999-12-31 18:59:59 EST"),
    ],
)
def test_what_no_date_of_the_zone_holds_is_shown_in_utc(
    zone: str, instant: datetime, shown: str
) -> None:
    with django_timezone.override(zone):
        # Whether a year is padded is the platform's affair.
        assert instants.exact(instant.replace(tzinfo=UTC)).lstrip("0") == shown


# The field, in this process (USE_TZ, UTC) -----------------------------------------------------


@pytest.mark.django_db
def test_every_way_in_and_out_is_exact() -> None:
    cursors = ScheduleCursor.objects
    cursor_row("first", FIRST).save()
    cursors.bulk_create([cursor_row("second", SECOND), cursor_row("later", LATER)])
    values = list(cursors.order_by("last_minute").values_list("last_minute", flat=True))
    assert values == [
        datetime(2026, 10, 25, 0, 30, 0, 123456, tzinfo=UTC),
        datetime(2026, 10, 25, 1, 30, 0, 123456, tzinfo=UTC),
        datetime(2026, 10, 25, 1, 30, 0, 123457, tzinfo=UTC),
    ]
    assert all(value.tzinfo is UTC for value in values)
    assert cursors.get(last_minute=FIRST).name == "first"
    assert cursors.get(last_minute=SECOND).name == "second"
    assert cursors.get(last_minute="2026-10-25T02:30:00.123457+01:00").name == "later"
    assert cursors.filter(last_minute__lt=SECOND).count() == 1
    assert cursors.exclude(last_minute__in=[FIRST, SECOND]).get().name == "later"
    ends = cursors.aggregate(first=Min("last_minute"), last=Max("last_minute"))
    assert (ends["first"], ends["last"]) == (values[0], values[2])
    assert cursors.latest("last_minute").name == "later"
    cursors.filter(name="first").update(next_minute=SECOND)
    assert cursors.get(name="first").next_minute == values[1]
    assert cursors.filter(next_minute__isnull=True).count() == 2


@pytest.mark.django_db
def test_bulk_update_writes_instants() -> None:
    cursor = cursor_row("one", FIRST)
    cursor.save()
    cursor.last_minute = LATER
    cursor.next_minute = NOW
    ScheduleCursor.objects.bulk_update([cursor], ["last_minute", "next_minute"])
    cursor.refresh_from_db()
    assert cursor.last_minute == LATER
    assert cursor.next_minute == NOW


@pytest.mark.django_db
def test_a_numeric_column_holds_it() -> None:
    cursor_row("one", NOW).save()
    with connection.cursor() as cursor:
        cursor.execute("SELECT last_minute FROM django_durable_jobs_schedulecursor")
        assert cursor.fetchone() == (1_773_500_966_535_897,)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (NAIVE, ValueError),
        (date(2026, 1, 1), TypeError),
        (1.5, TypeError),
        (True, TypeError),
        ("tomorrow", ValidationError),
        ("2026-02-30T00:00:00+00:00", ValidationError),
    ],
)
def test_what_names_no_instant_is_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        str(ScheduleCursor.objects.filter(last_minute=value).query)


@pytest.mark.parametrize("value", [1.5, True, "tomorrow", "2026-02-30T00:00:00+00:00"])
def test_text_that_names_no_instant_is_a_validation_error(value: Any) -> None:
    with pytest.raises(ValidationError):
        InstantField().to_python(value)


def test_a_calendar_lookup_is_refused_rather_than_guessed() -> None:
    with pytest.raises(FieldError):
        ScheduleCursor.objects.filter(last_minute__year=2026)


@pytest.mark.parametrize("value", [None, NOW])
def test_to_python_keeps_what_is_an_instant(value: Any) -> None:
    assert InstantField().to_python(value) is value


def test_to_python_takes_the_stored_number() -> None:
    assert InstantField().to_python(1_773_500_966_535_897) == NOW


# Serialization --------------------------------------------------------------------------------


@pytest.mark.django_db
@pytest.mark.parametrize("form", ["json", "jsonl", "xml"])
def test_serialized_instants_keep_their_microseconds(form: str) -> None:
    cursor_row("one", FIRST).save()
    text = serializers.serialize(form, ScheduleCursor.objects.all())
    ScheduleCursor.objects.all().delete()
    for loaded in serializers.deserialize(form, text):
        loaded.save()
    restored = ScheduleCursor.objects.get()
    assert restored.last_minute == datetime(2026, 10, 25, 0, 30, 0, 123456, tzinfo=UTC)
    assert (restored.next_minute, restored.updated_at) == (None, NOW)


@override_settings(USE_TZ=False, TIME_ZONE="Europe/London")
def test_an_unsaved_naive_instant_is_serialized_as_utc() -> None:
    [row] = json.loads(serializers.serialize("json", [cursor_row("one", NAIVE)]))
    assert row["fields"]["last_minute"] == "2026-10-25T00:30:00+00:00"


@pytest.mark.django_db
@pytest.mark.parametrize("result", [None, 5, 0.5, True, "5", "text", [1, "x"], {"a": {"b": []}}])
def test_dumpdata_and_loaddata_give_the_same_rows(
    tmp_path: Any, handler: Any, result: object
) -> None:
    submission = JobSubmission.create(handler, job_id="kept", run_at=NOW + STEP)
    row = Job.objects.submit(submission)
    Job.objects.filter(pk=row.pk).update(
        result=result, checkpoint=[result], status="succeeded", finished_at=NOW
    )
    attempt_row(row, status="succeeded", finished_at=NOW + STEP).save()
    before = [list(Job.objects.values()), list(JobAttempt.objects.values())]
    file = tmp_path / "dump.json"
    call_command("dumpdata", "django_durable_jobs", output=str(file), verbosity=0)
    JobAttempt.objects.all().delete()
    Job.objects.all().delete()
    call_command("loaddata", str(file), stdout=io.StringIO())
    assert [list(Job.objects.values()), list(JobAttempt.objects.values())] == before
    assert Job.objects.get().result == result
    assert Job.objects.submit(submission).newly_created is False


@pytest.mark.django_db
@pytest.mark.parametrize("result", ["5", "text", {"a": 1}, [None], 0.5])
def test_a_saved_result_stays_what_it_is(result: object) -> None:
    row = job_row(result=result, checkpoint=result)
    row.save()
    for _ in range(2):
        row = Job.objects.get(pk=row.pk)
        assert (row.result, row.checkpoint) == (result, result)
        row.save()


@pytest.mark.django_db
def test_stored_text_that_is_no_json_reads_as_none(caplog: pytest.LogCaptureFixture) -> None:
    row = job_row()
    row.save()
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_durable_jobs_job SET result = '{broken'")
    assert Job.objects.get(pk=row.pk).result is None
    assert "Stored result cannot be read" in caplog.text


def test_a_result_that_is_no_json_is_refused_on_save() -> None:
    with pytest.raises(ValueError, match="Not storable"):
        Job(result=float("nan"))._meta.get_field("result").get_prep_value(float("nan"))


# Shown to people ------------------------------------------------------------------------------


@override_settings(TIME_ZONE="Europe/London", LANGUAGE_CODE="en-us")
@pytest.mark.parametrize(
    ("zone", "shown"),
    [
        ("Europe/London", "Oct. 25, 2026, 1:30 a.m."),
        ("America/New_York", "Oct. 24, 2026, 8:30 p.m."),
    ],
)
def test_the_admin_shows_a_time_in_the_current_zone(zone: str, shown: str) -> None:
    field = ScheduleCursor._meta.get_field("last_minute")
    with django_timezone.override(zone):
        assert display_for_field(FIRST.astimezone(UTC), field, "-") == shown
    assert display_for_field(None, field, "-") == "-"


@override_settings(USE_TZ=False, TIME_ZONE="Europe/London", LANGUAGE_CODE="en-us")
def test_the_admin_shows_utc_without_use_tz() -> None:
    field = ScheduleCursor._meta.get_field("last_minute")
    shown = display_for_field(FIRST.astimezone(UTC), field, "-")
    assert shown == "Oct. 25, 2026, 12:30 a.m."


def test_a_form_takes_a_time() -> None:
    form_class = modelform_factory(ScheduleCursor, fields=["last_minute"])
    form = form_class({"last_minute": "2026-10-25 00:30:00.123456"})
    assert form.is_valid()
    assert form.instance.last_minute == FIRST.astimezone(UTC)
    text = str(form_class(instance=form.instance)["last_minute"])
    assert "2026-10-25T00:30:00.123456+00:00" in text


# Submission -----------------------------------------------------------------------------------


def test_a_naive_run_at_is_refused(handler: Any) -> None:
    with pytest.raises(InvalidSubmission, match="naive"):
        JobSubmission.create(handler, run_at=NAIVE)


@pytest.mark.parametrize(
    "run_at",
    [
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))),
        datetime.min.replace(tzinfo=timezone(timedelta(hours=1))),
        timedelta.max,
    ],
)
def test_a_run_at_outside_the_calendar_is_refused(handler: Any, run_at: Any) -> None:
    with pytest.raises(InvalidSubmission, match="years 1 to 9999"):
        JobSubmission.create(handler, run_at=run_at)


@pytest.mark.django_db
def test_instants_nobody_gave_come_from_the_deciding_clock(
    handler: Any, monkeypatch: pytest.MonkeyPatch, is_postgres: bool
) -> None:
    """A host whose clock is ten minutes fast delays nothing, and its leases are no longer."""
    fast = timedelta(minutes=10)
    real = clock.time.time_ns
    wrong = types.SimpleNamespace(time_ns=lambda: real() + 600 * 10**9)
    monkeypatch.setattr(clock, "time", wrong)
    now = datetime.now(UTC) + (timedelta() if is_postgres else fast)
    row = Job.objects.submit(handler)
    [claimed] = claim("default", queued_lanes("default"), limit=1, worker="w", lease_seconds=0.5)
    row.refresh_from_db()
    assert (row.run_at, row.initial_run_at) == (row.created_at, None)
    close = timedelta(minutes=5)
    assert abs(row.created_at - now) < close
    assert row.lease_expires_at is not None
    begun = JobAttempt.objects.get(token=claimed.token).started_at
    assert abs(begun - now) < close
    assert row.lease_expires_at - begun == timedelta(seconds=0.5)


# Other settings: a process of its own ---------------------------------------------------------


@pytest.fixture
def role_in_new_york(transactional_db: None, is_postgres: bool) -> Iterator[None]:
    """Let every new session of our role in this database begin in another zone."""
    if not is_postgres:
        yield
        return
    role = 'ROLE CURRENT_USER IN DATABASE "{}"'.format(connection.settings_dict["NAME"])
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER {role} SET TimeZone = 'America/New_York'")
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER {role} RESET TimeZone")


def test_the_repeated_hour_without_use_tz(role_in_new_york: None) -> None:
    env = environment(
        database=str(connection.settings_dict["NAME"]), USE_TZ=False, TIME_ZONE="Europe/London"
    )
    assert succeeded(python("-m", "tests._instants_child", env=env)) == "done"
