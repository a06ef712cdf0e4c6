"""The tables of docs/payloads.md say what the code does."""

from __future__ import annotations

import datetime
import re
import typing
from collections.abc import Callable, Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from django.contrib.auth.models import User

from django_durable_jobs.exceptions import InvalidHandler
from django_durable_jobs.payloads import JSON, Base64, ModelId, codec_for
from tests._marks import no_database

from .kinds import Colour, Line, Loose, Pair, Point, Rights, SecretStr
from .test_types import Sparse

pytestmark = no_database

PAGE = Path(__file__).parents[2].joinpath("docs", "payloads.md").read_text()
NAMES: dict[str, Any] = {
    **vars(datetime),
    **vars(typing),
    "Meta": msgspec.Meta,
    "Callable": Callable,
    "Iterable": Iterable,
}
for named in (Decimal, UUID, User, JSON, ModelId, Colour, Line, Loose, Pair, Point, Rights, Sparse):
    NAMES[named.__name__] = named
NAMES |= {"SecretStr": SecretStr, "Base64": Base64}


def table(title: str) -> list[list[str]]:
    """Give the first code of each cell of the table under these column titles."""
    lines = PAGE[PAGE.index(f"\n| {title} |\n") :].lstrip().splitlines()[2:]
    rows = lines[: next(n for n, line in enumerate(lines) if not line.startswith("|"))]
    cells = [re.split(r"(?<!\\)\|", row)[1:-1] for row in rows]
    return [[cell.replace("\\|", "|").strip() for cell in row] for row in cells]


def code(cell: str) -> str:
    found = re.match("`([^`]+)`", cell)
    assert found, cell
    return found[1]


TYPES = [tuple(map(code, row)) for row in table("type | a value | stored as")]
REFUSED = [code(row[0]) for row in table("type | why, and what instead")]


@pytest.mark.parametrize(("hint", "value", "text"), TYPES)
def test_what_the_guide_allows_is_stored_as_it_says(hint: str, value: str, text: str) -> None:
    codec = codec_for(eval(hint, NAMES))  # noqa: S307
    given = eval(value, NAMES)  # noqa: S307
    assert codec.encode(given) == text
    assert codec.decode(text) == given


@pytest.mark.parametrize("hint", REFUSED)
def test_what_the_guide_refuses_is_refused(hint: str) -> None:
    with pytest.raises(InvalidHandler, match="payload"):
        codec_for(eval(hint, NAMES))  # noqa: S307


def test_the_guide_has_every_kind_of_type() -> None:
    assert len(TYPES) >= 27
    assert len(REFUSED) >= 18
