"""Take out one condition of the fence at a time; the tests must notice each.

    python -m tests.mutations [name ...]
    python -m tests._postgres -- python -m tests.mutations

Works on a copy of the package and the tests in a temporary directory, for the database that
the tests use (``tests.settings``). Prints a table; the exit status is 1 if a mutant survives
its tests, or if its text is not found exactly once (then it must be written anew). A test that
comes to no end has noticed nothing: it is ended after ``SECONDS``, and said to be so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "django_durable_jobs"
FENCE, COMPLETION, RECOVERY, BLOCKING, MATRIX, REPORTS, LIMITS, LET_IN, REFUSED = (
    f"tests/transitions/test_{name}.py"
    for name in (
        "fence",
        "completion",
        "recovery",
        "blocking",
        "matrix",
        "reports",
        "limits",
        "let_in",
        "let_in_refused",
    )
)
RACES, REPORT_RACES, LIMIT_RACES = (
    f"tests/races/test_{name}_races.py" for name in ("transition", "report", "limit")
)
ON_FINISH = "tests/worker/test_on_finish_errors.py"
# As long as the tests of all mutants may take on a slow machine.
SECONDS = 1800
ENDLESS = -1
FAILED = 1  # pytest's exit status where tests have failed, and nothing else went wrong.

STALE = f"{FENCE}::test_a_stale_holder_writes_nothing_while_the_newer_attempt_runs"
DAMAGED = f"{FENCE}::test_a_job_without_exactly_its_attempt_is_left_as_it_is"
NOT_RUNNING = f"{FENCE}::test_a_token_left_on_a_job_that_does_not_run_is_worth_nothing"
AT_ITS_INSTANT = f"{FENCE}::test_a_lease_ends_at_its_instant"
PAST_THE_LEASE = f"{FENCE}::test_waiting_for_a_lock_past_the_lease_loses_it"
CANCELLED_FIRST = (
    f"{FENCE}::test_a_cancel_that_committed_before_the_finish_wins_and_the_attempt_says_what_it_did"
)
TOLD_WHY = f"{FENCE}::test_a_handler_is_told_why_its_write_was_refused"
HOLDS_UP_NOBODY = f"{FENCE}::test_a_locked_row_holds_up_nobody_else_of_its_group"
HOLDS_UP_RENEWAL = (
    f"{FENCE}::test_an_attempt_locked_by_a_stranger_holds_up_its_finish_alone_and_no_renewal"
)
FOREIGN_KEY = f"{FENCE}::test_a_foreign_key_to_the_job_holds_up_no_write"
REPORTED = f"{FENCE}::test_a_damaged_job_is_reported_once_and_its_neighbours_are_written"
FORWARD_ONLY = f"{REPORTS}::test_progress_never_goes_back_and_a_refusal_leaves_no_trace"
AFTER_ROLLBACK = f"{REPORTS}::test_after_a_rollback_the_last_progress_is_the_rows"
TWO_THREADS = f"{REPORT_RACES}::test_two_threads_of_a_handler_move_its_progress_forward_only"
STILL_QUEUED = f"{BLOCKING}::test_a_job_that_is_claimed_meanwhile_is_not_blocked"
EXPIRED_ONLY = f"{RECOVERY}::test_only_the_expired_are_touched"
NEVER_HIDE = f"{RECOVERY}::test_rows_that_cannot_be_recovered_never_hide_the_next"
OLD_SNAPSHOT = f"{RACES}::test_a_claim_with_an_old_snapshot_takes_no_job_twice"
UNDONE_CANCELLED = f"{BLOCKING}::test_a_claim_that_is_undone_after_a_cancel_ends_cancelled"

COMPLETE_CANCELLED = f"{COMPLETION}::test_a_cancel_that_committed_first_wins"
NO_TRANSACTION = f"{COMPLETION}::test_both_need_the_handlers_own_transaction"
ROLLED_BACK = f"{COMPLETION}::test_a_completion_that_rolled_back_is_a_failure_by_that_name"
TWICE = f"{COMPLETION}::test_twice_is_refused_and_the_transaction_usable"
NOT_HALF = f"{ON_FINISH}::test_whatever_else_it_does_the_job_is_not_half_finished"
PAST_ITS_LEASE = (
    "tests/races/test_completion_races.py::test_an_on_finish_that_runs_past_the_lease_stands"
)
RIVAL = f"{LIMIT_RACES}::test_a_rival_claim_counts_what_the_first_has_taken[1]"
LOSES_NOBODY = f"{LIMIT_RACES}::test_an_end_beside_a_claim_that_counted_before_it_loses_nobody"
DECISION = f"{LIMITS}::test_the_decision"
OTHER_HANDLER = f"{LIMITS}::test_the_same_key_of_another_handler_is_another_key"
HIDES_NOBODY = f"{LIMITS}::test_a_full_key_hides_no_other_job_however_many_are_ahead"
FROM_BEFORE = f"{LIMITS}::test_jobs_from_before_there_was_a_limit_are_held_to_it"
LETS_IN = f"{LIMITS}::test_what_ends_an_attempt_lets_in_the_next"
AS_MANY = f"{LIMITS}::test_as_many_are_let_in_as_places_are_freed"
PASSES_ON = f"{LIMITS}::test_who_was_let_in_and_leaves_passes_its_turn_on"
WHERE_FREE = f"{LET_IN}::test_where_a_place_is_free_and_nobody_comes_the_next_are_let_in"
WHOM_IT_SERVES = f"{LET_IN}::test_who_frees_a_place_lets_in_whom_it_serves"
NOT_OVERTAKEN = f"{LET_IN}::test_who_waits_is_not_overtaken_by_those_behind_it_that_never_waited"
UNDOES_NO_END = f"{REFUSED}::test_it_undoes_no_end_and_the_one_behind_it_gets_the_place"
NOBODY_TAKES = f"{LET_IN}::test_jobs_that_nobody_takes_do_not_keep_out_those_behind_them"
DOOMS_COMPLETION = f"{ON_FINISH}::test_an_error_in_complete_rolls_the_handlers_transaction_back"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A file with texts replaced, each of which must stand in it exactly once."""

    name: str
    file: str
    changes: Sequence[tuple[str, str]]
    tests: Sequence[str]


