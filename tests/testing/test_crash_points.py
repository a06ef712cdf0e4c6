"""crash_points(): handlers that are not idempotent are caught, and sound ones pass."""

from __future__ import annotations

import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from threading import Event

import pytest
from django.core import mail
from django.db import IntegrityError, connection, connections, transaction

from django_durable_jobs import (
    InvalidTransition,
    PermanentError,
    RetryLater,
    TransactionActive,
    job,
)
from django_durable_jobs.handlers import registry
from django_durable_jobs.models import Job
from django_durable_jobs.testing import CrashPointFailed, FakeClock, crash_points
from django_durable_jobs.testing.life import Crashed
from tests.racing import LIMIT
from tests.testapp.models import Business

from .dying import wipe
from .support import in_either_case

COMMIT = r"COMMIT|RELEASE SAVEPOINT"
BEGIN = r"BEGIN|SAVEPOINT"


def names() -> list[str]:
    return sorted(Business.objects.values_list("name", flat=True))


def crash(handler, check=None, **options):
    """Crash a job of the handler everywhere; its rows are quicker gone than all tables."""
    options = {"reset": wipe} | options
    return crash_points(handler.submit, check or (lambda job: None), **options)


# What is not idempotent is caught, at each kind of point


def twice_alone(ctx, sent):
    Business.objects.create(name="effect")


def twice_between_transactions(ctx, sent):
    if not Business.objects.filter(name="done").exists():
        with transaction.atomic():
            Business.objects.create(name="effect")
        with transaction.atomic():
            Business.objects.create(name="done")


def twice_in_one_as_django_opens_itself(ctx, sent):
    with transaction.atomic(savepoint=False):
        Business.objects.create(name="effect")


def twice_outside_before_the_transaction(ctx, sent):
    sent.append("mail")
    with transaction.atomic():
        Business.objects.create(name="effect")
        ctx.complete()


def twice_outside_and_nothing_else(ctx, sent):
    sent.append("mail")
    ctx.check()


def never_after_the_commit(ctx, sent):
    if not Business.objects.exists():
        with transaction.atomic():
            Business.objects.create(name="effect")
            transaction.on_commit(lambda: sent.append("mail"))


def fails_when_repeated(ctx, sent):
    Business.objects.create(pk=-1, name="effect")


@pytest.mark.parametrize(
    ("faulty", "rows", "mails", "when", "sql"),
    [
        (twice_alone, 1, 0, "after", "INSERT"),
        (twice_between_transactions, 1, 0, "after", COMMIT),
        (twice_in_one_as_django_opens_itself, 1, 0, "after", COMMIT),
        (twice_outside_before_the_transaction, 1, 1, "before", f"{BEGIN}|INSERT"),
        (twice_outside_and_nothing_else, 0, 1, "before", BEGIN),
        (never_after_the_commit, 1, 1, "after", COMMIT),
        (fails_when_repeated, 1, 0, "after", "INSERT"),
    ],
)
@in_either_case
def test_what_is_not_idempotent_is_caught(faulty, rows, mails, when, sql, case):
    sent: list[str] = []

    @job("crash.faulty", max_attempts=2)
    def handler(ctx) -> None:
        faulty(ctx, sent)

    def stage():
        sent.clear()
        return handler.submit()

    def check(job):
        assert (Business.objects.filter(name="effect").count(), len(sent)) == (rows, mails)

    with pytest.raises(CrashPointFailed) as caught:
        crash_points(stage, check, reset=wipe)
    point = caught.value.point
    assert point is not None
    assert point.when == when
    assert re.match(sql, point.sql)
    assert str(point) in str(caught.value)
    assert isinstance(caught.value.__cause__, AssertionError)


# What is idempotent passes, and each death is one


def by_an_inbox(ctx):
    with suppress(IntegrityError), transaction.atomic():
        Business.objects.create(pk=-1, name="inbox")
        Business.objects.create(name="effect")


def by_completing(ctx):
    with transaction.atomic():
        Business.objects.create(name="effect")
        ctx.complete()
    # Too late to change anything, also where it raises or is never reached.
    raise ValueError


def by_checkpoints(ctx):
    for done in range(ctx.checkpoint_value or 0, 2):
        with transaction.atomic():
            Business.objects.bulk_create([Business(name=f"effect {done}")])
            ctx.checkpoint(done + 1)
            ctx.progress((done + 1) / 2)


