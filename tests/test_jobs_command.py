"""``manage.py jobs``: list, show, stats, the moves, prune, workers and health (CONTRACT 7.3)."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connections
from django.test.utils import CaptureQueriesContext

from django_durable_jobs import job, pages
from django_durable_jobs.models import Job, JobAttempt, OperatorAction, QueuePause
from django_durable_jobs.testing import FakeClock, drain
from django_durable_jobs.transitions import pruning, workers
from django_durable_jobs.transitions.standing import standing

from ._processes import environment, manage
from ._rows import attempt_row, job_row

pytestmark = pytest.mark.django_db

START = datetime(2026, 3, 14, tzinfo=UTC)
ENDED = {"finished_at": START, "attempt_count": 3}
LEASE = {"lease_token": "t" * 32, "lease_expires_at": START}


@pytest.fixture(autouse=True)
def clock() -> Any:
    with FakeClock(START) as one:
        yield one


def saved(**changes: Any) -> Job:
    job = job_row(**{"run_at": START, "created_at": START, **changes})
    job.save()
    return job


def run(*arguments: str) -> tuple[int, str]:
    """Give the exit code and the text."""
    out = io.StringIO()
    try:
        call_command("jobs", *arguments, stdout=out)
    except SystemExit as ended:
        return int(str(ended.code)), out.getvalue()
    return 0, out.getvalue()


def answer(*arguments: str, code: int = 0) -> Any:
    found, text = run(*arguments, "--json")
    assert found == code, text
    return json.loads(text)


def ids(*arguments: str) -> list[int]:
    return [one["id"] for one in answer("list", *arguments)["jobs"]]


def test_list_filters_and_pages_and_shows_no_payload() -> None:
    jobs = [saved(queue="mails" if n % 2 else "default", payload='"secret"') for n in range(4)]
    failed = saved(status="failed", scope="a", error_category="timeout", **ENDED)
    everything = [one.pk for one in (*jobs, failed)][::-1]
    assert ids() == everything
    page = answer("list", "--limit=2")
    assert [one["id"] for one in page["jobs"]] == everything[:2]
    after = f"--after={page['next_cursor']}"
    assert ids("--limit=2", after) == everything[2:4]
    assert answer("list", "--limit=3", after)["next_cursor"] is None
    assert run("list", "--limit=2")[1].endswith(f"More: {after}\n")
    assert ids("--status=failed") == ids("--scope=a") == [failed.pk]
    assert ids("--queue=mails", "--handler=tests.rows") == [jobs[3].pk, jobs[1].pk]
    assert ids("--queue=none") == []
    code, text = run("list")
    assert code == 0
    assert "secret" not in text + json.dumps(answer("list"))
    assert "timeout" in text
    assert run("list", "--queue=none") == (0, "No jobs.\n")
    saved(job_id="a\x1b[31m\nb")
    assert r"a\x1b[31m\nb" in run("list")[1], "no other line, and no colour"
    for told, *wrong in (
        ("limit must be a whole number from 1 to 100", "--limit=101"),
        ("no cursor of this query", after, "--status=failed"),
        ("no cursor of this query", "--after=x"),
        ("queue must have 1 to 100 characters", "--queue="),
        ("scope must have 0 to 200 characters", f"--scope={'x' * 201}"),
    ):
        with pytest.raises(CommandError, match=told):
            run("list", *wrong)


def test_options_of_every_subcommand_stand_before_or_behind_it() -> None:
    saved()
    behind = run("list", "--json", "--database=default")
    assert run("--json", "--database=default", "list") == behind
    assert run("--json", "list", "--database=default") == behind
    assert json.loads(behind[1])["jobs"]
    for arguments in (["--database=none", "list"], ["list", "--database=none"]):
        with pytest.raises(CommandError, match="not in DATABASES"):
            run(*arguments)


def test_list_stays_within_the_bounds_of_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that are far too large for a page it reads the small columns alone."""
    rare = saved(handler="rare", payload="x" * 1_100_000)
    jobs = [saved(payload="x" * 1_100_000) for _ in range(3)]
    assert ids() == [one.pk for one in (rare, *jobs)][::-1]
    with CaptureQueriesContext(connections["default"]) as queries:
        run("list")
    assert not any("payload" in one["sql"] for one in queries)
    monkeypatch.setattr(pages, "WALKED", 2)
    monkeypatch.setattr("django_durable_jobs.management.jobs.moves.WALKED", 2)
    code, text = run("list", "--handler=rare")
    assert (code, text.splitlines()[0]) == (0, "No jobs among the next 2.")
    assert ids("--handler=rare", text.split("More: ")[1].strip()) == [rare.pk]


