"""A worker killed at its n-th database statement, for every n of its jobs' lives.

``child`` does the dying and tells what the tables held: before, right after the death, and
once a clean worker has drained. Here is what must be true of that (CONTRACT 3: every move is
all or nothing, a crash after a claim has used up one execution, leases bring the work back).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

import django_durable_jobs
from django_durable_jobs.handlers import registry
from django_durable_jobs.models import Job
from django_durable_jobs.transitions import recovery
from django_durable_jobs.transitions.claims import claim, queued_lanes
from django_durable_jobs.worker import loop
from django_durable_jobs.worker.loop import Worker
from django_durable_jobs.worker.options import build_options
from tests._processes import ROOT, environment

from .child import MOVES

# No attempt is over by its time, however slow the machine: the dead ones' leases are ended.
SETTINGS = {
    "LEASE_SECONDS": 600,
    "TIMEOUT_SECONDS": 500,
    "POLL_SECONDS": 0.1,
    "LOCK_TIMEOUT_SECONDS": 100,
}
TERMINAL = {"succeeded", "failed", "cancelled", "interrupted"}
Tables = dict[str, Any]


def lives(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Let ``child`` live and die; give what it wrote of each life."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.crash.child", str(folder), kind],
        cwd=ROOT,
        env=environment(DURABLE_JOBS=SETTINGS),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    records = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    assert records
    return records


@pytest.mark.parametrize("kind", [pytest.param("before", marks=pytest.mark.long), "after"])
@pytest.mark.timeout(600)
def test_a_worker_killed_at_each_of_its_statements(tmp_path: Path, kind: str) -> None:
    records = lives(tmp_path, kind)

    killed = [record for record in records if record["exits"] == [-signal.SIGKILL]]
    survived = [record for record in records if record["exits"] == [0]]
    assert len(killed) + len(survived) == len(records)
    # For each thread every number, from the first statement to the last one and beyond.
    for thread in {record["thread"] for record in records}:
        tried = {one["number"] for one in records if one["thread"] == thread}
        assert tried == ({0} if thread is None else set(range(1, max(tried) + 1)))
        assert any(one["thread"] == thread for one in survived)
    assert len(killed) >= 20
    for record in records:
        with told(record):
            check_death(record)
            check_end(record["ended"])


@pytest.mark.timeout(600)
def test_a_worker_killed_at_each_kind_of_move(tmp_path: Path) -> None:
    records = lives(tmp_path, "moves")
    assert len(records) == 2 * len(MOVES)
    for record in records:
        with told(record):
            assert record["exits"] == [-signal.SIGKILL]
            check_death(record)
            check_end(record["ended"])


@pytest.mark.timeout(600)
def test_a_worker_killed_again_and_again_never_exceeds_the_executions(tmp_path: Path) -> None:
    records = lives(tmp_path, "again")
    assert any(len(record["exits"]) > 2 for record in records)
    used_up = 0
    for record in records:
        with told(record):
            check_death(record)
            check_whole(record["ended"])
            for job in record["ended"]["jobs"]:
                assert job["status"] in TERMINAL or job["job_id"] in ("corrupt", "foreign")
                if job["status"] == "interrupted" and job["job_id"] != "fragile":
                    assert job["attempt_count"] == job["max_attempts"] == 2
                    assert job["error_category"] == "lost"
                    used_up += 1
    assert used_up, "no life came to its last execution"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite has no sessions to end")
def test_a_session_ended_in_the_middle_of_a_move_leaves_nothing_of_it(tmp_path: Path) -> None:
    for record in lives(tmp_path, "server"):
        with told(record):
            assert record["exits"] == [-signal.SIGKILL]
            check_whole(record["stopped"])
            check_history(record["stopped"], record["killed"])
            check_death(record)
            check_end(record["ended"])


NAMES = ("thread", "number", "where", "terminate", "exits", "note")


class told:  # noqa: N801 (reads as a word)
    """Say of which life it is that an assertion speaks."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            shown = {key: self.record.get(key) for key in NAMES}
            error.add_note(str(shown))
            for moment in ("started", "stopped", "killed", "ended"):
                for name, rows in self.record.get(moment, {}).items():
                    error.add_note(f"{moment} {name}: {json.dumps(rows, indent=1)}")


def check_death(record: dict[str, Any]) -> None:
    """Nothing half written; what was open is lost, and recorded so; history stays as it is."""
    check_whole(record["killed"])
    check_whole(record["ended"])
    check_history(record["killed"], record["ended"])
    assert record["drained_exit"] == 0
    ended = {one["token"]: one for one in record["ended"]["attempts"]}
    for one in record["killed"]["attempts"]:
        if one["status"] == "running":
            last = ended[one["token"]]
            assert (last["status"], last["outcome"]) in {
                ("interrupted", "lost"),
                ("cancelled", "lost"),
            }
            assert last["error_category"] == "lost"
            assert last["progress"] == one["progress"]


