"""``schedule()``: what it judges at once, what the checks judge, and taking it back."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.core import checks
from django.core.management import CommandError, call_command
from django.test import override_settings

from django_durable_jobs import InvalidSchedule, JobContext, ModelId, job, schedule, unschedule
from django_durable_jobs.schedules.declaration import registry
from django_durable_jobs.testing import FakeClock
from tests._marks import shown
from tests._processes import environment, manage

from .oracle import utc

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Report:
    title: str
    pages: int = 1


@pytest.fixture
def report() -> Any:
    @job("tests.report", queue="reports", priority=3, max_attempts=7)
    def report(ctx: JobContext, payload: Report) -> None: ...

    return report


def found() -> list[tuple[str, str]]:
    messages = checks.run_checks(tags=["durable_jobs"])
    told = [one for one in messages if not one.is_silenced()]
    return [(str(one.id).rpartition(".")[2], str(one.msg)) for one in told]


def test_what_is_declared_becomes_the_request(report: Any) -> None:
    declared = schedule("nightly", "30 2 * * *", report, Report("all"), description="All pages")
    made = declared.submission()
    assert (made.handler, made.queue, made.priority, made.max_attempts) == (
        "tests.report",
        "reports",
        3,
        7,
    )
    assert (made.payload, made.schedule, made.scheduled_for, made.run_at, made.scope) == (
        '{"title":"all","pages":1}',
        "nightly",
        None,
        None,
        "",
    )
    assert made.dedupe_key is None
    assert made.job_id != declared.submission().job_id
    options = {"queue": "q", "priority": -5, "max_attempts": 1, "scope": "tenant"}
    other = schedule("other", "* * * * *", "tests.report", Report("x"), **options).submission()
    assert (other.queue, other.priority, other.max_attempts, other.scope) == ("q", -5, 1, "tenant")
    assert registry.get("nightly") is declared
    assert [one.name for one in registry.all()] == ["nightly", "other"]
    assert declared.description == "All pages"


def test_the_payload_is_copied(report: Any) -> None:
    payload = Report("before")
    declared = schedule("nightly", "30 2 * * *", report, payload)
    payload.title = "after"
    assert "before" in declared.submission().payload


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"name": ""}, "name must have 1 to 200"),
        ({"name": " "}, "name must not be blank"),
        ({"name": "n" * 201}, "name must have 1 to 200"),
        ({"name": "a\0"}, "name must not hold NUL"),
        ({"name": "\ud800"}, "lone surrogate"),
        ({"name": 5}, "name must be str"),
        ({"cron": "5/15 * * * *"}, 'minute "5/15" is refused: .* write 5-59/15'),
        ({"cron": None}, "cron must be text"),
        ({"timezone": "Paris"}, "'Paris' is unknown"),
        ({"timezone": "../../etc/passwd"}, "is unknown"),
        ({"timezone": "/etc/passwd"}, "is unknown"),
        ({"timezone": "Europe"}, "is unknown"),
        ({"timezone": ""}, "is unknown"),
        ({"timezone": "UTC\0"}, "is unknown"),
        ({"timezone": "\ud800"}, "is unknown"),
        ({"timezone": None}, "timezone must be a name .* not NoneType"),
        ({"timezone": "localtime"}, "timezone must be a name .* not 'localtime'"),
        ({"timezone": "right/Europe/Paris"}, "timezone must be a name"),
        ({"catch_up": "some"}, 'catch_up must be "all", "latest" or "none"'),
        ({"catch_up": True}, "catch_up must be"),
        ({"catch_up": []}, "catch_up must be"),
        ({"grace": -1}, "grace must be a number of seconds"),
        ({"grace": float("nan")}, "grace must be"),
        ({"grace": float("inf")}, "grace must be"),
        ({"grace": "60"}, "grace must be"),
        ({"grace": True}, "grace must be"),
        ({"catch_up_limit": 0}, "catch_up_limit must be a whole number from 1 to 256"),
        ({"catch_up_limit": 257}, "catch_up_limit must be"),
        ({"catch_up_limit": True}, "catch_up_limit must be"),
        ({"catch_up_limit": 3, "catch_up": "latest"}, 'goes with catch_up="all"'),
        ({"handler": "tests.reprot"}, "Did you mean tests.report?"),
        ({"handler": ("tests.report", 2)}, "not registered"),
        ({"handler": 5}, "handler must be"),
        ({"payload": None}, "takes a payload"),
        ({"payload": {"title": "x"}}, "payload is refused"),
        ({"payload": (n for n in [1])}, "payload cannot be copied"),
        ({"queue": ""}, "queue must have"),
        ({"priority": 101}, "priority must be"),
        ({"max_attempts": 0}, "max_attempts must be"),
        ({"scope": "s" * 201}, "scope must have"),
        ({"description": "\0"}, "description must not hold NUL"),
    ],
    ids=shown,
)
def test_what_is_refused_names_the_schedule_and_the_field(
    report: Any, given: dict[str, Any], told: str
) -> None:
    values = {"name": "nightly", "cron": "* * * * *", "handler": report, "payload": Report("x")}
    with pytest.raises(InvalidSchedule, match=told) as caught:
        schedule(**(values | given))
    assert "Schedule " in str(caught.value)
    assert registry.all() == ()


def test_two_of_one_name(report: Any) -> None:
    schedule("nightly", "* * * * *", report, Report("x"))
    with pytest.raises(InvalidSchedule, match=r"Two schedules .*test_declaration:\d+ and .*:\d+"):
        schedule("nightly", "0 * * * *", report, Report("x"))
    unschedule("nightly")
    unschedule("nightly")
    schedule("nightly", "0 * * * *", report, Report("x"))


def test_grace_may_be_a_timedelta_and_policies_are_a_number(report: Any) -> None:
    def made(**options: Any) -> Any:
        unschedule("nightly")
        return schedule("nightly", "* * * * *", report, Report("x"), **options)

    assert made(grace=timedelta(minutes=2)).grace == 120
    assert made().grace == 60
    assert made().most_missed is None
    assert made(catch_up_limit=9).most_missed == 9
    assert made(catch_up="latest").most_missed == 1
    assert made(catch_up="none").most_missed == 0


# While the project starts ---------------------------------------------------------------------


@pytest.fixture
def starting(monkeypatch: Any) -> None:
    """Let the registry of apps look as it does while ``jobs.py`` modules are imported."""
    monkeypatch.setattr(apps, "ready", False)


def test_what_needs_the_project_is_told_by_the_checks(report: Any, starting: None) -> None:
    schedule("by text", "* * * * *", "tests.report", Report("x"))
    schedule("no handler", "* * * * *", "tests.missing")
    schedule("bad payload", "* * * * *", report, {"title": 5})
    schedule("bad queue", "* * * * *", report, Report("x"), queue=" ")
    with pytest.raises(InvalidSchedule, match="minute"):
        schedule("bad cron", "60 * * * *", report, Report("x"))
    errors = found()
    assert [identifier for identifier, _ in errors] == ["E006"] * 3
    for name, (_, message) in zip(["bad payload", "bad queue", "no handler"], errors, strict=True):
        assert message.startswith(f"Schedule {name!r} (tests.schedules.test_declaration:")


def test_a_payload_with_a_model_is_judged_once_models_are_there(starting: None) -> None:
    from tests.testapp.models import Business

    @job("tests.model")
    def model(ctx: JobContext, payload: ModelId[Business]) -> None: ...

    schedule("model", "* * * * *", model, ModelId[Business](5))
    assert found() == []


def test_bad_settings_are_told_alone(report: Any, starting: None) -> None:
    schedule("no handler", "* * * * *", "tests.missing")
    with override_settings(DURABLE_JOBS={"POLL_SECONDS": "x"}):
        assert [identifier for identifier, _ in found()] == ["E001"]


def test_a_worker_does_not_start_with_a_bad_schedule(report: Any, starting: None) -> None:
    schedule("no handler", "* * * * *", "tests.missing")
    with pytest.raises(CommandError, match="no handler") as caught:
        call_command("runjobs", "--once")
    assert caught.value.returncode == 2


def test_nothing_starts_with_a_bad_cron(tmp_path: Path) -> None:
    """A process of its own: the import of ``jobs.py`` ends it, and the last line says why."""
    app = tmp_path / "badly"
    app.mkdir()
    (app / "__init__.py").touch()
    (app / "jobs.py").write_text(
        "from django_durable_jobs import schedule\n"
        "schedule('nightly', '0 0 31 2 *', 'tests.report')\n"
    )
    env = environment(INSTALLED_APPS=["django_durable_jobs", "badly"])
    env["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    result = manage("check", env=env)
    assert result.returncode == 1
    assert "InvalidSchedule: Schedule 'nightly': cron: day of month" in result.stderr
    assert "never comes" in result.stderr.splitlines()[-1]


def test_declaring_needs_no_settings_and_no_apps() -> None:
    code = """
