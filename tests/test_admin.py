"""The admin's pages: what they show, to whom, in how many queries, and that they change nothing."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib import admin
from django.db import connection
from django.test import Client, RequestFactory
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_durable_jobs import clock, states
from django_durable_jobs import job as declare
from django_durable_jobs.admin import base, displays
from django_durable_jobs.admin import jobs as job_pages
from django_durable_jobs.handlers import registry
from django_durable_jobs.models import (
    Job,
    JobAttempt,
    LiveWorker,
    OperatorAction,
    QueuePause,
    ScheduleCursor,
)
from tests._admin import APP, choose, job_url, list_url, listed, staff, superuser
from tests._rows import NOW, attempt_row, job_row

pytestmark = pytest.mark.django_db

MICROSECONDS = int(NOW.timestamp()) * 1_000_000 + NOW.microsecond
SCRIPT = "<script>alert('x')</script>"
# Session, user, and what the site itself asks.
LIST_QUERIES = 6
DETAIL_QUERIES = 12
# Nothing that a policy of "default-src 'self'" would refuse.
REFUSED_BY_CSP = [
    re.compile(r"<script(?![^>]*\bsrc=)(?![^>]*type=\"application/json\")", re.I),
    re.compile(r"<style", re.I),
    re.compile(r"<[^>]+\sstyle\s*=", re.I),
    re.compile(r"<[^>]+\son\w+\s*=", re.I),
    re.compile(r"(?:href|src|action)\s*=\s*[\"']?\s*javascript:", re.I),
]


@pytest.fixture
def viewer() -> Client:
    return staff("view_job")


@pytest.fixture
def at_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the deciding clock stand at ``NOW``."""
    monkeypatch.setattr(clock, "_replacement", lambda: MICROSECONDS)


def saved(**changes: Any) -> Job:
    job = job_row(**changes)
    job.save()
    return job


def detail(client: Client, job: Job) -> str:
    response = client.get(job_url(job))
    assert response.status_code == 200, response
    return str(response.content.decode())


def every_kind() -> list[Job]:
    """Store a job of each status and each blocked reason."""
    jobs = []
    for status in states.JOB_STATUSES:
        ended = {"finished_at": NOW} if status in states.TERMINAL else {}
        lease = {"lease_token": "a" * 32, "lease_expires_at": NOW} if status == "running" else {}
        jobs.append(saved(status=status, attempt_count=1, **ended, **lease))
    jobs += [saved(status="blocked", blocked_reason=one) for one in states.BLOCKED_REASONS]
    return jobs


def all_rows() -> list[Any]:
    return [list(model.objects.order_by("pk").values()) for model in (Job, JobAttempt)]


def test_the_list_shows_what_an_operator_looks_for(viewer: Client) -> None:
    saved(
        job_id="o-1",
        handler="orders.ship",
        queue="mail",
        status="running",
        attempt_count=2,
        granted_attempts=1,
        progress=0.25,
        cancel_requested_at=NOW,
        lease_token="t" * 32,
        lease_expires_at=NOW,
    )
    page = viewer.get(list_url()).content.decode()
    for text in ("o-1", "orders.ship", "mail", "2 / 4", "25%", "requested"):
        assert text in page
    assert 'class="durable-status durable-status-running">running<' in page
    assert "django_durable_jobs/admin.css" in page


def test_the_newest_job_comes_first(viewer: Client) -> None:
    for number in range(3):
        saved(job_id=f"o-{number}")
    assert listed(viewer) == ["o-2", "o-1", "o-0"]


@pytest.mark.parametrize("status", states.JOB_STATUSES)
def test_the_status_filter_gives_just_that_status(viewer: Client, status: str) -> None:
    expected = {job.job_id for job in every_kind() if job.status == status}
    assert set(listed(viewer, status__exact=status)) == expected


def test_scheduled_jobs_are_listed_as_they_fall_due(viewer: Client) -> None:
    for hours in (2, 1, 3):
        saved(job_id=f"in-{hours}", status="scheduled", run_at=NOW + timedelta(hours=hours))
    assert listed(viewer, status__exact="scheduled") == ["in-1", "in-2", "in-3"]


