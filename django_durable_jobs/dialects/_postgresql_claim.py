"""The statements of PostgreSQL's claim, and of the keys that limits count by."""

from __future__ import annotations

from collections.abc import Sequence

from .base import ATTEMPTS, JOBS, in_lane

# What an UPDATE takes that changes no key. FOR UPDATE would also wait for (or pass over) rows
# that a foreign key of the host locks: a long transaction that references a job would lose it.
ROW_LOCK = " FOR NO KEY UPDATE"
# What a DELETE takes.
DELETE_LOCK = " FOR UPDATE"

_ORDER = ("id", "priority", "run_at")
# What is hashed with a key, so that no lock of the project is one of ours.
_SEED = 3_120_045_091_482_771
_HASH = f"hashtextextended(g.handler || chr(1) || g.key, {_SEED})"
# Random behind the claim's millisecond, so that the index of tokens grows at its end.
_MARK = "lpad(to_hex(now / 1000), 11, '0') || right(replace(gen_random_uuid()::text, '-', ''), 21)"


def pick_statement(
    lanes: int, condition: str, *, now: str, limit: int, columns: Sequence[str] = ("id",)
) -> str:
    """Lock the first jobs of so many lanes, which are merged lazily in the claim's order.

    So few more rows are locked than taken.
    """
    selected = ", ".join(f"j.{column}" for column in dict.fromkeys((*_ORDER, *columns)))
    each = (
        _first_of_lane(selected, f"{in_lane(number)} AND {condition}", now=now, limit=limit)
        + f"{ROW_LOCK} SKIP LOCKED"
        for number in range(lanes)
    )
    picks = " UNION ALL ".join(f"SELECT * FROM ({one}) AS lane{n}" for n, one in enumerate(each))
    return (
        f"SELECT {', '.join(columns)} FROM ({picks}) AS lanes"
        f" ORDER BY priority DESC, run_at, id LIMIT {int(limit)}"
    )


def best_lanes_statement(given: str, condition: str, *, now: str, limit: int) -> str:
    """Find, without a lock, the given lanes whose first claimable jobs come first of all.

    By one index descent for each lane, in a text that does not grow with them.
    """
    in_given = (
        "j.queue = g.queue AND j.handler = g.handler AND j.handler_version = g.version"
        " AND j.fingerprint = g.fingerprint"
    )
    selected = ", ".join(f"j.{column}" for column in _ORDER)
    first = _first_of_lane(selected, f"{in_given} AND {condition}", now=now, limit=1)
    return (
        f"SELECT g.ord FROM ({given}) AS g CROSS JOIN LATERAL ({first}) AS first"
        f" ORDER BY first.priority DESC, first.run_at, first.id LIMIT {int(limit)}"
    )


def _first_of_lane(selected: str, condition: str, *, now: str, limit: int) -> str:
    return (
        f"SELECT {selected} FROM {JOBS} j"
        f" WHERE {condition} AND j.run_at <= {now} AND j.cancel_requested_at IS NULL"
        " AND j.attempt_count < j.max_attempts + j.granted_attempts"
        f" ORDER BY j.priority DESC, j.run_at, j.id LIMIT {int(limit)}"
    )


def claim_statement(picked: str, *, now: str, lease: int, columns: Sequence[str]) -> str:
    """Claim the jobs whose ids are picked.

    Each CTE is materialised: a LIMIT inside a join may run again for each outer row.
    """
    wanted = ", ".join(f"j.{column}" for column in columns)
    return (
        f"WITH picked AS MATERIALIZED ({picked}),"
        f" timed AS MATERIALIZED (SELECT id, {now} AS now FROM picked),"
        f" marked AS MATERIALIZED (SELECT id, now, {_MARK} AS token FROM timed),"
        f" claimed AS (UPDATE {JOBS} j SET status = 'running', attempt_count = j.attempt_count + 1,"
        f" lease_token = m.token, lease_expires_at = m.now + {int(lease)},"
        " progress = 0, progress_message = ''"
        f" FROM marked m WHERE j.id = m.id RETURNING {wanted}, m.now AS claimed_at),"
        f" opened AS (INSERT INTO {ATTEMPTS} (job_id, number, token, worker, status, started_at,"
        " progress) SELECT id, attempt_count, lease_token, %(worker)s, 'running', claimed_at, 0"
        " FROM claimed)"
        " SELECT * FROM claimed ORDER BY priority DESC, run_at, id"
    )


def try_keys_statement(given: str) -> str:
    """Lock what nobody else holds, to the transaction's end: it outlives no pooled session."""
    return f"SELECT g.handler, g.key, pg_try_advisory_xact_lock({_HASH}) FROM ({given}) AS g"


def wait_for_keys_statement(given: str) -> str:
    """Wait for locks in the order of what is locked, so that two who wait cannot deadlock."""
    return (
        f"WITH hashes AS MATERIALIZED (SELECT DISTINCT {_HASH} AS hash FROM ({given}) AS g"
        " ORDER BY hash) SELECT pg_advisory_xact_lock(hash) FROM hashes"
    )


def of_keys_statement(given: str, condition: str) -> str:
    return (
        f"WITH picked AS MATERIALIZED (SELECT w.id FROM ({given}) AS g CROSS JOIN LATERAL"
        f" (SELECT j.id FROM {JOBS} j WHERE j.status = 'queued' AND j.handler = g.handler"
        f" AND j.concurrency_key = g.key AND {condition}"
        f" ORDER BY j.priority DESC, j.run_at, j.id LIMIT g.places{ROW_LOCK} OF j SKIP LOCKED)"
        " AS w) SELECT id FROM picked"
    )