async def by_async_code(ctx):
    await ctx.aprogress(0.5)
    await Business.objects.aupdate_or_create(pk=-1, defaults={"name": "effect"})


def by_on_finish(ctx):
    """What its ``on_finish`` writes commits with the job's end."""


def finished(event):
    Business.objects.create(name="effect")


SOUND = {
    by_an_inbox: ["effect", "inbox"],
    by_completing: ["effect"],
    by_checkpoints: ["effect 0", "effect 1"],
    by_on_finish: ["effect"],
    by_async_code: ["effect"],
}


@pytest.mark.parametrize("sound", SOUND)
@in_either_case
def test_what_is_idempotent_passes(sound, case, caplog):
    options = {"on_finish": finished} if sound is by_on_finish else {}
    handler = job("crash.sound", max_attempts=2, **options)(sound)
    ends = []

    def check(job):
        assert names() == SOUND[sound]
        ends.append([(one.status, one.outcome) for one in job.attempts.order_by("number")])

    points = crash(handler, check)
    lived = [("succeeded", "returned")]
    died = [("interrupted", "lost"), ("succeeded", "returned")]
    # The first has no crash, and what comes once the end is committed has nothing to recover.
    assert [one for one, _ in groupby(ends)] == [lived, died, lived]
    assert len(ends) == len(points) + 2
    assert [point.number for point in points] == list(range(1, len(points) + 1))
    assert {point.when for point in points} == {"before", "after"}
    # The dead say nothing.
    ours = [one for one in caplog.records if one.name.startswith("django_durable_jobs")]
    said = {one.getMessage().partition(") ")[2] for one in ours}
    assert said == ({"raised ValueError"} if sound is by_completing else set())


@contextmanager
def swallowed(seen):
    try:
        yield
    except BaseException as error:
        seen.add(type(error))


def by_swallowing(ctx, pk, seen):
    with swallowed(seen):
        Business.objects.create(pk=pk, name="alone")
    with swallowed(seen), transaction.atomic():
        Business.objects.create(pk=pk + 1, name="together")
        try:
            Business.objects.create(pk=pk + 2, name="together")
        finally:
            ctx.progress(0.5)
    with swallowed(seen):
        transaction.on_commit(lambda: seen.add("called back"))
        Business.objects.create(pk=pk + 3, name="alone")
    return "swallowed"


def past_django(ctx, pk, seen):
    """Send by what was opened before, and by the driver itself."""
    with connection.cursor() as cursor:
        raw = connection.connection
        try:
            cursor.execute("SELECT 1")
            Business.objects.create(pk=pk, name="alone")
        finally:
            for number, send in enumerate((cursor.execute, cursor.cursor.execute, raw.execute)):
                with suppress(BaseException):
                    send(f"INSERT INTO testapp_business VALUES ({pk + number + 1}, 'past', 0)")


@pytest.mark.parametrize(
    ("handled", "after_each"),
    [
        (
            by_swallowing,
            [{}, {"alone": 1}, {"alone": 1, "together": 2}, {"alone": 2, "together": 2}],
        ),
        # What goes past Django is no crash point.
        (past_django, [{}, {"alone": 1}, {"alone": 1, "past": 1}, {"alone": 1, "past": 3}]),
    ],
)
@in_either_case
def test_nothing_that_is_sent_after_the_crash_arrives(handled, after_each, case):
    """Whoever swallows it, or cleans up: what the next attempt finds was there at the crash."""
    found = []
    seen: set[object] = set()

    @job("crash.deaf", max_attempts=2)
    def deaf(ctx) -> str | None:
        if ctx.attempt == 2:
            found.append(Counter(names()))
            return "once more"
        return handled(ctx, 1, seen)

    results = []
    points = crash(deaf, lambda job: results.append(job.result))
    assert [one for one, _ in groupby(found)] == after_each
    # What a dead handler returned counts as little as what it went on to do.
    assert results[1:-2] == ["once more"] * (len(points) - 1)
    assert seen <= {Crashed, "called back"}


@in_either_case
def test_callbacks_of_a_commit_are_lost_with_it_and_later_no_more(case):
    sent: list[str] = []
    sent_at_crash = []

    @job("crash.callbacks", max_attempts=2)
    def handler(ctx) -> None:
        if ctx.attempt == 2:
            sent_at_crash.append([*sent])
            return
        for name in ("one", "two"):
            with transaction.atomic():
                Business.objects.create(name=name)
                transaction.on_commit(partial(sent.append, name))

    def stage():
        sent.clear()
        return handler.submit()

    points = crash_points(stage, lambda job: None, reset=wipe)
    after_each = [sent for sent, _ in groupby(sent_at_crash)]
    assert after_each == [[], ["one"], ["one", "two"]]
    for name in ("one", "two"):
        # The first point where it is not lost comes after that of the commit.
        point = points[next(n for n, sent in enumerate(sent_at_crash) if name in sent) - 1]
        assert (point.when, bool(re.match(COMMIT, point.sql))) == ("after", True)


