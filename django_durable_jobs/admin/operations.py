"""An operator's move on many jobs: each for itself, each written down with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..exceptions import DurableJobsError
from ..models import Job
from ..transitions.control import alias_of
from ..transitions.operators import UNCHANGED, Done, recorded

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
    def moved() -> Done:
        return Done(outcome=move(job), subject=str(job), job_key=job.pk)

    return recorded(alias_of(job), moved, action=action, operator=operator).outcome
