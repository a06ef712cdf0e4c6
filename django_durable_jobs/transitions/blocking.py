"""Block what no live worker can run, and release what this one can (CONTRACT 2.3, 4.6)."""

from __future__ import annotations

from collections.abc import Sequence

from .. import states
from ..dialects import dialect_for
from ..dialects.base import JOBS, Lane, in_lane, lane_params
from ..instants import seconds_to_microseconds
from ._lanes import in_lane_of, lanes
from ._let_in import pass_on
from ._pages import PAGE, each_page, move

_IN_LANE = in_lane()
_CLAIM_ORDER = "j.priority DESC, j.run_at, j.id"


def block_lane(alias: str, lane: Lane, reason: str, *, patience: float) -> int:
    """Block the jobs of a lane that have been due for ``patience`` seconds; give how many."""
    delay = seconds_to_microseconds(patience)
    dialect = dialect_for(alias)
    condition = f"{_IN_LANE} AND {dialect.claimable('j')} AND j.run_at <= {dialect.now()} - {delay}"
    return _block(alias, lane, condition, reason)


def has_unholdable(alias: str, lane: Lane, holds: float) -> bool:
    """Tell, without a lock, whether ``block_unholdable`` would find a job."""
    sql = f"SELECT EXISTS({_unholdable(alias, holds)})"
    return bool(dialect_for(alias).fetch(alias, sql, lane_params([lane]))[0][0])


def block_unholdable(alias: str, lane: Lane, holds: float) -> int:
    """Block jobs at the head of a lane whose timeout is ``holds`` seconds or more (4.6)."""
    condition = f"j.id IN ({_unholdable(alias, holds)})"
    return _block(alias, lane, condition, states.INVALID_POLICY)


def _unholdable(alias: str, holds: float) -> str:
    head = (
        f"SELECT j.id, j.timeout FROM {JOBS} j WHERE {_IN_LANE}"
        f" AND {dialect_for(alias).claimable('j')} ORDER BY {_CLAIM_ORDER} LIMIT {PAGE}"
    )
    return f"SELECT h.id FROM ({head}) AS h WHERE h.timeout >= {holds}"


def block_damaged(alias: str, job: int) -> int:
    """Block the jobs of a lane whose names cannot be read, told by one of them.

    No worker can ever ask for them, and only an operator can mend them.
    """
    condition = f"{in_lane_of(job)} AND {dialect_for(alias).claimable('j')}"
    return _block(alias, None, condition, states.CORRUPT_PAYLOAD)


def _block(alias: str, lane: Lane | None, condition: str, reason: str) -> int:
    if reason not in states.BLOCKED_REASONS:
        raise ValueError(f"{reason!r} is no reason to block a job")
    assignments = f"status = '{states.BLOCKED}', blocked_reason = '{reason}'"

    def block(ids: Sequence[int], now: int) -> list[int]:
        moved = move(alias, ids, assignments, states.QUEUED)
        pass_on(alias, moved)
        return moved

    params = {} if lane is None else lane_params([lane])
    return each_page(alias, condition, params, block, order=_CLAIM_ORDER)


def blocked_lanes(alias: str) -> list[Lane]:
    """Give the lanes that hold blocked jobs; takes no lock."""
    return lanes(alias, f"n.status = '{states.BLOCKED}'").sound


def release_lane(alias: str, lane: Lane, *, lease_seconds: float | None = None) -> int:
    """Release the blocked jobs of a lane that this worker can run; give how many.

    Not those of a corrupt payload, nor of a policy that still cannot hold here.
    """
    holds = dialect_for(alias).longest_timeout(lease_seconds)
    condition = (
        f"{_IN_LANE} AND j.status = '{states.BLOCKED}'"
        f" AND j.blocked_reason <> '{states.CORRUPT_PAYLOAD}'"
        + ("" if holds is None else f" AND j.timeout < {holds}")
    )

    def release(ids: Sequence[int], now: int) -> list[int]:
        status = f"CASE WHEN run_at <= {now} THEN '{states.QUEUED}' ELSE '{states.SCHEDULED}' END"
        return move(alias, ids, f"status = {status}, blocked_reason = NULL", states.BLOCKED)

    return each_page(alias, condition, lane_params([lane]), release)