def _one(name: str, file: str, before: str, after: str, *tests: str) -> Mutant:
    return Mutant(name=name, file=file, changes=[(before, after)], tests=tests)


_P, _S = "dialects/postgresql.py", "dialects/sqlite.py"
_PC, _SC = "dialects/_postgresql_claim.py", "dialects/_sqlite_claim.py"
_EARLY = "(extract(epoch from statement_timestamp()) * 1000000)::bigint"

_COUNT_AS_IT_WAITS = """\
        EARLY.clear()
        if in_line:
            from ..dialects._postgresql_claim import _HASH

            given, params = dialect.rows(KEY_COLUMNS, list(in_line))
            sql = (
                "WITH l AS MATERIALIZED (SELECT g.handler, g.key,"
                f" pg_advisory_xact_lock({_HASH}) AS got FROM ({given}) AS g)"
                f" SELECT l.handler, l.key, (SELECT count(*) FROM {JOBS} j WHERE"
                " j.status = 'running' AND j.handler = l.handler AND j.concurrency_key = l.key),"
                " l.got FROM l"
            )
            for row in dialect.fetch(alias, sql, params):
                EARLY[LimitKey(row[0], row[1])] = row[2]
"""

POSTGRESQL = [
    _one("the job's status", _P, "WHERE o.status = 'running'", "WHERE true", NOT_RUNNING),
    _one("the job's token", _P, " AND o.lease_token = o.token", "", DAMAGED),
    Mutant(
        name="every token",
        file=_P,
        changes=[(" AND o.lease_token = o.token", ""), (" AND a.token = o.token", "")],
        tests=[STALE],
    ),
    _one("the lease", _P, " AND o.lease_expires_at > o.now", "", AT_ITS_INSTANT),
    _one("the clock: the statement's", _P, "locked.*, {now} AS now", f"locked.*, {_EARLY} AS now",
         PAST_THE_LEASE),
    Mutant(
        name="the clock: read before the lock",
        file=_P,
        changes=[
            ("{locked}{extra} FROM {JOBS}", "{locked}{extra}, {now} AS now FROM {JOBS}"),
            ("SELECT locked.*, {now} AS now FROM locked", "SELECT locked.* FROM locked"),
        ],
        tests=[PAST_THE_LEASE],
    ),
    _one("the lock", _P, " ORDER BY j.id{ROW_LOCK} OF j{skip}", " ORDER BY j.id", PAST_THE_LEASE),
    _one("the lock is skipped", _P, 'skip = "" if wait else " SKIP LOCKED"', 'skip = ""',
         HOLDS_UP_NOBODY),
    _one("the lock leaves keys alone", _PC, '" FOR NO KEY UPDATE"', '" FOR UPDATE"', FOREIGN_KEY),
    _one("the attempt's job", _P, "JOIN o ON a.job_id = o.id\"", 'JOIN o ON true"', DAMAGED),
    _one("the attempt's token", _P, " AND a.token = o.token", "", DAMAGED),
    _one("the attempt's number", _P, " AND a.number = o.attempt_count", "", DAMAGED),
    _one("the attempt's status", _P, " AND a.status = 'running'{lock}", "{lock}", DAMAGED),
    _one("the attempt, at a renewal", _P, "SELECT m.job_id FROM m",
         "SELECT o.id AS job_id FROM o", DAMAGED),
    _one("a renewal locks no attempt", "transitions/leases.py", "    locks_attempt=False,\n", "",
         HOLDS_UP_RENEWAL),
    _one("the attempt is there", _P, "j.id = o.id AND o.id IN (SELECT job_id FROM a) RETURNING",
         "j.id = o.id RETURNING", DAMAGED),
    _one("the attempt is there, at a fence", _P, "FROM o WHERE o.id IN (SELECT job_id FROM a)",
         "FROM o", DAMAGED),
    _one("an end that is being written is not lost", "worker/heartbeat.py",
         "elif one.ended or one.ctx.completed:", "elif one.ctx.completed:", PAST_ITS_LEASE),
    _one("a key's lock", _PC, "pg_try_advisory_xact_lock({_HASH}) FROM", "true FROM", RIVAL),
    Mutant(
        name="a count as old as the lock's wait",
        file="transitions/_limits.py",
        changes=[
            ("        if in_line:\n            dialect.wait_for_keys(alias, in_line)\n",
             _COUNT_AS_IT_WAITS),
            ("    if not ones:\n        return {}\n",
             "    if EARLY:\n        return EARLY\n    if not ones:\n        return {}\n"),
            ("# The rounds of one transaction.", "EARLY = {}\n# The rounds of one transaction."),
        ],
        tests=[RIVAL],
    ),
    _one("who is let in after the commit", "transitions/_let_in.py",
         "if missed and connections", "if False and connections", LOSES_NOBODY),
    _one("how many are let in", _PC, "LIMIT g.places{ROW_LOCK}", "LIMIT 500{ROW_LOCK}", AS_MANY),
    _one("who is let in", _PC, "ORDER BY j.priority DESC, j.run_at, j.id LIMIT g.places",
         "ORDER BY j.id LIMIT g.places", LETS_IN),
    _one("a claim's lock", _PC, '+ f"{ROW_LOCK} SKIP LOCKED"', "", OLD_SNAPSHOT),
]  # fmt: skip

