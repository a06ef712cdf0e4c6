"""The codec, the fingerprint, ``ModelId`` and the rules for stored JSON and text."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import decimal
import enum
import json
import logging
import math
import os
import pickle
import subprocess
import sys
import typing
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, TypedDict, TypeVar
from zoneinfo import ZoneInfo

import msgspec
import pytest
from django.apps.registry import Apps
from django.contrib.auth.models import Group, User
from django.contrib.sessions.models import Session
from django.db import models
from django.test import override_settings
from django.utils.safestring import mark_safe
from hypothesis import given, settings
from hypothesis import strategies as st

from django_durable_jobs.exceptions import InvalidHandler, InvalidSubmission
from django_durable_jobs.payloads import (
    JSON,
    CorruptPayload,
    ModelId,
    NotStorable,
    check_text,
    clean_text,
    codec_for,
    decode_json_text,
    encode_result,
    payload_sha256,
)

quick = settings(deadline=None, max_examples=150)
LIMIT = 65_536
isolated = Apps()


class Article(models.Model):
    id = models.UUIDField(primary_key=True, default=uuid.uuid4)

    class Meta:
        apps = isolated
        app_label = "shop"


class Cover(models.Model):
    article = models.OneToOneField(Article, models.CASCADE, primary_key=True)

    class Meta:
        apps = isolated
        app_label = "shop"


class Odd(models.Model):
    day = models.DateField(primary_key=True)

    class Meta:
        apps = isolated
        app_label = "shop"


class Base(models.Model):
    class Meta:
        apps = isolated
        app_label = "shop"
        abstract = True


class SpecialUser(User):
    class Meta:
        apps = isolated
        app_label = "shop"
        proxy = True


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1


class Choice(models.TextChoices):
    OPEN = "open"


class Rights(enum.Flag):
    READ = 1


class SecretStr(str):
    pass


class Secret:
    pass


SecretText = NewType("SecretText", str)
Cents = NewType("Cents", int)
T = TypeVar("T")


@dataclasses.dataclass
class Line:
    sku: str
    count: int = 1


@dataclasses.dataclass
class Order:
    number: int
    lines: list[Line] = dataclasses.field(default_factory=list)
    total: decimal.Decimal = decimal.Decimal(0)
    colour: Colour | None = None
    parent: Order | None = None


@dataclasses.dataclass
class BiggerLine(Line):
    extra: str = ""


@dataclasses.dataclass
class Box(Generic[T]):
    content: T


@dataclasses.dataclass
class Guarded:
    value: int

    def __post_init__(self) -> None:
        if self.value == 7:
            raise KeyError("hunter2")


class Point(msgspec.Struct, tag="point", rename="camel"):
    x_axis: int
    y_axis: int = 0


class Loose(TypedDict, total=False):
    a: typing.Required[int]
    b: str


class Pair(NamedTuple):
    a: int


class Everything(TypedDict):
    whole: int
    real: float
    text: str
    flag: bool
    nothing: None
    raw: bytes
    when: datetime.datetime
    day: datetime.date
    time: datetime.time
    span: datetime.timedelta
    key: uuid.UUID
    money: decimal.Decimal
    colour: Colour
    word: Literal["a", "b"]
    pair: tuple[int, str]
    many: tuple[int, ...]
    table: dict[str, list[int]]


def refusal(hint: Any) -> str:
    with pytest.raises(InvalidHandler) as caught:
        codec_for(hint)
    return str(caught.value)


def refused(hint: Any, value: object) -> str:
    with pytest.raises(InvalidSubmission) as caught:
        codec_for(hint).encode(value)
    return str(caught.value)


def round_trip(hint: Any, value: object) -> Any:
    codec = codec_for(hint)
    return codec.decode(codec.encode(value))


# Types that are refused at registration ------------------------------------------------------


@dataclasses.dataclass
class HasSecret:
    tokens: dict[str, list[SecretStr]]


@dataclasses.dataclass
class HasModel:
    owner: User | None


@dataclasses.dataclass
class HasInit:
    value: dataclasses.InitVar[int]


@pytest.mark.parametrize(
    ("hint", "says"),
    [
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
        (HasModel, "payload.owner is the model User"),
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
        ("int", "not supported"),
    ],
)
def test_a_type_that_cannot_be_carried_exactly_is_refused(hint: Any, says: str) -> None:
    assert says in refusal(hint)


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


# What goes in comes out ----------------------------------------------------------------------

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=20,
)
lines = st.builds(Line, sku=st.text(st.characters(exclude_categories=["Cs"])), count=st.integers(0))
money = st.decimals(allow_nan=False, allow_infinity=False)
offsets = st.integers(-1439, 1439).map(
    lambda minutes: datetime.timezone(datetime.timedelta(minutes=minutes))
)


@quick
@given(json_values)
def test_plain_json_round_trips(value: Any) -> None:
    text = codec_for(JSON).encode(value)
    assert codec_for(JSON).decode(text) == value == json.loads(text)
    assert "\0" not in text


@quick
@given(
    st.integers(-(2**63), 2**63 - 1),
    st.lists(lines.filter(lambda line: line.count < 2**63), max_size=3),
    money,
    st.sampled_from([None, *Colour]),
)
def test_dataclasses_round_trip(
    number: int, given_lines: list[Line], total: decimal.Decimal, colour: Colour | None
) -> None:
    order = Order(number, given_lines, total, colour, Order(1))
    assert round_trip(Order, order) == order


@quick
@given(
    st.datetimes(timezones=offsets | st.just(datetime.UTC)) | st.datetimes(),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.uuids(),
    st.binary(max_size=50),
)
def test_moments_ids_and_bytes_round_trip(
    when: datetime.datetime,
    day: datetime.date,
    time: datetime.time,
    span: datetime.timedelta,
    key: uuid.UUID,
    raw: bytes,
) -> None:
    hints = (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, uuid.UUID, bytes)
    for hint, value in zip(hints, (when, day, time, span, key, raw), strict=True):
        read = round_trip(hint, value)
        assert read == value
        assert type(read) is type(value)


def test_every_supported_type_in_one_payload() -> None:
    value = Everything(
        whole=1, real=1.5, text="é\0", flag=True, nothing=None, raw=b"\xff",
        when=datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), day=datetime.date(2026, 1, 1),
        time=datetime.time(1, 2), span=datetime.timedelta(1), key=uuid.UUID(int=5),
        money=decimal.Decimal("1.10"), colour=Colour.RED, word="a", pair=(1, "x"),
        many=(1, 2), table={"k": [1]},
    )  # fmt: skip
    assert round_trip(Everything, value) == value
    assert "\\u0000" in codec_for(Everything).encode(value)


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (Loose, {"a": 1}),
        (Point, Point(1, 2)),
        (Box[int], Box(3)),
        (Sequence[int], [1]),
        (Mapping[str, int], {"a": 1}),
        (Cents, 5),
        (Level, Level.LOW),
        (Annotated[int, msgspec.Meta(ge=1, title="count")], 1),
        (JSON | None, None),
        (int | str | None, "x"),
        (None, None),
    ],
)
def test_other_supported_types_round_trip(hint: Any, value: object) -> None:
    assert round_trip(hint, value) == value


def test_an_attrs_like_class_is_read_by_its_attributes() -> None:
    class Attribute:
        name = "value"

    class Attrs:
        __attrs_attrs__ = (Attribute,)
        value = math.nan

    with pytest.raises(NotStorable, match="NaN"):
        encode_result(Attrs(), LIMIT)


def test_a_repeated_hour_keeps_its_wall_clock_and_offset() -> None:
    zone = ZoneInfo("Europe/Berlin")
    given_time = datetime.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zone)
    read = round_trip(datetime.datetime, given_time)
    assert read.utcoffset() == datetime.timedelta(hours=1)
    assert read.replace(tzinfo=None) == datetime.datetime(2026, 10, 25, 2, 30)  # noqa: DTZ001


def test_subclasses_of_plain_types_count_by_their_value() -> None:
    assert codec_for(str).encode(mark_safe("x")) == '"x"'
    assert codec_for(str).encode(Choice.OPEN) == '"open"'
    assert codec_for(int).encode(Level.LOW) == "1"
    assert codec_for(int).encode(type("Int", (int,), {})(3)) == "3"
    assert codec_for(float).encode(type("Real", (float,), {})(-0.0)) == "-0.0"
    assert codec_for(dict[str, int]).encode({Choice.OPEN: 1}) == '{"open":1}'
    assert codec_for(decimal.Decimal).encode(type("D", (decimal.Decimal,), {})("1.0")) == '"1.0"'
    assert codec_for(uuid.UUID).encode(type("U", (uuid.UUID,), {})(int=1)).endswith('1"')


def test_a_frozen_time_is_a_time() -> None:
    # freezegun and its like give subclasses.
    class FrozenDatetime(datetime.datetime):
        pass

    class FrozenDate(datetime.date):
        pass

    zone = ZoneInfo("Europe/Berlin")
    moment = FrozenDatetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zone)
    assert codec_for(datetime.datetime).encode(moment) == '"2026-10-25T02:30:00+01:00"'
    assert codec_for(datetime.date).encode(FrozenDate(2026, 1, 1)) == '"2026-01-01"'
    assert "not one that its type allows" in refused(datetime.date, moment)


# Submission without coercion -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("hint", "value", "says"),
    [
        (int, "5", "expected int, got str"),
        (int, True, "expected int, got bool"),
        (int, 5.0, "expected int, got float"),
        (str, 5, "expected str, got int"),
        (str, b"x", "expected str, got bytes"),
        (bool, 1, "expected bool, got int"),
        (float, True, "expected float, got bool"),
        (float, "1", "expected float, got str"),
        (float, 2**53 + 1, "not exact"),
        (list[int], (1,), "expected list, got tuple"),
        (tuple[int, ...], [1], "expected tuple, got list"),
        (list[int], [1, "x"], "$[1]: expected int, got str"),
        (dict[str, int], 5, "expected object, got int"),
        (Colour, "red", "expected Colour, got str"),
        (datetime.datetime, "2026-01-01T00:00:00Z", "expected datetime, got str"),
        (datetime.datetime, datetime.date(2026, 1, 1), "not one that its type allows"),
        (decimal.Decimal, 1.5, "expected Decimal, got float"),
        (uuid.UUID, str(uuid.UUID(int=1)), "expected UUID, got str"),
        (Line, {"sku": "a"}, "expected Line, got dict"),
        (Line, BiggerLine("a"), "expected Line, got BiggerLine"),
        (Line, Line(typing.cast("str", 5)), "$.sku: expected str, got int"),
        (Order, Order(1, [Line("a", typing.cast("int", "x"))]), "$.lines[0].count"),
        (Loose, {"b": "x"}, "missing required field a"),
        (Loose, {"a": 1, "c": 2}, "keys that its type does not have"),
        (Annotated[int, msgspec.Meta(ge=1)], 0, "$:"),
        (Line, None, "got null"),
        (None, 5, "expected null, got int"),
    ],
)
def test_a_value_of_another_type_is_refused_by_path_and_type(
    hint: Any, value: object, says: str
) -> None:
    assert says in refused(hint, value)


def test_an_int_that_a_float_holds_exactly_is_one() -> None:
    codec = codec_for(list[float])
    assert codec.encode([5, 5.0]) == "[5,5.0]"
    assert codec.decode("[5,5.0]") == [5.0, 5.0]
    assert type(codec.decode("[5]")[0]) is float


def test_an_offset_that_the_text_cannot_hold_is_refused() -> None:
    odd = datetime.timezone(datetime.timedelta(seconds=1172))
    value = datetime.datetime(1900, 1, 1, tzinfo=odd)
    assert "does not come back" in refused(datetime.datetime, value)


def test_a_dataclass_without_one_of_its_attributes_is_refused() -> None:
    line = Line("a")
    del line.sku
    assert "missing required field sku" in refused(Line, line)


@pytest.mark.parametrize("sku", ["hunter2", math.nan, "hunter2\ud800", 2**70, {"hunter2": {1}}])
def test_messages_never_show_a_value(sku: Any) -> None:
    for hint in (dict[str, Literal["other"]], dict[str, int], dict[str, Colour], JSON):
        for value in ({"a": sku}, {"hunter2": sku}, {"a": "hunter2"}):
            try:
                codec_for(hint).encode(value)
            except InvalidSubmission as error:
                assert "hunter2" not in str(error)
                assert error.__cause__ is None
                assert error.__suppress_context__


def test_what_a_class_of_the_payload_raises_is_a_refusal_without_its_words() -> None:
    value = Guarded(1)
    value.value = 7
    assert "hunter2" not in refused(Guarded, value)
    with pytest.raises(CorruptPayload) as caught:
        codec_for(Guarded).decode('{"value":7}')
    assert "hunter2" not in str(caught.value)


# What no database may see --------------------------------------------------------------------

nested: list[Any] = []
for _ in range(10_000):
    nested = [nested]
cyclic: list[Any] = []
cyclic += [cyclic, cyclic]
shared: list[Any] = [1]
for _ in range(60):
    shared = [shared, shared]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (math.nan, "NaN"),
        ([math.inf], "$[0]: float is NaN or infinite"),
        (decimal.Decimal("NaN"), "Decimal is NaN"),
        ("\ud800", "surrogate"),
        ({"\udfff": 1}, "surrogate"),
        (2**63, "64 bits"),
        (-(2**63) - 1, "64 bits"),
        ({1: 2}, "keys must be str"),
        ({None: 2}, "keys must be str"),
        ({1, 2}, "set is not a JSON type"),
        (object(), "object is not a JSON type"),
        (len, "is not a JSON type"),
        (Line, "type is not a JSON type"),
        (1j, "complex is not a JSON type"),
        (nested, "deeper than 100"),
        (cyclic, "deeper than 100"),
        (shared, "larger than"),
        ("x" * (1024 * 1024), "larger than"),
        ([1] * (1024 * 1024), "larger than"),
        ({"x" * (1024 * 1024): 1}, "larger than"),
        (b"x" * (1024 * 1024), "larger than"),
        (User(pk=1), "User is not a JSON type"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 40 else type(value).__name__,
)
def test_what_json_or_a_database_cannot_hold_is_refused(value: object, says: str) -> None:
    assert says in refused(JSON, value)
    with pytest.raises(NotStorable, match="Not storable as JSON"):
        encode_result(value, LIMIT)


def test_the_size_is_counted_in_utf8_bytes() -> None:
    codec = codec_for(str)
    with override_settings(DURABLE_JOBS={"MAX_PAYLOAD_BYTES": 10}):
        assert codec.encode("é" * 4) == f'"{"é" * 4}"'
        with pytest.raises(InvalidSubmission, match="10 bytes"):
            codec.encode("é" * 5)
        with pytest.raises(InvalidSubmission, match="10 bytes"):
            codec.encode("\0" * 2)


def test_a_hundred_levels_are_allowed_and_no_more() -> None:
    value: Any = 1
    for _ in range(100):
        value = [value]
    assert round_trip(JSON, value) == value
    assert "deeper" in refused(JSON, [value])
    order = Order(1)
    order.parent = order
    assert "deeper" in refused(Order, order)


# Dispatch ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nul",
        "[" * 10_000,
        '{"sku":5}',
        '{"count":1}',
        '{"sku":"a","count":"1"}',
        '{"sku":"a","count":true}',
        '{"sku":"a","more":1}',
        '{"sku":"a","count":NaN}',
        '{"sku":"\ud800"}',
        "[]",
        "null",
        typing.cast("str", None),
    ],
)
def test_a_stored_text_of_another_shape_is_corrupt(text: str) -> None:
    with pytest.raises(CorruptPayload):
        codec_for(Line).decode(text)


def test_other_words_for_the_same_value_are_not_corrupt() -> None:
    assert codec_for(Line).decode(' {"count": 2, "sku": "a"}') == Line("a", 2)
    assert codec_for(Line).decode('{"sku":"a"}') == Line("a")
    assert codec_for(list[float]).decode("[1]") == [1.0]
    assert codec_for(tuple[float, ...]).decode("[1]") == (1.0,)


def test_a_surplus_field_deep_inside_is_corrupt() -> None:
    text = '{"number":1,"lines":[{"sku":"a","count":1,"more":1}]}'
    with pytest.raises(CorruptPayload, match="fields that its type does not have"):
        codec_for(Order).decode(text)


@quick
@given(st.text() | json_values.map(json.dumps))
def test_any_text_is_decoded_or_corrupt(text: str) -> None:
    for hint in (Order, Loose, Everything, JSON, ModelId[Article]):
        with contextlib.suppress(CorruptPayload):
            codec_for(hint).decode(text)


def test_the_hash_is_over_the_exact_bytes() -> None:
    assert payload_sha256("null").startswith("74234e98afe7498f")
    assert payload_sha256('"é"') != payload_sha256('"\\u00e9"')


# The fingerprint -----------------------------------------------------------------------------


def fingerprint(hint: Any) -> str:
    return codec_for(hint).fingerprint


def make(name: str, *fields: Any) -> Any:
    return dataclasses.make_dataclass(name, fields)


ONE = make("One", ("a", int), ("b", str))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (ONE, make("Renamed", ("a", int), ("b", str))),
        (int | None, typing.Union[None, int]),  # noqa: UP007
        (Cents, int),
        (list[int], Sequence[int]),
        (Literal["a", "b"], Literal["b", "a"]),
        (Colour, enum.Enum("Other", {"B": "blue", "R": "red"})),
        (make("D", ("a", int, 1)), make("D", ("a", int, 2))),
        (make("D", ("a", int, 1)), make("D", ("a", int, dataclasses.field(default_factory=int)))),
        (Annotated[int, msgspec.Meta(title="x")], int),
        (ModelId["auth.User"], ModelId[User]),
        (None, type(None)),
        (ONE, TypedDict("T", {"a": int, "b": str})),
        (Loose, make("D", ("a", int), ("b", str, ""))),
        (TypedDict("L", {"b": str, "a": int}), TypedDict("R", {"a": int, "b": str})),
    ],
)
def test_the_same_schema_has_one_fingerprint(left: Any, right: Any) -> None:
    assert fingerprint(left) == fingerprint(right)


def test_every_change_of_the_schema_changes_the_fingerprint() -> None:
    class Renamed(msgspec.Struct, tag="other", rename="camel"):
        x_axis: int
        y_axis: int = 0

    class Listed(msgspec.Struct, tag="point", rename="camel", array_like=True):
        x_axis: int
        y_axis: int = 0

    hints = [
        ONE,
        make("D", ("b", str), ("a", int)),
        make("D", ("a", int), ("b", str, "")),
        make("D", ("a", int), ("b", str), ("c", int)),
        make("D", ("a", int), ("b", str | None)),
        make("D", ("a", int), ("c", str)),
        make("D", ("a", float), ("b", str)),
        TypedDict("M", {"a": int, "b": str}, total=False),
        Point,
        Renamed,
        Listed,
        int,
        float,
        str,
        bool,
        None,
        Annotated[int, msgspec.Meta(ge=1)],
        Annotated[int, msgspec.Meta(ge=2)],
        list[int],
        list[str],
        tuple[int, ...],
        tuple[int, int],
        dict[str, int],
        dict[str, str],
        Colour,
        enum.Enum("C", {"RED": "red"}),
        Literal["a"],
        Literal["a", "b"],
        Literal[1],
        JSON,
        ModelId[User],
        ModelId[Group],
        ModelId[Session],
        ModelId[Article],
        ModelId[Cover],
        Order,
        Line,
    ]
    prints = [fingerprint(hint) for hint in hints]
    assert len(set(prints)) == len(hints)
    assert all(len(text) == 32 and int(text, 16) >= 0 for text in prints)


def test_a_recursive_type_has_a_fingerprint() -> None:
    assert fingerprint(Order) == codec_for(Order).fingerprint != fingerprint(Line)


def test_the_fingerprint_of_a_known_type_stays_as_it_is() -> None:
    # Stored with every job: another value here blocks every waiting job of every user.
    assert fingerprint(None) == "667aeee105eb8c6d8ff239720a302519"
    assert fingerprint(Line) == "ba6ea472e7a5e10ca6d33564daabb1f4"
    assert fingerprint(ModelId[User]) == "0690567c92cc09f06907a8e2ac9bab2a"


STABLE = """
import enum, typing
from django_durable_jobs.payloads import codec_for
class T(typing.TypedDict, total=False):
    zeta: int
    alpha: typing.Required[str]
    mid: typing.Literal["x", "y", "z"]
