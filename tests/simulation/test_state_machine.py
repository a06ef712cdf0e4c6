"""Random programs over the public API and the transitions, beside an oracle in memory.

Several workers with all their tokens, old ones included, operators, passes, and a clock that
is moved: after each step the tables are exactly what the oracle says (``oracle.py``), and
what must always hold is read from the tables themselves.

The ordinary suite begins with the same seed each time. ``SIMULATION_STEPS=30000`` runs so many
steps of new ones; the seed is printed, and ``SIMULATION_SEED`` repeats it. The programs of one
draw resemble each other, so there are many draws of few, with seeds that count up.
"""

from __future__ import annotations

import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import transaction
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from django_durable_jobs import JobSubmission, PermanentError, RetryLater, TransactionActive, job
from django_durable_jobs.dialects.base import Lane as StoredLane
from django_durable_jobs.exceptions import DurableJobsError, JobInterrupt
from django_durable_jobs.handlers import registry
from django_durable_jobs.models import Job, JobAttempt, QueuePause
from django_durable_jobs.testing import FakeClock, drain
from django_durable_jobs.transitions import (
    blocking,
    claims,
    completion,
    leases,
    maintenance,
    outcomes,
    recovery,
)
from tests.testapp.models import Business

from . import oracle
from .oracle import End, Lane, Oracle, Refused, Request

START = datetime(2026, 3, 14, 12, 0, tzinfo=UTC)
STEPS_A_PROGRAM = 50
STEPS = int(os.environ.get("SIMULATION_STEPS", "0"))
ORDINARY_STEPS = 1_000

JOB_COLUMNS = (
    "id",
    "scope",
    "job_id",
    "handler",
    "payload",
    "queue",
    "priority",
    "dedupe_key",
    "initial_run_at",
    "max_attempts",
    "retry_on_interrupt",
    "created_at",
    "run_at",
    "status",
    "blocked_reason",
    "concurrency_key",
    "limit_waiting",
    "attempt_count",
    "granted_attempts",
    "cancel_requested_at",
    "lease_token",
    "lease_expires_at",
    "finished_at",
    "progress",
    "progress_message",
    "checkpoint",
    "result",
    "error_category",
)
ATTEMPT_COLUMNS = (
    "number",
    "token",
    "worker",
    "status",
    "outcome",
    "started_at",
    "finished_at",
    "progress",
    "cancel_requested_at",
    "error_category",
)

# -- what the handlers do when ``drain()`` runs them, told by the payload

RETURNS, RAISES, GIVES_UP, RETRIES_LATER, REPORTS, COMPLETES, ROLLS_BACK = range(7)
BACKOFF = {
    "simulated.steady": timedelta(seconds=60),
    "simulated.fragile": timedelta(seconds=5),
    "simulated.limited": timedelta(seconds=5),
}
LIMITS = {"simulated.limited": 1}


def act(ctx: Any, payload: int) -> Any:
    if payload == RAISES:
        raise ValueError("on purpose")
    if payload == GIVES_UP:
        raise PermanentError("on purpose")
    if payload == RETRIES_LATER:
        raise RetryLater(30)
    if payload == REPORTS:
        ctx.progress(0.5, "half")
        ctx.checkpoint({"attempt": ctx.attempt})
    if payload in (COMPLETES, ROLLS_BACK):
        with transaction.atomic():
            Business.objects.create(name="completes")
            ctx.complete({"attempt": ctx.attempt})
            transaction.set_rollback(payload == ROLLS_BACK)
    return {"attempt": ctx.attempt}


def register_handlers() -> None:
    @job("simulated.steady", timeout=5, backoff=BACKOFF["simulated.steady"])
    def steady(ctx, payload: int) -> dict[str, int]:
        return act(ctx, payload)

    @job(
        "simulated.fragile",
        timeout=5,
        backoff=BACKOFF["simulated.fragile"],
        retry_on_interrupt=False,
    )
    def fragile(ctx, payload: int) -> dict[str, int]:
        return act(ctx, payload)

    @job(
        "simulated.limited",
        timeout=5,
        backoff=BACKOFF["simulated.limited"],
        concurrency=LIMITS["simulated.limited"],
        concurrency_key=key_of,
    )
    def limited(ctx, payload: int) -> dict[str, int]:
        return act(ctx, payload)


def key_of(payload: int) -> str | None:
    """Two keys, and none for some."""
    return None if payload == GIVES_UP else f"k{payload % 2}"


HANDLERS = tuple(BACKOFF)
QUEUES = ("default", "slow")
WAITING = ("queued", "scheduled")
RETRYABLE = ("failed", "cancelled", "interrupted")
LANES = tuple(Lane(queue, handler) for queue in QUEUES for handler in HANDLERS)

# -- what is drawn

PICK = st.integers(0, 40)
# Mostly what a move is for, sometimes anything.
HOW = st.sampled_from(["fitting"] * 4 + ["stale", "any"])
ONE_PICK = st.tuples(HOW, PICK)
PICKS = st.lists(ONE_PICK, min_size=1, max_size=3)
Pick = tuple[str, int]
LEASE = st.sampled_from([60, 10, 600])
# A caller's transaction around a move, and how it ends.
AROUND = st.sampled_from(["none", "commit", "rollback"])
DOORS = st.sampled_from(["submit", "enqueue", "stage", "enqueue inside", "rolled back"])
HANDLER = st.sampled_from(HANDLERS)
RUN_AT = st.sampled_from(
    [None, None, START + timedelta(minutes=1), START + timedelta(hours=1), START - timedelta(1)]
)
REASONS = st.sampled_from(["unknown_handler", "schema_mismatch", "invalid_policy"])


