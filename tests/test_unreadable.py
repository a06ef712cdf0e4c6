"""Stored text that cannot be decoded reads as None, and costs nobody else anything (3.14).

SQLite stores any bytes as text. PostgreSQL refuses them, so there only the reads are tried.
"""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import connection, models
from django.db.models import Count, Exists, Max, OuterRef, Subquery
from django.test import Client

from django_durable_jobs import JobContext, job
from django_durable_jobs.exceptions import IdentityConflict
from django_durable_jobs.fields import JSONTextField
from django_durable_jobs.handlers import Handler, registry
from django_durable_jobs.models import (
    Job,
    JobAttempt,
    LiveWorker,
    OperatorAction,
    QueuePause,
    ScheduleCursor,
)
from django_durable_jobs.testing import drain
from django_durable_jobs.transitions import workers
from django_durable_jobs.worker.passes import Serving, run_passes

from ._rows import NOW

pytestmark = pytest.mark.django_db
only_sqlite = pytest.mark.skipif(
    connection.vendor != "sqlite", reason="PostgreSQL's text is always Unicode"
)
TEXT = (models.CharField, models.TextField)


def text_columns(model: type[models.Model]) -> list[str]:
    """Every column of text but those that a constraint keeps to known words or to NULL."""
    fields = [field for field in model._meta.concrete_fields if isinstance(field, TEXT)]
    return [field.name for field in fields if field.name not in ("status", "lease_token")]


def damage(row: models.Model, *columns: str) -> None:
    """Store in each column what is no UTF-8, another one in each row."""
    sets = ", ".join(f"{column} = CAST(X'FFFE{row.pk:04X}' AS TEXT)" for column in columns)
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE {row._meta.db_table} SET {sets} WHERE id = %s", [row.pk])


@pytest.fixture
def count() -> Any:
    with registry.temporary():

        @job("unreadable.count", concurrency=1)
        def count(ctx: JobContext) -> int:
            return 1

        yield count


# What a worker needs of a job before it can run it; the rest is not its matter.
NEEDED = {"scope", "job_id", "handler", "payload", "payload_sha256", "fingerprint", "queue"}


