"""Schedules in the admin: what is shown, and pause, resume, run now (CONTRACT 6, FAULTS 28)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_durable_jobs import schedule, unschedule
from django_durable_jobs.models import Job, OperatorAction, ScheduleCursor
from django_durable_jobs.testing import FakeClock, run_schedules
from tests._admin import hidden_fields, job_url, messages, staff, superuser

from .oracle import MINUTE
from .support import START

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("clock")]

LIST = "admin:django_durable_jobs_schedulecursor_changelist"
PERMISSIONS = {
    "pause_schedule": "pause_schedule",
    "resume_schedule": "pause_schedule",
    "run_schedule": "run_schedule",
}


@pytest.fixture
def cursor(tick: Any) -> ScheduleCursor:
    schedule("tick", "* * * * *", tick)
    run_schedules()
    found: ScheduleCursor = ScheduleCursor.objects.get()
    return found


def page_of(client: Client, cursor: ScheduleCursor) -> str:
    url = reverse("admin:django_durable_jobs_schedulecursor_change", args=[cursor.pk])
    return client.get(url).content.decode()


def post(client: Client, action: str, cursor: ScheduleCursor, **more: Any) -> Any:
    data = {"action": action, "index": "0", "_selected_action": [cursor.pk]}
    return client.post(reverse(LIST), data | more)


def confirm(client: Client, action: str, cursor: ScheduleCursor) -> Any:
    page = post(client, action, cursor)
    assert page.status_code == 200 and "tick" in page.content.decode()
    return client.post(reverse(LIST), hidden_fields(page))


def everything() -> list[Any]:
    return [
        list(model.objects.order_by("pk").values())
        for model in (ScheduleCursor, Job, OperatorAction, LogEntry)
    ]


# What is shown ----------------------------------------------------------------------------------


def test_each_schedule_with_its_times_and_its_lag(
    cursor: ScheduleCursor, tick: Any, clock: FakeClock
) -> None:
    schedule("night", "30 2 * * *", tick, timezone="Europe/Paris", description="Every night")
    run_schedules()
    clock.advance(7 * 60)
    run_schedules()
    clock.advance(200)
    client = staff("view_schedulecursor")
    listed = client.get(reverse(LIST)).content.decode()
    assert "30 2 * * * in Europe/Paris" in listed
    assert '<time datetime="2026-03-01T12:07:00+00:00"' in listed
    assert '<time datetime="2026-03-01T12:11:00+00:00"' in listed
    assert "140 s" in listed and "active" in listed
    page = page_of(client, cursor)
    for minute in (3, 4, 5, 6, 7, 11, 12, 13, 14, 15):
        assert f"<li>2026-03-01 12:{minute:02d}:00 UTC</li>" in page
    assert "tests.tick" in page and "tick" in page
    night = ScheduleCursor.objects.get(name="night")
    page = page_of(client, night)
    assert "<li>2026-03-02 01:30:00 UTC</li>" in page and "Every night" in page


def test_why_it_does_not_fire(cursor: ScheduleCursor, tick: Any) -> None:
    client = staff("view_schedulecursor")
    ScheduleCursor.objects.update(paused=True, problem="IntegrityError<script>")
    page = page_of(client, cursor)
    assert "It is paused." in page
    assert "It could not fire: IntegrityError&lt;script&gt;" in page
    unschedule("tick")
    assert "It is not declared" in page_of(client, cursor)
    schedule("tick", "*/5 * * * *", tick)
    assert "It runs with another cron" in page_of(client, cursor)


def test_a_jobs_page_tells_that_its_schedule_is_paused(
    cursor: ScheduleCursor, clock: FakeClock
) -> None:
    clock.advance(60)
    [made] = run_schedules()
    client = staff("view_job")
    assert "Its schedule" not in client.get(job_url(made)).content.decode()
    ScheduleCursor.objects.update(paused=True)
    page = client.get(job_url(made)).content.decode()
    assert "Its schedule tick is paused: it makes no more jobs, and this one runs still." in page


def test_a_page_of_many_takes_few_queries(cursor: ScheduleCursor, tick: Any) -> None:
    client = superuser()
    client.get(reverse(LIST))
    with CaptureQueriesContext(connection) as one:
        client.get(reverse(LIST))
    for number in range(200):
        schedule(f"many {number}", "0 0 * * *", tick)
    run_schedules()
    with CaptureQueriesContext(connection) as many:
        client.get(reverse(LIST))
    assert len(many) == len(one) < 12
    found = client.get(reverse(LIST), {"q": "many 17"}).context["cl"].result_list
    assert len(found) == 12


# Who may do what --------------------------------------------------------------------------------


@pytest.mark.parametrize("action", PERMISSIONS)
def test_each_action_needs_its_permission_on_the_server(
    cursor: ScheduleCursor, action: str
) -> None:
    ScheduleCursor.objects.update(paused=action == "resume_schedule")
    before = everything()
    other = set(PERMISSIONS.values()) - {PERMISSIONS[action]}
    for client in (
        Client(),
        staff(PERMISSIONS[action]),
        staff("view_schedulecursor", "view_job", "cancel_job", *other),
    ):
        post(client, action, cursor, confirm="yes")
        post(client, action, cursor, confirm="yes", select_across="1")
        assert everything() == before
    allowed = staff("view_schedulecursor", PERMISSIONS[action])
    assert post(allowed, action, cursor).status_code == 200
    assert everything() == before, "it asks first"
    confirm(allowed, action, cursor)
    assert everything() != before


def test_a_viewer_is_offered_nothing_and_others_what_fits(cursor: ScheduleCursor) -> None:
    button = 'name="action" value="{}"'
    viewer = page_of(staff("view_schedulecursor"), cursor)
    assert button.format("pause_schedule") not in viewer
    client = superuser()
    page = page_of(client, cursor)
    assert button.format("pause_schedule") in page and button.format("run_schedule") in page
    assert button.format("resume_schedule") not in page
    ScheduleCursor.objects.update(paused=True)
    page = page_of(client, cursor)
    assert button.format("resume_schedule") in page
    assert button.format("pause_schedule") not in page
    assert 'name="_save"' not in page


# What they do -----------------------------------------------------------------------------------


def test_pause_and_resume(cursor: ScheduleCursor, clock: FakeClock) -> None:
    client = superuser()
    assert messages(confirm(client, "pause_schedule", cursor)) == ["1 paused."]
    clock.advance(timedelta(hours=1))
    assert run_schedules() == []
    assert messages(confirm(client, "pause_schedule", cursor)) == ["1 unchanged."]
    assert messages(confirm(client, "resume_schedule", cursor)) == ["1 resumed."]
    assert run_schedules() == []
    clock.advance(60)
    assert [one.scheduled_for for one in run_schedules()] == [START + 61 * MINUTE]
    kept = OperatorAction.objects.order_by("id")
    assert [(one.operator, one.action, one.detail, one.job_key) for one in kept] == [
        ("root", "pause_schedule", "schedule tick: paused", None),
        ("root", "resume_schedule", "schedule tick: resumed", None),
    ]
    assert [one.get_change_message() for one in LogEntry.objects.order_by("id")] == [
        "Pause: paused",
        "Resume: resumed",
    ]


def test_run_now_from_its_own_page(cursor: ScheduleCursor) -> None:
    client = superuser()
    page = post(client, "run_schedule", cursor, from_page="1")
    answer = client.post(reverse(LIST), hidden_fields(page))
    assert answer.url == reverse(
        "admin:django_durable_jobs_schedulecursor_change", args=[cursor.pk]
    )
    made = Job.objects.get()
    assert (made.schedule, made.scheduled_for, made.status) == ("tick", None, "queued")
    kept = OperatorAction.objects.get()
    assert (kept.action, kept.job_key) == ("run_schedule", made.pk)
    assert kept.detail == f"schedule tick: {made}: run now"


def test_what_is_refused_is_told_and_stops_no_other(cursor: ScheduleCursor, tick: Any) -> None:
    schedule("other", "* * * * *", tick)
    run_schedules()
    ScheduleCursor.objects.update(paused=True)
    unschedule("tick")
    schedule("tick", "*/5 * * * *", tick)
    client = superuser()
    chosen = [row.pk for row in ScheduleCursor.objects.all()]
    page = client.post(reverse(LIST), {"action": "resume_schedule", "_selected_action": chosen})
    assert "2 schedules" in page.content.decode()
    told = messages(client.post(reverse(LIST), hidden_fields(page)))
    assert told[0] == "1 resumed, 1 refused."
    assert "jobs adopt-schedule tick" in told[1]
    assert ScheduleCursor.objects.get(name="tick").paused
