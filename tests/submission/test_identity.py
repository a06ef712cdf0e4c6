"""A job's identity, and what a repeated submission is compared by (CONTRACT 0, 1.1 to 1.3)."""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import time
from collections.abc import Callable
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.test import override_settings

from django_durable_jobs import IdentityConflict, InvalidSubmission, JobSubmission
from django_durable_jobs import submission as submission_module
from django_durable_jobs.models import Job
from tests.testapp.models import Business

from .handlers import Order, anything, bill, bill_again, order, ship, sweep

pytestmark = pytest.mark.django_db

NOON = dt.datetime(2031, 5, 6, 12, 0, 0, 123456, tzinfo=dt.UTC)
NFC, NFD = "\N{LATIN SMALL LETTER E WITH ACUTE}", "e\N{COMBINING ACUTE ACCENT}"


def submit(**options: Any) -> Job:
    return Job.objects.submit(ship, Order(1), **{"job_id": "a", **options})


# Identity (1.1) --------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["", "Owner", "owner", NFC, NFD, " "])
def test_the_scope_hash_is_sha256_of_the_utf8_bytes(scope: str) -> None:
    job = submit(scope=scope)
    assert Job.objects.get().scope_hash == hashlib.sha256(scope.encode("utf-8")).hexdigest()
    assert job.scope == scope


@pytest.mark.parametrize(
    ("one", "two"), [("Owner", "owner"), (NFC, NFD), ("a", "a "), ("ß", "ss"), ("I", "ı")]
)
def test_no_collation_merges_scopes_or_ids(one: str, two: str) -> None:
    jobs = [submit(scope=one), submit(scope=two), submit(job_id=one), submit(job_id=two)]
    assert all(job.newly_created for job in jobs)
    assert Job.objects.count() == 4
    assert [job.scope for job in Job.objects.in_scope(one)] == [one]


def test_a_pruned_job_frees_its_id() -> None:
    first = submit()
    Job.objects.filter(pk=first.pk).delete()
    again = submit(queue="elsewhere")
    assert again.newly_created and again.pk != first.pk


def test_an_omitted_id_is_made_unique_and_ordered_by_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    for millisecond in (1, 2, 1_000, 1_700_000_000_000, 1_900_000_000_000):
        monkeypatch.setattr(time, "time_ns", lambda now=millisecond: now * 1_000_000)
        made.append({order(None).job_id for _ in range(1_000)})
    monkeypatch.undo()
    assert all(len(ids) == 1_000 for ids in made)
    assert all(max(earlier) < min(later) for earlier, later in zip(made, made[1:], strict=False))


def test_the_scope_narrows_what_is_read_and_controlled() -> None:
    mine, theirs = submit(scope="mine"), submit(scope="theirs")
    in_scope = Job.objects.in_scope("mine")
    assert list(in_scope) == [mine]
    assert in_scope.filter(job_id="a").get().request_cancel() == "cancelled"
    assert not in_scope.filter(pk=theirs.pk).exists()
    theirs.refresh_from_db()
    assert theirs.status == "queued"
    for bad in ("x" * 201, "a\0", None):
        with pytest.raises(InvalidSubmission, match="scope must"):
            Job.objects.in_scope(bad)  # type: ignore[arg-type]


# The request (1.2) -----------------------------------------------------------------------------