def _request(**values: Any) -> Request:
    fragile = values["handler"] == "simulated.fragile"
    key = key_of(values["payload"]) if values["handler"] in LIMITS else None
    return Request(**values, retry_on_interrupt=not fragile, concurrency_key=key)


REQUESTS = st.builds(
    _request,
    job_id=st.sampled_from([*[None] * 6, "a", "b"]),
    scope=st.sampled_from(["", "", "", "tenant"]),
    handler=HANDLER,
    payload=st.integers(RETURNS, ROLLS_BACK),
    queue=st.sampled_from(QUEUES),
    priority=st.sampled_from([0, 0, 5]),
    max_attempts=st.integers(1, 3),
    dedupe_key=st.sampled_from([None, None, "k"]),
    run_at=RUN_AT,
)
ENDS = st.sampled_from(
    [
        End(result={"n": 1}),
        End(),
        End(status="failed", outcome="raised", final_status="failed", category="handler_error",
            delay=timedelta(seconds=30)),
        End(status="failed", outcome="raised", final_status="failed", category="handler_error",
            delay=timedelta(0)),
        End(status="failed", outcome="raised", final_status="failed", category="permanent"),
        End(status="timed_out", outcome="stopped", final_status="failed", category="timeout",
            delay=timedelta(seconds=5)),
        End(status="interrupted", outcome="stopped", final_status="interrupted",
            category="stopped", stopped_by_worker=True),
    ]
)  # fmt: skip
ADVANCES = st.sampled_from([0.000001, 1, 5, 5, 10, 60, -5, -5])

CLAIM = rule(
    worker=st.sampled_from(["w1", "w2", "w3"]),
    limit=st.integers(1, 4),
    lanes=st.sampled_from([LANES, LANES, LANES[:2], LANES[3:]]),
    lease=LEASE,
    around=st.sampled_from(["none"] * 5 + ["inside"]),
)

Answer = tuple[str, Any]


def answer(call: Callable[[], Any]) -> Answer:
    """What a call gave, or the name of the contract's error that it raised."""
    try:
        return "gave", call()
    except Refused as refused:
        return "refused", refused.name
    except (DurableJobsError, JobInterrupt) as error:
        return "refused", type(error).__name__