_OWN = "        with self.own(alias, lock_timeout=lock_timeout):\n            return self._fenced("
_READ = 'given, params = self.rows(move.inputs, values)\n        params["now"] = host_now()'

SQLITE = [
    _one("the job's status", _S, "WHERE j.status = 'running' AND", "WHERE", NOT_RUNNING),
    _one("the job's token", _S, " AND j.lease_token = i.token", "", DAMAGED),
    Mutant(
        name="every token",
        file=_S,
        changes=[(" AND j.lease_token = i.token", ""), (" AND a.token = o.token AND", " AND")],
        tests=[STALE],
    ),
    _one("the lease", _S, " AND j.lease_expires_at > {NOW}", "", AT_ITS_INSTANT),
    Mutant(
        name="the clock: read before BEGIN",
        file=_S,
        changes=[
            (_OWN, "        self.early = host_now()\n" + _OWN),
            (_READ, _READ.replace("host_now()", 'getattr(self, "early", None) or host_now()')),
        ],
        tests=[PAST_THE_LEASE],
    ),
    _one("the clock: read before the writer", _S,
         "if not own:\n            self.fetch(alias, TAKE_WRITER)", "if not own:", PAST_THE_LEASE),
    _one("the attempt's job", _S, '"a.job_id = o.id AND a.token', '"a.token', DAMAGED),
    _one("the attempt's token", _S, " AND a.token = o.token AND", " AND", DAMAGED),
    _one("the attempt's number", _S, " AND a.number = o.attempt_count", "", DAMAGED),
    _one("the attempt's status", _S, " AND a.status = 'running'\"\n)", '"\n)', DAMAGED),
    _one("the attempt is there", _S,
         'narrowed = " AND o.id IN (SELECT value FROM json_each(%(mine)s))"', 'narrowed = ""',
         DAMAGED),
    _one("the attempt is there, at a fence", _S, "AS o WHERE 1 = 1{narrowed}", "AS o WHERE 1 = 1",
         DAMAGED),
    _one("how many are let in", _SC, " WHERE e.key < g.places", "", AS_MANY),
    _one("who is let in", _SC, " ORDER BY j.priority DESC, j.run_at, j.id LIMIT %(most)s",
         " ORDER BY j.id LIMIT %(most)s", LETS_IN),
    _one("the attempt is there, unchanged", _S, "_job_write(move, owned, _ATTEMPT_IS_OPEN)",
         '_job_write(move, owned, "")', DAMAGED),
]  # fmt: skip

