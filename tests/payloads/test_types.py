"""Types that are refused at registration, with the place named (CONTRACT 2.2)."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import msgspec
import pytest
from django.contrib.auth.models import User

from django_durable_jobs.payloads import (
    Base64,
    ModelId,
    codec_for,
)
from tests._marks import no_database

from .kinds import (
    Box,
    Pair,
    Rights,
    Secret,
    SecretStr,
    SecretText,
    T,
    fingerprint,
    make,
    refusal,
    refused,
)

pytestmark = no_database


@dataclasses.dataclass
class HasSecret:
    tokens: dict[str, list[SecretStr]]


@dataclasses.dataclass
class HasModel:
    owner: User | None


@dataclasses.dataclass
class HasInit:
    value: dataclasses.InitVar[int]


class Sparse(msgspec.Struct, omit_defaults=True):
    value: int = 1


REFUSED: list[tuple[Any, str]] = [
    (SecretStr, "secret"),
    (SecretText, "secret"),
    (Annotated[str, Secret], "secret"),
    (Annotated[str, Secret()], "secret"),
    (int | SecretStr, "secret"),
    (HasSecret, "secret"),
    (list[HasSecret], "secret"),
    (Box[SecretStr], "secret"),
    (User, "ModelId[User]"),
    (User | int, "ModelId[User]"),
    (HasModel, ".owner is the model User"),
    (Any, "say what it holds"),
    (object, "say what it holds"),
    (list[list], "list[str]"),
    (list[dict], "dict[str, JSON]"),
    (tuple, "say what it holds"),
    (list[Any], "say what it holds"),
    (dict[str, Any], "say what it holds"),
    (Box, "say what it holds"),
    (T, "say what it holds"),
    (Callable, "callable"),
    (Callable[[int], int], "callable"),
    (type[int], "callable"),
    (set[int], "no order"),
    (list[frozenset[int]], "no order"),
    (Pair, "dataclass"),
    (Rights, "Flag"),
    (dict[int, str], "must be str"),
    (bytearray, "bytes"),
    (memoryview, "bytes"),
    (complex, "complex"),
    (Iterable[int], "Iterable"),
    (msgspec.Raw, "not one that a payload can hold"),
    (str | datetime.date, "not supported"),
    (HasInit, "InitVar"),
    (ModelId, "ModelId[Article]"),
    (bytes, "is bytes without a declared form"),
    (Annotated[bytes, msgspec.Meta(max_length=5)], "is bytes without a declared form"),
    (Annotated[bytes, msgspec.Meta(extra_json_schema={"contentEncoding": "hex"})], "declared"),
    (dict[bytes, int], "must be str"),
    (Sparse, "omits defaults"),
]


@pytest.mark.parametrize(("hint", "says"), [*REFUSED, ("int", "not supported")])
def test_a_type_that_cannot_be_carried_exactly_is_refused(hint: Any, says: str) -> None:
    assert says in refusal(hint)


@pytest.mark.parametrize(("hint", "says"), REFUSED)
def test_a_refusal_names_the_place(hint: Any, says: str) -> None:
    inner = make("Inner", ("good", int), ("bad", hint))
    outer = make("Outer", ("items", list[inner]))
    text = refusal(dict[str, outer])
    assert says in text
    assert "payload[...].items[...].bad" in text, "the place, and not only its field"


def test_an_unresolvable_annotation_names_its_place() -> None:
    inner = dataclasses.make_dataclass("Inner", [("bad", "Nowhere")])
    assert "type of payload.items[...]" in refusal(make("Outer", ("items", list[inner])))


def test_datetimes_that_say_nothing_beside_naive_ones_are_refused() -> None:
    local = Annotated[datetime.datetime, msgspec.Meta(tz=False)]
    mixed = make("Mixed", ("when", datetime.datetime), ("local", local))
    assert "payload.when does not say which datetimes it takes" in refusal(mixed)


def test_bytes_with_their_form_declared_are_taken() -> None:
    short = Annotated[Base64, msgspec.Meta(max_length=2)]
    for hint in (Base64, list[Base64], Base64 | None, short, make("Box", ("raw", Base64))):
        codec_for(hint)
    assert codec_for(short).encode(b"\xff\x00") == '"/wA="'
    assert "$" in refused(short, b"abc")


def test_names_that_only_a_function_knows_are_refused_with_advice() -> None:
    @dataclasses.dataclass
    class Inner:
        value: int

    @dataclasses.dataclass
    class Outer:
        inner: Inner

    assert codec_for(Inner).decode('{"value":1}') == Inner(1)
    assert "module level" in refusal(Outer)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the type statement came with 3.12")
def test_the_name_and_the_meaning_of_a_type_alias_count() -> None:
    names: dict[str, Any] = {"SecretStr": SecretStr}
    exec("type SecretKey = str\ntype Key = SecretStr\ntype Count = int", names)  # noqa: S102
    assert "secret" in refusal(names["SecretKey"])
    assert "secret" in refusal(names["Key"])
    assert fingerprint(names["Count"]) == fingerprint(int)


def test_an_enum_with_values_that_are_not_json_is_refused() -> None:
    assert "not supported" in refusal(enum.Enum("Ratio", {"HALF": 0.5}))
