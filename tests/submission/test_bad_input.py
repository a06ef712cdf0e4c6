"""Everything wrong with a submission is refused before the database is touched (1.1, 1.2)."""

from __future__ import annotations

import datetime as dt
import enum
from typing import Any

import pytest
from django.db import transaction
from django.test import override_settings

from django_durable_jobs import InvalidSubmission, JobSubmission
from django_durable_jobs.models import Job
from tests.testapp.models import Business

from .handlers import Order, anything, limited, order, ship, stranger, sweep

pytestmark = pytest.mark.django_db

SURROGATE = "\ud800"
DEEP: list[Any] = []
for _ in range(10_000):
    DEEP = [DEEP]

BAD_TEXT = {
    "NUL": ("a\0b", "must not hold NUL or a lone surrogate"),
    "surrogate": (f"a{SURROGATE}b", "must not hold NUL or a lone surrogate"),
    "bytes": (b"a", "must be str, not bytes"),
    "int": (7, "must be str, not int"),
    "list": (["a"], "must be str, not list"),
}
NAMES = ("job_id", "dedupe_key", "queue")
BAD_OPTIONS = [
    *((name, value, says) for name in (*NAMES, "scope") for value, says in BAD_TEXT.values()),
    *((name, "", "must have 1 to") for name in NAMES),
    *((name, " \t\n", "must not be blank") for name in NAMES),
    *((name, "\N{NO-BREAK SPACE}", "must not be blank") for name in NAMES),
    ("job_id", "x" * 201, "must have 1 to 200 characters; it has 201"),
    ("dedupe_key", "x" * 201, "must have 1 to 200 characters; it has 201"),
    ("queue", "x" * 101, "must have 1 to 100 characters; it has 101"),
    ("scope", "x" * 201, "must have 0 to 200 characters; it has 201"),
    ("scope", None, "scope must be str, not NoneType"),
    ("priority", -101, "priority must be a whole number from -100 to 100"),
    ("priority", 101, "priority must be a whole number from -100 to 100"),
    ("priority", True, "priority must be a whole number"),
    ("priority", 1.0, "priority must be a whole number"),
    ("priority", "1", "priority must be a whole number"),
    ("max_attempts", 0, "max_attempts must be a whole number from 1 to 1000"),
    ("max_attempts", 1001, "max_attempts must be a whole number from 1 to 1000"),
    ("max_attempts", True, "max_attempts must be a whole number"),
    ("max_attempts", 2.0, "max_attempts must be a whole number"),
    ("run_at", dt.datetime(2030, 1, 1), "give an aware one"),
    ("run_at", dt.date(2030, 1, 1), "must be an aware datetime or a timedelta, not date"),
    ("run_at", 60, "must be an aware datetime or a timedelta, not int"),
    ("run_at", "2030-01-01T00:00Z", "must be an aware datetime or a timedelta, not str"),
    ("run_at", dt.timedelta.max, "run_at lies outside the years 1 to 9999"),
    ("run_at", dt.timedelta.min, "run_at lies outside the years 1 to 9999"),
    (
        "run_at",
        dt.datetime(1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1))),
        "run_at lies outside the years 1 to 9999",
    ),
    (
        "run_at",
        dt.datetime(9999, 12, 31, 23, 59, tzinfo=dt.timezone(-dt.timedelta(hours=1))),
        "run_at lies outside the years 1 to 9999",
    ),
    ("colour", "red", "unknown option colour: use dedupe_key, job_id"),
]
BAD_PAYLOADS = [
    (ship, None, "takes a payload, and none was given"),
    (ship, {"number": 1}, "refused at"),
    (ship, Order("1"), "refused at"),  # type: ignore[arg-type]
    (ship, Order(1.0), "refused at"),  # type: ignore[arg-type]
    (ship, Order(True), "refused at"),
    (ship, Order(2**63), "refused at"),
    (ship, Order(1, SURROGATE), "lone surrogate"),
    (ship, Order(1, lines=[2**64]), "64 bits"),
    (sweep, 0, "takes no payload: leave it out, or declare handler(ctx, payload: T)"),
    (anything, float("nan"), "NaN or infinite"),
    (anything, [float("inf")], "NaN or infinite"),
    (anything, {"a": -float("inf")}, "NaN or infinite"),
    (anything, 2**64, "beyond 64 bits: use str or Decimal"),
    (anything, -(2**63) - 1, "beyond 64 bits: use str or Decimal"),
    (anything, {SURROGATE: 1}, "lone surrogate"),
    (anything, {1: 1}, "keys must be str"),
    (anything, {"a"}, "not a JSON type"),
    (anything, object(), "not a JSON type"),
    (anything, DEEP, "nested deeper than 100 levels"),
    (anything, "x" * 10_000_000, "larger than 1048576 bytes"),
    (limited, Order(1, ""), "concurrency_key must have 1 to 200 characters; it has 0"),
    (limited, Order(1, "x" * 201), "concurrency_key must have 1 to 200 characters; it has 201"),
    (limited, Order(1, "a\0"), "concurrency_key must not hold NUL"),
]
BAD_HANDLERS = [
    ("submission.shipp", "Did you mean submission.ship"),
    ("", "No handler is named"),
    ("nothing.like.it", "Is its jobs.py in an installed app?"),
    (SURROGATE, "No handler is named"),
    (("submission.ship", 2), "is not registered, though others of its name are"),
    (("submission.ship", "1"), 'must be a function decorated with @job, "name" or'),
    (("submission.ship",), 'must be a function decorated with @job, "name" or'),
    (stranger, "No handler is named"),
    (lambda ctx: None, 'must be a function decorated with @job, "name" or'),
    (None, 'must be a function decorated with @job, "name" or'),
    (7, 'must be a function decorated with @job, "name" or'),
]


