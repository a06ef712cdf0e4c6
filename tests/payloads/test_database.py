"""Through the database and out again: the same bytes in each of them, the same value back."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import hashlib
import typing
import uuid
from typing import Any, Literal, Optional, TypedDict

import msgspec
import pytest
from django.contrib.auth.models import User
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from django_durable_jobs import JobContext, job
from django_durable_jobs.handlers import Handler, registry
from django_durable_jobs.models import Job
from django_durable_jobs.payloads import JSON, Base64, ModelId
from django_durable_jobs.testing import drain
from tests._rows import stored_bytes

from .kinds import Article, Colour, Level
from .schemas import GOLDEN, SCHEMAS

pytestmark = pytest.mark.django_db
Typed = tuple[Any, Any]

text = st.text(st.characters(exclude_categories=["Cs"]))
whole = st.integers(-(2**63), 2**63 - 1)
real = st.floats(allow_nan=False, allow_infinity=False)
plain = st.recursive(
    st.none() | st.booleans() | whole | real | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
offsets = st.integers(-1439, 1439).map(
    lambda minutes: datetime.timezone(datetime.timedelta(minutes=minutes))
)
LEAVES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (int, whole),
    (float, real),
    (str, text),
    (bool, st.booleans()),
    (Base64, st.binary(max_size=20)),
    (datetime.datetime, st.datetimes(timezones=offsets)),
    (datetime.date, st.dates()),
    (datetime.time, st.times()),
    (datetime.timedelta, st.timedeltas()),
    (uuid.UUID, st.uuids()),
    (decimal.Decimal, st.decimals(allow_nan=False, allow_infinity=False)),
    (Colour, st.sampled_from(Colour)),
    (Level, st.sampled_from(Level)),
    (Literal["a", "b"], st.sampled_from("ab")),
    (ModelId[User], whole.map(ModelId[User])),
    (ModelId[Article], st.uuids().map(ModelId[Article])),
    (JSON, plain),
]


@st.composite
def typed(draw: st.DrawFn, depth: int = 3) -> Typed:
    """Draw a type, and a value that it accepts."""
    kind = draw(st.sampled_from(["leaf", *CONTAINERS])) if depth else "leaf"
    if kind == "leaf":
        hint, values = draw(st.sampled_from(LEAVES))
        return hint, draw(values)
    return CONTAINERS[kind](draw, depth - 1)


def a_list(draw: st.DrawFn, depth: int) -> Typed:
    hint, value = draw(typed(depth))
    return list[hint], [value] * draw(st.integers(0, 3))


def a_tuple(draw: st.DrawFn, depth: int) -> Typed:
    pairs = [draw(typed(depth)) for _ in range(draw(st.integers(1, 3)))]
    return tuple[tuple(hint for hint, _ in pairs)], tuple(value for _, value in pairs)  # type: ignore[misc]


def a_dict(draw: st.DrawFn, depth: int) -> Typed:
    hint, value = draw(typed(depth))
    return dict[str, hint], dict.fromkeys(draw(st.lists(text, max_size=3)), value)


def an_optional(draw: st.DrawFn, depth: int) -> Typed:
    hint, value = draw(typed(depth))
    return Optional[hint], draw(st.sampled_from([None, value]))  # noqa: UP045


def a_record(draw: st.DrawFn, depth: int) -> Typed:
    names = draw(st.lists(st.sampled_from(["a", "b_c", "id", "type_"]), unique=True, max_size=3))
    pairs = {name: draw(typed(depth)) for name in names}
    fields = [(name, hint) for name, (hint, _) in pairs.items()]
    values = {name: value for name, (_, value) in pairs.items()}
    kind = draw(st.sampled_from([dataclasses.make_dataclass, msgspec.defstruct, TypedDict]))
    if kind is TypedDict:
        return TypedDict("Record", dict(fields)), values
    made: Any = kind("Record", fields)
    return made, made(**values)


CONTAINERS = {"list": a_list, "tuple": a_tuple, "dict": a_dict, "or none": an_optional} | {
    "record": a_record
}


def handler_of(name: str, hint: Any, given_to: dict[str, Any]) -> Handler[..., Any]:
    def handler(ctx: JobContext, payload: Any) -> None:
        given_to[name] = payload

    handler.__annotations__["payload"] = hint
    return job(name)(handler)


@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(st.lists(typed(), min_size=4, max_size=8))
def test_any_value_that_the_type_accepts_comes_back_equal(pairs: list[Typed]) -> None:
    received: dict[str, Any] = {}
    with registry.temporary():
        for number, (hint, value) in enumerate(pairs):
            handler_of(f"database.{number}", hint, received).submit(value)
        drain()
    for number, (hint, value) in enumerate(pairs):
        back = received[f"database.{number}"]
        assert back == value, hint
        assert type(back) is type(value), hint


def test_every_database_stores_the_same_bytes() -> None:
    received: dict[str, Any] = {}
    jobs: dict[str, Job] = {}
    with registry.temporary():
        for name, (hint, value) in SCHEMAS.items():
            if hint is None:
                jobs[name] = job(name)(lambda ctx: received.update(nothing=None)).submit()
            else:
                jobs[name] = handler_of(name, hint, received).submit(value)
        drain()
    for name, one in jobs.items():
        golden = GOLDEN[name]
        stored = golden["text"].encode()
        assert stored_bytes(one, "payload") == stored, name
        sha256 = hashlib.sha256(stored).hexdigest()
        found = Job.objects.values_list("payload", "payload_sha256", "fingerprint").get(pk=one.pk)
        assert found == (golden["text"], sha256, golden["fingerprint"]), name
    values = {name: value for name, (_, value) in SCHEMAS.items()}
    assert received == values
    assert typing.cast("Any", received["float, an int"]) == 5.0