import sys
from django_durable_jobs import schedule, unschedule
assert "croniter" not in sys.modules, "only who declares schedules pays for it"
schedule("nightly", "30 2 * * *", "shop.report", {"a": 1}, timezone="Europe/Paris")
unschedule("nightly")
assert "django_durable_jobs.models" not in sys.modules
"""
    env = {"PYTHONPATH": str(ROOT), "PATH": ""}
    subprocess.run([sys.executable, "-W", "error", "-c", code], env=env, check=True, timeout=120)


# Warnings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cron", "timezone", "warned"),
    [
        ("*/15 * * * *", "Europe/Paris", True),
        ("0 */2 * * *", "Australia/Lord_Howe", True),
        ("*/15 * * * *", "UTC", False),
        ("*/15 * * * *", "Asia/Tokyo", False),
        ("30 2 * * *", "Europe/Paris", False),
        ("0 8,20 * * *", "Europe/Paris", False),
    ],
)
def test_an_interval_in_a_zone_with_summer_time(
    report: Any, cron: str, timezone: str, warned: bool
) -> None:
    schedule("often", cron, report, Report("x"), timezone=timezone)
    with FakeClock(utc("2026-06-01T00:00")):
        messages = found()
    assert [identifier for identifier, _ in messages] == ["W001"] * warned
    if warned:
        assert 'timezone="UTC"' in messages[0][1] and cron in messages[0][1]


def test_a_grace_shorter_than_two_polls(report: Any) -> None:
    schedule("all", "0 0 * * *", report, Report("x"), grace=0)
    schedule("soon", "0 0 * * *", report, Report("x"), grace=1.9, catch_up="none")
    schedule("later", "0 0 * * *", report, Report("x"), grace=2, catch_up="latest")
    [(identifier, message)] = found()
    assert identifier == "W001"
    assert "'soon'" in message and "grace=1.9" in message and "2 s" in message