def _check(handler: Any, payload: Any, options: dict[str, Any], says: str, queries: Any) -> None:
    """Try every door for one, outside a transaction and inside; each refuses without a query."""
    doors = [Job.objects.submit, Job.objects.enqueue, Job.objects.stage]
    for door in doors:
        with queries(0), pytest.raises(InvalidSubmission) as caught:
            door(handler, payload, **options)
        assert says in str(caught.value)
        assert str(caught.value).endswith((".", "?"))
    with transaction.atomic():
        for door in doors:
            with queries(0), pytest.raises(InvalidSubmission):
                door(handler, payload, **options)
        Business.objects.create(name="still usable")
    assert Business.objects.exists() and not Job.objects.exists()


@pytest.mark.parametrize(("name", "value", "says"), BAD_OPTIONS)
def test_a_bad_option_is_refused(
    name: str, value: Any, says: str, django_assert_num_queries: Any
) -> None:
    _check(ship, Order(1), {name: value}, says, django_assert_num_queries)


@pytest.mark.parametrize(("handler", "payload", "says"), BAD_PAYLOADS)
def test_a_bad_payload_is_refused(
    handler: Any, payload: Any, says: str, django_assert_num_queries: Any
) -> None:
    _check(handler, payload, {}, says, django_assert_num_queries)


@pytest.mark.parametrize(("handler", "says"), BAD_HANDLERS)
def test_a_handler_that_is_not_registered_is_refused(
    handler: Any, says: str, django_assert_num_queries: Any
) -> None:
    _check(handler, None, {}, says, django_assert_num_queries)


@pytest.mark.parametrize("extra", [{"payload": Order(1)}, {"job_id": "b"}, {"queue": "q"}])
def test_a_submission_is_complete(extra: dict[str, Any], django_assert_num_queries: Any) -> None:
    _check(
        order("a"),
        extra.pop("payload", None),
        extra,
        "give payload and options to JobSubmission.create()",
        django_assert_num_queries,
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([order, None], "entry 0 is a function: make each by JobSubmission.create()"),
        ([("submission.ship", Order(1))], "entry 0 is a tuple"),
        ("a", "entry 0 is a str"),
        (None, "give an iterable of submissions, not NoneType"),
        (7, "give an iterable of submissions, not int"),
        ("submission", "give an iterable of submissions, not JobSubmission"),
    ],
)
def test_the_many_doors_take_submissions_only(
    given: Any, says: str, django_assert_num_queries: Any
) -> None:
    given = order("a") if given == "submission" else given
    for door in (Job.objects.submit_many, Job.objects.enqueue_many, Job.objects.stage_many):
        with django_assert_num_queries(0), pytest.raises(InvalidSubmission) as caught:
            door(given)
        assert says in str(caught.value)