def test_show_tells_all_of_a_job_by_number_or_identity() -> None:
    job = saved(job_id="order-7", scope="a", payload='{"n":1}')
    attempt_row(job, number=1, worker="w1", status="failed", finished_at=START).save()
    found = answer("show", str(job.pk))
    assert found == answer("show", "order-7", "--scope=a")
    assert (found["id"], found["payload"], found["ownership"]) == (job.pk, '{"n":1}', "unclaimed")
    assert [one["worker"] for one in found["attempts"]] == ["w1"]
    assert "attempt 1: failed" in run("show", str(job.pk))[1]
    for told, *missing in (
        ('number 0; for a job id write --scope ""', "0"),
        ('"order-7" in scope ""; for another one write --scope.', "order-7"),
        ('"order-7" in scope "b".', "order-7", "--scope=b"),
    ):
        with pytest.raises(CommandError, match=f"there is no job.* {re.escape(told)}"):
            run("show", *missing)
    unscoped, digits = saved(job_id="order-7"), saved(job_id="0")
    assert answer("show", "order-7")["id"] == unscoped.pk
    assert answer("show", "0", "--scope=")["id"] == digits.pk


def test_show_tells_why_each_attempt_failed_and_the_newest_traceback() -> None:
    """Also of a job that was queued again since, and so has none of its own."""
    job = saved(attempt_count=2)
    for number, category in enumerate(("timeout", "handler_error"), 1):
        told = {"error_category": category, "error_traceback": f"Traceback of {number}:\n  line"}
        ended = {"status": "failed", "outcome": "raised", "finished_at": START}
        attempt_row(job, number=number, token=f"{number}" * 32, **ended, **told).save()
    lines = run("show", str(job.pk))[1].splitlines()
    first, second = (lines.index(f"attempt {number}: failed, raised") for number in (1, 2))
    assert any("timeout" in line for line in lines[first:second])
    assert any("handler_error" in line for line in lines[second:])
    assert lines[-2:] == ["Traceback of 2:", "  line"] and "Traceback of 1:" not in lines


def test_show_names_the_limit_that_a_job_waits_under_and_who_holds_its_places() -> None:
    token = "c" * 32
    held = saved(job_id="held", concurrency_key="k", status="running", lease_token=token)
    attempt_row(held, number=1, token=token, worker="w1", started_at=START).save()
    waits = saved(concurrency_key="k", limit_waiting=True)
    limit = answer("show", str(waits.pk))["limit"]
    assert (limit["key"], limit["number"], limit["running"]) == ("k", None, 1)
    [holder] = limit["holders"]
    assert (holder["job"], holder["job_id"], holder["worker"]) == (held.pk, "held", "w1")
    assert answer("show", str(saved().pk))["limit"] is None


def test_show_says_why_a_job_does_not_run_as_the_admin_does(durable_handlers: Any) -> None:
    @job("tests.rows", concurrency=1)
    def limited(ctx: Any) -> None: ...

    token = "c" * 32
    QueuePause.objects.create(queue="mails", paused_at=START)
    held = saved(job_id="held", concurrency_key="k", status="running", lease_token=token)
    attempt_row(held, number=1, token=token, worker="w1", started_at=START).save()
    waits = saved(concurrency_key="k", limit_waiting=True, queue="mails")
    reasons = [
        "1 of 1 places of its concurrency key k are taken.",
        f"Job held ({held.pk}) holds a place since 2026-03-14 00:00:00 UTC, on worker w1.",
        "Its queue mails is paused.",
        "No live worker serves its queue mails and its handler tests.rows.",
    ]
    assert answer("show", str(waits.pk))["standing"] == standing(waits) == reasons
    assert run("show", str(waits.pk))[1].splitlines()[:5] == [*reasons, ""]
    ended = saved(status="succeeded", **ENDED)
    assert answer("show", str(ended.pk))["standing"] == ["It has succeeded."]


def test_show_tells_in_utc_what_no_date_of_the_zone_holds(settings: Any) -> None:
    settings.TIME_ZONE = "Asia/Tokyo"
    last = saved(status="scheduled", run_at=datetime.max.replace(tzinfo=UTC))
    said = "It is due later, at 9999-12-31 23:59:59 UTC."
    assert standing(last)[0] == answer("show", str(last.pk))["standing"][0] == said
    assert said in run("show", str(last.pk))[1]


def test_stats_count_each_queue() -> None:
    for queue, status in (("a", "queued"), ("a", "queued"), ("b", "running")):
        saved(queue=queue, status=status)
    found = answer("stats")
    assert found["queues"] == {"a": {"queued": 2}, "b": {"running": 1}}
    assert found["live_workers"] == 0
    assert (found["waiting_at_limits"], found["oldest_at_limit_seconds"]) == (0, None)
    text = run("stats")[1]
    assert text.endswith("0 live workers; the oldest due job has waited 0 s\n")
    assert "at a limit" not in text


