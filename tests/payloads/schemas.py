"""One schema of each kind and a value of it: what is stored of them stands in a file.

The file is what every Python, every library version and every database must agree with.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import typing
import uuid
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session

from django_durable_jobs.payloads import JSON, Base64, ModelId

from .kinds import Article, Colour, Cover, Level, Line, Loose, Order, Point

GOLDEN: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("golden.json").read_text())

UTC = datetime.UTC
EAST = datetime.timezone(datetime.timedelta(hours=5, minutes=30))


@dataclasses.dataclass
class Nested:
    """Everything inside everything, once."""

    order: Order
    points: dict[str, list[Point]]
    shape: Annotated[str, msgspec.Meta(pattern="^[a-z]+$", max_length=9)]
    pair: tuple[int, Colour | None]
    article: ModelId[Article]
    share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1
    extra: JSON = None
    raw: list[Base64] | None = None


class Listed(msgspec.Struct, array_like=True, tag=7):
    a: int
    b: str = ""


class Sized(TypedDict):
    few: Annotated[list[int], msgspec.Meta(min_length=1, max_length=3)]
    keys: dict[Annotated[str, msgspec.Meta(min_length=2)], bool]
    step: Annotated[int, msgspec.Meta(multiple_of=5)]
    above: Annotated[float, msgspec.Meta(gt=1)]


Auto = enum.Enum("Auto", ["FIRST", "SECOND"])
KEY = uuid.UUID("00112233-4455-6677-8899-aabbccddeeff")

SCHEMAS: dict[str, tuple[Any, Any]] = {
    "nothing": (None, None),
    "bool": (bool, True),
    "int": (int, -(2**63)),
    "float": (float, 0.1),
    "float, an int": (float, 5),
    "float, large": (float, 1e300),
    "float, small": (float, 5e-324),
    "str": (str, 'é\N{SNOWMAN}\U0001f600 "\\/ \0\x1f\x7f\u2028'),
    "bytes": (Base64, bytes(range(256))),
    "datetime": (datetime.datetime, datetime.datetime(2026, 3, 14, 15, 9, 26, 535897, UTC)),
    "datetime, an offset": (datetime.datetime, datetime.datetime(2026, 3, 14, tzinfo=EAST)),
    "datetime, aware": (
        Annotated[datetime.datetime, msgspec.Meta(tz=True)],
        datetime.datetime(1, 1, 1, tzinfo=UTC),
    ),
    "datetime, naive": (
        Annotated[datetime.datetime, msgspec.Meta(tz=False)],
        datetime.datetime(2026, 3, 14, 15, 9),
    ),
    "date": (datetime.date, datetime.date(2026, 3, 14)),
    "time": (datetime.time, datetime.time(15, 9, 26, 5)),
    "timedelta": (datetime.timedelta, datetime.timedelta(days=-1, microseconds=1)),
    "uuid": (uuid.UUID, KEY),
    "decimal": (decimal.Decimal, decimal.Decimal("-1.10E+30")),
    "enum": (Colour, Colour.BLUE),
    "enum of ints": (Level, Level.LOW),
    "enum by auto": (Auto, Auto["SECOND"]),
    "literal": (Literal["b", "a"], "a"),
    "optional": (int | None, None),
    "union": (dict[str, int] | list[int] | str | None, [1]),
    "list": (list[str], ["b", "a"]),
    "tuple": (tuple[int, ...], (2, 1)),
    "pair": (tuple[str, bool], ("a", False)),
    "dict": (dict[str, int], {"b": 1, "a": 2}),
    "dict of dicts": (dict[str, dict[str, list[float]]], {"": {"\0": [-0.0]}}),
    "json": (JSON, {"b": [None, 1, 1.5, "x", {"y": False}], "a": {}}),
    "bare dict": (dict, {"a": [1]}),
    "bare list": (list, [{"a": 1}, None]),
    "dataclass": (Line, Line("a")),
    "recursive": (Order, Order(1, [Line("b", 2)], decimal.Decimal("0.10"), Colour.RED, Order(2))),
    "typed dict": (Loose, {"b": "x", "a": 1}),
    "struct": (Point, Point(1, 2)),
    "struct as list": (Listed, Listed(1)),
    "constraints": (Sized, {"few": [1], "keys": {"ab": True}, "step": 10, "above": 1.5}),
    "id, int": (ModelId[User], ModelId[User](7)),
    "id, text": (ModelId[Session], ModelId[Session]("abc")),
    "id, uuid": (ModelId[Article], ModelId[Article](KEY)),
    "id, one to one": (ModelId[Cover], ModelId[Cover](KEY)),
    "id, by name": (ModelId["auth.user"], ModelId["auth.User"](7)),
    "nested": (
        Nested,
        Nested(
            order=Order(1),
            points={"a": [Point(1)]},
            shape="round",
            pair=(1, None),
            article=ModelId[Article](KEY),
            extra={"a": [typing.cast("Any", 1)]},
            raw=[b"\xff"],
        ),
    ),
}