class JobsMachine(RuleBasedStateMachine):
    """One program: all of it in one transaction, as in a ``TestCase``, which is rolled back."""

    seen: Counter[str] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.oracle = Oracle(START, LIMITS)
        self.pks: list[int] = []
        self.tokens: list[str] = []
        self.business: list[str] = []
        self.damaged: set[int] = set()
        self.damages: set[str] = set()
        self.steps = 0
        self._clock = FakeClock(START)
        self._clock.__enter__()
        self._wrapper = transaction.atomic()
        self._wrapper._from_testcase = True
        self._wrapper.__enter__()

    def teardown(self) -> None:
        transaction.set_rollback(True)
        self._wrapper.__exit__(None, None, None)
        self._clock.__exit__(None, None, None)

    # -- helpers

    def compare(self, move: str, real: Callable[[], Any], model: Callable[[], Any]) -> Answer:
        expected, found = answer(model), answer(real)
        assert found == expected, f"{move}: {found} instead of {expected}"
        self.seen[f"{move} {expected[1] if expected[0] == 'refused' else 'gave'}"] += 1
        return found

    @contextmanager
    def inside(self, around: str) -> Iterator[None]:
        """A caller's transaction, or none; what is rolled back leaves no trace."""
        if around == "none":
            yield
            return
        jobs, tokens = self.oracle.copy_jobs(), dict(self.oracle.tokens)
        with transaction.atomic():
            Business.objects.create(name=around)
            yield
            transaction.set_rollback(around == "rollback")
        if around == "rollback":
            self.oracle.jobs, self.oracle.tokens = jobs, tokens
            del self.pks[len(jobs) :]
            self.seen["rolled back"] += 1
        else:
            self.business.append(around)

    def job_number(self, pick: Pick, *statuses: str) -> int:
        """Pick a job: of those statuses, if there is one and not just any was asked for."""
        how, place = pick
        fitting = [] if how == "any" else [one.number for one in self._in(*statuses)]
        numbers = fitting or range(len(self.oracle.jobs))
        return numbers[place % len(numbers)]

    def _in(self, *statuses: str) -> list[oracle.Job]:
        return [one for one in self.oracle.jobs if one.status in statuses]

    def picked_tokens(self, picks: Sequence[Pick]) -> list[str]:
        """Pick different tokens: of running attempts, of older ones of running jobs, or any."""
        jobs = self.oracle.jobs
        held = {one.number: one.lease_token for one in jobs if one.lease_token}
        stale = [
            token
            for token, number in self.oracle.tokens.items()
            if held.get(number, token) != token
        ]
        chosen: dict[str, None] = {}
        for how, place in picks:
            pool = {"fitting": list(held.values()), "stale": stale}.get(how) or self.tokens
            chosen[pool[place % len(pool)]] = None
        return list(chosen)

    def holder(self, token: str) -> tuple[int, str]:
        return self.pks[self.oracle.tokens[token]], token

    def by_number(self, changed: dict[int, Any]) -> dict[int, Any]:
        return {self.pks.index(pk): status for pk, status in changed.items()}

    def stored(self, number: int) -> Job:
        return Job.objects.get(pk=self.pks[number])

    def submission(self, request: Request) -> JobSubmission:
        return JobSubmission.create(
            request.handler,
            request.payload,
            job_id=request.job_id,
            scope=request.scope,
            queue=request.queue,
            priority=request.priority,
            run_at=request.run_at,
            max_attempts=request.max_attempts,
            dedupe_key=request.dedupe_key,
        )

    def stored_lane(self, lane: Lane) -> StoredLane:
        handler = registry.resolve(lane.handler)
        return StoredLane(
            queue=lane.queue,
            handler=handler.name,
            version=handler.version,
            fingerprint=handler.fingerprint,
        )

    # -- submission

    @initialize(
        requests=st.lists(REQUESTS, min_size=4, max_size=7), limit=st.integers(1, 5), lease=LEASE
    )
    def begin(self, requests: list[Request], limit: int, lease: int) -> None:
        for request in requests:
            self._submit(request, "submit")
        self._claim("w1", limit, LANES, lease)

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=3), door=DOORS, around=AROUND)
    def submit(self, requests: list[Request], door: str, around: str) -> None:
        if len(requests) == 1:
            self._submit(requests[0], door)
        else:
            self._submit_many(requests, around)

    @rule(
        pick=PICK,
        door=DOORS,
        changed=st.sampled_from([None, None, None, None, "payload", "run_at"]),
    )
    def repeat(self, pick: int, door: str, changed: str | None) -> None:
        """Ask again, exactly or not, for a job that is there."""
        known = self.oracle.jobs[pick % len(self.oracle.jobs)].request
        payload = (known.payload + 1) % 7
        key = key_of(payload) if known.handler in LIMITS else None
        changes: dict[str, Any] = {
            "payload": {"payload": payload, "concurrency_key": key},
            "run_at": {"run_at": START + timedelta(minutes=7)},
        }.get(changed or "", {})
        self._submit(replace(known, **changes), door)

    def _submit(self, request: Request, door: str) -> None:
        one = self.submission(request)
        around = {"submit": "none", "enqueue": "none", "rolled back": "rollback"}.get(
            door, "commit"
        )
        call = {"submit": Job.objects.submit, "enqueue": Job.objects.enqueue}.get(
            door, Job.objects.enqueue if door == "enqueue inside" else Job.objects.stage
        )
        expected = answer(lambda: self.oracle.submit(request))
        if around == "none" or expected[0] == "refused":
            self._compare_submission(expected, lambda: [self._through(call, one, around)])
            return
        # The model has submitted already: take it back where the transaction is.
        made = self.oracle.jobs[-1] if expected[1][1] else None
        if made is not None:
            self.oracle.jobs.pop()
        with self.inside(around):
            if made is not None:
                self.oracle.jobs.append(made)
            self._compare_submission(expected, lambda: [call(one)])

    def _through(self, call: Callable[..., Job], one: JobSubmission, around: str) -> Job:
        if around == "none":
            return call(one)
        with transaction.atomic():
            Business.objects.create(name="doomed")
            return call(one)

    def _compare_submission(self, expected: Answer, real: Callable[[], list[Job]]) -> None:
        found = answer(real)
        self.seen[f"submit {expected[1] if expected[0] == 'refused' else 'gave'}"] += 1
        if expected[0] == "refused":
            assert found == expected
            return
        assert found[0] == "gave", found
        answers = expected[1] if isinstance(expected[1], list) else [expected[1]]
        assert len(found[1]) == len(answers)
        for given, (number, new) in zip(found[1], answers, strict=True):
            if new:
                self._learn(number, given)
            assert (given.pk, given.newly_created) == (self.pks[number], new)
            model = self.oracle.jobs[number]
            assert (given.status, given.run_at) == (model.status, model.run_at)

    def _learn(self, number: int, given: Job) -> None:
        assert number == len(self.pks)
        assert given.pk not in self.pks
        self.pks.append(given.pk)
        model = self.oracle.jobs[number]
        if model.request.job_id is None:
            model.request = replace(model.request, job_id=given.job_id)

    def _submit_many(self, requests: list[Request], around: str) -> None:
        ones = [self.submission(request) for request in requests]
        kept = self.oracle.copy_jobs()
        if answer(lambda: self.oracle.submit_many(requests))[0] == "refused":
            around = "none"
        self.oracle.jobs = kept
        call = Job.objects.submit_many if around == "none" else Job.objects.stage_many
        with self.inside(around):
            expected = answer(lambda: self.oracle.submit_many(requests))
            self._compare_submission(expected, lambda: call(ones))

    # -- the worker

    def _claim_some(
        self, worker: str, limit: int, lanes: tuple[Lane, ...], lease: int, around: str
    ) -> None:
        if around == "none" or not self.oracle.claimable(lanes, limit):
            self._claim(worker, limit, lanes, lease)
            return
        # The worker's moves are durable and alone.
        with transaction.atomic(), pytest.raises(TransactionActive):
            self._claim(worker, limit, lanes, lease)

    # One rule is as likely as another, and without claims nothing happens.
    claim = CLAIM(_claim_some)
    claim_again = precondition(lambda self: self.oracle.claimable(LANES, 1))(CLAIM(_claim_some))
    claim_more = precondition(lambda self: self.oracle.claimable(LANES, 1))(CLAIM(_claim_some))

    @precondition(lambda self: self._in("running") and self.tokens)
    @rule(end=ENDS, pick=PICK, stops=st.booleans())
    def finish_one(self, end: End, pick: int, stops: bool) -> None:
        self._finish([("fitting", pick)], [end], stops)

    def _claim(self, worker: str, limit: int, lanes: tuple[Lane, ...], lease: int) -> None:
        wanted = [self.stored_lane(lane) for lane in lanes]
        found = claims.claim(
            "default",
            [lane for lane in claims.queued_lanes("default") if lane in wanted],
            limit=limit,
            worker=worker,
            lease_seconds=lease,
        )
        expected = self._expected_claim(lanes, limit)
        assert [one.id for one in found] == [self.pks[number] for number in expected]
        for number, one in zip(expected, found, strict=True):
            self._learn_claim(number, one.token, worker, timedelta(seconds=lease))
            model = self.oracle.jobs[number]
            left = one.max_attempts + one.granted_attempts - one.attempt_count
            assert (one.attempt_count, left >= 0) == (model.attempt_count, True)
            assert (one.payload, one.job_id) == (str(model.request.payload), model.request.job_id)

    def _expected_claim(self, lanes: tuple[Lane, ...], limit: int) -> list[int]:
        waited = sum(one.limit_waiting for one in self.oracle.jobs)
        expected = self.oracle.claim(lanes, limit)
        self.seen["sent to wait"] += sum(one.limit_waiting for one in self.oracle.jobs) - waited
        return expected

    def _learn_claim(self, number: int, token: str, worker: str, lease: timedelta) -> None:
        assert token not in self.oracle.tokens, "a token appeared twice"
        self.tokens.append(token)
        self.oracle.claimed(number, token, worker, lease)
        self.seen["claim"] += 1

    @precondition(lambda self: self._in("running") and self.tokens)
    @rule(picks=PICKS, lease=LEASE)
    def renew(self, picks: list[Pick], lease: int) -> None:
        tokens = self.picked_tokens(picks)
        holders = [self.holder(token) for token in tokens]
        renewed = leases.renew("default", holders, lease_seconds=lease)
        expected = self.oracle.renew(tokens, timedelta(seconds=lease))
        assert renewed == expected
        self.seen["renewed"] += len(renewed)
        self.seen["not renewed"] += len(tokens) - len(renewed)

    @precondition(lambda self: self._in("running") and self.tokens)
    @rule(pick=ONE_PICK, around=AROUND, times=st.sampled_from([0, 1, 1, 2]))
    def complete(self, pick: Pick, around: str, times: int) -> None:
        """Fence, and complete so many times, in the handler's own transaction."""
        (token,) = self.picked_tokens([pick])
        inside = around != "none"
        with self.inside(around):
            self.compare(
                "fence",
                lambda: completion.fence("default", *self.holder(token)),
                lambda: self.oracle.fence(token, inside=inside),
            )
            for _ in range(times):
                self.compare(
                    "complete",
                    lambda: completion.complete(
                        "default", *self.holder(token), '{"n":1}', is_keyed=self._is_keyed(token)
                    ),
                    lambda: self.oracle.complete(token, {"n": 1}, inside=inside),
                )

    def _watch_cancels(self, picks: list[Pick]) -> None:
        tokens = self.picked_tokens(picks)
        found = leases.cancel_requests("default", [self.holder(token) for token in tokens])
        models = [(token, self.oracle.jobs[self.oracle.tokens[token]]) for token in tokens]
        assert found == {
            token for token, model in models if model.lease_token == token and model.cancelled
        }

    @precondition(lambda self: self._in("running") and self.tokens)
    @rule(
        pick=ONE_PICK,
        fraction=st.sampled_from([0.25, 0.5, 0.5, 1.0]),
        around=AROUND,
    )
    def progress(self, pick: Pick, fraction: float, around: str) -> None:
        (token,) = self.picked_tokens([pick])
        with self.inside(around):
            self.compare(
                "progress",
                lambda: outcomes.record_progress("default", *self.holder(token), fraction, around),
                lambda: self.oracle.progress(token, fraction, around),
            )

    @precondition(lambda self: self._in("running") and self.tokens)
    @rule(
        pick=ONE_PICK,
        value=st.integers(0, 9),
        around=AROUND,
    )
    def checkpoint(self, pick: Pick, value: int, around: str) -> None:
        (token,) = self.picked_tokens([pick])
        with self.inside(around):
            self.compare(
                "checkpoint",
                lambda: outcomes.record_checkpoint("default", *self.holder(token), str(value)),
                lambda: self.oracle.checkpoint(token, value),
            )

    @precondition(lambda self: self._in("running") and self.tokens)
    @rule(picks=PICKS, reason=st.sampled_from([None, None, "corrupt_payload", "schema_mismatch"]))
    def undo_claims(self, picks: list[Pick], reason: str | None) -> None:
        """Give back, or block with a reason."""
        holders = [self.holder(token) for token in self.picked_tokens(picks)]
        tokens = [token for _, token in holders]
        if reason is None:
            changed = claims.give_back("default", holders)
            self._compare_changes("give back", changed, self.oracle.give_back(tokens))
            return
        changed = claims.block_claimed("default", [(*holder, reason) for holder in holders])
        self._compare_changes("block claimed", changed, self.oracle.block_claimed(tokens, reason))

    def _compare_changes(
        self, move: str, changed: dict[int, Any], expected: dict[int, Any]
    ) -> None:
        assert self.by_number(changed) == expected
        self.seen.update(f"{move} {status}" for status in expected.values())

    @precondition(lambda self: self._in("running") and self.tokens)
    @rule(picks=PICKS, ends=st.lists(ENDS, min_size=3, max_size=3), stops=st.booleans())
    def finish(self, picks: list[Pick], ends: list[End], stops: bool) -> None:
        self._finish(picks, ends, stops)

    def _finish(self, picks: list[Pick], ends: list[End], stops: bool) -> None:
        tokens = self.picked_tokens(picks)
        chosen = [
            (token, self._handler_end(token, end, stops))
            for token, end in zip(tokens, ends, strict=False)
        ]
        report = outcomes.finish("default", [self._outcome(token, end) for token, end in chosen])
        expected = self.oracle.finish(chosen)
        told = {self.oracle.tokens[token] for token in (*expected.written, *expected.again)}
        jobs = self.oracle.jobs
        assert self.by_number(report.written) == {number: jobs[number].status for number in told}
        assert {one.token for one in report.lost} == expected.lost
        assert {one.token for one in report.damaged} == expected.damaged
        assert report.busy == []
        self.seen.update(f"finish {status}" for status in expected.written.values())
        self.seen["finish again"] += len(expected.again)
        self.seen["finish lost"] += len(expected.lost)
        self.seen["finish damaged"] += len(expected.damaged)

    def _handler_end(self, token: str, end: End, stops: bool) -> End:
        """A handler may stop for a cancel, where one was requested."""
        model = self.oracle.jobs[self.oracle.tokens[token]]
        if stops and model.lease_token == token and model.cancelled:
            return End(status="cancelled", outcome="stopped", final_status="cancelled")
        return end

    def _is_keyed(self, token: str) -> bool:
        return self.oracle.jobs[self.oracle.tokens[token]].limit_key is not None

    def _outcome(self, token: str, end: End) -> outcomes.Outcome:
        pk, _ = self.holder(token)
        return outcomes.Outcome(
            job=pk,
            token=token,
            status=end.status,
            outcome=end.outcome,
            final_status=end.final_status,
            result=None if end.result is None else '{"n":1}',
            retry_delay=None if end.delay is None else end.delay // timedelta(microseconds=1),
            stopped_by_worker=end.stopped_by_worker,
            is_keyed=self._is_keyed(token),
            error_category=end.category,
        )

    # -- the passes

    @rule(
        which=st.sampled_from(["promote", "exhaust", "recover expired", "block", "release lane"]),
        lane=st.sampled_from(LANES),
    )
    def a_pass(self, which: str, lane: Lane) -> None:
        if which == "promote":
            self.promote()
        elif which == "exhaust":
            self._exhaust()
        elif which == "recover expired":
            self.recover_expired()
        elif which == "block":
            self._block(lane, "unknown_handler", 10)
        else:
            self._release_lane(lane)

    @precondition(lambda self: self.oracle.lanes("queued"))
    @rule(pick=PICK, reason=REASONS, patience=st.sampled_from([0, 0, 10]))
    def block(self, pick: int, reason: str, patience: int) -> None:
        lanes = sorted(self.oracle.lanes("queued"))
        self._block(lanes[pick % len(lanes)], reason, patience)

    def _block(self, lane: Lane, reason: str, patience: int) -> None:
        moved = blocking.block_lane("default", self.stored_lane(lane), reason, patience=patience)
        expected = self.oracle.block(lane, reason, timedelta(seconds=patience))
        self._compare_pass("block", moved, expected)

    @precondition(lambda self: self.oracle.lanes("blocked"))
    @rule(pick=PICK)
    def release_lane(self, pick: int) -> None:
        lanes = sorted(self.oracle.lanes("blocked"))
        self._release_lane(lanes[pick % len(lanes)])

    def _release_lane(self, lane: Lane) -> None:
        moved = blocking.release_lane("default", self.stored_lane(lane))
        self._compare_pass("release lane", moved, self.oracle.release_lane(lane))

    @precondition(lambda self: any(one.run_at <= self.oracle.now for one in self._in("scheduled")))
    @rule()
    def promote(self) -> None:
        self._compare_pass("promote", maintenance.promote_due("default"), self.oracle.promote())

    @precondition(lambda self: self.oracle.expired())
    @rule()
    def recover_expired(self) -> None:
        moved = recovery.recover_expired("default")
        self._compare_pass("recover expired", moved, self.oracle.recover_expired())

    def _exhaust(self) -> None:
        self._compare_pass("exhaust", maintenance.exhaust("default"), self.oracle.exhaust())

    exhaust = precondition(lambda self: self.oracle.exhausted())(rule()(_exhaust))
    exhaust_now = precondition(lambda self: self.oracle.exhausted())(rule()(_exhaust))

    def _compare_pass(self, move: str, moved: int, expected: int) -> None:
        assert moved == expected, f"{move}: {moved} instead of {expected}"
        self.seen[move] += moved

    def _work(self, max_jobs: int) -> None:
        """A whole worker: the passes, claim, dispatch, handler and finish of ``drain()``."""
        attempts = drain(max_jobs=max_jobs)
        for attempt in attempts:
            self._passes()
            (number,) = self._expected_claim(LANES, 1)
            assert attempt.job_id == self.pks[number]
            self._learn_claim(number, attempt.token, "testing.drain", timedelta(hours=2))
            model = self.oracle.jobs[number]
            payload = model.request.payload
            if payload == REPORTS:
                self.oracle.progress(attempt.token, 0.5, "half")
                self.oracle.checkpoint(attempt.token, {"attempt": model.attempt_count})
            if payload == COMPLETES:
                self.oracle.complete(attempt.token, {"attempt": model.attempt_count}, inside=True)
                self.business.append("completes")
            else:
                self.oracle.finish([(attempt.token, self._end_of(model))])
            self.seen["drained"] += 1
        if len(attempts) < max_jobs:
            self._passes()
            assert self._expected_claim(LANES, 1) == []

    def _passes(self) -> None:
        self.oracle.recover_expired()
        self.oracle.exhaust()
        self.oracle.promote()
        for lane in self.oracle.lanes("blocked"):
            self.oracle.release_lane(lane)
        self.oracle.let_in_free()

    def _end_of(self, model: oracle.Job) -> End:
        payload = model.request.payload
        if payload in (RETURNS, REPORTS):
            return End(result={"attempt": model.attempt_count})
        failed = End(status="failed", outcome="raised", final_status="failed")
        if payload == GIVES_UP:
            return replace(failed, category="permanent")
        if payload == RETRIES_LATER:
            return replace(failed, category="handler_error", delay=timedelta(seconds=30))
        failed = replace(failed, delay=BACKOFF[model.request.handler])
        if payload == ROLLS_BACK:
            return replace(failed, category="completion_rolled_back", outcome="returned")
        return replace(failed, category="handler_error")

    # -- what happens now and then

    @rule(what=st.sampled_from(["pause", "read", "watch", "work", "work"]), pick=PICK, picks=PICKS)
    def now_and_then(self, what: str, pick: int, picks: list[Pick]) -> None:
        if what == "pause":
            self._pause("slow")
        elif what == "read":
            self._read(pick)
        elif what == "work":
            self._work(1 + pick % 3)
        elif self.tokens:
            self._watch_cancels(picks)

    # -- the operator

    @precondition(lambda self: self._in("running"))
    @rule(pick=ONE_PICK, around=AROUND)
    def cancel(self, pick: Pick, around: str) -> None:
        number = self.job_number(pick, "running")
        with self.inside(around):
            found = self.compare(
                "cancel",
                lambda: self.stored(number).request_cancel(),
                lambda: self.oracle.cancel(number),
            )
        self.seen[f"cancel {found[1]}"] += 1

    @precondition(lambda self: any(self._in(*RETRYABLE)))
    @rule(pick=ONE_PICK, extra=st.sampled_from([0, 0, 1, 2]), around=AROUND)
    def retry(self, pick: Pick, extra: int, around: str) -> None:
        number = self.job_number(pick, *RETRYABLE)
        with self.inside(around):
            self.compare(
                "retry",
                lambda: self.stored(number).retry(extra_attempts=extra).status,
                lambda: self.oracle.retry(number, extra),
            )

    @precondition(lambda self: self._in("blocked"))
    @rule(pick=ONE_PICK, around=AROUND)
    def release(self, pick: Pick, around: str) -> None:
        number = self.job_number(pick, "blocked")
        with self.inside(around):
            self.compare(
                "release",
                lambda: self.stored(number).release(),
                lambda: self.oracle.release(number),
            )

    @precondition(lambda self: self._in("running"))
    @rule(
        pick=ONE_PICK,
        shown=st.sampled_from(["current", "current", "none", "other"]),
        requeue=st.sampled_from([None, None, True, False]),
        around=AROUND,
    )
    def recover(self, pick: Pick, shown: str, requeue: bool | None, around: str) -> None:
        number = self.job_number(pick, "running")
        token = {
            "current": self.oracle.jobs[number].lease_token,
            "none": None,
            "other": self.tokens[pick[1] % len(self.tokens)] if self.tokens else "0" * 32,
        }[shown]
        with self.inside(around):
            self.compare(
                "recover",
                lambda: self.stored(number).recover(token, requeue=requeue),
                lambda: self.oracle.recover(number, token, requeue),
            )

    def _pause(self, queue: str) -> None:
        """Pause a queue, or go on with it."""
        if queue in self.oracle.paused:
            self.oracle.paused.remove(queue)
            QueuePause.objects.filter(queue=queue).delete()
        else:
            self.oracle.paused.add(queue)
            QueuePause.objects.create(queue=queue, paused_at=self._clock.now)

    @rule(seconds=ADVANCES)
    def advance(self, seconds: float) -> None:
        self.oracle.now = self._clock.advance(seconds)

    @precondition(lambda self: self._moments())
    @rule(pick=PICK, early=st.sampled_from([timedelta(0), timedelta(0), timedelta(microseconds=1)]))
    def advance_to_the_moment(self, pick: int, early: timedelta) -> None:
        """To the very instant at which something is due or expires, or just before it."""
        moments = self._moments()
        self.oracle.now = self._clock.advance(
            moments[pick % len(moments)] - early - self.oracle.now
        )

    def _moments(self) -> list[datetime]:
        """What lies before the clock: ends of leases, and when jobs are due."""
        found = {one.lease_expires_at for one in self._in("running") if one.lease_expires_at}
        found |= {one.run_at for one in self._in("scheduled", "queued")}
        return sorted(one for one in found if one > self.oracle.now)

    def _read(self, pick: int) -> None:
        number = self.job_number(("any", pick))
        assert self.stored(number).ownership == self.oracle.ownership(number)
        if self.tokens:
            token = self.tokens[pick % len(self.tokens)]
            expected = self.oracle.execution_status(token)
            assert Job.objects.execution_status(token) == expected
        assert Job.objects.execution_status("f" * 32) == "ended"
        for scope in ("", "tenant"):
            inside = set(Job.objects.in_scope(scope).values_list("id", flat=True))
            assert inside == {
                self.pks[one.number] for one in self.oracle.jobs if one.request.scope == scope
            }

    # -- damage, as an import or a hand in the tables does it

    @precondition(lambda self: self._fitting("lease"))
    @rule(pick=PICK, kind=st.sampled_from(["lease", "expiry", "attempt"]))
    def damage_running(self, pick: int, kind: str) -> None:
        self._damage(pick, kind)

    @precondition(lambda self: self._fitting("cancelled"))
    @rule(pick=PICK)
    def damage_waiting(self, pick: int) -> None:
        self._damage(pick, "cancelled")

    @precondition(lambda self: self._fitting("exhausted"))
    @rule(pick=PICK)
    def exhaust_by_hand(self, pick: int) -> None:
        self._damage(pick, "exhausted")

    def _fitting(self, kind: str) -> list[oracle.Job]:
        """The jobs that can be damaged so; each kind of job once in a program."""
        if self._damaged_part(kind) in self.damages:
            return []
        return [one for one in self.oracle.jobs if self._can_be_damaged(one, kind)]

    def _damaged_part(self, kind: str) -> str:
        return kind if kind in ("cancelled", "exhausted") else "running"

    def _damage(self, pick: int, kind: str) -> None:
        fitting = self._fitting(kind)
        model = fitting[pick % len(fitting)]
        stored = Job.objects.filter(pk=self.pks[model.number])
        if kind == "cancelled":
            model.cancel_requested_at = self.oracle.now
            stored.update(cancel_requested_at=self.oracle.now)
        elif kind == "exhausted":
            model.max_attempts = model.attempt_count - model.granted_attempts
            stored.update(max_attempts=model.max_attempts)
        elif kind == "attempt":
            JobAttempt.objects.filter(token=model.lease_token).delete()
            model.attempts.remove(model.open_attempt)
        else:
            model.lease_expires_at = None
            if kind == "lease":
                model.lease_token = None
            stored.update(lease_token=model.lease_token, lease_expires_at=None)
        self.damaged.add(model.number)
        self.damages.add(self._damaged_part(kind))
        self.seen[f"damage {kind}"] += 1

    def _can_be_damaged(self, model: oracle.Job, kind: str) -> bool:
        if kind == "cancelled":
            return model.status in WAITING
        if kind == "exhausted":
            return model.status == "queued" and model.attempt_count > model.granted_attempts
        return model.status == "running" and model.open_attempt is not None

    # -- what holds after each step

    @invariant()
    def tables_are_what_the_oracle_says(self) -> None:
        jobs = list(Job.objects.order_by("id").values(*JOB_COLUMNS))
        attempts: dict[int, list[dict[str, Any]]] = {pk: [] for pk in self.pks}
        for row in JobAttempt.objects.order_by("number").values("job_id", *ATTEMPT_COLUMNS):
            attempts[row.pop("job_id")].append(row)
        by_pk = {row["id"]: row for row in jobs}
        assert set(by_pk) == set(self.pks)
        for number, pk in enumerate(self.pks):
            model = self.oracle.jobs[number]
            assert by_pk[pk] == self._job_row(model)
            assert attempts[pk] == [
                {column: getattr(one, column) for column in ATTEMPT_COLUMNS}
                for one in model.attempts
            ]
            self._always_holds(by_pk[pk], attempts[pk], damaged=number in self.damaged)
        names = Business.objects.order_by("id").values_list("name", flat=True)
        assert list(names) == self.business

    def _job_row(self, model: oracle.Job) -> dict[str, Any]:
        request = model.request
        values = {
            "id": self.pks[model.number],
            "payload": str(request.payload),
            "initial_run_at": request.run_at,
        }
        for column in JOB_COLUMNS:
            if column not in values:
                values[column] = getattr(model if hasattr(model, column) else request, column)
        return values

    def _always_holds(
        self, row: dict[str, Any], attempts: list[dict[str, Any]], *, damaged: bool
    ) -> None:
        """Told from the tables alone."""
        if row["status"] != "succeeded":
            assert row["result"] is None, "a result is visible before success"
        terminal = row["status"] in oracle.TERMINAL
        assert (row["finished_at"] is not None) == terminal
        granted = row["max_attempts"] + row["granted_attempts"]
        assert damaged or row["attempt_count"] <= granted, "more executions than were granted"
        if damaged:
            return
        running = row["status"] == "running"
        open_ = [one for one in attempts if one["status"] == "running"]
        assert len(open_) == (1 if running else 0)
        assert (row["lease_token"] is not None) == running
        assert (row["lease_expires_at"] is not None) == running
        if running:
            assert open_[0]["token"] == row["lease_token"]
        numbers = [one["number"] for one in attempts]
        assert numbers == list(range(1, row["attempt_count"] + 1))

    @invariant()
    def no_key_has_more_running_than_its_limit(self) -> None:
        running = Counter(
            Job.objects.filter(status="running", concurrency_key__isnull=False).values_list(
                "handler", "concurrency_key"
            )
        )
        assert all(count <= LIMITS[handler] for (handler, _), count in running.items()), running
        waiting = sum(one.limit_waiting for one in self.oracle.jobs)
        self.seen["waits for a place"] += waiting

    @invariant()
    def every_token_is_known_and_unique(self) -> None:
        assert len(self.tokens) == len(set(self.tokens))

    @invariant()
    def the_passes_are_told_what_waits(self) -> None:
        # Dear, so not after each step.
        self.steps += 1
        if self.steps % 3:
            return
        waiting = maintenance.waiting("default")
        jobs = self.oracle.jobs
        now = self.oracle.now
        assert waiting.promote == any(
            one.status == "scheduled" and one.run_at <= now for one in jobs
        )
        assert waiting.recover == bool(self.oracle.expired())
        assert waiting.exhaust == bool(self.oracle.exhausted())
        assert waiting.release == any(one.status == "blocked" for one in jobs)
        assert waiting.let_in == any(one.limit_waiting for one in jobs)
        for found, status in (
            (claims.queued_lanes("default"), "queued"),
            (blocking.blocked_lanes("default"), "blocked"),
        ):
            lanes = [Lane(lane.queue, lane.handler) for lane in found]
            assert sorted(lanes) == sorted(self.oracle.lanes(status))


