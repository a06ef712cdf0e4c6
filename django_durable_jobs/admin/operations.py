"""An operator's move on many jobs: each for itself, each written down with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from django.db import connections, transaction

from ..dialects import dialect_for
from ..exceptions import DurableJobsError
from ..models import Job, OperatorAction
from ..transactions import in_callers_transaction
from ..transitions.control import alias_of
from .search import now

UNCHANGED = "unchanged"

# Makes the move on one job and gives its outcome in a word.
Move = Callable[[Job], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of the jobs that an operator chose."""

    outcomes: Counter[str] = field(default_factory=Counter)
    changed: dict[str, list[Job]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


def operate(jobs: Iterable[Job], move: Move, *, action: str, operator: str) -> Report:
    """Make the move on each job; one that is refused is reported and stops no other."""
    report = Report()
    for job in jobs:
        try:
            outcome = _one(job, move, action=action, operator=operator)
        except DurableJobsError as error:
            report.refused.append(f"{job}: {error}")
        except Job.DoesNotExist:
            report.refused.append(f"{job}: it is gone.")
        else:
            report.outcomes[outcome] += 1
            if outcome != UNCHANGED:
                report.changed.setdefault(outcome, []).append(job)
    return report


def _one(job: Job, move: Move, *, action: str, operator: str) -> str:
    """Commit the move and its record together, in a transaction whose lock waits are bounded."""
    alias = alias_of(job)

    def moved() -> str:
        outcome = move(job)
        if outcome != UNCHANGED:
            _record(alias, job, outcome, action=action, operator=operator)
        return outcome

    def alone() -> str:
        with dialect.own(alias):
            return moved()

    dialect = dialect_for(alias)
    if in_callers_transaction(connections[alias]):
        with transaction.atomic(using=alias):
            return moved()
    return dialect.retried(alone)


def _record(alias: str, job: Job, outcome: str, *, action: str, operator: str) -> None:
    OperatorAction.objects.using(alias).create(
        operator=operator[:255],
        action=action,
        job_key=job.pk,
        # The record outlives the job, so it names it.
        detail=f"{job}: {outcome}",
        happened_at=now(alias),
    )