@pytest.mark.django_db(transaction=True)
def test_threads_of_the_handler_die_with_it():
    found = []

    def work(has_written: Event, may_commit: Event) -> None:
        try:
            with transaction.atomic():
                Business.objects.create(name="in a thread")
                has_written.set()
                assert may_commit.wait(LIMIT)
        finally:
            has_written.set()
            connections.close_all()

    @job("crash.threads", max_attempts=2)
    def handler(ctx) -> None:
        if ctx.attempt == 2:
            found.append(names())
            return
        has_written, may_commit = Event(), Event()
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(work, has_written, may_commit)
            try:
                assert has_written.wait(LIMIT)
                Business.objects.first()  # Where this dies, the thread has a transaction open.
            finally:
                may_commit.set()
            writing.result()

    points = crash(handler)
    assert len(found) == len(points) - 1
    commit = next(number for number, point in enumerate(points) if point.sql == "COMMIT")
    assert "SELECT" in points[commit - 1].sql
    assert found == [[]] * (commit + 1) + [["in a thread"]] * (len(found) - commit - 1)


@pytest.fixture
def other(tmp_path, case):
    """Another database, in which the handler has a table; in a TestCase with a wrapper too."""
    connections.databases["other"] = connections["default"].settings_dict | {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(tmp_path / "other.sqlite3"),
        "OPTIONS": {},
    }
    connection = connections["other"]
    # Django allows a test the databases only that were there when it began.
    connection.ensure_connection = lambda: connection.connection or connection.connect()
    wrapper = transaction.atomic(using="other")
    wrapper._from_testcase = True
    with ExitStack() as stack:
        stack.callback(connections.databases.pop, "other")
        stack.callback(connections.__delitem__, "other")
        stack.callback(connection.close)
        with connection.cursor() as cursor:
            cursor.execute("CREATE TABLE effect (key integer PRIMARY KEY)")
        if case == "TestCase":
            stack.enter_context(wrapper)
        yield connection


@pytest.mark.parametrize("is_sound", [True, False])
@in_either_case
def test_each_database_of_the_handler_dies(is_sound, other, case):
    def fetch(sql: str) -> list[tuple[int]]:
        with other.cursor() as cursor:
            cursor.execute(sql)
            return cursor.fetchall()

    @job("crash.two_databases", max_attempts=2)
    def two(ctx) -> None:
        with transaction.atomic(using="other"):
            key = "1" if is_sound else "NULL"
            fetch(f"INSERT INTO effect VALUES ({key}) ON CONFLICT DO NOTHING")
        with transaction.atomic():
            Business.objects.create(name="effect")
            ctx.complete()

    def reset():
        wipe()
        fetch("DELETE FROM effect")

    def check(job):
        assert (fetch("SELECT count(*) FROM effect"), names()) == ([(1,)], ["effect"])

    if is_sound:
        points = crash(two, check, reset=reset)
        assert {point.database for point in points} == {"default", "other"}
        return
    with pytest.raises(CrashPointFailed) as caught:
        crash(two, check, reset=reset)
    point = caught.value.point
    assert (point.when, point.database) == ("after", "other")
    assert re.match(COMMIT, point.sql)


# How the job goes on


@in_either_case
def test_a_job_that_may_not_run_again_ends_interrupted(case):
    @job("crash.once", retry_on_interrupt=False)
    def once(ctx) -> None:
        Business.objects.create(name="effect")

    ends = []
    crash(once, lambda job: ends.append((job.status, *names())))
    assert ends[0] == ends[-1] == ends[-2] == ("succeeded", "effect")
    assert ends[1] == ("interrupted",)
    assert set(ends[2:-2]) == {("interrupted", "effect")}


@in_either_case
def test_the_crash_uses_up_an_execution(case):
    handler = job("crash.single", max_attempts=1)(lambda ctx: None)
    with pytest.raises(CrashPointFailed, match="is interrupted.* 1 of 1, one by the crash"):
        crash(handler)
    # Where that is what is wanted: at most once.
    assert crash(handler, ends={"interrupted", "succeeded"})