def test_jobs_at_a_limit_have_a_filter_of_their_own(viewer: Client) -> None:
    saved(job_id="free")
    saved(job_id="held", limit_waiting=True, concurrency_key="k")
    assert listed(viewer, status__exact="at_limit") == ["held"]
    assert listed(viewer, status__exact="queued") == ["free"]


@pytest.mark.usefixtures("at_now")
def test_the_time_filter_is_exact_in_a_table_in_order(viewer: Client) -> None:
    ages = {"minutes": 5, "hours": 60 * 3, "days": 60 * 24 * 3, "weeks": 60 * 24 * 20}
    for name, minutes in reversed(ages.items()):
        for number in range(150):
            age = timedelta(minutes=minutes, microseconds=-number)
            saved(job_id=f"{name}-{number}", created_at=NOW - age)
    for span, count in {"hour": 150, "day": 300, "week": 450, "month": 600}.items():
        response = viewer.get(list_url(), {"created": span})
        assert response.context["cl"].result_count == count


@pytest.mark.usefixtures("at_now")
def test_the_time_filter_survives_a_row_out_of_order(viewer: Client) -> None:
    saved(job_id="old", created_at=NOW - timedelta(days=2))
    saved(job_id="new", created_at=NOW)
    saved(job_id="imported", created_at=NOW - timedelta(days=90))
    assert listed(viewer, created="hour") == ["new"]
    assert listed(viewer, created="nonsense") == ["imported", "new", "old"]


def test_search_finds_a_job_id_exactly_in_every_scope(viewer: Client) -> None:
    for scope in ("", "tenant-a", "tenant-b"):
        saved(job_id="o-1", scope=scope, handler=f"h{scope}")
        saved(job_id="o-12", scope=scope)
    assert listed(viewer, q="o-1") == ["o-1"] * 3
    assert listed(viewer, q=" o-12 ") == ["o-12"] * 3
    assert listed(viewer, q="o-") == []


def test_search_finds_a_row_by_its_number(viewer: Client) -> None:
    job = saved(job_id="o-1")
    saved(job_id="o-2")
    assert listed(viewer, q=str(job.pk)) == ["o-1"]
    assert listed(viewer, q="9" * 40) == []


def test_search_finds_handlers_by_their_beginning(viewer: Client) -> None:
    saved(job_id="ship", handler="orders.ship")
    saved(job_id="bill", handler="orders.bill")
    saved(job_id="mail", handler="mail.send")
    assert listed(viewer, q="orders.") == ["bill", "ship"]
    assert listed(viewer, q="orders.", status__exact="failed") == []
    assert listed(viewer, q="100%") == []


def test_search_in_an_empty_table_finds_nothing(viewer: Client) -> None:
    assert listed(viewer, q="o-1") == []
    assert listed(viewer, created="hour") == []


def test_a_capped_count_says_so(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base.CappedPaginator, "cap", 60)
    Job.objects.bulk_create(job_row() for _ in range(61))
    assert "More than 60 match" in viewer.get(list_url()).content.decode()
    Job.objects.order_by("pk")[:1].get().delete()
    assert "More than" not in viewer.get(list_url()).content.decode()


@pytest.mark.parametrize(
    "query",
    [{}, {"p": 2}, {"status__exact": "queued"}, {"created": "week"}, {"q": "row"}, {"q": "12"}],
)
def test_the_list_makes_few_queries_however_many_rows(
    viewer: Client, query: dict[str, Any]
) -> None:
    Job.objects.bulk_create(job_row(payload="x" * 5000) for _ in range(120))
    with CaptureQueriesContext(
        connection,
    ) as captured:
        response = viewer.get(list_url(), query)
        assert response.status_code == 200
    # Two more where a permission is looked up; two for the span, two for the search.
    assert len(captured) <= LIST_QUERIES + 4, [one["sql"] for one in captured]
    assert not any('"payload"' in one["sql"] for one in captured)


