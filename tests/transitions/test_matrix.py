"""Every status x every move x every kind of token: exactly the legal rows change.

Made from ``states.MOVES``. Where a move is not legal, both tables are bit for bit as before.
So they are where the row of the attempt, which a move ends or relies on, is not there or closed.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from django_durable_jobs import states
from django_durable_jobs.exceptions import LeaseLost
from django_durable_jobs.models import Job, JobAttempt
from django_durable_jobs.testing import FakeClock

from . import moves
from .moves import CALLS, MOVE_OF, NOW, TOKENS, Case

pytestmark = pytest.mark.django_db


def _cases() -> list[Case]:
    cases = []
    for move in CALLS:
        legal = states.TRANSITIONS[MOVE_OF.get(move, move)]
        needs_token = legal.fenced or move == "recover"
        for status in states.JOB_STATUSES:
            for token in TOKENS if needs_token else ["right"]:
                leases = ["valid", "expired"] if status == states.RUNNING else ["valid"]
                cases += [Case(status=status, move=move, token=token, lease=one) for one in leases]
        if needs_token or move == "recover_expired":
            cases += [
                Case(status=states.RUNNING, move=move, token="right", lease=lease, attempt=attempt)
                for lease in ("valid", "expired")
                for attempt in ("closed", "missing")
            ]
    return cases


def is_legal(case: Case) -> bool:
    """Say by the table, the token and the lease whether the move may change the job."""
    move = states.TRANSITIONS[MOVE_OF.get(case.move, case.move)]
    if case.status not in move.sources:
        # A cancel of a running job is a request, and the other way round.
        twin = {"cancel": "request_cancel", "request_cancel": "cancel"}.get(case.move)
        return twin is not None and case.status in states.TRANSITIONS[twin].sources
    if case.attempt != "open":
        return False
    if move.fenced:
        return case.token == "right" and case.lease == "valid"
    if case.move == "recover_expired":
        return case.lease == "expired"
    return case.token == "right"


def test_every_move_of_the_table_is_called():
    assert {MOVE_OF.get(name, name) for name in CALLS} == set(states.TRANSITIONS)


@pytest.mark.parametrize("case", _cases(), ids=str)
def test_exactly_the_legal_rows_change(case):
    with FakeClock(NOW):
        job = moves.build(case)
        before = moves.snapshot()
        error = moves.make(case, job)
        after = moves.snapshot()

    if not is_legal(case):
        assert after == before
        return
    assert error is None
    assert after != before
    assert _others(after["Job"], job.pk) == _others(before["Job"], job.pk)
    # The older attempt is history: no move touches it.
    assert JobAttempt.objects.get(token=moves.OLD).status == states.INTERRUPTED
    move = states.TRANSITIONS[MOVE_OF.get(case.move, case.move)]
    stored = Job.objects.get(pk=job.pk)
    if case.status in move.sources:
        assert stored.status in move.targets
    _check_invariants(stored)


def _others(rows, pk):
    return [row for row in rows if row[0] != pk]


def _check_invariants(job):
    open_ = job.attempts.filter(status=states.RUNNING)
    running = job.status == states.RUNNING
    assert open_.count() == (1 if running else 0)
    assert (job.lease_token is not None) == running
    assert (job.lease_expires_at is not None) == running
    assert (job.finished_at is not None) == job.is_terminal
    numbers = list(job.attempts.order_by("number").values_list("number", flat=True))
    assert numbers == list(range(1, job.attempt_count + 1))
    if job.status != states.SUCCEEDED:
        assert job.result is None


def _fences() -> list[Case]:
    """The cells of a renewal, which has the same rights."""
    return [replace(case, move="fence") for case in _cases() if case.move == "renew"]


@pytest.mark.parametrize("case", _fences(), ids=str)
def test_a_fence_is_the_holders_alone_and_changes_nothing(case):
    with FakeClock(NOW):
        job = moves.build(case)
        before = moves.snapshot()
        owns = is_legal(replace(case, move="renew"))
        with nullcontext() if owns else pytest.raises(LeaseLost):
            moves.fence(job, TOKENS[case.token])
        assert moves.snapshot() == before


HOLDERS = ("progress", "checkpoint", "complete")
TOLD = ("progress", "checkpoint", "complete", "recover", "release", "retry")


@pytest.mark.parametrize("case", [one for one in _cases() if one.move in TOLD], ids=str)
def test_what_is_refused_to_a_holder_is_told(case):
    """A holder whose write met no row gets the exception, never a quiet None."""
    with FakeClock(NOW):
        job = moves.build(case)
        error = moves.make(case, job)
    assert (error is None) == is_legal(case)
    if error is not None:
        expected = "LeaseLost" if case.move in HOLDERS else "InvalidTransition"
        assert type(error).__name__ == expected
        if expected == "InvalidTransition":
            assert job.job_id in str(error)
            why = case.status if case.attempt == "open" else "attempt row is missing"
            assert why in str(error) or "token" in str(error)


@pytest.mark.parametrize(
    ("changes", "cancelled", "left", "status", "attempt"),
    [
        ({}, False, True, "succeeded", "succeeded"),
        ({}, True, True, "cancelled", "cancelled"),
        ({"final_status": "failed", "status": "failed", "outcome": "raised"}, False, True, "failed",
         "failed"),
        ({"final_status": "failed", "status": "failed", "outcome": "raised", "retry_delay": 5},
         False, True, "scheduled", "failed"),
        ({"final_status": "failed", "status": "failed", "outcome": "raised", "retry_delay": 5},
         False, False, "failed", "failed"),
        ({"final_status": "failed", "status": "failed", "outcome": "raised", "retry_delay": 5},
         True, True, "cancelled", "cancelled"),
        ({"final_status": "failed", "status": "timed_out", "outcome": "stopped", "retry_delay": 5},
         False, True, "scheduled", "timed_out"),
        ({"final_status": "interrupted", "status": "interrupted", "outcome": "stopped",
          "stopped_by_worker": True}, False, False, "queued", "interrupted"),
        ({"final_status": "interrupted", "status": "interrupted", "outcome": "stopped",
          "stopped_by_worker": True}, True, True, "cancelled", "cancelled"),
    ],
)  # fmt: skip
def test_one_statement_decides_the_end(changes, cancelled, left, status, attempt):
    """The outcome against a cancel that committed earlier, and against the executions left."""
    case = Case(status=states.RUNNING, move="finish", token="right")
    with FakeClock(NOW):
        job = moves.build(case)
        Job.objects.filter(pk=job.pk).update(
            max_attempts=3 if left else 2, cancel_requested_at=NOW if cancelled else None
        )
        report = moves.outcomes.finish("default", [moves.outcome(job, moves.CURRENT, **changes)])
    assert report.written == {job.pk: status}
    job.refresh_from_db()
    ended = job.attempts.get(token=moves.CURRENT)
    assert (job.status, ended.status) == (status, attempt)
    assert ended.outcome == changes.get("outcome", "returned")
    assert (ended.cancel_requested_at is not None) == cancelled
    if status == "queued":
        assert job.granted_attempts == 1, "a shutdown grants what it stopped"
    if status == "scheduled":
        assert job.run_at == NOW.replace(microsecond=5)


def test_an_end_whose_answer_was_lost_is_found_written():
    """The commit stood and the connection broke: the second try is no loss (FAULTS 10)."""
    with FakeClock(NOW):
        job = moves.build(Case(status=states.RUNNING, move="finish", token="right"))
        first = moves.outcomes.finish("default", [moves.outcome(job, moves.CURRENT)])
        again = moves.outcomes.finish("default", [moves.outcome(job, moves.CURRENT)])
    assert first.written == again.written == {job.pk: "succeeded"}
    assert again.lost == again.busy == again.damaged == []
