"""Results, and the text that is stored about a running job (CONTRACT 3.14)."""

from __future__ import annotations

import datetime
import enum
import json
import logging
import math
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_durable_jobs.exceptions import InvalidSubmission
from django_durable_jobs.payloads import (
    NotStorable,
    OptionalResult,
    check_text,
    clean_text,
    codec_for,
    decode_json_text,
    encode_result,
    encode_return,
)

from .kinds import (
    LIMIT,
    Choice,
    Colour,
    Line,
    quick,
    round_trip,
)


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
        ("longer", 5, "lo…"),
        ("a\0b\ud800c", 9, "a\ufffdb\ufffdc"),
        ("a\0b\ud800c", 8, "a\ufffdb…"),
        ("x", 0, ""),
        ("xy", 1, "x"),
        ("xyzu", 3, "…"),
        ("xy", -1, ""),
        (None, 9, "None"),
        (ValueError("why"), 9, "why"),
        (Choice.OPEN, 9, "open"),
        (Hostile(), 30, "<Hostile without text>"),
        (10**5000, 30, "<int without text>"),
        ("éé", 4, "éé"),
        ("ééé", 5, "é…"),
        ("ééé", 4, "…"),
        ("\U0001f600" * 2, 7, "\U0001f600…"),
        ("\U0001f600" * 2, 6, "…"),
        ("é" * 50_000_000, 7, "éé…"),
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

    assert clean_text(Text("written"), 6) == "wri…"
    assert clean_text(Speaker(), 5) == "sp…"


@quick
@given(st.text(st.characters()), st.integers(-1, 30))
def test_clean_text_is_always_storable(value: str, limit: int) -> None:
    text = clean_text(value, limit)
    whole = clean_text(value, 1000)
    assert len(text.encode()) <= max(limit, 0)
    assert "\0" not in text
    if len(whole.encode()) <= limit:
        assert text == whole
    elif limit >= 3:
        assert text.endswith("…")
        assert whole.startswith(text[:-1])
        assert len(text.encode()) > limit - 4, "cut no earlier than a character asks for"


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


def test_a_result_that_is_optional_is_left_out_where_it_cannot_be_stored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert encode_return(None, LIMIT, "j") is None
    assert encode_return([1], LIMIT, "j") == "[1]"
    assert encode_return(OptionalResult([1]), LIMIT, "j") == "[1]"
    assert encode_return(OptionalResult(None), LIMIT, "j") is None
    assert not caplog.records
    for value in (object(), math.nan, "x" * LIMIT):
        with pytest.raises(NotStorable):
            encode_return(value, LIMIT, "j")
        assert encode_return(OptionalResult(value), LIMIT, "j") is None
        assert "job j goes without its result: Not storable as JSON" in caplog.messages[-1]
    assert len(caplog.records) == 3
    with pytest.raises(NotStorable, match="OptionalResult is not a JSON type"):
        encode_return([OptionalResult(1)], LIMIT, "j")


def test_a_row_written_past_the_doors_has_no_limit() -> None:
    assert encode_result([1, [2]], sys.maxsize) == "[1,[2]]"