_IS_CANCELLED = '_CANCELLED = "o.cancel_requested_at IS NOT NULL"'

BOTH = [
    _one("a cancel, at the finish", "transitions/outcomes.py", _IS_CANCELLED,
         '_CANCELLED = "1 = 0"', CANCELLED_FIRST),
    _one("a cancel, at a progress", "transitions/outcomes.py",
         'condition="o.cancel_requested_at IS NULL AND ', 'condition="', TOLD_WHY),
    _one("a step back, at a progress", "transitions/outcomes.py",
         " AND o.fraction >= o.progress", "", FORWARD_ONLY, TWO_THREADS),
    _one("both rows, at a progress", "transitions/outcomes.py",
         '    attempt_set={"progress": "o.fraction"},\n', "", FORWARD_ONLY),
    _one("a report joins the handler", "transitions/_fence.py",
         "own = not joins_transaction(connections[alias])", "own = True", AFTER_ROLLBACK),
    _one("a cancel, at a fence", "transitions/completion.py",
         "job_set={}, condition=_NOT_CANCELLED", "job_set={}", COMPLETE_CANCELLED),
    _one("a cancel, at a completion", "transitions/completion.py",
         "    condition=_NOT_CANCELLED,\n", "", COMPLETE_CANCELLED),
    _one("the handler's own transaction", "transitions/completion.py",
         "if not in_callers_transaction(connections[alias]):", "if False:", NO_TRANSACTION),
    _one("a completion is told from a loss", "transitions/completion.py",
         "if completion_stands(alias, values[1]):", "if False:", TWICE),
    _one("a completion stands: asked", "worker/execution.py",
         "return None if ctx.completion_stands() else _rolled_back(dispatch, ctx)", "return None",
         ROLLED_BACK),
    _one("a completion stands: read from rows", "worker/context.py",
         "self._completed and self._store.completion_stands()", "self._completed", ROLLED_BACK),
    _one("an on_finish that failed in complete()", "worker/on_finish.py",
         "doom(django_connections[alias])", "pass", DOOMS_COMPLETION),
    _one("an on_finish that undid its transaction", "worker/on_finish.py", "if called and not",
         "if False and not", NOT_HALF),
    _one("what on_finish left open", "worker/on_finish.py",
         "    finally:\n        connections.undo()", "    finally:\n        pass", NOT_HALF),
    _one("a cancel, at an undone claim", "transitions/claims.py", _IS_CANCELLED,
         '_CANCELLED = "1 = 0"', UNDONE_CANCELLED),
    _one("what damaged means", "transitions/_fence.py", "a.number = j.attempt_count AND ", "",
         REPORTED),
    _one("the lease, at a recovery", "transitions/recovery.py",
         " AND j.lease_expires_at <= {dialect_for(alias).now()}", "", EXPIRED_ONLY),
    _one("the rows that hide the next", "transitions/_pages.py", "if len(page) < PAGE:",
         "if len(page) < PAGE or stuck:", NEVER_HIDE),
    _one("a limit's number", "transitions/_limits.py", "counts[one.key] < one.limit",
         "counts[one.key] <= one.limit", DECISION),
    _one("a key that others have locked", "transitions/_limits.py",
         "elif one.key not in running:", "elif False:", DECISION),
    _one("a key's handler", "transitions/_limits.py", " AND j.handler = g.handler", "",
         OTHER_HANDLER),
    _one("a full key is passed over", "transitions/_limits.py",
         "for one in (*found.full, *found.locked)", "for one in ()", HIDES_NOBODY),
    _one("running jobs without a key", "transitions/_limits.py", "g.unkeyed IS NOT NULL\"",
         "1 = 0\"", FROM_BEFORE),
    _one("jobs from before get their key", "transitions/_limits.py",
         "        _store_keys(alias, [*decision.taken, *decision.full])\n", "", FROM_BEFORE),
    _one("let in by an end", "transitions/_let_in.py",
         "            pass_on(alias, [row[0] for row in rows])\n", "", LETS_IN),
    _one("let in by an end beside on_finish", "transitions/outcomes.py",
         "            pass_on(alias, [row[0] for row in rows])\n", "            pass\n", LETS_IN),
    _one("let in by a completion", "transitions/completion.py",
         "        pass_on(alias, [job])\n", "        pass\n", LETS_IN),
    _one("let in by a recovery", "transitions/recovery.py",
         "    pass_on(alias, moved)\n", "", LETS_IN),
    _one("let in by a recovery by hand", "transitions/recovery.py",
         "    pass_on(alias, [row.pk])\n", "", LETS_IN),
    _one("a turn passed on by a cancel", "transitions/control.py",
         "            pass_on(alias, [row.pk])\n", "            pass\n", PASSES_ON),
    _one("a turn passed on by a block", "transitions/blocking.py",
         "        pass_on(alias, moved)\n", "", PASSES_ON),
    _one("a turn passed on by exhaustion", "transitions/maintenance.py",
         "        pass_on(alias, moved)\n", "", PASSES_ON),
    _one("those who were let in and are not taken", "transitions/_let_in.py",
         "0 AS waits\")", "0 AS waits\") + \" AND 1 = 0\"", WHOM_IT_SERVES),
    _one("the order of turns", "transitions/_let_in.py",
         "OVER (ORDER BY t.priority DESC, t.run_at, t.id)", "OVER (ORDER BY t.waits)",
         NOT_OVERTAKEN),
    _one("who has a place at a turn", "transitions/_let_in.py", "p.places - ({running})",
         "p.places", WHERE_FREE),
    _one("an end that can let nobody in", "transitions/_let_in.py",
         "        if connection.needs_rollback or connection.closed_in_transaction:\n"
         "            raise", "        raise", UNDOES_NO_END),
    _one("who cannot be let in", "transitions/_let_in.py", "        refuse(alias, one)\n",
         "        pass\n", UNDOES_NO_END),
    _one("who is on the way, in our queues", "transitions/limits.py", "elif of_ours:",
         "elif False:", NOBODY_TAKES),
    _one("the source of a pass", "transitions/_pages.py",
         "WHERE status || '' = '{source}' AND id", "WHERE id", STILL_QUEUED),
]  # fmt: skip