# What a run must have come to, or it has tested too little; the rare only in a long one.
SEEN_SOON = frozenset(
    {
        "block",
        "block claimed blocked",
        "cancel cancelled",
        "cancel requested",
        "checkpoint LeaseLost",
        "checkpoint gave",
        "claim",
        "complete TransactionRequired",
        "complete gave",
        "drained",
        "finish failed",
        "finish lost",
        "finish scheduled",
        "finish succeeded",
        "give back queued",
        "not renewed",
        "progress LeaseLost",
        "progress gave",
        "promote",
        "recover InvalidTransition",
        "recover gave",
        "release lane",
        "renewed",
        "retry gave",
        "rolled back",
        "submit IdentityConflict",
        "submit gave",
        "sent to wait",
        "waits for a place",
    }
)
SEEN_AT_LENGTH = SEEN_SOON | {
    "block claimed cancelled",
    "cancel unchanged",
    "complete InvalidTransition",
    "complete JobCancelled",
    "complete LeaseLost",
    "damage attempt",
    "damage cancelled",
    "damage exhausted",
    "damage expiry",
    "damage lease",
    "exhaust",
    "finish cancelled",
    "finish again",
    "finish damaged",
    "finish interrupted",
    "finish queued",
    "give back cancelled",
    "progress InvalidTransition",
    "progress JobCancelled",
    "recover expired",
    "release InvalidTransition",
    "release gave",
    "retry AttemptsExhausted",
    "retry InvalidTransition",
}
LONG = 20_000


