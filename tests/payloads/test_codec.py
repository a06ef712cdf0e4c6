"""What goes in comes out, or is refused with its path (CONTRACT 2.2)."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import decimal
import json
import math
import tracemalloc
import typing
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo

import msgspec
import pytest
from django.contrib.auth.models import Group, User
from django.test import override_settings
from django.utils.safestring import mark_safe
from hypothesis import given
from hypothesis import strategies as st

from django_durable_jobs.exceptions import InvalidSubmission
from django_durable_jobs.payloads import (
    JSON,
    Base64,
    CorruptPayload,
    ModelId,
    NotStorable,
    codec_for,
    encode_result,
    payload_sha256,
)
from tests._marks import no_database

from .kinds import (
    LIMIT,
    Article,
    BiggerLine,
    Box,
    Cents,
    Choice,
    Colour,
    Everything,
    Guarded,
    Level,
    Line,
    Loose,
    Order,
    Point,
    quick,
    refused,
    round_trip,
    saved,
)

pytestmark = no_database

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
    st.datetimes(timezones=offsets | st.just(datetime.UTC)),
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
    hints = (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, uuid.UUID, Base64)
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
        (Order, Line("a"), "at $: expected Order, got Line"),
        (Line, Order(1, []), "at $: expected Line, got Order"),
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


@pytest.mark.parametrize("sku", ["hunter2", math.nan, "hunter2\ud800", 2**70, {"hunter2!": {1}}])
def test_messages_never_show_a_value(sku: Any) -> None:
    for hint in (dict[str, Literal["other"]], dict[str, int], dict[str, Colour], JSON):
        for value in ({"a": sku}, {"not a name: hunter2": sku}, {"a": "hunter2"}):
            try:
                codec_for(hint).encode(value)
            except InvalidSubmission as error:
                assert "hunter2" not in str(error)
                assert error.__cause__ is None
                assert error.__suppress_context__


@dataclasses.dataclass
class Basket:
    items: list[Line]
    notes: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)


IN_FOURTH = [Line("a")] * 3
WRONG: Any = "x"


@pytest.mark.parametrize(
    ("hint", "value", "path"),
    [
        (Basket, Basket([*IN_FOURTH, Line(typing.cast("str", 5))]), "$.items[3].sku"),
        (Basket, Basket([*IN_FOURTH, Line("a", 2**63)]), "$.items[3].count"),
        (Basket, Basket([*IN_FOURTH, Line("\udfff")]), "$.items[3].sku"),
        (Basket, Basket([*IN_FOURTH, BiggerLine("a")]), "$.items[3]"),
        (JSON, {"items": [1, 2, 3, {"price": math.nan}]}, "$.items[3].price"),
        (dict, {"items": [1, 2, 3, {"unit-price": {1}}]}, "$.items[3].unit-price"),
        (dict, {"items": [{"a b@c": {"price": math.inf}}]}, "$.items[0][...].price"),
        (dict, {"x" * 41: math.nan}, "$[...]"),
        (dict[str, list[int]], {"a": [1], "b": [1, "x"], "c": []}, "$.b[1]"),
        (dict[str, Line], {"a": Line("a"), "b": Line("b", True)}, "$.b.count"),
        (dict[str, Colour], {"a": Colour.RED, "b": "black"}, "$.b"),
        (
            Basket,
            Basket(
                [], {"a": {"b": 1}, "c": {"d": 1, "e": typing.cast("int", "x"), "f": 2}, "g": {}}
            ),
            "$.notes.c.e",
        ),
        (list[datetime.datetime], [datetime.datetime(2026, 1, 1)], "$[0]"),
        (list[ModelId[User]], [ModelId[User](5), "5"], "$[1]"),
        (list[ModelId[User]], [ModelId[User](5), User(pk=5)], "$[1]"),
        (list[ModelId[User]], [ModelId[User](5), saved(Group(pk=5))], "$[1]"),
    ],
)
def test_a_refusal_names_the_path(hint: Any, value: object, path: str) -> None:
    assert f"refused at {path}: " in refused(hint, value)


def test_a_path_too_long_to_read_is_cut() -> None:
    deep: Any = 1
    for _ in range(101):
        deep = {"quite_a_long_name_of_a_field": deep}
    says = refused(JSON, deep)
    assert "refused at $.quite_a_long_name_of_a_field.quite" in says
    assert len(says) < 200


def test_a_naive_datetime_is_taken_only_where_it_is_declared() -> None:
    local = Annotated[datetime.datetime, msgspec.Meta(tz=False)]
    naive = datetime.datetime(2026, 1, 1, 12)
    aware = naive.replace(tzinfo=datetime.UTC)
    assert "this datetime is naive: give an aware one" in refused(datetime.datetime, naive)
    assert "this datetime is naive" in refused(dict[str, datetime.datetime], {"a": naive})
    assert round_trip(local, naive) == naive
    assert "$" in refused(local, aware)
    assert round_trip(tuple[datetime.datetime, int], (aware, 1)) == (aware, 1)
    for text in ('["2026-01-01T12:00:00"]', '["2026-01-01T12:00:00Z","2026-01-01T12:00:00"]'):
        with pytest.raises(CorruptPayload, match="naive"):
            codec_for(list[datetime.datetime]).decode(text)
    zoned = Annotated[datetime.datetime, msgspec.Meta(tz=True)]
    both = tuple[zoned, local]  # type: ignore[valid-type]
    assert round_trip(both, (aware, naive)) == (aware, naive)


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


def peak(work: Callable[[], object]) -> int:
    """Measure the most memory that some work takes at a time."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "value",
    [[1] * 32_000, [[]] * 21_000, [{}] * 21_000, ["x" * 60_000], {str(n): 0 for n in range(7000)}],
    ids=lambda value: type(value[0] if isinstance(value, list) else value).__name__,
)
def test_the_memory_of_a_payload_is_bounded_by_its_size(value: Any) -> None:
    codec = codec_for(JSON)
    with override_settings(DURABLE_JOBS={"MAX_PAYLOAD_BYTES": LIMIT}):
        text = codec.encode(value)
        assert LIMIT * 0.9 < len(text) <= LIMIT
        assert peak(lambda: codec.encode(value)) < 40 * LIMIT
        assert peak(lambda: codec.decode(text)) < 40 * LIMIT
        for too_large in ([value] * 1000, [0] * 1_000_000, shared):
            assert peak(lambda large=too_large: refused(JSON, large)) < 2 * LIMIT


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
