"""``manage.py runjobs``: its options, its refusals and its exit codes (CONTRACT 4.5, 4.9, 4.10)."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.db.migrations.recorder import MigrationRecorder

from django_durable_jobs import JobContext, job
from django_durable_jobs.handlers import Handler, Registry
from django_durable_jobs.models import Job, JobAttempt, LiveWorker

from .conftest import StartWorker
from .support import PATIENCE, QUICK, Background, drain, fresh, only_attempt, until

in_transactions = pytest.mark.django_db
committed = pytest.mark.django_db(transaction=True)


@pytest.fixture
def noop(handlers: Registry) -> Handler[..., Any]:
    @job("command.noop")
    def noop(ctx: JobContext) -> int:
        return 1

    return noop


def statuses(jobs: list[Job]) -> list[str]:
    return [fresh(one).status for one in jobs]


# What is run ---------------------------------------------------------------------------------


@committed
def test_drain_runs_what_is_due_and_what_that_makes_due(handlers: Registry) -> None:
    @job("command.chain")
    def chain(ctx: JobContext) -> None:
        if ctx.scope != "xxx":
            chain.submit(scope=ctx.scope + "x")

    @job("command.again", backoff=0)
    def again(ctx: JobContext) -> None:
        if ctx.attempt == 1:
            raise ValueError

    @job("command.backs_off", backoff=60)
    def backs_off(ctx: JobContext) -> None:
        raise ValueError

    chain.submit()
    twice = again.submit()
    later = chain.submit(scope="later", run_at=timedelta(hours=1))
    waiting = backs_off.submit()
    drain(threads=2)
    assert Job.objects.filter(handler="command.chain", status="succeeded").count() == 4
    assert (fresh(twice).status, fresh(twice).attempt_count) == ("succeeded", 2)
    assert statuses([later, waiting]) == ["scheduled", "scheduled"]


@committed
def test_once_makes_one_claim(noop: Handler[..., Any]) -> None:
    five = [noop.submit() for _ in range(5)]
    call_command("runjobs", "--once", "--threads=2", verbosity=0)
    assert statuses(five) == ["succeeded"] * 2 + ["queued"] * 3


@committed
def test_once_promotes_and_recovers_before_it_claims(noop: Handler[..., Any]) -> None:
    due, dead = noop.submit(), noop.submit()
    Job.objects.filter(pk=due.pk).update(status="scheduled", run_at=1)
    Job.objects.filter(pk=dead.pk).update(
        status="running", lease_token="t" * 32, lease_expires_at=1, attempt_count=1
    )
    JobAttempt.objects.create(job=dead, number=1, token="t" * 32, status="running", started_at=1)
    call_command("runjobs", "--once", "--threads=2", verbosity=0)
    assert statuses([due, dead]) == ["succeeded", "succeeded"]
    assert fresh(dead).attempt_count == 2


@committed
@pytest.mark.parametrize("mode", [["--drain"], []], ids=["drain", "serve"])
def test_max_jobs_ends_after_so_many(
    noop: Handler[..., Any], mode: list[str], durable_jobs: Callable[..., None]
) -> None:
    durable_jobs(POLL_SECONDS=0.02)
    five = [noop.submit() for _ in range(5)]
    call_command("runjobs", "--processes=0", "--threads=2", "--max-jobs=3", *mode, verbosity=0)
    assert statuses(five) == ["succeeded"] * 3 + ["queued"] * 2


@committed
@pytest.mark.parametrize(
    ("arguments", "served"),
    [
        (["--queues=a"], "a"),
        (["--queues", "a, c"], "ac"),
        (["--exclude-queues=a"], "bc"),
        (["--exclude-queues", "a,b"], "c"),
        (["--queues=a,b", "--exclude-queues=b"], "a"),
        ([], "abc"),
    ],
)
def test_queues(noop: Handler[..., Any], arguments: list[str], served: str) -> None:
    for queue in "abc":
        noop.submit(queue=queue, job_id=queue)
    drain(*arguments)
    done = Job.objects.filter(status="succeeded").order_by("job_id")
    assert "".join(done.values_list("job_id", flat=True)) == served
    assert Job.objects.filter(status="queued").count() == 3 - len(served)


@committed
def test_the_queues_of_the_settings_are_the_default(
    noop: Handler[..., Any], durable_jobs: Callable[..., None]
) -> None:
    durable_jobs(QUEUES=["a"])
    a, b = noop.submit(queue="a"), noop.submit(queue="b")
    drain()
    assert statuses([a, b]) == ["succeeded", "queued"]
    drain("--queues=b")
    assert statuses([b]) == ["succeeded"]


@committed
def test_the_name_is_on_the_attempts(noop: Handler[..., Any]) -> None:
    named, unnamed = noop.submit(), noop.submit()
    call_command("runjobs", "--once", "--threads=1", "--name=the name", verbosity=0)
    drain()
    assert only_attempt(named).worker == "the name"
    assert only_attempt(unnamed).worker not in ("", "the name")


@committed
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_bound_what_runs_at_a_time(handlers: Registry, threads: int) -> None:
    lock = threading.Lock()
    running, most = 0, 0
    together = threading.Barrier(threads, timeout=PATIENCE)

    @job("command.counts")
    def counts(ctx: JobContext) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait()
        with lock:
            running -= 1
        together.wait()

    six = [counts.submit() for _ in range(6)]
    drain(threads=threads)
    assert statuses(six) == ["succeeded"] * 6
    assert most == threads


@committed
def test_it_works_in_a_thread_of_a_test(noop: Handler[..., Any]) -> None:
    one = noop.submit()
    Background(drain).ends()
    assert statuses([one]) == ["succeeded"]


@committed
def test_priority_and_due_time_order_one_thread(handlers: Registry) -> None:
    order: list[str] = []

    @job("command.ordered")
    def ordered(ctx: JobContext) -> None:
        order.append(ctx.job_id)

    for number, priority in enumerate([0, 5, -5, 5]):
        ordered.submit(job_id=f"{priority}/{number}", priority=priority)
    drain()
    assert order == ["5/1", "5/3", "0/0", "-5/2"]


# What is said --------------------------------------------------------------------------------


@committed
@pytest.mark.parametrize(
    ("queues", "told"),
    [
        ((), "all queues"),
        (("--queues=a,b",), "a, b"),
        (("--exclude-queues=b,c",), "all queues but b, c"),
        (("--queues=a,b", "--exclude-queues=b,c"), "a"),
    ],
    ids=str,
)
@pytest.mark.parametrize("verbosity", [0, 1])
def test_the_banner_says_who_serves_what(
    noop: Handler[..., Any], verbosity: int, queues: tuple[str, ...], told: str
) -> None:
    out = io.StringIO()
    call_command(
        "runjobs",
        "--drain",
        "--name=me",
        "--threads=3",
        *queues,
        verbosity=verbosity,
        stdout=out,
    )
    expected = f"Worker me on database default: {told}; 1 x 3 slots.\n" if verbosity else ""
    assert out.getvalue() == expected


@committed
def test_a_process_says_what_it_does_on_its_terminal(start_worker: StartWorker) -> None:
    loud = start_worker("--processes=0", "--name=me", "-v", "1")
    until(lambda: "Worker me on database default: all queues" in loud.output())
    until(LiveWorker.objects.exists, "the worker's row")
    loud.send()
    assert loud.ends() == 0
    assert "stopping" in loud.output()
    assert not LiveWorker.objects.exists()
    quiet = start_worker("--drain", "-v", "0")
    assert quiet.ends() == 0
    assert quiet.output() == ""


# What is refused -----------------------------------------------------------------------------


def refused(*arguments: str, code: int = 2) -> str:
    with pytest.raises(CommandError) as caught:
        call_command("runjobs", *arguments, verbosity=0)
    assert caught.value.returncode == code
    return str(caught.value)


@in_transactions
@pytest.mark.parametrize("mode", ["--drain", "--once", "--processes=0", "--processes=2"])
def test_inside_a_testcase_it_names_what_to_use_instead(mode: str) -> None:
    if connection.vendor == "sqlite" and connection.is_in_memory_db():
        pytest.skip("a database in memory is refused before its TestCase is looked at")
    assert "testing.drain()" in refused(mode)


@committed
def test_inside_an_open_transaction_it_refuses(noop: Handler[..., Any]) -> None:
    with transaction.atomic():
        one = noop.stage()
        assert "testing.drain()" in refused("--drain")
    transaction.set_autocommit(False)
    try:
        assert "testing.drain()" in refused("--drain")
    finally:
        transaction.set_autocommit(True)
    assert statuses([one]) == ["queued"]


@in_transactions
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--drain", "--once"], "not both"),
        (["--database=nowhere"], "nowhere"),
        (["--threads=0"], "--threads"),
        (["--processes=-1"], "--processes"),
        (["--max-jobs=0"], "--max-jobs"),
        (["--queues=a,,b"], "--queues"),
        (["--exclude-queues="], "--exclude-queues"),
        (["--name=" + "x" * 200], "--name"),
        (["--name= "], "--name"),
    ],
)
def test_a_bad_option_is_refused_in_a_sentence(arguments: list[str], words: str) -> None:
    assert words in refused(*arguments)


@in_transactions
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"LEASE_SECONDS": 0}, "LEASE_SECONDS"),
        ({"LEASE_SECOND": 9}, "LEASE_SECONDS"),
        ({"THREADS": "4"}, "THREADS"),
        ({"DATABASE": "nowhere"}, "nowhere"),
    ],
)
def test_a_bad_setting_is_refused_in_a_sentence(
    durable_jobs: Callable[..., None], keys: dict[str, Any], words: str
) -> None:
    durable_jobs(**keys)
    assert words in refused("--drain")


@committed
@pytest.mark.parametrize("lease", [20, 20.0001])
def test_on_sqlite_the_lease_must_be_longer_than_every_timeout(
    handlers: Registry, durable_jobs: Callable[..., None], lease: float
) -> None:
    @job("command.slow", timeout=20)
    def slow(ctx: JobContext) -> None: ...

    durable_jobs(LEASE_SECONDS=lease, TIMEOUT_SECONDS=10)
    if connection.vendor == "sqlite" and lease == 20:
        message = refused("--drain")
        assert "command.slow" in message
        assert "LEASE_SECONDS" in message
    else:
        drain()
    durable_jobs(LEASE_SECONDS=lease, TIMEOUT_SECONDS=lease)
    if connection.vendor == "sqlite":
        assert "TIMEOUT_SECONDS" in refused("--drain")
    else:
        drain()


@committed
def test_a_missing_migration_stops_the_start() -> None:
    recorder = MigrationRecorder(connection)
    applied = recorder.migration_qs.filter(app="django_durable_jobs").order_by("-id").first()
    recorder.record_unapplied(applied.app, applied.name)
    try:
        message = refused("--drain", code=3)
    finally:
        recorder.record_applied(applied.app, applied.name)
    assert applied.name in message
    assert "migrate" in message


@committed
def test_a_refusal_is_one_line_and_an_exit_code(start_worker: StartWorker) -> None:
    worker = start_worker(durable_jobs={**QUICK, "LEASE_SECONDS": 0})
    assert worker.ends() == 2
    assert "LEASE_SECONDS" in worker.output()
    assert "Traceback" not in worker.output()
    assert worker.output().count("\n") == 1


@committed
def test_drain_takes_up_retries_while_another_job_still_runs(
    handlers: Registry, durable_jobs: Callable[..., None]
) -> None:
    durable_jobs(POLL_SECONDS=0.1)
    retried = threading.Event()

    @job("tests.waits_for_the_retry", timeout=50)
    def waits(ctx: JobContext) -> bool:
        return retried.wait(45)

    @job("tests.fails_once", backoff=0)
    def fails_once(ctx: JobContext) -> None:
        if ctx.attempt == 1:
            raise ValueError("once")
        retried.set()

    waiting = waits.submit()
    fails_once.submit()
    drain(threads=2)
    assert fresh(waiting).result is True