def test_a_submission_is_immutable_and_serialized_at_once() -> None:
    payload = Order(1, lines=[1])
    request = JobSubmission.create(ship, payload, job_id="a")
    payload.number = 2
    payload.lines.append(2)
    assert ship.codec.decode(request.payload) == Order(1, lines=[1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.queue = "other"  # type: ignore[misc]
    assert Job.objects.submit(request).payload == request.payload


@pytest.mark.parametrize(
    ("spec", "version"),
    [
        (bill, 1),
        (bill_again, 2),
        ("submission.bill", 2),
        (("submission.bill", 1), 1),
        (("submission.bill", 2), 2),
    ],
)
def test_a_handler_is_named_in_three_ways(spec: Any, version: int) -> None:
    job = Job.objects.submit(spec, Order(1))
    assert (job.handler, job.handler_version) == ("submission.bill", version)


def test_what_is_omitted_comes_from_the_handler_and_the_settings() -> None:
    with override_settings(DURABLE_JOBS={"MAX_ATTEMPTS": 7, "TIMEOUT_SECONDS": 9}):
        own, default = ship.submit(Order(1)), sweep.submit()
    assert (own.queue, own.priority, own.max_attempts, own.timeout) == ("parcels", 3, 4, 12.5)
    assert (default.queue, default.priority) == ("default", 0)
    assert (default.max_attempts, default.timeout) == (7, 9.0)
    assert own.retry_on_interrupt and not default.retry_on_interrupt
    assert (own.scope, own.dedupe_key, own.initial_run_at) == ("", None, None)


def test_a_new_job_reads_like_its_stored_row() -> None:
    for job in (submit(scope="s", dedupe_key="k"), submit(job_id="b", run_at=NOON)):
        assert job.newly_created and not job._state.adding and job._state.db == "default"
        stored = Job.objects.get(pk=job.pk)
        assert not stored.newly_created
        for field in Job._meta.concrete_fields:
            assert getattr(stored, field.name) == getattr(job, field.name), field.name


# Instants (0) ----------------------------------------------------------------------------------


def test_an_omitted_run_at_is_the_creation_instant_of_the_deciding_clock(
    monkeypatch: pytest.MonkeyPatch, is_postgres: bool
) -> None:
    years = 10 * 365 * 86_400 * 1_000_000
    real = submission_module.host_now()
    # The clock of this host, the web host, is wrong by years.
    monkeypatch.setattr(submission_module, "host_now", lambda: real + years)
    if is_postgres:
        monkeypatch.setattr(time, "time_ns", lambda: (real + years) * 1000)
    job = submit()
    monkeypatch.undo()
    assert job.initial_run_at is None and job.status == "queued"
    assert job.run_at == job.created_at
    assert abs(job.created_at - dt.datetime.now(dt.UTC)) < dt.timedelta(minutes=5)


def test_a_delay_counts_from_the_making_of_the_submission_by_the_hosts_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submission_module, "host_now", lambda: 1_900_000_000_000_001)
    request = order("a", run_at=dt.timedelta(hours=1))
    expected = dt.datetime(2030, 3, 17, 18, 46, 40, 1, tzinfo=dt.UTC)
    assert request.run_at == expected
    monkeypatch.setattr(submission_module, "host_now", lambda: 2_000_000_000_000_000)
    assert Job.objects.submit(request).initial_run_at == expected
    # Kept, the same request can be repeated; made anew it is another one.
    assert not Job.objects.submit(request).newly_created
    with pytest.raises(IdentityConflict):
        Job.objects.submit(order("a", run_at=dt.timedelta(hours=1)))


@pytest.mark.parametrize(
    ("run_at", "status"),
    [
        (dt.datetime(1, 1, 1, tzinfo=dt.UTC), "queued"),
        (dt.timedelta(seconds=-1), "queued"),
        (dt.timedelta(0), "queued"),
        (dt.timedelta(days=1), "scheduled"),
        (dt.datetime.max.replace(tzinfo=dt.UTC), "scheduled"),
    ],
)
def test_what_is_due_is_queued_and_the_rest_scheduled(run_at: Any, status: str) -> None:
    job = submit(run_at=run_at)
    assert job.status == status == Job.objects.get().status
    assert job.run_at == job.initial_run_at == Job.objects.get().initial_run_at
    if isinstance(run_at, dt.datetime):
        assert job.run_at == run_at


def test_one_instant_is_one_instant_in_every_zone() -> None:
    submit(run_at=NOON)
    for zone in ("Asia/Kathmandu", "America/St_Johns"):
        assert not submit(run_at=NOON.astimezone(ZoneInfo(zone))).newly_created
    stored = Job.objects.get().initial_run_at
    assert stored is not None and stored == NOON and stored.tzinfo is dt.UTC


def test_both_hours_of_a_repeated_hour_are_told_apart() -> None:
    berlin = ZoneInfo("Europe/Berlin")
    first = dt.datetime(2030, 10, 27, 2, 30, tzinfo=berlin)
    submit(run_at=first)
    assert not submit(run_at=first.astimezone(dt.UTC)).newly_created
    with pytest.raises(IdentityConflict):
        submit(run_at=first.replace(fold=1))
    with override_settings(USE_TZ=False, TIME_ZONE="Europe/Berlin"):
        assert not submit(run_at=dt.datetime(2030, 10, 27, 2, 30)).newly_created
        assert not submit(run_at=first).newly_created
        with pytest.raises(IdentityConflict):
            submit(run_at=dt.datetime(2030, 10, 27, 2, 30, fold=1))


# Repeating (1.3) -------------------------------------------------------------------------------


def test_an_equal_submission_gives_the_existing_job() -> None:
    first = submit(run_at=NOON, dedupe_key="k")
    again = submit(run_at=NOON, dedupe_key="k")
    assert first.newly_created and not again.newly_created
    assert again.pk == first.pk and Job.objects.count() == 1


DIFFERENT: dict[str, Callable[[], JobSubmission]] = {
    "handler": lambda: JobSubmission.create(("submission.bill", 1), Order(1), job_id="a"),
    "payload": lambda: order("a", 2),
    "queue": lambda: order("a", queue="other"),
    "priority": lambda: order("a", priority=4),
    "max_attempts": lambda: order("a", max_attempts=5),
    "dedupe_key": lambda: order("a", dedupe_key="k"),
    "run_at": lambda: order("a", run_at=NOON),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_request_under_the_identity_conflicts(name: str) -> None:
    before = submit()
    for first, second in ((None, DIFFERENT[name]()), (DIFFERENT[name](), order("a"))):
        if first is not None:
            Job.objects.all().delete()
            before = Job.objects.submit(first)
        with pytest.raises(IdentityConflict) as caught:
            Job.objects.submit(second)
        assert 'job id "a" is taken in scope ""' in str(caught.value)
        assert "use another job_id, or repeat exactly what was submitted first" in str(caught.value)
        stored = Job.objects.get()
        assert (stored.pk, stored.payload) == (before.pk, before.payload)


def test_versions_of_a_handler_and_microseconds_of_an_instant_differ() -> None:
    Job.objects.submit(bill, Order(1), job_id="v")
    with pytest.raises(IdentityConflict):
        Job.objects.submit(bill_again, Order(1), job_id="v")
    submit(run_at=NOON)
    with pytest.raises(IdentityConflict):
        submit(run_at=NOON + dt.timedelta(microseconds=1))


@pytest.mark.parametrize(
    ("one", "two"), [({"a": 1, "b": 2}, {"b": 2, "a": 1}), (1, 1.0), (NFC, NFD), ([], {})]
)
def test_the_payload_is_compared_as_text(one: Any, two: Any) -> None:
    Job.objects.submit(anything, one, job_id="a")
    assert not Job.objects.submit(anything, one, job_id="a").newly_created
    with pytest.raises(IdentityConflict):
        Job.objects.submit(anything, two, job_id="a")


def test_the_same_id_in_another_scope_is_another_job() -> None:
    submit()
    assert submit(scope="b", queue="other").newly_created


def test_no_later_change_touches_what_is_compared() -> None:
    job = submit(dedupe_key="k")
    Job.objects.filter(pk=job.pk).update(queue="moved", priority=-5, run_at=NOON)
    assert not submit(dedupe_key="k").newly_created
    job.refresh_from_db()
    assert job.request_cancel() == "cancelled"
    job.retry(extra_attempts=3)
    Job.objects.filter(pk=job.pk).update(status="scheduled", run_at=NOON)
    again = submit(dedupe_key="k")
    assert not again.newly_created
    assert (again.queue, again.priority, again.granted_attempts) == ("moved", -5, 3)
    with pytest.raises(IdentityConflict):
        submit(dedupe_key="k", queue="moved")


@pytest.mark.parametrize("status", ["succeeded", "failed", "cancelled", "interrupted"])
def test_an_ended_job_still_has_its_identity(status: str) -> None:
    job = submit()
    Job.objects.filter(pk=job.pk).update(status=status, finished_at=NOON)
    assert submit().pk == job.pk
    with pytest.raises(IdentityConflict):
        submit(priority=0)


def test_equal_ids_do_not_merge_business_rows() -> None:
    # A stable id makes creation idempotent, and nothing beside it (1.7).
    for _ in range(2):
        Business.objects.create(name="outbox row")
        submit()
    assert (Job.objects.count(), Business.objects.count()) == (1, 2)
