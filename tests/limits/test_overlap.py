"""The detector finds every overshoot, and none where there is none."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests._marks import no_database

from .._rows import NOW
from .overlap import Stay, overshoots

pytestmark = no_database


def stay(start: int, end: int, *, limit: int = 1, key: str = "a") -> Stay:
    return Stay(
        who=f"{start}-{end}",
        key=key,
        limit=limit,
        start=NOW + timedelta(seconds=start),
        end=NOW + timedelta(seconds=end),
    )


@pytest.mark.parametrize(
    ("stays", "who"),
    [
        ([], []),
        ([stay(0, 2), stay(2, 4)], []),
        ([stay(0, 2), stay(1, 4, key="b")], []),
        ([stay(1, 4), stay(0, 2)], ["1-4"]),
        ([stay(0, 9), stay(1, 2), stay(3, 4)], ["1-2", "3-4"]),
        ([stay(0, 5, limit=2), stay(0, 5, limit=2), stay(4, 6, limit=2)], ["4-6"]),
        ([stay(0, 2, limit=2), stay(0, 5, limit=2), stay(2, 6, limit=2)], []),
        # The number of who begins counts.
        ([stay(0, 9, limit=3), stay(1, 9, limit=3), stay(2, 9, limit=1)], ["2-9"]),
        ([stay(0, 9, limit=1), stay(1, 9, limit=3), stay(2, 9, limit=3)], []),
    ],
)
def test_who_begins_where_there_is_no_place(stays: list[Stay], who: list[str]) -> None:
    assert [one.split()[0] for one in overshoots(stays)] == who
