"""assert_staged() and refute_staged(): by handler, typed payload and fields, from the rows."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from django.db import transaction

from django_durable_jobs import InvalidSubmission, job
from django_durable_jobs.models import Job
from django_durable_jobs.testing import (
    FakeClock,
    assert_staged,
    capture_staged,
    drain,
    refute_staged,
)

from .support import in_either_case

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


@dataclass
class Greeting:
    name: str
    tags: dict[str, int]


ADA = Greeting("Ada", {"a": 1, "b": 2})
BOB = Greeting("Bob", {})


@pytest.fixture
def greet():
    @job("testing.greet")
    def greet(ctx, payload: Greeting) -> None:
        pass

    return greet


@pytest.fixture
def bare():
    @job("testing.bare", version=2)
    def bare(ctx) -> None:
        pass

    return bare


@in_either_case
def test_the_rows_decide_also_inside_an_open_transaction(case, greet):
    refute_staged(greet)
    with transaction.atomic():
        inside = greet.stage(ADA)
        assert assert_staged(greet, ADA) == inside
        with transaction.atomic():
            greet.stage(BOB)
            assert_staged(greet, BOB)
            transaction.set_rollback(True)
        refute_staged(greet, BOB)
    drain()
    assert assert_staged(greet, ADA).status == "succeeded", "staged it was"


@pytest.mark.django_db
def test_a_handler_is_given_as_itself_by_name_or_by_name_and_version(greet, bare):
    @job("testing.bare", version=3)
    def newer(ctx) -> None:
        pass

    old = bare.submit()
    for handler in (bare, "testing.bare", ("testing.bare", 2), None):
        assert assert_staged(handler) == old
    for handler in (newer, ("testing.bare", 3), greet):
        refute_staged(handler)
    assert assert_staged(bare, None) == old, "the payload of one that takes none"
    with pytest.raises(InvalidSubmission, match="testing.greet"):
        refute_staged("testing.gret")
    with pytest.raises(InvalidSubmission, match="not registered"):
        refute_staged(("testing.bare", 1))


@pytest.mark.django_db
def test_a_payload_is_compared_as_the_typed_value(greet, bare):
    staged = greet.submit(ADA)
    bare.submit()
    assert assert_staged(greet, Greeting("Ada", {"b": 2, "a": 1})) == staged
    assert assert_staged(greet, lambda payload: payload.tags["a"] == 1) == staged
    refute_staged(greet, BOB)
    refute_staged("testing.greet", lambda payload: "z" in payload.tags)
    for wrong in ({"name": "Ada", "tags": {}}, Greeting(1, {}), None):
        with pytest.raises(InvalidSubmission):
            refute_staged(greet, wrong)
    with pytest.raises(TypeError, match="give the handler"):
        refute_staged(payload=ADA)


@pytest.mark.django_db
def test_a_payload_that_nobody_here_can_read_matches_none_and_is_shown(greet):
    staged = greet.submit(ADA)
    Job.objects.update(fingerprint="0" * 64)
    refute_staged(greet, ADA)
    Job.objects.update(fingerprint=staged.fingerprint, payload='{"odd": 1}')
    refute_staged(greet, lambda payload: True)
    with pytest.raises(AssertionError, match='payload {"odd": 1}'):
        assert_staged(greet, ADA)
    assert_staged(greet)


@pytest.mark.django_db
def test_each_field_is_compared(bare):
    given = {
        "queue": "mails",
        "job_id": "mine",
        "scope": "tenant",
        "dedupe_key": "key",
        "run_at": START,
        "priority": 5,
    }
    bare.submit()
    staged = bare.submit(**given)
    given["concurrency_key"] = None
    others = {"queue": "x", "job_id": "x", "scope": "", "dedupe_key": None, "priority": 0}
    others["run_at"] = START + timedelta(microseconds=1)
    others["concurrency_key"] = "x"
    assert assert_staged(bare, **given) == staged
    for name, value in given.items():
        assert assert_staged(**{name: value}) == staged
        refute_staged(**(given | {name: others[name]}))


@pytest.mark.django_db
def test_a_concurrency_key_is_compared(bare):
    @job("testing.limited", concurrency=1, concurrency_key=lambda payload: payload["shop"])
    def limited(ctx, payload: dict[str, str]) -> None: ...

    bare.submit()
    staged = limited.submit({"shop": "north"})
    assert assert_staged(concurrency_key="north") == staged
    refute_staged(limited, concurrency_key=None)
    with pytest.raises(
        AssertionError, match=r"concurrency_key 'north'.*\(other: concurrency_key\)"
    ):
        assert_staged(limited, concurrency_key="south")


@pytest.mark.django_db
def test_run_at_is_what_was_staged_by_the_clock_in_force(bare):
    with FakeClock(START) as clock:
        later = bare.submit(run_at=timedelta(hours=1))
        now = bare.submit()
        assert assert_staged(run_at=timedelta(hours=1)) == later
        assert assert_staged(run_at=None) == assert_staged(run_at=START) == now
        clock.advance(3600)
        drain()
        Job.objects.update(run_at=START + timedelta(days=1))
        assert assert_staged(run_at=clock.now) == later, "a retry moves it not"
        refute_staged(run_at=timedelta(hours=1))
    with pytest.raises(ValueError, match="FakeClock"):
        refute_staged(run_at=timedelta(hours=1))
    with pytest.raises(ValueError, match="naive"):
        refute_staged(run_at=datetime(2026, 3, 1))


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"colour": "red"}, "not compared by 'colour': use queue, job_id, scope"),
        ({"queue": 1}, "queue cannot be of type int"),
        ({"priority": True}, "priority cannot be of type bool"),
        ({"priority": "5"}, "priority cannot be of type str"),
        ({"scope": None}, "scope cannot be of type NoneType"),
    ],
)
def test_what_no_job_can_match_is_a_type_error(fields, says):
    for check in (assert_staged, refute_staged):
        with pytest.raises(TypeError, match=says):
            check(**fields)


@pytest.mark.django_db
def test_a_payload_of_another_class_is_told_with_the_handler(greet):
    @dataclass
    class Other:
        title: str

    for check in (assert_staged, refute_staged):
        with pytest.raises(
            InvalidSubmission, match=f'^handler "{greet.name}": .*expected Greeting, got Other'
        ):
            check(greet, Other("Ada"))


@pytest.mark.django_db
def test_count_wants_exactly_so_many(greet):
    greet.submit(ADA)
    last = greet.submit(ADA)
    greet.submit(BOB)
    assert assert_staged(greet, ADA, count=2) == last, "of several the one staged last"
    with pytest.raises(AssertionError, match="2 staged jobs are of handler .*, not 1"):
        assert_staged(greet, ADA, count=1)
    with pytest.raises(ValueError, match="refute_staged"):
        assert_staged(greet, count=0)


@in_either_case
def test_a_block_tells_what_was_staged_inside_alone(case, greet, bare):
    before = greet.submit(ADA, job_id="before")
    with transaction.atomic(), capture_staged() as staged:
        greet.stage(ADA, job_id="before")
        bare.stage()
        new = greet.stage(BOB)
    assert [one.handler for one in staged] == ["testing.bare", "testing.greet"]
    assert assert_staged(greet, among=staged) == new
    refute_staged(greet, ADA, among=staged)
    assert assert_staged(greet, ADA) == before
    with capture_staged() as nothing:
        pass
    refute_staged(among=nothing)
    with pytest.raises(RuntimeError), capture_staged() as unfilled:
        bare.submit()
        raise RuntimeError
    assert unfilled == []


@pytest.mark.django_db
def test_a_failure_shows_what_is_staged_instead_the_nearest_first(greet, bare):
    with pytest.raises(AssertionError, match="No job is staged at all"):
        assert_staged(greet)
    with FakeClock(START):
        bare.submit(job_id="1")
        greet.submit(BOB, job_id="2", queue="mails")
        greet.submit(ADA, job_id="3", run_at=START)
    with pytest.raises(AssertionError) as caught:
        assert_staged(greet, ADA, queue="mails")
    rest = "scope '', dedupe_key None, concurrency_key None, run_at"
    assert str(caught.value).splitlines() == [
        "No staged job is of handler 'testing.greet', version 1, payload"
        " Greeting(name='Ada', tags={'a': 1, 'b': 2}), queue 'mails'. Staged:",
        "  testing.greet version 1, payload Greeting(name='Bob', tags={}), queue 'mails',"
        f" job_id '2', {rest} None, priority 0 (other: payload)",
        "  testing.greet version 1, payload Greeting(name='Ada', tags={'a': 1, 'b': 2}),"
        f" queue 'default', job_id '3', {rest} 2026-03-01T12:00:00+00:00, priority 0"
        " (other: queue)",
        f"  testing.bare version 2, payload None, queue 'default', job_id '1', {rest} None,"
        " priority 0 (other: handler, queue)",
    ]
    with pytest.raises(AssertionError) as caught:
        refute_staged(bare)
    assert str(caught.value).splitlines() == [
        "No staged job may be of handler 'testing.bare', version 2. Staged:",
        f"  testing.bare version 2, payload None, queue 'default', job_id '1', {rest} None,"
        " priority 0",
    ]


@pytest.mark.django_db
def test_a_failure_stays_readable_however_much_is_staged(greet):
    long = Greeting("x" * 10_000, {})
    for _ in range(12):
        greet.submit(long)
    with pytest.raises(AssertionError, match="and 2 more") as caught:
        refute_staged(greet, long)
    assert len(str(caught.value)) < 6_000


@pytest.mark.django_db
def test_the_traceback_ends_in_the_test():
    with pytest.raises(AssertionError) as caught:
        assert_staged()
    hidden = [entry for entry in caught.traceback if entry.ishidden(caught)]
    assert [entry.name for entry in hidden] == ["assert_staged"]
