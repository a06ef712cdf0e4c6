"""Types and models that the tests of payloads carry, and what is done with them."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import typing
import uuid
from typing import Any, Generic, Literal, NamedTuple, NewType, TypedDict, TypeVar

import msgspec
import pytest
from django.apps.registry import Apps
from django.contrib.auth.models import User
from django.db import models
from hypothesis import settings

from django_durable_jobs.exceptions import InvalidHandler, InvalidSubmission
from django_durable_jobs.payloads import (
    Base64,
    codec_for,
)

quick = settings(max_examples=150)
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


class Publication(models.Model):
    class Meta:
        apps = isolated
        app_label = "shop"


class Magazine(Publication):
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
    raw: Base64
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


def fingerprint(hint: Any) -> str:
    return codec_for(hint).fingerprint


def make(name: str, *fields: Any) -> Any:
    return dataclasses.make_dataclass(name, fields)


def saved(instance: Any) -> Any:
    instance._state.adding = False
    return instance