# Of one draw.
PROGRAMS = 10
# Draws beyond those that were asked for.
MORE = 20
CHOSEN = settings(
    max_examples=PROGRAMS,
    stateful_step_count=STEPS_A_PROGRAM,
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)


def unseen() -> list[str]:
    expected = SEEN_AT_LENGTH if STEPS >= LONG else SEEN_SOON
    return sorted(expected - set(+JobsMachine.seen))


def _new_seed() -> int:
    # Not by the ``random`` that plugins seed for each test.
    return random.SystemRandom().getrandbits(32)


@pytest.mark.django_db
@pytest.mark.timeout(900)
def test_any_program_leaves_what_the_oracle_says(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    # Each handler that raises is logged with its traceback.
    caplog.set_level(logging.CRITICAL, "django_durable_jobs")
    number = int(os.environ.get("SIMULATION_SEED") or (_new_seed() if STEPS else 1))
    if STEPS:
        with capsys.disabled():
            print(f"\nsimulation: {STEPS} steps, SIMULATION_SEED={number}")  # noqa: T201
    JobsMachine.seen.clear()
    with registry.temporary():
        register_handlers()
        turns = max(1, (STEPS or ORDINARY_STEPS) // (PROGRAMS * STEPS_A_PROGRAM))
        # What a seed gives depends on the modules that are loaded: more where it saw too little.
        for turn in range(turns + MORE):
            if turn >= turns and not unseen():
                break
            try:
                run_state_machine_as_test(seed(number + turn)(JobsMachine), settings=CHOSEN)
            except BaseException as error:
                error.add_note(f"SIMULATION_SEED={number + turn} comes to it at once")
                raise
    assert not unseen(), f"never seen: {unseen()}"


@pytest.mark.django_db
@pytest.mark.parametrize(("cancelled", "status"), [(True, "cancelled"), (False, "scheduled")])
def test_a_repeated_finish_tells_what_came_of_the_first(cancelled: bool, status: str) -> None:
    """As where the answer to the commit was lost: not the status that was asked for."""
    with registry.temporary(), FakeClock(START):
        register_handlers()
        stored = Job.objects.submit("simulated.steady", RAISES)
        lanes = claims.queued_lanes("default")
        (held,) = claims.claim("default", lanes, limit=1, worker="w", lease_seconds=60)
        if cancelled:
            stored.request_cancel()
        end = outcomes.Outcome(
            job=held.id,
            token=held.token,
            status="failed",
            outcome="raised",
            final_status="failed",
            retry_delay=1,
        )
        assert outcomes.finish("default", [end]).written == {held.id: status}
        assert outcomes.finish("default", [end]).written == {held.id: status}