def test_a_job_makes_few_queries_however_many_attempts(viewer: Client) -> None:
    job = saved(attempt_count=60, max_attempts=100)
    detail(viewer, job)  # Django keeps the content types that the first page has looked up.
    counts = []
    for numbers in (range(1, 31), range(31, 61)):
        for number in numbers:
            ended = {"status": "failed", "finished_at": NOW}
            attempt_row(job, number=number, token=f"{number:032x}", **ended).save()
        OperatorAction.objects.bulk_create(
            OperatorAction(operator="o", action="retry", job_key=job.pk, happened_at=NOW)
            for _ in numbers
        )
        with CaptureQueriesContext(connection) as captured:
            page = detail(viewer, job)
        counts.append(len(captured))
    assert counts[0] == counts[1] <= DETAIL_QUERIES, [one["sql"] for one in captured]
    assert page.count("attempt 60") and not page.count("attempt 40")
    shown = job_pages.ATTEMPTS_SHOWN
    assert len(re.findall(r"durable-status-failed", page)) == shown


def test_a_long_text_is_cut_in_the_database(viewer: Client) -> None:
    cap = displays.TEXT_CAP
    job = saved(payload='"' + "x" * cap + "SECRET-TAIL" + '"')
    with CaptureQueriesContext(connection) as captured:
        page = detail(viewer, job)
    assert "SECRET-TAIL" not in page
    assert f"The first {cap} of {cap + 13} characters." in page
    whole = re.compile(r'(?<!\()"django_durable_jobs_job"\."payload"')
    assert not any(whole.search(one["sql"]) for one in captured)


def test_what_jobs_hold_is_escaped(viewer: Client) -> None:
    job = saved(
        status="failed",
        finished_at=NOW,
        attempt_count=1,
        **dict.fromkeys(
            (
                "job_id",
                "scope",
                "handler",
                "queue",
                "payload",
                "dedupe_key",
                "concurrency_key",
                "progress_message",
                "error_summary",
                "error_traceback",
            ),
            SCRIPT,
        ),
        error_category="<b>",
        result=SCRIPT,
        checkpoint=SCRIPT,
    )
    attempt_row(job, number=1, worker=SCRIPT, error_summary=SCRIPT, error_traceback=SCRIPT).save()
    OperatorAction.objects.create(
        operator=SCRIPT, action=SCRIPT[:32], job_key=job.pk, detail=SCRIPT, happened_at=NOW
    )
    client = superuser()
    pages = [
        detail(client, job),
        client.get(list_url()).content.decode(),
        client.get(reverse(f"admin:{APP}_operatoraction_changelist")).content.decode(),
        choose(client, "retry", [job]).content.decode(),
    ]
    for page in pages:
        assert "<script>alert" not in page and "<b>" not in page
        assert "&lt;script&gt;alert" in page
        # Shown once escaped, not twice.
        assert "&amp;lt;" not in page


def test_text_that_cannot_be_decoded_is_shown_as_it_is(viewer: Client) -> None:
    job = saved(payload="{not json")
    Job.objects.filter(pk=job.pk).update(checkpoint="{broken")
    page = detail(viewer, job)
    assert "{not json" in page and "{broken" in page


def test_instants_are_shown_in_the_local_zone(viewer: Client, settings: Any) -> None:
    settings.USE_TZ = True
    settings.TIME_ZONE = "Europe/London"
    summer = datetime(2026, 7, 1, 12, 30, 15, tzinfo=UTC)
    job = saved(run_at=summer, created_at=summer)
    for page in (viewer.get(list_url()).content.decode(), detail(viewer, job)):
        assert "July 1, 2026, 1:30 p.m." in page
        assert 'datetime="2026-07-01T12:30:15+00:00"' in page
        assert "12:30 p.m." not in page
    assert "2026-07-01 13:30:15 BST" in detail(viewer, job)


def test_instants_are_shown_in_the_local_zone_without_use_tz(viewer: Client, settings: Any) -> None:
    settings.USE_TZ = False
    settings.TIME_ZONE = "Europe/London"
    saved(run_at=datetime(2026, 7, 1, 12, 30, 15, tzinfo=UTC))
    assert "July 1, 2026, 1:30 p.m." in viewer.get(list_url()).content.decode()


@pytest.mark.parametrize(
    ("zone", "run_at"), [("Asia/Tokyo", datetime.max), ("America/New_York", datetime.min)]
)
def test_an_instant_that_no_date_of_the_zone_holds_is_shown_in_utc(
    viewer: Client, settings: Any, zone: str, run_at: datetime
) -> None:
    settings.TIME_ZONE = zone
    job = saved(run_at=run_at.replace(tzinfo=UTC), initial_run_at=run_at.replace(tzinfo=UTC))
    shown = f'datetime="{run_at.isoformat()}+00:00"'
    for page in (viewer.get(list_url()).content.decode(), detail(viewer, job)):
        assert shown in page