def fails_for_good(ctx):
    raise PermanentError("no")


def comes_later(ctx):
    if ctx.attempt <= 3:
        raise ValueError if ctx.attempt == 1 else RetryLater(3600)


@pytest.mark.parametrize(
    ("function", "end", "attempts"), [(fails_for_good, "failed", 1), (comes_later, "succeeded", 4)]
)
@in_either_case
def test_nothing_is_waited_for_and_no_clock_is_moved(function, end, attempts, case):
    handler = job("crash.later", max_attempts=4, backoff=86_400)(function)
    counts = []
    with FakeClock(datetime(2026, 3, 1, tzinfo=UTC)) as clock:
        crash_points(
            lambda: handler.submit(run_at=datetime(2027, 3, 1, tzinfo=UTC)),
            lambda job: counts.append(job.attempt_count),
            reset=wipe,
            ends={end},
        )
        assert clock.now == datetime(2026, 3, 1, tzinfo=UTC)
    assert counts[0] == counts[-1] == attempts
    assert set(counts[1:-2]) == {max(attempts, 2)}


# What a run begins with, and what it leaves


@pytest.mark.django_db
def test_a_test_case_is_left_as_it_was():
    Business.objects.create(name="of the test")

    @job("crash.messy", max_attempts=2)
    def messy(ctx) -> None:
        Business.objects.filter(name="of the test").delete()
        Business.objects.create(name="new")

    def check(job):
        assert "of the test" not in names()
        with suppress(IntegrityError):  # Breaks the transaction of the run.
            Business.objects.create(pk=Business.objects.first().pk)

    assert crash_points(messy.submit, check)
    assert names() == ["of the test"]
    assert not Job.objects.exists()
    assert not connection.needs_rollback


@pytest.mark.django_db(transaction=True)
def test_else_each_run_begins_with_an_empty_database(monkeypatch):
    Business.objects.create(name="of the test")
    found = []

    def stage():
        found.append((names(), Job.objects.count()))
        Business.objects.create(name="staged")
        return job("crash.nothing")(lambda ctx: None).submit()

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="only runs in tests"):
        patched.delattr(mail, "outbox")
        crash_points(stage, lambda job: None)
    assert names() == ["of the test"]
    points = crash_points(stage, lambda job: registry.unregister("crash.nothing", 1))
    assert found == [([], 0)] * (len(points) + 2)


@in_either_case
def test_what_is_not_as_it_should_be_is_said(case):
    secret = "a secret of the payload"

    @job("crash.secret", max_attempts=2)
    def handler(ctx, payload: str) -> None:
        Business.objects.create(name=payload)

    def check(job):
        assert Business.objects.count() == 1, "the check's own words"

    with pytest.raises(CrashPointFailed) as caught:
        crash_points(lambda: handler.submit(secret), check, reset=wipe)
    said = str(caught.value)
    assert said.startswith('after a crash after statement 1 on "default": INSERT INTO')
    assert "AssertionError: the check's own words" in said
    assert secret not in said + repr(caught.value.point)

    with pytest.raises(CrashPointFailed, match="^without a crash: ZeroDivisionError") as caught:
        crash_points(lambda: handler.submit("x"), lambda job: 1 / 0, reset=wipe)
    assert caught.value.point is None
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    # A BaseException, which stays what it is and is told where it happened.
    with pytest.raises(pytest.fail.Exception) as failed:
        crash_points(lambda: handler.submit("x"), lambda job: pytest.fail("no"), reset=wipe)
    assert failed.value.__notes__ == ["without a crash"]


@in_either_case
def test_what_cannot_be_crashed_is_refused(case):
    sent = []

    @job("crash.endless")
    def endless(ctx) -> None:
        sent.append(1)
        for _ in sent:
            Business.objects.first()

    with pytest.raises(RuntimeError, match="more than 5 crash points"):
        crash(endless, max_points=5)
    with pytest.raises(TypeError, match="must give the job, not NoneType"):
        crash_points(lambda: None, lambda job: None, reset=wipe)
    with pytest.raises(InvalidTransition, match="ended as cancelled"):
        crash_points(lambda: cancelled(endless.submit()), lambda job: None, reset=wipe)
    with transaction.atomic(), pytest.raises(TransactionActive):
        crash(endless)


def cancelled(staged: Job) -> Job:
    staged.request_cancel()
    return staged
