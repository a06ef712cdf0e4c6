"""The one clock that decides what is due and whose lease has expired.

PostgreSQL: the database's, read by SQL at the moment the expression is evaluated.
SQLite: the host's, read in Python once the write lock is held. A test may replace it
for the whole process (``testing.FakeClock``); then the fake instant is bound in SQL.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_replacement: Callable[[], int] | None = None


def replaced() -> int | None:
    """Give the injected instant (microseconds), or None while the real clock is used."""
    return None if _replacement is None else _replacement()


def replace(read: Callable[[], int] | None) -> None:
    """Make ``read`` the clock of this process; None gives the real one back."""
    global _replacement
    _replacement = read


def host_now() -> int:
    """Read the injected or the host's clock, in microseconds since 1970 UTC."""
    instant = replaced()
    return time.time_ns() // 1000 if instant is None else instant
