"""An operator's move on many rows: each for itself, each written down with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from django.core.exceptions import ObjectDoesNotExist

from ..exceptions import DurableJobsError
from ..transitions.control import alias_of
from ..transitions.operators import UNCHANGED, Done, recorded

Move = Callable[[Any], Done]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of the rows that an operator chose."""

    outcomes: Counter[str] = field(default_factory=Counter)
    changed: dict[str, list[Any]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


def operate(rows: Iterable[Any], move: Move, *, action: str, operator: str) -> Report:
    """Make the move on each row; one that is refused is reported and stops no other."""
    report = Report()
    for row in rows:
        try:
            done = recorded(alias_of(row), partial(move, row), action=action, operator=operator)
        except DurableJobsError as error:
            report.refused.append(f"{row}: {error}")
        except ObjectDoesNotExist:
            report.refused.append(f"{row}: it is gone.")
        else:
            report.outcomes[done.outcome] += 1
            if done.outcome != UNCHANGED:
                report.changed.setdefault(done.outcome, []).append(row)
    return report