def test_stats_count_those_that_wait_at_a_limit_which_are_not_due(clock: FakeClock) -> None:
    for seconds in (20, 50):
        due = START - timedelta(seconds=seconds)
        saved(run_at=due, concurrency_key="k", limit_waiting=True)
    saved(run_at=START - timedelta(seconds=90), concurrency_key="k", status="running")
    beat("w")
    found = answer("stats")
    assert (found["waiting_at_limits"], found["oldest_at_limit_seconds"]) == (2, 50)
    assert found["oldest_due_seconds"] is None
    assert run("stats")[1].splitlines()[-2:] == [
        "1 live worker; no job is due",
        "at a limit: 2 queued jobs; the oldest has waited 50 s",
    ]


def test_moves_are_made_each_for_itself_and_recorded() -> None:
    failed, blocked, queued = (
        saved(status="failed", **ENDED),
        saved(status="blocked", blocked_reason="unknown_handler"),
        saved(),
    )
    done = answer("retry", str(queued.pk), str(failed.pk), "0", "--extra-attempts=1", code=1)
    assert [one["outcome"] for one in done] == ["refused", "retried", "refused"]
    assert "queued" in done[0]["reason"]
    assert answer("release", str(blocked.pk))[0]["outcome"] == "queued"
    assert run("cancel", str(queued.pk)) == (0, f"{queued.pk}: cancelled\n")
    assert answer("cancel", str(queued.pk))[0]["outcome"] == "unchanged"
    assert list(Job.objects.order_by("id").values_list("status", flat=True)) == [
        "queued",
        "queued",
        "cancelled",
    ]
    recorded = OperatorAction.objects.order_by("id")
    assert [(one.action, one.job_key) for one in recorded] == [
        ("retry", failed.pk),
        ("release", blocked.pk),
        ("request_cancel", queued.pk),
    ]
    assert all(one.operator.endswith("(manage.py)") for one in recorded)


def test_recover_takes_the_token_that_the_operator_names() -> None:
    held = saved(status="running", attempt_count=1, **LEASE)
    attempt_row(held, token=LEASE["lease_token"]).save()
    unknown = saved(status="running", attempt_count=1)
    both = [str(held.pk), str(unknown.pk)]
    refused = answer("recover", *both, "--token=other", code=1)
    assert [one["outcome"] for one in refused] == ["refused", "refused"]
    [forgotten] = answer("recover", both[0], code=1)
    assert "it has a token; give --token (see jobs show)" in forgotten["reason"]
    token = f"--token={LEASE['lease_token']}"
    assert answer("recover", both[0], token, "--no-requeue")[0]["outcome"] == "interrupted"
    assert answer("recover", both[1])[0]["outcome"] == "queued"