@pytest.mark.usefixtures("at_now")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"status": "scheduled", "run_at": NOW + timedelta(hours=1)}, "It is due later, at"),
        (
            {
                "status": "scheduled",
                "run_at": NOW + timedelta(hours=1),
                "attempt_count": 1,
                "error_category": "handler_error",
            },
            "Attempt 1 has failed; it is tried again at 2026-03-14 16:09:26 UTC.",
        ),
        (
            {"limit_waiting": True, "concurrency_key": "k-7"},
            "key k-7 is reached; 0 run with it.",
        ),
        ({"attempt_count": 3}, "No executions are left"),
        ({"cancel_requested_at": NOW}, "Its cancel was requested; it is not claimed."),
        ({}, "No live worker serves its queue default and its handler tests.rows."),
        ({"queue": "paused"}, "Its queue paused is paused."),
        ({"queue": "served"}, "It is due and waits for a free slot of a worker."),
        ({"status": "blocked", "blocked_reason": "unknown_handler"}, "no live worker knows"),
        ({"status": "blocked", "blocked_reason": "schema_mismatch"}, "payload type has changed"),
        ({"status": "blocked", "blocked_reason": "corrupt_payload"}, "does not match its hash"),
        ({"status": "blocked", "blocked_reason": "invalid_policy"}, "timeout cannot hold"),
        ({"status": "blocked"}, "for a reason not known here"),
        ({"status": "running"}, "needs an operator&#x27;s recover"),
        (
            {"status": "running", "lease_token": "t", "lease_expires_at": NOW},
            "lost its lease at 2026-03-14 15:09:26 UTC",
        ),
        (
            {
                "status": "running",
                "lease_token": "t",
                "lease_expires_at": NOW + timedelta(minutes=1),
                "cancel_requested_at": NOW,
            },
            "Its cancel was requested at 2026-03-14 15:09:26 UTC",
        ),
        ({"status": "succeeded", "finished_at": NOW}, "It has succeeded."),
        ({"status": "cancelled", "finished_at": NOW}, "It was cancelled."),
        ({"status": "failed", "finished_at": NOW}, "A retry queues it again."),
        ({"status": "failed", "finished_at": NOW, "attempt_count": 3}, "must grant more"),
    ],
)
def test_a_job_says_why_it_is_not_running(
    viewer: Client, changes: dict[str, Any], said: str
) -> None:
    QueuePause.objects.create(queue="paused", paused_at=NOW)
    LiveWorker.objects.create(
        name="w",
        host="h",
        pid=1,
        queues=["served"],
        capabilities=[["tests.rows", 1, "f" * 64]],
        started_at=NOW,
        last_seen_at=NOW,
    )
    assert said in detail(viewer, saved(**changes))


def test_a_job_at_its_limit_names_the_limit_and_who_holds_its_places(viewer: Client) -> None:
    keyed = {"concurrency_key": "k-7", "handler": "admin.limited"}
    lease = {"lease_token": "t" * 32, "lease_expires_at": NOW + timedelta(minutes=1)}
    runs = saved(job_id="runs", status="running", attempt_count=1, **keyed, **lease)
    attempt_row(runs, number=1, token="t" * 32, worker="host-1").save()
    waits = saved(limit_waiting=True, **keyed)
    for number, said in (
        (1, "1 of 1 places of its concurrency key k-7 are taken."),
        (2, "of which 1 of 2 run: the next pass of a worker lets it in"),
    ):
        with registry.temporary():
            declare("admin.limited", concurrency=number)(lambda ctx: None)
            page = detail(viewer, waits)
        assert said in page
        assert f"Job runs ({runs.pk}) holds a place since 2026-03-14 15:09:26 UTC" in page
        assert "on worker host-1." in page


def test_viewing_changes_no_row(viewer: Client) -> None:
    jobs = every_kind()
    jobs.append(saved(status="running"))
    before = all_rows()
    for query in ({}, {"status__exact": "running"}, {"created": "day"}, {"q": "row"}):
        listed(viewer, **query)
    for job in jobs:
        detail(viewer, job)
        history = reverse("admin:django_durable_jobs_job_history", args=[job.pk])
        assert viewer.get(history).status_code == 200
    assert all_rows() == before


