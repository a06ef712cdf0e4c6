"""Jobs that the database refuses to change, by damage or by a trigger of the project's (FAULTS 6).

This process leaves them out for a while, so that they hold up nobody behind them.
"""

from __future__ import annotations

import time

REFUSED_SECONDS = 30.0
# By database and job, until when.
_refused: dict[tuple[str, int], float] = {}


def refuse(alias: str, job: int) -> None:
    _refused[alias, job] = time.monotonic() + REFUSED_SECONDS


def left_out(alias: str, condition: str = "") -> str:
    """Add to a condition on a job ``j`` that it is none of these."""
    refused = _refused_now(alias)
    if not refused:
        return condition
    others = f"j.id NOT IN ({', '.join(map(str, refused))})"
    return f"{condition} AND {others}" if condition else others


def _refused_now(alias: str) -> list[int]:
    if not _refused:
        return []
    now = time.monotonic()
    for key in [key for key, until in list(_refused.items()) if until <= now]:
        _refused.pop(key, None)
    return [job for name, job in list(_refused) if name == alias]