E = enum.Enum("E", {"C": "c", "A": "a", "B": "b"})
for hint in (T, dict[str, T | None], E):
    print(codec_for(hint).fingerprint)
"""


def run(code: str, **environment: str) -> str:
    inherited = {key: text for key, text in os.environ.items() if key != "DJANGO_SETTINGS_MODULE"}
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-W", "error", "-c", code]
    env = {**inherited, "PYTHONPATH": path, **environment}
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    assert len({run(STABLE, PYTHONHASHSEED=seed) for seed in ("0", "1", "77")}) == 1


def test_importing_needs_no_settings_and_no_loaded_apps() -> None:
    code = (
        "import django_durable_jobs as d, sys\n"
        "@d.job('a')\n"
        "def a(ctx, payload: d.ModelId['shop.Article']): ...\n"
        "from django.conf import settings\n"
        "print(settings.configured, d.job, d.ModelId)"
    )
    assert run(code).startswith("False")


# ModelId -------------------------------------------------------------------------------------


def saved(instance: Any) -> Any:
    instance._state.adding = False
    return instance


def test_a_model_id_is_made_from_an_instance_or_a_key() -> None:
    user = saved(User(pk=5))
    made = [ModelId[User].of(user), ModelId[User](5), ModelId[User](user), ModelId(user)]
    assert set(made) == {ModelId[User](5)}
    assert made[0].pk == 5
    assert made[0].model_class() is User
    assert repr(made[0]) == "ModelId[auth.User](5)"
    assert ModelId.of(user) == made[0]
    assert ModelId["auth.User"](5) == made[0]
    assert made[0] != ModelId[Group](5)
    assert made[0] != 5


def test_the_bound_class_is_one_and_the_same() -> None:
    assert ModelId[User] is ModelId[User]
    assert ModelId["auth.User"] is ModelId["auth.user"]
    assert isinstance(ModelId[User](5), ModelId[User])
    with pytest.raises(TypeError):
        ModelId[User][Group]
    assert typing.get_args(ModelId[T]) == (T,)


@pytest.mark.parametrize(
    ("hint", "value", "says"),
    [
        (ModelId[User], saved(Group(pk=5)), "was given a auth.Group"),
        (ModelId[User], User(pk=5), "not saved"),
        (ModelId[User], saved(User()), "not saved"),
        (ModelId[Article], Article(), "not saved"),
        (ModelId[User], "5", "type int, not str"),
        (ModelId[User], True, "type int, not bool"),
        (ModelId[User], None, "type int, not NoneType"),
        (ModelId[User], 2**63, "64 bits"),
        (ModelId[Session], 5, "type str"),
        (ModelId[Session], "a\0", "NUL"),
        (ModelId[Session], "\ud800", "surrogate"),
        (ModelId[Article], str(uuid.UUID(int=1)), "type UUID, not str"),
        (ModelId, 5, "needs its model"),
    ],
)
def test_a_key_that_is_not_the_models_is_refused(hint: Any, value: Any, says: str) -> None:
    with pytest.raises(InvalidSubmission, match=says):
        hint(value)


def test_of_takes_instances_only() -> None:
    with pytest.raises(InvalidSubmission, match="takes a model instance, not int"):
        ModelId[User].of(typing.cast("User", 5))


@pytest.mark.parametrize(
    ("target", "says"),
    [(int, "takes a model class"), (5, "takes a model class"), (Base, "abstract"),
     (models.Model, "abstract"), ("Article", "app_label"), ("a.b.c", "app_label"), (".", "app_")],
)  # fmt: skip
def test_what_is_no_model_is_refused_in_the_brackets(target: Any, says: str) -> None:
    with pytest.raises(InvalidHandler, match=says):
        ModelId[target]


def test_a_model_that_no_app_has_is_found_when_it_is_needed() -> None:
    codec = codec_for(ModelId["shop.Nothing"])
    with pytest.raises(InvalidHandler, match="no model of an installed app"):
        _ = codec.fingerprint
    with pytest.raises(InvalidHandler, match="DateField"):
        _ = codec_for(ModelId[Odd]).fingerprint
    with pytest.raises(InvalidHandler, match="needs its model"):
        ModelId.model_class()


def test_the_wire_form_is_the_key() -> None:
    key = uuid.UUID(int=5)
    for hint, pk, text in [
        (ModelId[User], 5, "5"),
        (ModelId[Session], "abc", '"abc"'),
        (ModelId[Article], key, f'"{key}"'),
        (ModelId[Cover], key, f'"{key}"'),
    ]:
        codec = codec_for(hint)
        assert codec.encode(hint(pk)) == text
        assert codec.decode(text) == hint(pk)
        assert type(codec.decode(text)) is hint
    assert encode_result({"id": ModelId[Article](key)}, LIMIT) == f'{{"id":"{key}"}}'


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (ModelId[User], '"5"'),
        (ModelId[User], "5.0"),
        (ModelId[User], "true"),
        (ModelId[User], "null"),
        (ModelId[Session], "5"),
        (ModelId[Article], "5"),
        (ModelId[Article], '"5"'),
        (ModelId[Article], '"00000000000000000000000000000005"'),
    ],
)
def test_a_stored_key_of_another_type_is_corrupt(hint: Any, text: str) -> None:
    with pytest.raises(CorruptPayload):
        codec_for(hint).decode(text)


def test_a_payload_holds_the_id_of_that_model_and_no_other() -> None:
    @dataclasses.dataclass
    class Publish:
        user: ModelId[User]

    assert round_trip(Publish, Publish(ModelId(saved(User(pk=5))))).user.pk == 5
    assert "expected ModelId[auth.User]" in refused(Publish, Publish(ModelId[Group](5)))
    assert "expected ModelId[auth.User], got int" in refused(
        Publish, Publish(typing.cast("Any", 5))
    )
    assert round_trip(ModelId["auth.User"], ModelId[User](5)).pk == 5


def test_a_proxy_names_the_same_row() -> None:
    assert ModelId[User].of(saved(SpecialUser(pk=5))).pk == 5


def test_a_model_id_cannot_be_changed_and_can_be_copied() -> None:
    made = ModelId[User](5)
    with pytest.raises(AttributeError):
        made.pk = 6
    with pytest.raises(AttributeError):
        del made.pk
    assert copy.deepcopy(made) == made == pickle.loads(pickle.dumps(made))  # noqa: S301


def test_get_reads_with_the_default_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Manager:
        def using(self, alias: str) -> Manager:
            calls.append(alias)
            return self

        def get(self, *, pk: int) -> str:
            return f"row {pk}"

        async def aget(self, *, pk: int) -> str:
            return f"row {pk}"

    monkeypatch.setitem(vars(User._meta), "default_manager", Manager())
    made: Any = ModelId[User](5)
    assert made.get() == "row 5"
    assert made.get(using="other") == "row 5"
    for options in ({}, {"using": "other"}):
        with pytest.raises(StopIteration) as stopped:
            made.aget(**options).send(None)
        assert stopped.value.value == "row 5"
    assert calls == ["other", "other"]


# Results and stored text ---------------------------------------------------------------------


def test_results_become_their_json_forms() -> None:
    value = {"when": datetime.date(2026, 1, 1), "pair": (1, 2), "line": Line("a"), "c": Colour.RED}
    text = encode_result(value, LIMIT)
    assert decode_json_text(text) == {
        "when": "2026-01-01",
        "pair": [1, 2],
        "line": {"sku": "a", "count": 1},
        "c": "red",
    }
    assert encode_result(None, 4) == "null"
    with pytest.raises(NotStorable, match="larger than 3 bytes"):
        encode_result(1234, 3)


class Hostile:
    def __str__(self) -> str:
        raise SystemExit("hunter2")


class Liar:
    @property
    def __class__(self) -> type:
        raise KeyError("hunter2")


def test_a_hostile_result_is_refused_by_class_names_only() -> None:
    odd = type("Odd", (datetime.timedelta,), {})(1)
    for value in (Liar(), [Liar()], Hostile(), odd):
        with pytest.raises(NotStorable) as caught:
            encode_result(value, LIMIT)
        assert "hunter2" not in str(caught.value)


def test_an_enum_of_other_values_is_not_a_result() -> None:
    with pytest.raises(NotStorable, match="tuple is not a JSON type"):
        encode_result(enum.Enum("Pairs", {"A": (1, 2)})["A"], LIMIT)


def test_an_unset_field_is_left_out() -> None:
    class Patch(msgspec.Struct):
        name: str | msgspec.UnsetType = msgspec.UNSET

    assert codec_for(Patch).encode(Patch()) == "{}"
    assert round_trip(Patch, Patch("x")) == Patch("x")


@quick
@given(
    st.recursive(
        st.integers() | st.floats() | st.text(st.characters()) | st.binary() | st.builds(object),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.integers() | st.text(st.characters()), inner, max_size=3)
            | st.tuples(inner)
        ),
        max_leaves=8,
    )
)
def test_any_result_is_stored_or_not_storable(value: object) -> None:
    try:
        text = encode_result(value, LIMIT)
    except NotStorable:
        return
    assert len(text.encode()) <= LIMIT
    assert "\0" not in text
    json.loads(text)


@pytest.mark.parametrize("text", ["", "x", "[" * 10_000, "\ud800", b"\xff", 5, "NaN"])
def test_stored_json_that_cannot_be_read_is_none_and_logged(
    text: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "django_durable_jobs"):
        assert decode_json_text(text) is None
    assert len(caplog.records) == 1


def test_no_stored_json_is_none_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    assert decode_json_text(None) is None
    assert decode_json_text("[1]") == [1]
    assert not caplog.records


@pytest.mark.parametrize(
    ("value", "limit", "text"),
    [
        ("plain", 5, "plain"),
        ("longer", 5, "long…"),
        ("a\0b\ud800c", 9, "a�b�c"),
        ("x", 0, ""),
        ("xy", 1, "…"),
        ("xy", -1, ""),
        (None, 9, "None"),
        (ValueError("why"), 9, "why"),
        (Choice.OPEN, 9, "open"),
        (Hostile(), 30, "<Hostile without text>"),
        (10**5000, 30, "<int without text>"),
        ("é" * 50_000_000, 3, "éé…"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_text_about_a_running_job_is_cleaned_and_cut(value: object, limit: int, text: str) -> None:
    assert clean_text(value, limit) == text


def test_clean_text_survives_a_str_subclass_that_misbehaves() -> None:
    class Text(str):
        def __str__(self) -> str:
            raise ValueError

        def __len__(self) -> int:
            raise ValueError

        def __getitem__(self, key: Any) -> str:
            raise ValueError

    class Speaker:
        def __str__(self) -> str:
            return Text("spoken")

    assert clean_text(Text("written"), 5) == "writ…"
    assert clean_text(Speaker(), 5) == "spok…"


@quick
@given(st.text(st.characters()), st.integers(-1, 30))
def test_clean_text_is_always_storable(value: str, limit: int) -> None:
    text = clean_text(value, limit)
    assert len(text) <= max(limit, 0)
    assert "\0" not in text
    text.encode()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (5, "queue must be str, not int"),
        (None, "queue must be str"),
        (b"x", "queue must be str, not bytes"),
        ("", "1 to 5 characters; it has 0"),
        ("123456", "1 to 5 characters; it has 6"),
        (" \t", "must not be blank"),
        ("a\0", "NUL"),
        ("\ud800", "surrogate"),
    ],
)
def test_text_that_is_refused_names_the_parameter(value: object, says: str) -> None:
    with pytest.raises(InvalidSubmission, match=says):
        check_text("queue", value, 1, 5)


def test_text_that_is_accepted_comes_back_plain() -> None:
    assert check_text("scope", "", 0, 5) == ""
    assert check_text("scope", " ", 0, 5) == " "
    assert check_text("queue", "éé", 1, 2) == "éé"
    assert type(check_text("queue", Choice.OPEN, 1, 5)) is str


@pytest.mark.parametrize(
    ("hint", "value"), [(dict, {"a": [1, None, {"b": "c"}]}), (list, [1, "a", {"b": None}])]
)
def test_a_bare_dict_or_list_as_the_whole_payload_is_plain_json(hint, value):
    codec = codec_for(hint)
    assert codec.decode(codec.encode(value)) == value
    with pytest.raises(InvalidSubmission):
        codec.encode("neither")
    with pytest.raises(InvalidSubmission):
        codec.encode(type(value)([("x", object())]) if hint is dict else [object()])