@pytest.mark.parametrize("model", [Job, ScheduleCursor, LiveWorker, QueuePause, OperatorAction])
def test_not_even_a_superuser_adds_changes_or_deletes(model: Any) -> None:
    row = {
        Job: lambda: saved(job_id="o-1"),
        ScheduleCursor: lambda: ScheduleCursor.objects.create(
            name="s", fingerprint="f", last_minute=NOW, updated_at=NOW
        ),
        LiveWorker: lambda: LiveWorker.objects.create(
            name="w", host="h", pid=1, started_at=NOW, last_seen_at=NOW
        ),
        QueuePause: lambda: QueuePause.objects.create(queue="q", paused_at=NOW),
        OperatorAction: lambda: OperatorAction.objects.create(
            operator="o", action="retry", job_key=1, happened_at=NOW
        ),
    }[model]()
    before = model.objects.values().get()
    client = superuser()
    name = f"admin:{APP}_{model._meta.model_name}"
    change, add = reverse(f"{name}_change", args=[row.pk]), reverse(f"{name}_add")
    delete = reverse(f"{name}_delete", args=[row.pk])
    assert client.get(reverse(f"{name}_changelist")).status_code == 200
    page = client.get(change)
    assert page.status_code == 200
    assert not re.search(r'<(select|textarea)|name="_save"|deletelink', page.content.decode())
    assert client.post(change, {"status": "succeeded", "name": "x"}).status_code == 403
    assert client.get(add).status_code == client.post(add, {}).status_code == 403
    assert client.get(delete).status_code == client.post(delete, {"post": "yes"}).status_code == 403
    data = {"action": "delete_selected", "_selected_action": row.pk, "post": "yes"}
    client.post(reverse(f"{name}_changelist"), data)
    assert model.objects.values().get() == before


def test_attempts_follow_the_permission_of_their_job(viewer: Client) -> None:
    job = saved(attempt_count=1)
    attempt_row(job, number=1, worker="the-worker").save()
    assert "the-worker" in detail(viewer, job)
    assert staff("view_jobattempt").get(job_url(job)).status_code == 403


def test_staff_without_permission_sees_no_jobs() -> None:
    job = saved()
    client = staff()
    assert client.get(list_url()).status_code == 403
    assert client.get(job_url(job)).status_code == 403


def test_a_job_that_is_not_there_is_told(viewer: Client) -> None:
    url = reverse("admin:django_durable_jobs_job_change", args=[12345])
    assert viewer.get(url).status_code == 302


def test_every_page_obeys_a_strict_content_security_policy() -> None:
    client = superuser()
    job = saved(status="failed", finished_at=NOW, attempt_count=1, error_traceback="trace")
    attempt_row(job, number=1, error_traceback="trace").save()
    running = saved(status="running", lease_token="t" * 32, lease_expires_at=NOW)
    pages = [
        client.get(list_url()),
        client.get(job_url(job)),
        client.get(job_url(running)),
        choose(client, "retry", [job]),
        choose(client, "request_cancel", [job]),
    ]
    models = (ScheduleCursor, LiveWorker, QueuePause, OperatorAction)
    pages += [
        client.get(reverse(f"admin:{APP}_{model._meta.model_name}_changelist")) for model in models
    ]
    for page in pages:
        text = page.content.decode()
        for refused in REFUSED_BY_CSP:
            assert not refused.search(text), (refused.pattern, refused.search(text))


def test_an_operator_action_leads_to_its_job() -> None:
    job = saved()
    for key in (job.pk, None):
        OperatorAction.objects.create(operator="o", action="a", job_key=key, happened_at=NOW)
    page = superuser().get(reverse(f"admin:{APP}_operatoraction_changelist")).content.decode()
    assert page.count(f'href="{job_url(job)}"') == 1


@pytest.mark.parametrize("model", [Job, ScheduleCursor, LiveWorker, QueuePause, OperatorAction])
def test_the_pages_read_the_jobs_database(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "settings", SimpleNamespace(DATABASE="jobs"))
    request: Any = RequestFactory().get("/")
    assert admin.site.get_model_admin(model).get_queryset(request).db == "jobs"