LIMITS = [
    ("job_id", "x"),
    ("job_id", "x" * 200),
    ("job_id", "\U0001f4e6" * 200),
    ("dedupe_key", "x"),
    ("dedupe_key", "\U0001f4e6" * 200),
    ("queue", "x"),
    ("queue", "\U0001f4e6" * 100),
    ("scope", ""),
    ("scope", " "),
    ("scope", "\U0001f4e6" * 200),
    ("priority", -100),
    ("priority", 100),
    ("max_attempts", 1),
    ("max_attempts", 1000),
]
EDGE_TEXT = [
    " padded ",
    "e\N{COMBINING ACUTE ACCENT}",
    "a'b\"c\\d%s%%{}$1;--",
    "\x01\x7f\u2028\ufeff",
]


@pytest.mark.parametrize(
    ("name", "value"),
    [*LIMITS, *((name, text) for name in (*NAMES, "scope") for text in EDGE_TEXT)],
)
def test_the_widest_allowed_values_are_stored_as_they_are(name: str, value: Any) -> None:
    job = Job.objects.submit(ship, Order(1), **{name: value})
    stored = Job.objects.get()
    assert getattr(job, name) == value
    assert getattr(stored, name) == value
    assert stored.submitted_queue == stored.queue
    again = Job.objects.submit(ship, Order(1), **{"job_id": job.job_id, name: value})
    assert not again.newly_created


@pytest.mark.parametrize("length", range(64 - 2, 64 + 2))
def test_the_payload_limit_counts_utf8_bytes(length: int) -> None:
    with override_settings(DURABLE_JOBS={"MAX_PAYLOAD_BYTES": 64}):
        text = "\N{SNOWMAN}" * ((length - 2) // 3)
        text += "x" * (length - 2 - len(text.encode()))
        if length > 64:
            with pytest.raises(InvalidSubmission, match="larger than 64 bytes"):
                Job.objects.submit(anything, text)
        else:
            assert len(Job.objects.submit(anything, text).payload.encode()) == length


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), 1e308, "a\0b", "\U0001f4e6", {}, [], None])
def test_a_payload_at_the_edge_is_stored_exactly(value: Any) -> None:
    job = Job.objects.submit(anything, value)
    stored = Job.objects.get()
    assert stored.payload == job.payload
    assert anything.codec.decode(stored.payload) == value


class Colour(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 9


def test_subclasses_of_plain_types_become_plain() -> None:
    # A driver may refuse a list of a type and its subclass, and code of a subclass can
    # change what it says of itself.
    odd = JobSubmission.create(
        ship,
        Order(1),
        job_id=Colour.RED,
        scope=Colour.RED,
        queue=Colour.RED,
        dedupe_key=Colour.RED,
        priority=Level.HIGH,
        max_attempts=Level.HIGH,
    )
    for name in ("job_id", "scope", "queue", "dedupe_key"):
        assert type(getattr(odd, name)) is str
    assert type(odd.priority) is int and type(odd.max_attempts) is int
    jobs = Job.objects.submit_many([order("plain", scope="red"), odd])
    assert [job.queue for job in jobs] == ["parcels", "red"]
    assert Job.objects.get(job_id="red").priority == 9


def test_an_unknown_option_is_told_by_the_many_doors_of_a_handler_too():
    with pytest.raises(InvalidSubmission, match="unknown option colour"):
        ship.submit_many([None], colour="red")


def test_fields_of_the_payload_are_no_options():
    with pytest.raises(InvalidSubmission, match="unknown option account: .* payload is one object"):
        ship.submit(account=7)


@pytest.mark.parametrize("one", [Order(1), "text", {"number": 1}, None], ids=repr)
def test_one_payload_is_not_many(one: Any):
    with pytest.raises(InvalidSubmission, match=r"iterable of payloads, not one \w+: write \["):
        ship.submit_many(one)


def test_a_version_is_a_number_and_no_boolean():
    with pytest.raises(InvalidSubmission):
        JobSubmission.create(("tests.ship", True))
