"""Prune: delete ended jobs and their attempts, because an operator says so (CONTRACT 3.13)."""

from __future__ import annotations

from .. import states
from ..dialects import dialect_for
from ..instants import seconds_to_microseconds
from ..models import Job
from ._pages import each_page

DAY_SECONDS = 86_400


def prune(alias: str, *, days: float, statuses: frozenset[str] = frozenset(states.TERMINAL)) -> int:
    """Delete the jobs that ended more than ``days`` ago in one of ``statuses``; give how many.

    Page by page, each in a short transaction; what somebody has locked is passed over, and what
    an open transaction has made a row refer to. Rows of the project that refer to a job go or
    stay as their ``on_delete`` says.
    """
    kept = statuses - set(states.TERMINAL)
    if kept:
        raise ValueError(f"jobs that are {sorted(kept)} have not ended")
    ended = ", ".join(f"'{one}'" for one in sorted(statuses))
    before = dialect_for(alias).instant(alias) - seconds_to_microseconds(days * DAY_SECONDS)

    def delete(ids: list[int], now: int) -> list[int]:
        Job.objects.using(alias).filter(pk__in=ids).delete()
        return ids

    condition = f"j.status IN ({ended}) AND j.finished_at < {before}"
    return each_page(alias, condition, (), delete, to_delete=True)
