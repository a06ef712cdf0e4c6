"""The statements of SQLite's claim, and of the keys that limits count by."""

from __future__ import annotations

from collections.abc import Sequence

from .base import ATTEMPTS, JOBS

# The instant is bound, never written out: else no statement's text would be the same twice,
# and each would be prepared anew.
NOW = "%(now)s"

# Read as bytes: text that is not UTF-8 would fail the whole claim, its neighbours included.
# (The lane's columns are known to be what was asked for, and the token is ours.)
UNDECODED = {
    "payload",
    "payload_sha256",
    "checkpoint",
    "scope",
    "scope_hash",
    "job_id",
    "concurrency_key",
}


def pick_statement(lanes: Sequence[str], columns: Sequence[str]) -> str:
    """The columns of the first jobs of all lanes; behind them id, priority and due time."""
    shown = ", ".join(f"{_as_bytes(f'j.{name}', name)} AS {name}" for name in columns)
    picks = " UNION ALL ".join(f"SELECT * FROM ({_lane_statement(shown, one)})" for one in lanes)
    return f"{picks} ORDER BY at_priority DESC, at_run_at, at_id LIMIT %(limit)s"


def _lane_statement(shown: str, condition: str) -> str:
    """One lane in the claim's order; a job whose timeout its lease cannot hold is left (4.6)."""
    return (
        f"SELECT {shown}, j.id AS at_id, j.priority AS at_priority, j.run_at AS at_run_at"
        f" FROM {JOBS} j WHERE {condition}"
        f" AND j.run_at <= {NOW} AND j.cancel_requested_at IS NULL"
        " AND j.attempt_count < j.max_attempts + j.granted_attempts"
        " AND j.timeout * 1000000 < %(lease)s"
        " ORDER BY j.priority DESC, j.run_at, j.id LIMIT %(limit)s"
    )


# Random behind the claim's millisecond, so that the index of tokens grows at its end.
_MARK = f"printf('%%.11s', printf('%%011x', {NOW} / 1000)) || substr(lower(hex(randomblob(11))), 2)"


def claim_statement(columns: Sequence[str]) -> str:
    wanted = ", ".join(_as_bytes(column, column) for column in columns)
    return (
        f"UPDATE {JOBS} SET status = 'running', attempt_count = attempt_count + 1,"
        f" lease_token = {_MARK}, lease_expires_at = {NOW} + %(lease)s,"
        " progress = 0, progress_message = ''"
        " WHERE id IN (SELECT value FROM json_each(%(picked)s))"
        f" RETURNING {wanted}, {NOW} AS claimed_at"
    )


OPEN_ATTEMPTS = (
    f"INSERT INTO {ATTEMPTS} (job_id, number, token, worker, status, started_at, progress)"
    f" SELECT id, attempt_count, lease_token, %(worker)s, 'running', {NOW}, 0"
    f" FROM {JOBS} WHERE id IN (SELECT value FROM json_each(%(picked)s)) ORDER BY id"
)


def of_keys_statement(given: str, condition: str) -> str:
    """The first jobs of each key: the most that any is given places for, cut to its own."""
    first = (
        f"SELECT j.id FROM {JOBS} j WHERE j.status = 'queued' AND j.concurrency_key IS NOT NULL"
        f" AND j.handler = g.handler AND j.concurrency_key = g.key AND {condition}"
        " ORDER BY j.priority DESC, j.run_at, j.id LIMIT %(most)s"
    )
    return (
        f"SELECT e.value FROM ({given}) AS g, json_each((SELECT json_group_array(w.id)"
        f" FROM ({first}) AS w)) AS e WHERE e.key < g.places"
    )


def _as_bytes(expression: str, column: str) -> str:
    return f"CAST({expression} AS BLOB)" if column in UNDECODED else expression
