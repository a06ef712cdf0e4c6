"""Renew, and read what became of a token."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from django.db import connections

from .. import states
from ..conf import settings
from ..dialects import dialect_for
from ..dialects.base import ATTEMPTS, JOBS, FencedMove
from ..instants import seconds_to_microseconds
from ._fence import ID_AND_TOKEN, fenced

RENEW = FencedMove(
    name="renew",
    inputs={**ID_AND_TOKEN, "lease": "bigint"},
    job_set={"lease_expires_at": "o.now + o.lease"},
    locks_attempt=False,
    returning=("lease_token",),
)

_HEX = frozenset(string.hexdigits)


def renew(alias: str, holders: Sequence[tuple[int, str]], *, lease_seconds: float) -> set[str]:
    """Prolong all the given leases in one statement; give the tokens of those that were.

    Locked rows are passed over, never waited for: missing is not lost (CONTRACT 4.3).
    """
    if not holders:
        return set()
    lease = seconds_to_microseconds(lease_seconds)
    # Not longer than a sixth of the lease: the next try must come before it is over.
    wait = min(float(settings.LOCK_TIMEOUT_SECONDS), lease_seconds / 6)
    rows = [(job, token, lease) for job, token in holders]
    return set(fenced(alias, RENEW, rows, lock_timeout=wait).values())


def cancel_requests(alias: str, holders: Sequence[tuple[int, str]]) -> set[str]:
    """Give the tokens whose jobs' cancel is requested; one query, no lock (3.5)."""
    if not holders:
        return set()
    dialect = dialect_for(alias)
    given, params = dialect.rows(ID_AND_TOKEN, holders)
    sql = (
        f"SELECT i.token FROM ({given}) AS i JOIN {JOBS} j ON j.id = i.id"
        " WHERE j.lease_token = i.token AND j.cancel_requested_at IS NOT NULL"
    )
    return {row[0] for row in dialect.fetch(alias, sql, params)}


def execution_status(token: Any, *, using: str | None = None) -> str:
    """Say ``"running"``, ``"cancel_requested"`` or ``"ended"`` of any text (CONTRACT 3.10)."""
    if not isinstance(token, str) or len(token) != 32 or not _HEX.issuperset(token):
        return "ended"
    sql = (
        f"SELECT j.cancel_requested_at FROM {ATTEMPTS} a JOIN {JOBS} j ON j.id = a.job_id"
        f" WHERE a.token = %s AND a.status = '{states.RUNNING}'"
        f" AND j.status = '{states.RUNNING}' AND j.lease_token = a.token"
    )
    with connections[using or settings.DATABASE].cursor() as cursor:
        cursor.execute(sql, [token])
        row = cursor.fetchone()
    if row is None:
        return "ended"
    return "running" if row[0] is None else "cancel_requested"