@only_sqlite
@pytest.mark.parametrize("column", text_columns(Job))
def test_a_job_with_an_unreadable_column_stops_no_other(
    count: Handler[..., Any], column: str, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = [count.submit(job_id=f"{number}", dedupe_key=f"{number}") for number in range(5)]
    broken = jobs.pop(2)
    damage(broken, column)
    drain()
    assert [Job.objects.get(pk=one.pk).status for one in jobs] == ["succeeded"] * 4
    caplog.clear()
    found = Job.objects.get(pk=broken.pk)
    if column in NEEDED:
        assert (found.status, found.blocked_reason) == ("blocked", "corrupt_payload")
        assert (found.attempt_count, found.attempts.count()) == (0, 0)
    else:
        assert found.status == "succeeded"
    written_by_the_end = {"result", "error_category", "error_summary", "error_traceback"}
    if column not in written_by_the_end | {"progress_message", "blocked_reason"}:
        if column == "concurrency_key":
            assert found.concurrency_key == count.name, "the claim knows the key of a handler"
        else:
            assert getattr(found, column) is None
            assert f"Stored {column} cannot be read" in caplog.text
    # No worker takes it up again, and none stumbles over it.
    drain()
    assert Job.objects.get(pk=broken.pk).status == found.status


@only_sqlite
@pytest.mark.parametrize("model", [Job, JobAttempt])
def test_every_way_of_the_orm_reads_none(
    count: Handler[..., Any], model: type[models.Model], caplog: pytest.LogCaptureFixture
) -> None:
    whole, broken = count.submit(), count.submit()
    drain()
    row: Any = model._default_manager.get(**{"pk" if model is Job else "job": broken.pk})
    columns = text_columns(model)
    damage(row, *columns)
    caplog.clear()
    objects: Any = model._default_manager
    expected = dict.fromkeys(columns)
    found = objects.get(pk=row.pk)
    assert {name: getattr(found, name) for name in columns} == expected
    assert objects.filter(pk=row.pk).values(*columns).get() == expected
    assert objects.filter(pk=row.pk).values_list(*columns).get() == (None,) * len(columns)
    assert list(objects.filter(pk=row.pk).iterator()) == [row]
    row.refresh_from_db()
    assert getattr(row, columns[0]) is None
    assert str(row)
    assert len(caplog.records) == 5 * len(columns)
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    related = Job.objects.prefetch_related("attempts").order_by("id")
    assert [one.attempts.all()[0].job_id for one in related] == [whole.pk, broken.pk]


@only_sqlite
def test_pages_hold_unreadable_jobs_like_others(count: Handler[..., Any]) -> None:
    first, broken, last = (count.submit() for _ in range(3))
    drain()
    columns = text_columns(Job)
    damage(broken, *columns)
    page = Job.objects.page(max_bytes=100)
    assert page.jobs == [last, broken, first]
    assert {name: getattr(page.jobs[1], name) for name in columns} == dict.fromkeys(columns)
    assert Job.objects.page(limit=2).jobs == [last, broken]
    assert Job.objects.page(status="succeeded").jobs == [last, broken, first]
    assert Job.objects.page(handler="unreadable.count").jobs == [last, first]
    out = io.StringIO()
    call_command("jobs", "list", "--json", stdout=out)
    listed = json.loads(out.getvalue())["jobs"]
    assert [one["id"] for one in listed] == [last.pk, broken.pk, first.pk]
    assert listed[1]["handler"] is None
    call_command("jobs", "list", stdout=out)
    assert "None" in out.getvalue()


@only_sqlite
def test_an_operator_can_see_and_move_an_unreadable_job(count: Handler[..., Any]) -> None:
    broken = count.submit(dedupe_key="k")
    damage(broken, *text_columns(Job))
    found = Job.objects.get(pk=broken.pk)
    assert found.request_cancel() == "cancelled"
    assert found.retry().status == "queued"
    drain()
    assert Job.objects.get().blocked_reason == "corrupt_payload"
    assert found.release() == "queued"
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    for url in ("", f"{broken.pk}/change/", "?q=unreadable"):
        page = client.get(f"/admin/django_durable_jobs/job/{url}")
        assert page.status_code == 200


@only_sqlite
def test_an_identity_that_an_unreadable_job_has_is_taken(count: Handler[..., Any]) -> None:
    for columns, repeats in [(["result", "progress_message"], True), (["payload"], False)]:
        name = columns[0]
        first = count.submit(job_id=name)
        damage(first, *columns)
        if repeats:
            assert count.submit(job_id=name).pk == first.pk
        else:
            with pytest.raises(IdentityConflict):
                count.submit(job_id=name)


@only_sqlite
def test_unreadable_rows_of_the_other_tables_stop_nothing(
    count: Handler[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    key = workers.register(
        "default", name="w", queues=None, excluded_queues=[], capabilities={("a", 1, "f")}
    )
    rows: list[models.Model] = [
        LiveWorker.objects.get(pk=key),
        QueuePause.objects.create(queue="q", paused_at=NOW),
        OperatorAction.objects.create(operator="me", action="cancel", happened_at=NOW),
        ScheduleCursor.objects.create(name="s", fingerprint="f", last_minute=NOW, updated_at=NOW),
    ]
    for row in rows:
        damage(row, *text_columns(type(row)))
    foreign = count.submit()
    Job.objects.update(handler="nobody's")
    run_passes("default", Serving.everything(), patient=False)
    assert f"the row of live worker {key} cannot be read" in caplog.text
    assert Job.objects.get(pk=foreign.pk).blocked_reason == "unknown_handler"
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    for row in rows:
        name = row._meta.model_name
        for url in ("", f"{row.pk}/change/"):
            assert client.get(f"/admin/django_durable_jobs/{name}/{url}").status_code == 200


def test_a_worker_row_of_another_shape_serves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    options = {"name": "w", "queues": None, "excluded_queues": [], "capabilities": {("a", 1, "f")}}
    for shape in ({"excluded_queues": 7}, {"capabilities": [1]}, {"queues": [[1]]}):
        key = workers.register("default", **options)
        LiveWorker.objects.filter(pk=key).update(**shape)
    fine = workers.register("default", **options)
    assert len(workers.live_capabilities("default")) == 1
    assert caplog.text.count("cannot be read") == 3
    assert LiveWorker.objects.get(pk=fine).capabilities == [["a", 1, "f"]]


# In the database text stays text --------------------------------------------------------------


def test_queries_over_text_are_what_they_are_everywhere(count: Handler[..., Any]) -> None:
    first, second = count.submit(job_id="a"), count.submit(job_id="b", queue="é")
    drain()
    jobs = Job.objects.order_by("id")
    same = jobs.filter(pk=OuterRef("pk"))
    assert jobs.filter(job_id__in=jobs.values("job_id")).count() == 2
    assert jobs.filter(job_id=Subquery(same.values("job_id")[:1])).count() == 2
    assert jobs.filter(Exists(same.values("payload"))).count() == 2
    again: Any = jobs.annotate(again=Subquery(same.values("queue")))
    assert [one.again for one in again] == ["default", "é"]
    assert set(jobs.values_list("queue", flat=True).distinct()) == {"default", "é"}
    assert jobs.values("handler").distinct().count() == 1
    groups = Job.objects.values("handler", "queue").annotate(n=Count("id")).order_by("queue")
    assert [(one["queue"], one["n"]) for one in groups] == [("default", 1), ("é", 1)]
    assert jobs.aggregate(last=Max("queue"))["last"] == "é"
    alone = [Job.objects.filter(pk=one.pk) for one in (second, first)]
    both = alone[0].union(alone[1]).order_by("job_id")
    assert [one.job_id for one in both] == ["a", "b"]
    assert JobAttempt.objects.filter(job__queue="é").select_related("job").get().job == second
    assert jobs.filter(result=1).count() == 2
    assert {type(field) for field in Job._meta.fields if field.name == "result"} == {JSONTextField}