def test_prune_deletes_what_ended_long_ago_page_by_page(
    monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    monkeypatch.setattr("django_durable_jobs.transitions._pages.PAGE", 3)
    old = [saved(status="succeeded", **ENDED) for _ in range(7)]
    attempt_row(old[0], status="succeeded", finished_at=START).save()
    failed = saved(status="failed", **ENDED)
    waiting = saved()
    clock.advance(timedelta(days=10))
    new = saved(status="succeeded", finished_at=START + timedelta(days=9))
    assert answer("prune", "--days=10.5") == {"pruned": 0}
    assert answer("prune", "--days=9", "--status=succeeded") == {"pruned": 7}
    assert set(Job.objects.values_list("pk", flat=True)) == {failed.pk, waiting.pk, new.pk}
    assert not JobAttempt.objects.exists()
    assert run("prune", "--days=0.5") == (0, "deleted 2 jobs.\n")
    assert list(Job.objects.all()) == [waiting]
    with pytest.raises(CommandError, match="above 0"):
        run("prune", "--days=0")
    with pytest.raises(ValueError, match="have not ended"):
        pruning.prune("default", days=1, statuses=frozenset({"running"}))


# Queues -----------------------------------------------------------------------------------------


def test_a_paused_queue_is_claimed_from_once_it_is_resumed(
    clock: FakeClock, durable_handlers: Any
) -> None:
    @job("tests.greet")
    def greet(ctx: Any, payload: str) -> None: ...

    held, free = (greet.submit("x", queue=name) for name in ("held", "free"))
    assert run("pause-queue", "held") == (0, "held: paused\n")
    clock.advance(60)
    assert answer("pause-queue", "held") == {"queue": "held", "outcome": "unchanged"}
    assert QueuePause.objects.get().paused_at == START
    assert [one.job for one in drain()] == [free]
    assert answer("resume-queue", "held")["outcome"] == "resumed"
    assert answer("resume-queue", "held")["outcome"] == "unchanged"
    assert [one.job for one in drain()] == [held]
    recorded = OperatorAction.objects.order_by("id").values_list("action", "detail")
    assert list(recorded) == [
        ("pause_queue", "queue held: paused"),
        ("resume_queue", "queue held: resumed"),
    ]
    with pytest.raises(CommandError, match="queue must have 1 to 100 characters"):
        run("pause-queue", "")


# Workers and health -----------------------------------------------------------------------------


def beat(name: str, **loops: tuple[float, float]) -> int:
    described = {
        loop: {"age": age, "pace": pace, "failures": 0} for loop, (age, pace) in loops.items()
    }
    health = {"slots": 16, "held": 2, "loops": described}
    return workers.register(
        "default", name=name, queues=["a"], excluded_queues=[], capabilities=(), health=health
    )


def problems(*arguments: str) -> list[str]:
    found = answer("health", *arguments, code=1)
    assert not found["healthy"]
    return found["problems"]  # type: ignore[no-any-return]


def test_workers_and_their_last_beat(clock: FakeClock) -> None:
    assert run("workers") == (0, "No workers.\n")
    beat("gone")
    clock.advance(workers.LIVE_SECONDS + 5)
    beat("here", claim=(0, 0))
    found = answer("workers")
    assert [(one["name"], one["live"], one["seen_seconds"]) for one in found] == [
        ("gone", False, 25),
        ("here", True, 0),
    ]
    assert found[1]["health"]["slots"] == 16
    assert "25 s ago" in run("workers")[1]


def test_health_of_the_workers(clock: FakeClock) -> None:
    assert problems() == ["no worker lives"]
    beat("web/1", claim=(0.1, 0), renewal=(45, 20))
    found = answer("health")
    assert (found["healthy"], found["problems"]) == (True, [])
    assert "All is well." in run("health")[1]
    # Another one's late loop is no problem of a probe that names its own.
    beat("late/1", claim=(31, 0), renewal=(45, 20))
    assert problems() == ["worker late/1: late loops: claim (31 s)"]
    assert answer("health", "--name=web")["healthy"]
    assert answer("health", "--name=web/1")["healthy"]
    assert problems("--name=we") == ["no worker lives that is named we"]
    # The seconds since the beat count.
    clock.advance(16)
    assert "worker late/1: late loops: claim (47 s)" in problems()
    # What is of another version or damaged is not judged.
    worker = workers.register(
        "default", name="web/1", queues=None, excluded_queues=[], capabilities=()
    )
    for broken in ({"loops": 7}, {"loops": {"claim": 7, "renewal": {"age": "x"}}}, {}, 7):
        workers.beat("default", worker, broken)  # type: ignore[arg-type]
        assert answer("health", "--name=web")["healthy"]


def test_health_of_the_jobs(clock: FakeClock) -> None:
    saved(run_at=START - timedelta(seconds=100), queue="paused")
    QueuePause.objects.create(queue="paused", paused_at=START)
    saved(run_at=START - timedelta(seconds=50), limit_waiting=True, concurrency_key="k")
    saved(run_at=START - timedelta(seconds=20))
    saved(run_at=START + timedelta(seconds=20), status="scheduled")
    saved(status="running", **LEASE)
    saved(status="running")
    beat("w")
    found = answer("health", "--max-due=30")
    assert found["oldest_due_seconds"] == 20
    assert (found["stuck_running"], found["unknown_running"]) == (0, 1)
    assert problems("--max-due=10") == ["the oldest due job has waited for 20 s"]
    clock.advance(61)
    beat("w")
    assert problems() == ["no pass has recovered 1 running job whose lease was lost"]


def test_a_database_that_refuses_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*arguments: Any, **options: Any) -> Any:
        raise DatabaseError("with a value")

    monkeypatch.setattr(type(connections["default"]), "cursor", refuses)
    with pytest.raises(CommandError, match=r"the database refused it: DatabaseError\.$"):
        run("health")


def test_before_migrate_it_names_the_command() -> None:
    ended = manage("jobs", "list", env=environment())
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == (
        'CommandError: database "default" lacks 0001_initial of django_durable_jobs:'
        " run manage.py migrate --database default.\n"
    )


def test_a_reader_that_has_had_enough_is_no_error(child_environment: dict[str, str]) -> None:
    """As ``head`` may have: ``manage.py jobs schedules | head``."""
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-m", "django", "jobs", "schedules"],
        env=child_environment,
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("behind", [True, False])
def test_django_s_own_options_stand_before_or_behind_the_subcommand(behind: bool) -> None:
    env = environment()
    settings = f"--settings={env.pop('DJANGO_SETTINGS_MODULE')}"
    options = [settings, "--traceback", "--no-color", "-v", "0", "--pythonpath=."]
    ended = manage("jobs", *(["list", *options] if behind else [*options, "list"]), env=env)
    # The settings are found, and the whole traceback is asked for.
    assert "Traceback" in ended.stderr and "lacks 0001_initial" in ended.stderr, ended.stderr
