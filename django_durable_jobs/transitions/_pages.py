"""Bounded passes, page by page: rows that somebody has locked are passed over, poison isolated."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from django.db import DatabaseError, transaction

from ..dialects import dialect_for
from ..dialects.base import JOBS, Params, Row

logger = logging.getLogger("django_durable_jobs")

PAGE = 500
# A lock that was waited for is no fault of a row: then the whole page is tried again later.
AT_ONCE_SECONDS = 1.0


class PageWork(Protocol):
    """Move the locked jobs ``ids`` at the instant ``now``; give the ids that were moved."""

    def __call__(self, ids: list[int], now: int) -> list[int]: ...


def each_page(
    alias: str,
    condition: str,
    params: Params,
    work: PageWork,
    *,
    order: str = "j.id",
    to_delete: bool = False,
) -> int:
    """Do ``work(ids, now)`` on locked pages of the jobs that meet a condition.

    Each page is a transaction of our own, done again if it fell victim to another one. Work
    gives the ids of the rows that it moved, which takes them out of the condition. The others
    are left out of the next pages, so that they never hide them. Work that deletes says
    ``to_delete``. Gives how many rows were moved.
    """
    dialect = dialect_for(alias)

    def one_page(condition: str) -> tuple[list[Row], set[int]]:
        with dialect.own(alias):
            page = dialect.lock_jobs(
                alias, condition, params, limit=PAGE, order=order, to_delete=to_delete
            )
            ids = [row[0] for row in page]
            now = max((row[1] for row in page), default=0)
            return page, set(isolated(alias, ids, partial(work, now=now)) if page else ())

    total = 0
    stuck: list[int] = []
    while True:
        left_out = f" AND j.id NOT IN ({', '.join(map(str, stuck))})" if stuck else ""
        page, moved = dialect.retried(partial(one_page, condition + left_out))
        total += len(moved)
        stuck += [row[0] for row in page if row[0] not in moved]
        if len(page) < PAGE:
            return total


def isolated(alias: str, ids: list[int], work: Callable[[list[int]], list[int]]) -> list[int]:
    """Do ``work(ids)``; where the database refuses, halve until the refused rows stand alone."""
    began = time.monotonic()
    try:
        with transaction.atomic(using=alias):
            return work(ids)
    except DatabaseError as error:
        is_transient = dialect_for(alias).is_transient(error)
        if is_transient and not is_at_once(alias, error, began):
            raise
        if len(ids) == 1:
            # What is transient comes again with each pass, and needs no traceback.
            logger.log(
                logging.WARNING if is_transient else logging.ERROR,
                "job %d cannot be moved and is passed over",
                ids[0],
                exc_info=not is_transient,
            )
            return []
    half = len(ids) // 2
    return isolated(alias, ids[:half], work) + isolated(alias, ids[half:], work)


def is_at_once(alias: str, error: BaseException, began: float) -> bool:
    """Tell that a row was refused without a wait, and so will be whoever else waits for it."""
    return dialect_for(alias).blames_row(error) and time.monotonic() - began < AT_ONCE_SECONDS


def move(alias: str, ids: Sequence[int], assignments: str, source: str) -> list[int]:
    """Set columns of the given jobs that still have the status ``source``; give their ids."""
    dialect = dialect_for(alias)
    given, params = dialect.rows({"id": "bigint"}, [(one,) for one in ids])
    sql = (
        # The empty text keeps a planner without statistics from the index of all these jobs.
        f"UPDATE {JOBS} SET {assignments}"
        f" WHERE status || '' = '{source}' AND id IN (SELECT g.id FROM ({given}) AS g)"
        " RETURNING id"
    )
    return [row[0] for row in dialect.fetch(alias, sql, params)]