def check_whole(tables: Tables) -> None:
    """Every job and its attempts belong together."""
    attempts: dict[int, list[dict[str, Any]]] = {job["id"]: [] for job in tables["jobs"]}
    for one in tables["attempts"]:
        attempts[one["job_id"]].append(one)
    for job in tables["jobs"]:
        open_ = [one["token"] for one in attempts[job["id"]] if one["status"] == "running"]
        running = job["status"] == "running"
        assert open_ == ([job["lease_token"]] if running else [])
        assert (job["lease_token"] is not None) == running
        assert (job["lease_expires_at"] is not None) == running
        assert (job["finished_at"] is not None) == (job["status"] in TERMINAL)
        assert (job["blocked_reason"] is not None) == (job["status"] == "blocked")
        assert job["result"] is None or job["status"] == "succeeded"
        assert job["attempt_count"] <= job["max_attempts"] + job["granted_attempts"]
        # This one was made exhausted by hand, without attempts.
        if job["job_id"] != "exhausted":
            numbers = [one["number"] for one in attempts[job["id"]]]
            assert numbers == list(range(1, job["attempt_count"] + 1))
        for one in attempts[job["id"]]:
            assert (one["finished_at"] is None) == (one["status"] == "running")
            assert (one["outcome"] is None) == (one["status"] == "running")
    # A job that was staged beside a business row is there if the row is, and not without it.
    tokens = {one["token"] for one in tables["attempts"] if one["job_id"] == job_of(tables, "work")}
    wrote = [row["name"] for row in tables["business"] if row["name"] in tokens]
    followed = [job for job in tables["jobs"] if job["job_id"] == "followed"]
    assert len(followed) == (1 if wrote else 0)
    # Written in the transaction that completes the job: there if and only if it succeeded.
    job = next(one for one in tables["jobs"] if one["job_id"] == "complete")
    by_attempts = {one["token"]: one["status"] for one in attempts[job["id"]]}
    wrote = [by_attempts[row["name"]] for row in tables["business"] if row["name"] in by_attempts]
    assert wrote == (["succeeded"] if job["status"] == "succeeded" else [])
    # Written by on_finish in the transaction that ends the job: there if and only if it ended.
    told = {f"told of {job['job_id']}" for job in tables["jobs"] if job["status"] == "succeeded"}
    told &= {"told of complete", "told of fragile"}
    assert told == {row["name"] for row in tables["business"] if row["name"].startswith("told")}
    # Otherwise an execution writes once, and another one of the same job may write again.
    names = [row["name"] for row in tables["business"] if row["name"] not in told]
    assert len(names) == len(set(names))
    assert set(names) <= {one["token"] for one in tables["attempts"]}


def check_history(earlier: Tables, later: Tables) -> None:
    """What has ended is never written again."""
    found = {one["token"]: one for one in later["attempts"]}
    for one in earlier["attempts"]:
        if one["status"] != "running":
            assert found[one["token"]] == one
    jobs = {job["id"]: job for job in later["jobs"]}
    for job in earlier["jobs"]:
        if job["status"] in TERMINAL:
            assert jobs[job["id"]] == job


def check_end(tables: Tables) -> None:
    """Where each job comes to, whatever happened to its first worker."""
    jobs = {job["job_id"]: job for job in tables["jobs"]}
    assert len(jobs) == len(tables["jobs"])
    for name in ("work", "complete", "lost", "released", "followed"):
        assert (jobs[name]["status"], jobs[name]["progress"]) == ("succeeded", 1), name
    assert jobs["cancelled"]["status"] == "cancelled"
    assert jobs["exhausted"]["status"] == "failed"
    assert jobs["exhausted"]["error_category"] == "exhausted"
    fragile = jobs["fragile"]
    # One that may not be interrupted is not started again.
    assert fragile["status"] in ("succeeded", "interrupted")
    assert fragile["attempt_count"] == 1
    for name, reason in (("corrupt", "corrupt_payload"), ("foreign", "unknown_handler")):
        assert (jobs[name]["status"], jobs[name]["blocked_reason"]) == ("blocked", reason)
    # The dead worker's attempt, and the one that succeeded.
    assert jobs["lost"]["attempt_count"] >= 2
    # It failed once by itself.
    failed = [
        one
        for one in tables["attempts"]
        if one["job_id"] == jobs["work"]["id"] and one["outcome"] == "raised"
    ]
    assert len(failed) <= 1
    # The result is that of the execution that succeeded, the last.
    assert jobs["work"]["result"] == jobs["work"]["attempt_count"]


def job_of(tables: Tables, name: str) -> int:
    (pk,) = (job["id"] for job in tables["jobs"] if job["job_id"] == name)
    return pk


# -- found by these deaths


@pytest.mark.django_db(transaction=True)
def test_a_drain_runs_what_its_own_pass_is_about_to_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread recovers; the other, which decides about the end, must not overlook that."""
    chores_hold_the_row = threading.Event()
    main_has_looked = threading.Event()
    move, run_passes, claim_jobs = recovery.move, loop.run_passes, loop.claim

    def slow_move(*args: Any) -> list[int]:
        if threading.current_thread() is not threading.main_thread():
            chores_hold_the_row.set()
            # On SQLite, and where the passes wait for each other, main looks later.
            main_has_looked.wait(1)
        return move(*args)

    def passes_in_turn(*args: Any, **kwargs: Any) -> int:
        if threading.current_thread() is not threading.main_thread():
            return run_passes(*args, **kwargs)
        chores_hold_the_row.wait(1)
        return run_passes(*args, **kwargs)

    def told_claim(*args: Any, **kwargs: Any) -> Any:
        try:
            return claim_jobs(*args, **kwargs)
        finally:
            main_has_looked.set()

    with registry.temporary():

        @django_durable_jobs.job("crash.recovered")
        def recovered(ctx) -> int:
            return ctx.attempt

        stored = recovered.submit()
        assert claim("default", queued_lanes("default"), limit=1, worker="dead", lease_seconds=60)
        Job.objects.filter(pk=stored.pk).update(lease_expires_at=stored.created_at)
        monkeypatch.setattr(recovery, "move", slow_move)
        monkeypatch.setattr(loop, "run_passes", passes_in_turn)
        monkeypatch.setattr(loop, "claim", told_claim)

        assert Worker(build_options(drain=True, threads=1)).run() == 0

    stored.refresh_from_db()
    assert (stored.status, stored.result) == ("succeeded", 2)
