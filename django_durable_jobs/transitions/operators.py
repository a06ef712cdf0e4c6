"""What operators do is written down with it: who, when, what (CONTRACT 6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from django.db import connections, transaction

from ..dialects import dialect_for
from ..instants import from_microseconds
from ..models import OperatorAction
from ..transactions import in_callers_transaction

UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a move has done, in a word, to what; ``job_key`` is the row number of a job."""

    outcome: str
    subject: str
    job_key: int | None = None


def recorded(alias: str, move: Callable[[], Done], *, action: str, operator: str) -> Done:
    """Make an operator's move and commit its record with it; lock waits are bounded.

    A move that left everything unchanged leaves no record.
    """
    dialect = dialect_for(alias)

    def work() -> Done:
        done = move()
        if done.outcome != UNCHANGED:
            _record(alias, done, action=action, operator=operator)
        return done

    def alone() -> Done:
        with dialect.own(alias):
            return work()

    if in_callers_transaction(connections[alias]):
        with transaction.atomic(using=alias):
            return work()
    return dialect.retried(alone)


def _record(alias: str, done: Done, *, action: str, operator: str) -> None:
    OperatorAction.objects.using(alias).create(
        operator=operator[:255],
        action=action,
        job_key=done.job_key,
        # The record outlives what it is about, so it names it.
        detail=f"{done.subject}: {done.outcome}",
        happened_at=from_microseconds(dialect_for(alias).instant(alias)),
    )
