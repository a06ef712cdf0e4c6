"""The fingerprint: the same schema has one, another has another (CONTRACT 2.3)."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import os
import subprocess
import sys
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import pytest
from django.contrib.auth.models import Group, User
from django.contrib.sessions.models import Session

from django_durable_jobs.payloads import (
    JSON,
    Base64,
    ModelId,
    codec_for,
)
from tests._marks import no_database

from .kinds import (
    Article,
    Cents,
    Colour,
    Cover,
    Line,
    Loose,
    Order,
    Point,
    fingerprint,
    make,
)

pytestmark = no_database

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
        dict[Annotated[str, msgspec.Meta(min_length=1)], str],
        Base64,
        datetime.datetime,
        Annotated[datetime.datetime, msgspec.Meta(tz=True)],
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


def test_numbers_that_change_their_names_are_another_schema() -> None:
    """``auto()`` counts by place: a member put in between gives the others other meanings."""
    before = enum.Enum("E", ["OPEN", "CLOSED"])
    between = enum.Enum("E", ["OPEN", "HELD", "CLOSED"])
    swapped = enum.Enum("E", ["CLOSED", "OPEN"])
    assert len({fingerprint(one) for one in (before, between, swapped)}) == 3
    assert fingerprint(before) == fingerprint(enum.IntEnum("Other", {"CLOSED": 2, "OPEN": 1}))


def test_a_recursive_type_has_a_fingerprint() -> None:
    assert fingerprint(Order) == codec_for(Order).fingerprint != fingerprint(Line)


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
