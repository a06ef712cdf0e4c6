"""Concurrency limits: who is claimed, who waits, and who is let in by what (CONTRACT 3.12)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_durable_jobs import JobSubmission, job, states
from django_durable_jobs.dialects.base import JOBS, LimitKey
from django_durable_jobs.handlers import registry
from django_durable_jobs.models import Job
from django_durable_jobs.transitions import (
    _limits,
    blocking,
    claims,
    completion,
    maintenance,
    outcomes,
    recovery,
)
from django_durable_jobs.transitions._lanes import lane_of
from django_durable_jobs.transitions._limits import Candidate, Patience, decide
from django_durable_jobs.transitions.claims import ClaimedJob
from tests._rows import job_row

from .live import LONG_AGO, check_rows, done, expire, holders

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    with registry.temporary():
        yield


def declare(concurrency: int | None = 1, *, name: str = "limits.keyed", **options: Any) -> Any:
    """Register a handler whose payload is its key; ``None`` for no limit."""
    if concurrency is not None:
        options.setdefault("concurrency_key", lambda payload: payload)

    @job(name, concurrency=concurrency, timeout=0.01, **options)
    def keyed(ctx: Any, payload: str | None) -> None: ...

    return keyed


def claim(
    limit: int = 10, *, lease: float = 60, patience: Patience | None = None
) -> list[ClaimedJob]:
    lanes = claims.queued_lanes("default")
    return claims.claim(
        "default", lanes, limit=limit, worker="w", lease_seconds=lease, patience=patience
    )


def ids(ones: list[ClaimedJob]) -> list[int]:
    return [one.id for one in ones]


def end(one: ClaimedJob, **changes: Any) -> outcomes.FinishReport:
    return outcomes.finish("default", [done(one, is_keyed=True, **changes)])


def waiting() -> list[int]:
    return list(Job.objects.filter(limit_waiting=True).order_by("pk").values_list("pk", flat=True))


# The decision -------------------------------------------------------------------------------------

A, B = LimitKey("h", "a"), LimitKey("h", "b")


def candidates(*keys: LimitKey | None, limit: int = 2) -> list[Candidate]:
    return [
        Candidate(id=number, version=1, key=key, limit=limit) for number, key in enumerate(keys)
    ]


@pytest.mark.parametrize(
    ("keys", "running", "room", "taken", "full", "locked"),
    [
        ([], {}, 9, [], [], []),
        ([None, None], {}, 9, [0, 1], [], []),
        ([None, None], {}, 1, [0], [], []),
        ([A, A, A], {A: 0}, 9, [0, 1], [2], []),
        ([A, A, A], {A: 1}, 9, [0], [1, 2], []),
        ([A, A], {A: 2}, 9, [], [0, 1], []),
        # More than it may be: another worker's code allows more.
        ([A], {A: 3}, 9, [], [0], []),
        ([A, B], {}, 9, [], [], [0, 1]),
        ([A, B, A, None], {B: 0}, 9, [1, 3], [], [0, 2]),
        ([A, A, A, B, None], {A: 1, B: 1}, 2, [0, 3], [1, 2], []),
        # Nothing is said of those behind the last that there is room for.
        ([A, A, A], {A: 0}, 2, [0, 1], [], []),
    ],
)
def test_the_decision(keys, running, room, taken, full, locked):
    before = dict(running)
    found = decide(candidates(*keys), running, room)
    assert [one.id for one in found.taken] == taken
    assert [one.id for one in found.full] == full
    assert [one.id for one in found.locked] == locked
    assert running == before


def test_the_decision_goes_by_each_candidates_own_limit():
    ones = [
        Candidate(id=number, version=number, key=A, limit=limit)
        for number, limit in enumerate([1, 2, 3, 2])
    ]
    found = decide(ones, {A: 1}, 9)
    assert [one.id for one in found.taken] == [1, 2]
    assert [one.id for one in found.full] == [0, 3]


# The claim ----------------------------------------------------------------------------------------


def test_a_key_never_has_more_than_its_number():
    keyed = declare(2)
    stored = [keyed.submit(key).pk for key in ("a", "a", "b", "a", "b", "b", "a")]
    assert ids(claim()) == [stored[at] for at in (0, 1, 2, 4)]
    assert waiting() == [stored[at] for at in (3, 5, 6)]
    assert claim() == []
    check_rows()


def test_a_claim_takes_no_more_than_its_room_and_sends_nobody_to_wait_for_that():
    keyed = declare(2)
    stored = [keyed.submit("a").pk for _ in range(4)]
    assert ids(claim(1)) == stored[:1] and waiting() == []
    assert ids(claim(1)) == stored[1:2] and waiting() == []
    assert claim(1) == [] and waiting() == stored[2:]


def test_a_full_key_hides_no_other_job_however_many_are_ahead():
    keyed, free = declare(), declare(None, name="limits.free")
    keys = ["a"] * 1500 + [f"k{number}" for number in range(80)] * 3
    Job.objects.submit_many(JobSubmission.create(keyed, key) for key in keys)
    last = [keyed.submit("z").pk, free.submit("a").pk]
    assert len(claim(81)) == 81
    assert ids(claim(2)) == last
    assert claim() == []
    assert len(waiting()) == 1500 - 1 + 80 * 2
    check_rows()


def test_a_claim_that_was_long_sending_jobs_to_wait_leaves_the_rest_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
):
    """And says so; without a bound it looks behind all of them."""
    monkeypatch.setattr(_limits, "ROUNDS", 1)
    monkeypatch.setattr(_limits, "SENT_AT_ONCE", 2)
    keyed = declare()
    keyed.submit("a")
    assert len(claim()) == 1
    behind = [keyed.submit("a").pk for _ in range(10)]
    free = [keyed.submit(key).pk for key in "bc"]
    for sent in (2, 4, 6):
        patience = Patience(-1)
        assert claim(1, patience=patience) == []
        assert patience.over and waiting() == behind[:sent]
    patience = Patience(600)
    assert ids(claim(1, patience=patience)) == [free[0]]
    assert not patience.over and waiting() == behind
    assert claim(1, patience=(last := Patience(-1))) and not last.over
    assert claim(1, patience=last) == [] and not last.over, "nothing is left"


def test_no_key_is_no_limit_and_neither_is_no_number():
    keyed, free = declare(1), declare(None, name="limits.free")
    stored = [keyed.submit(None).pk for _ in range(3)] + [free.submit("a").pk for _ in range(2)]
    assert ids(claim()) == stored
    assert waiting() == []


def test_one_limit_for_the_handler_and_one_for_each_scope():
    whole = declare(2, name="limits.whole", concurrency_key=None)
    scoped = declare(1, name="limits.scoped", concurrency_key="scope")
    stored = [whole.submit(None, scope=scope).pk for scope in "abc"]
    stored += [scoped.submit(None, scope=scope).pk for scope in "abab"]
    assert ids(claim()) == [stored[at] for at in (0, 1, 3, 4)]
    assert waiting() == [stored[at] for at in (2, 5, 6)]


def test_the_same_key_of_another_handler_is_another_key():
    one, other = declare(1), declare(1, name="limits.other")
    stored = [one.submit("a").pk, other.submit("a").pk]
    assert ids(claim(1)) + ids(claim(1)) == stored


def test_an_expired_lease_holds_its_place_until_its_attempt_is_ended():
    keyed = declare(1, retry_on_interrupt=False)
    keyed.submit("a")
    second = keyed.submit("a")
    held = claim(1)
    expire(held)
    assert claim() == [] and waiting() == [second.pk]
    assert recovery.recover_expired("default") == 1
    assert ids(claim()) == [second.pk]


def test_the_claiming_workers_number_counts():
    """Old and new code, each with its own number; without any the limit is not asked."""
    old, new = declare(1, version=1), declare(2, version=2)
    jobs = [handler.submit("a").pk for handler in (old, new, old, new)]
    assert ids(claim()) == jobs[:2]
    assert waiting() == jobs[2:]


def test_a_version_without_a_limit_does_not_ask_and_is_counted():
    keyed, free = declare(2, version=1), declare(None, version=2)
    Job.objects.bulk_create(rows_of(free, 3, concurrency_key="a"))
    assert len(claim()) == 3
    waits = keyed.submit("a")
    assert claim() == [] and waiting() == [waits.pk]


@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize(("per", "free"), [("handler", 0), ("scope", 1), ("payload", 3)])
def test_jobs_from_before_there_was_a_limit_are_held_to_it(per, free, running):
    """Stored without a key; where only the payload could tell it, there is none."""
    before = declare(None)
    old = [before.submit("a", scope=scope).pk for scope in ("x", "x", "x", "y")]
    if running:
        assert ids(claim(1)) == old[:1]
    registry.unregister("limits.keyed", 1)
    key = {"handler": None, "scope": "scope", "payload": lambda payload: payload}[per]
    declare(1, concurrency_key=key)
    if not running:
        assert ids(claim(1)) == old[:1]
    assert len(claim()) == free
    assert len(waiting()) == 3 - free
    stored = Job.objects.filter(pk__in=waiting()).values_list("concurrency_key", flat=True)
    assert set(stored) == {"handler": {"limits.keyed"}, "scope": {"scope:x"}, "payload": set()}[per]


def rows_of(handler: Any, count: int, **changes: Any) -> list[Job]:
    values = {
        "handler": handler.name,
        "handler_version": handler.version,
        "fingerprint": handler.fingerprint,
        "run_at": LONG_AGO,
        "timeout": 0.01,
    }
    return [job_row(**(values | changes)) for _ in range(count)]


def test_the_number_of_statements_grows_with_nothing():
    """Neither with the number, nor with how many are claimed, ended and let in at once."""
    counts = set()
    for number in (2, 40):
        name = f"limits.n{number}"
        keyed = declare(number, name=name)
        Job.objects.submit_many(JobSubmission.create(keyed, "a") for _ in range(2 * number))
        with CaptureQueriesContext(connection) as claiming:
            held = claim(number + 1)
        assert len(held) == number
        with CaptureQueriesContext(connection) as ending:
            outcomes.finish("default", [done(one, is_keyed=True) for one in held])
        assert not waiting()
        counts.add((len(claiming), len(ending)))
        assert len(claim(number)) == number
    assert len(counts) == 1, counts


def test_a_claim_without_limits_is_what_it_was():
    free = declare(None)
    free.submit("a")
    lanes = claims.queued_lanes("default")
    with CaptureQueriesContext(connection) as caught:
        claims.claim("default", lanes, limit=1, worker="w", lease_seconds=60)
    on_jobs = [one["sql"] for one in caught.captured_queries if JOBS in one["sql"]]
    assert len(on_jobs) == (1 if connection.vendor == "postgresql" else 3)
    assert not any("advisory" in one for one in on_jobs)


# Who is let in ------------------------------------------------------------------------------------


def complete(one: ClaimedJob, *, commit: bool = True) -> None:
    with transaction.atomic():
        completion.complete("default", one.id, one.token, None, is_keyed=True)
        transaction.set_rollback(not commit)


def end_beside(one: ClaimedJob) -> None:
    told: list[str] = []
    outcomes.finish_beside("default", done(one, is_keyed=True), told.append)
    assert told == ["succeeded"]


def recover_expired(one: ClaimedJob) -> None:
    expire([one])
    assert recovery.recover_expired("default") == 1


def requested(one: ClaimedJob) -> None:
    assert stored(one).request_cancel() == "requested"
    end(one)


def stored(one: ClaimedJob) -> Job:
    return Job.objects.get(pk=one.id)


FAILED = {"status": "failed", "outcome": "raised", "final_status": "failed"}
STOPPED = {
    "status": "interrupted",
    "outcome": "stopped",
    "final_status": "interrupted",
    "stopped_by_worker": True,
}
ENDS: dict[str, Callable[[ClaimedJob], Any]] = {
    "success": end,
    "failure": lambda one: end(one, **FAILED),
    "backoff": lambda one: end(one, **FAILED, retry_delay=60_000_000),
    "stopped by its worker": lambda one: end(one, **STOPPED),
    "cancel while it ran": requested,
    "beside on_finish": end_beside,
    "complete": complete,
    "give back": lambda one: claims.give_back("default", holders([one])),
    "block at dispatch": lambda one: claims.block_claimed(
        "default", [(one.id, one.token, states.CORRUPT_PAYLOAD)]
    ),
    "recover": lambda one: stored(one).recover(one.token),
    "recover, not again": lambda one: stored(one).recover(one.token, requeue=False),
    "recover, expired": recover_expired,
}


@pytest.mark.parametrize("name", ENDS)
def test_what_ends_an_attempt_lets_in_the_next(name):
    """One, by priority, then due time, then id; nobody of another key or handler."""
    keyed, other = declare(), declare(name="limits.other")
    [keyed.submit("a"), keyed.submit("b"), other.submit("a")]
    held = claim()
    queue = [
        keyed.submit("a", priority=priority, run_at=Job.objects.earliest("pk").created_at - early)
        for priority, early in [
            (0, timedelta(hours=2)),
            (1, timedelta(hours=1)),
            (1, timedelta(hours=2)),
            (1, timedelta(hours=2)),
        ]
    ]
    others = [keyed.submit("b", priority=9).pk, other.submit("a", priority=9).pk]
    assert claim() == []
    everybody = sorted([one.pk for one in queue] + others)
    assert waiting() == everybody
    ENDS[name](held[0])
    assert waiting() == [pk for pk in everybody if pk != queue[2].pk]
    check_rows()


def test_a_completion_that_is_rolled_back_lets_nobody_in():
    keyed = declare()
    [keyed.submit("a"), keyed.submit("a")]
    [held] = claim()
    complete(held, commit=False)
    assert len(waiting()) == 1 and claim() == []


def test_an_end_that_is_not_its_tokens_lets_nobody_in():
    keyed = declare()
    [keyed.submit("a"), keyed.submit("a")]
    [held] = claim()
    wrong = outcomes.finish("default", [done(held, is_keyed=True, token="0" * 32)])
    assert wrong.lost and len(waiting()) == 1


TURNS: dict[str, Callable[[Job], Any]] = {
    "cancel": lambda one: one.request_cancel(),
    "block": lambda one: blocking.block_lane(
        "default", lane_of(one), states.UNKNOWN_HANDLER, patience=0
    ),
    "exhaust": lambda one: maintenance.exhaust("default"),
}


@pytest.mark.parametrize("name", TURNS)
def test_who_was_let_in_and_leaves_passes_its_turn_on(name):
    keyed = declare()
    first, second, third = (keyed.submit("a") for _ in range(3))
    [held] = claim(1)
    assert claim() == []
    end(held)
    assert (held.id, waiting()) == (first.pk, [third.pk])
    if name == "exhaust":
        Job.objects.filter(pk=second.pk).update(attempt_count=3)
    TURNS[name](Job.objects.get(pk=second.pk))
    assert waiting() == []
    assert ids(claim()) == [third.pk]


def test_a_cancel_of_one_that_waits_lets_nobody_in():
    keyed = declare()
    jobs = [keyed.submit("a") for _ in range(3)]
    claim(1), claim()
    assert jobs[1].request_cancel() == "cancelled"
    assert waiting() == [jobs[2].pk]
    assert not Job.objects.get(pk=jobs[1].pk).limit_waiting


def test_as_many_are_let_in_as_places_are_freed():
    keyed = declare(3)
    jobs = [keyed.submit(key).pk for key in "aaabbb" + "aaaabb"]
    held = claim()
    assert ids(held) == jobs[:6] and waiting() == jobs[6:]
    outcomes.finish("default", [done(one, is_keyed=True) for one in held[1:4]])
    assert waiting() == [*jobs[8:10], jobs[11]]


def test_a_group_of_more_keys_than_are_locked_at_once_lets_in_each(
    django_capture_on_commit_callbacks,
):
    keyed = declare()
    keys = [f"k{number:03}" for number in range(70)]
    Job.objects.submit_many(JobSubmission.create(keyed, key) for key in keys * 2)
    held = claim(70)
    assert claim() == [] and len(waiting()) == 70
    with django_capture_on_commit_callbacks(execute=True):
        outcomes.finish("default", [done(one, is_keyed=True) for one in held])
    assert waiting() == []