def main(names: Sequence[str]) -> int:
    database = "postgres" if os.environ.get("TEST_DATABASE") == "postgres" else "sqlite"
    mutants = [*(POSTGRESQL if database == "postgres" else SQLITE), *BOTH]
    chosen = [one for one in mutants if not names or one.name in names]
    print(f"Mutants on {database}: {len(chosen)}")
    with tempfile.TemporaryDirectory(prefix="durable-jobs-mutants-") as folder:
        copy = _copy(Path(folder))
        everything = dict.fromkeys(test for one in chosen for test in one.tests)
        if _run(copy, everything) != 0:
            print("The tests fail without any mutant; nothing can be said.")
            return 1
        survivors = [one.name for one in chosen if not _is_killed(copy, one)]
    print(f"Survived: {', '.join(survivors)}" if survivors else "All were noticed.")
    return 1 if survivors or not chosen else 0


def _copy(folder: Path) -> Path:
    without = shutil.ignore_patterns("__pycache__")
    for name in (PACKAGE, "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=without)
    shutil.copy(ROOT / "pyproject.toml", folder)
    ask = f"import {PACKAGE}; print({PACKAGE}.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", ask], cwd=folder, env=_environment(folder), capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    if not Path(found.stdout.strip()).resolve().is_relative_to(folder.resolve()):
        raise SystemExit(f"another copy of the package is in the way: {found.stdout}")
    return folder


def _environment(folder: Path) -> dict[str, str]:
    # Without bytecode: two mutants of one second and one length would be taken for the same.
    return {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


def _is_killed(copy: Path, mutant: Mutant) -> bool:
    path = copy / PACKAGE / mutant.file
    original = changed = path.read_text()
    for before, after in mutant.changes:
        if changed.count(before) != 1:
            print(f"  {mutant.name:36} ?? stands {changed.count(before)} times in {mutant.file}")
            return False
        changed = changed.replace(before, after)
    path.write_text(changed)
    began = time.monotonic()
    try:
        status = _run(copy, mutant.tests)
    finally:
        path.write_text(original)
    killed = status == FAILED
    answers = {FAILED: "noticed", 0: "SURVIVED", ENDLESS: "?? came to no end"}
    answer = answers.get(status, f"?? pytest ended with {status}")
    print(f"  {mutant.name:36} {answer:10} {time.monotonic() - began:5.1f} s", flush=True)
    return killed


def _run(copy: Path, tests: Iterable[str]) -> int:
    plainly = ("-q", "-x", "-p", "no:cacheprovider", "--timeout=0")
    command = [sys.executable, "-m", "pytest", *plainly, *tests]
    try:
        run = subprocess.run(
            command,
            cwd=copy,
            env=_environment(copy),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return ENDLESS
    if run.returncode not in (0, FAILED):
        print(run.stdout[-4000:])
    return run.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
