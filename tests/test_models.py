"""What must always hold is a named constraint: each refusal, by writes that pass every door."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.apps import apps
from django.contrib.auth.management import _get_all_permissions
from django.db import IntegrityError, connection, models, transaction

from django_durable_jobs import states
from django_durable_jobs.fields import InstantField
from django_durable_jobs.models import Job, JobAttempt, QueuePause, ScheduleCursor

from ._rows import NOW, attempt_row, job_row

pytestmark = pytest.mark.django_db

MODELS = list(apps.get_app_config("django_durable_jobs").get_models())
LIVE_HOLDERS = [
    {"status": "scheduled"},
    {"status": "queued"},
    {"status": "running"},
    {"status": "blocked", "blocked_reason": "unknown_handler"},
    {"status": "blocked", "blocked_reason": "schema_mismatch"},
    {"status": "blocked", "blocked_reason": "invalid_policy"},
    # Imported or damaged: without a reason it is still live.
    {"status": "blocked", "blocked_reason": None},
]
FREED_HOLDERS = [
    {"status": "blocked", "blocked_reason": "corrupt_payload"},
    *({"status": status, "finished_at": NOW} for status in states.TERMINAL),
]


def stored(row: models.Model) -> Any:
    row.save(force_insert=True)
    return row


@contextmanager
def refused_by(name: str) -> Iterator[None]:
    """Expect the database to refuse a write by the constraint of this name, and no other."""
    with pytest.raises(IntegrityError) as caught, transaction.atomic():
        yield
    if connection.vendor == "postgresql":
        assert caught.value.__cause__.diag.constraint_name == name  # type: ignore[union-attr]
        return
    constraint = {one.name: one for model in MODELS for one in model._meta.constraints}[name]
    message = str(caught.value)
    if isinstance(constraint, models.CheckConstraint):
        assert message == f"CHECK constraint failed: {name}"
    else:
        # SQLite names the columns of a unique index instead.
        columns = [part.rpartition(".")[2] for part in message.rpartition(": ")[2].split(", ")]
        assert [column.removesuffix("_id") for column in columns] == [
            field.removesuffix("_id") for field in constraint.fields
        ]


@contextmanager
def taken_by_unique_field() -> Iterator[None]:
    with pytest.raises(IntegrityError), transaction.atomic():
        yield


# Identity -------------------------------------------------------------------------------------


def test_an_identity_is_taken_once() -> None:
    stored(job_row(job_id="one"))
    with refused_by("durable_job_identity"):
        stored(job_row(job_id="one", handler="another"))


@pytest.mark.parametrize("status", states.JOB_STATUSES)
def test_an_identity_stays_taken_in_every_status(status: str) -> None:
    ended = NOW if status in states.TERMINAL else None
    stored(job_row(job_id="one", status=status, finished_at=ended))
    with refused_by("durable_job_identity"):
        stored(job_row(job_id="one"))


def test_an_identity_is_free_once_its_row_is_gone() -> None:
    stored(job_row(job_id="one")).delete()
    stored(job_row(job_id="one"))


def test_scopes_and_ids_that_look_alike_are_different() -> None:
    stored(job_row(job_id="one", scope="owner"))
    stored(job_row(job_id="one", scope="Owner"))
    stored(job_row(job_id="ONE", scope="owner"))
    stored(job_row(job_id="one ", scope="owner"))
    assert Job.objects.in_scope("owner").count() == 3


def test_an_update_cannot_take_an_identity_either() -> None:
    stored(job_row(job_id="one"))
    second = stored(job_row(job_id="two"))
    with refused_by("durable_job_identity"):
        Job.objects.filter(pk=second.pk).update(job_id="one")


# The live dedupe key --------------------------------------------------------------------------


@pytest.mark.parametrize("holder", LIVE_HOLDERS, ids=str)
def test_a_live_job_holds_its_key(holder: dict[str, Any]) -> None:
    stored(job_row(dedupe_key="key", **holder))
    with refused_by("durable_job_live_dedupe_key"):
        stored(job_row(dedupe_key="key"))
    other = stored(job_row())
    with refused_by("durable_job_live_dedupe_key"):
        Job.objects.filter(pk=other.pk).update(dedupe_key="key")


@pytest.mark.parametrize("holder", FREED_HOLDERS, ids=str)
def test_an_ended_or_corrupt_job_frees_its_key(holder: dict[str, Any]) -> None:
    first = stored(job_row(dedupe_key="key", **holder))
    stored(job_row(dedupe_key="key"))
    # Its way back is closed while another job holds the key.
    with refused_by("durable_job_live_dedupe_key"):
        Job.objects.filter(pk=first.pk).update(
            status="queued", finished_at=None, blocked_reason=None
        )
    # And so is every other live status.
    stored(job_row(dedupe_key="key", **holder))


@pytest.mark.parametrize(
    "other", [{"scope": "another"}, {"handler": "another"}, {"dedupe_key": "KEY"}]
)
def test_a_key_belongs_to_one_scope_and_handler(other: dict[str, Any]) -> None:
    stored(job_row(dedupe_key="key"))
    stored(job_row(**{"dedupe_key": "key", **other}))


def test_jobs_without_a_key_are_as_many_as_one_likes() -> None:
    stored(job_row(dedupe_key=None))
    stored(job_row(dedupe_key=None))


# Occurrences ----------------------------------------------------------------------------------


def test_an_occurrence_happens_once() -> None:
    stored(job_row(schedule="nightly", scheduled_for=NOW))
    with refused_by("durable_job_occurrence"):
        stored(job_row(schedule="nightly", scheduled_for=NOW, handler="another", scope="another"))
    stored(job_row(schedule="hourly", scheduled_for=NOW))
    stored(job_row(schedule="nightly", scheduled_for=NOW.replace(minute=10)))


def test_an_occurrence_stays_taken_when_its_job_has_ended() -> None:
    stored(
        job_row(schedule="nightly", scheduled_for=NOW, status="cancelled", finished_at=NOW),
    )
    with refused_by("durable_job_occurrence"):
        stored(job_row(schedule="nightly", scheduled_for=NOW))


# Status, lease, end ---------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["", "QUEUED", "waiting", "timed_out"])
def test_an_unknown_status_is_refused(status: str) -> None:
    with refused_by("durable_job_status_known"):
        stored(job_row(status=status))


@pytest.mark.parametrize("status", states.JOB_STATUSES)
@pytest.mark.parametrize(
    "lease",
    [
        {"lease_token": "a" * 32, "lease_expires_at": NOW},
        {"lease_token": "a" * 32},
        {"lease_expires_at": NOW},
    ],
    ids=["both", "token", "expiry"],
)
def test_only_a_running_job_has_a_lease(status: str, lease: dict[str, Any]) -> None:
    row = job_row(status=status, finished_at=NOW if status in states.TERMINAL else None, **lease)
    if status == "running":
        stored(row)
        return
    with refused_by("durable_job_lease_only_running"):
        stored(row)


def test_a_running_job_without_a_lease_can_be_stored() -> None:
    """Imported or damaged; nobody guesses that it is dead (CONTRACT 3.7)."""
    assert stored(job_row(status="running")).ownership == "unknown"


@pytest.mark.parametrize("status", states.JOB_STATUSES)
def test_exactly_the_ended_jobs_have_an_end(status: str) -> None:
    ended = status in states.TERMINAL
    stored(job_row(status=status, finished_at=NOW if ended else None))
    with refused_by("durable_job_finished_terminal"):
        stored(job_row(status=status, finished_at=None if ended else NOW))


# Ranges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-100, 0, 100])
def test_a_priority_in_range_is_stored(value: int) -> None:
    assert stored(job_row(priority=value)).priority == value


@pytest.mark.parametrize("value", [-101, 101])
def test_a_priority_out_of_range_is_refused(value: int) -> None:
    with refused_by("durable_job_priority_range"):
        stored(job_row(priority=value))


@pytest.mark.parametrize("value", [-0.01, 1.01, float("inf"), float("-inf")])
def test_a_progress_out_of_range_is_refused(value: float) -> None:
    with refused_by("durable_job_progress_range"):
        stored(job_row(progress=value))
    job = stored(job_row())
    with refused_by("durable_attempt_progress_range"):
        stored(attempt_row(job, progress=value))


@pytest.mark.parametrize("make", [job_row, lambda **more: attempt_row(stored(job_row()), **more)])
def test_a_progress_that_is_no_number_is_refused(make: Callable[..., models.Model]) -> None:
    row = make(progress=float("nan"))
    # SQLite stores NaN as NULL, which the column refuses.
    with pytest.raises(IntegrityError), transaction.atomic():
        row.save()


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_a_progress_in_range_is_stored(value: float) -> None:
    job = stored(job_row(progress=value))
    stored(attempt_row(job, progress=value))


@pytest.mark.parametrize(
    "counts",
    [
        {"max_attempts": 0},
        {"max_attempts": -1},
        {"max_attempts": 1001},
        {"attempt_count": -1},
        {"granted_attempts": -1},
    ],
    ids=str,
)
def test_counts_out_of_range_are_refused(counts: dict[str, int]) -> None:
    with refused_by("durable_job_attempts_range"):
        stored(job_row(**counts))


@pytest.mark.parametrize(
    "counts",
    [
        {"max_attempts": 1},
        {"max_attempts": 1000},
        # Grants may go beyond, and an imported row may have used more than it had.
        {"max_attempts": 1000, "granted_attempts": 5000, "attempt_count": 6001},
    ],
    ids=str,
)
def test_counts_in_range_are_stored(counts: dict[str, int]) -> None:
    stored(job_row(**counts))


# Attempts -------------------------------------------------------------------------------------


def test_an_attempt_number_is_taken_once_per_job() -> None:
    job, other = stored(job_row()), stored(job_row())
    stored(attempt_row(job, number=1))
    with refused_by("durable_attempt_number"):
        stored(attempt_row(job, number=1))
    stored(attempt_row(job, number=2))
    stored(attempt_row(other, number=1))


def test_a_token_is_taken_once() -> None:
    stored(attempt_row(stored(job_row()), token="a" * 32))
    with refused_by("durable_attempt_token"):
        stored(attempt_row(stored(job_row()), token="a" * 32))


@pytest.mark.parametrize("status", ["", "queued", "blocked", "scheduled"])
def test_an_unknown_status_of_an_attempt_is_refused(status: str) -> None:
    job = stored(job_row())
    with refused_by("durable_attempt_status_known"):
        stored(attempt_row(job, status=status, finished_at=NOW))


@pytest.mark.parametrize("status", states.ATTEMPT_STATUSES)
def test_exactly_the_ended_attempts_have_an_end(status: str) -> None:
    job = stored(job_row())
    running = status == "running"
    stored(attempt_row(job, status=status, finished_at=None if running else NOW))
    with refused_by("durable_attempt_finished_ended"):
        stored(attempt_row(job, status=status, finished_at=NOW if running else None))


def test_an_attempt_needs_its_job() -> None:
    gone = job_row()
    gone.pk = 2**60
    with pytest.raises(IntegrityError), transaction.atomic():
        stored(attempt_row(gone))
        connection.check_constraints()


# The small tables -----------------------------------------------------------------------------


def test_a_schedule_has_one_cursor() -> None:
    common = {"fingerprint": "f", "last_minute": NOW, "updated_at": NOW}
    ScheduleCursor.objects.create(name="nightly", **common)
    with taken_by_unique_field():
        ScheduleCursor.objects.create(name="nightly", **common)


def test_a_queue_is_paused_once() -> None:
    QueuePause.objects.create(queue="mails", paused_at=NOW)
    with taken_by_unique_field():
        QueuePause.objects.create(queue="mails", paused_at=NOW)


# Keys, types and names ------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_ids_are_bigints_and_never_used_again(model: type[models.Model]) -> None:
    assert isinstance(model._meta.pk, models.BigAutoField)
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute("SELECT sql FROM sqlite_master WHERE name = %s", [model._meta.db_table])
            assert '"id" integer NOT NULL PRIMARY KEY AUTOINCREMENT' in cursor.fetchone()[0]
        else:
            cursor.execute(
                "SELECT data_type, is_identity FROM information_schema.columns"
                " WHERE table_name = %s AND column_name = 'id'",
                [model._meta.db_table],
            )
            assert cursor.fetchone() == ("bigint", "YES")


def test_the_id_of_a_pruned_job_is_not_given_again() -> None:
    last = stored(job_row())
    before = last.pk
    last.delete()
    assert stored(job_row()).pk > before


def test_an_id_may_need_sixty_four_bits() -> None:
    job = stored(job_row(id=2**62))
    stored(attempt_row(job, id=2**62 + 1))
    assert JobAttempt.objects.get(pk=2**62 + 1).job_id == 2**62


@pytest.mark.parametrize(
    "field",
    [
        field
        for model in MODELS
        for field in model._meta.concrete_fields
        if isinstance(field, InstantField)
    ],
    ids=str,
)
def test_instants_are_bigints(field: InstantField) -> None:
    assert field.db_type(connection) == "bigint"


def test_no_column_holds_local_time() -> None:
    kinds = {type(field) for model in MODELS for field in model._meta.concrete_fields}
    assert not kinds & {models.DateTimeField, models.DateField, models.TimeField}


@pytest.mark.parametrize("model", MODELS)
def test_names_are_ours_and_short_enough(model: type[models.Model]) -> None:
    for index in model._meta.indexes:
        assert index.name.startswith("durable_") and len(index.name) <= 30
    for constraint in model._meta.constraints:
        assert constraint.name.startswith("durable_") and len(constraint.name) <= 30


@pytest.mark.parametrize("model", MODELS)
def test_the_database_has_what_the_model_names(model: type[models.Model]) -> None:
    with connection.cursor() as cursor:
        found = connection.introspection.get_constraints(cursor, model._meta.db_table)
    names = {one.name for one in (*model._meta.indexes, *model._meta.constraints)}
    assert names <= found.keys()


def test_only_viewing_and_our_own_actions_are_permissions() -> None:
    permissions = {code for model in MODELS for code, _ in _get_all_permissions(model._meta)}
    ours = {"cancel_job", "retry_job", "release_job", "pause_schedule", "run_schedule"}
    assert permissions == ours | {f"view_{model._meta.model_name}" for model in MODELS}


# The objects ----------------------------------------------------------------------------------


def test_a_row_read_back_is_not_newly_created() -> None:
    assert Job.objects.get(pk=stored(job_row()).pk).newly_created is False


@pytest.mark.parametrize("status", states.JOB_STATUSES)
def test_is_terminal(status: str) -> None:
    assert job_row(status=status).is_terminal is (status in states.TERMINAL)


def test_attempts_go_with_their_job() -> None:
    job = stored(job_row())
    stored(attempt_row(job))
    assert job.attempts.count() == 1
    job.delete()
    assert JobAttempt.objects.count() == 0


def test_in_scope_reads_one_scope() -> None:
    mine, other = stored(job_row(scope="a")), stored(job_row(scope="b"))
    assert mine.scope_hash == hashlib.sha256(b"a").hexdigest()
    assert list(Job.objects.in_scope("a")) == [mine]
    assert list(Job.objects.in_scope("b")) == [other]
    assert not Job.objects.in_scope("")


def test_rows_name_themselves() -> None:
    job = job_row(job_id="x-1", handler="shop.mail")
    assert str(job) == "shop.mail x-1"
    assert str(attempt_row(job, number=3)) == "attempt 3"
    for model in MODELS:
        assert str(model()) is not None
