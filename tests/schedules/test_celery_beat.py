"""``manage.py jobs read-celery-beat``: what it prints is Python that declares the same minutes."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from django_durable_jobs import JobContext, job
from django_durable_jobs.payloads import JSON
from django_durable_jobs.schedules.declaration import Schedule, registry
from django_durable_jobs.schedules.expression import parse

pytestmark = pytest.mark.django_db

# The columns as django-celery-beat 2.x makes them.
TABLES = {
    "crontabschedule": "minute text, hour text, day_of_month text, month_of_year text,"
    " day_of_week text, timezone text",
    "intervalschedule": "every integer, period text",
    "solarschedule": "event text, latitude numeric, longitude numeric",
    "clockedschedule": "clocked_time text",
    "periodictask": "name text, task text, args text, kwargs text, queue text, exchange text,"
    " routing_key text, headers text, priority integer, expires text, expire_seconds integer,"
    " one_off boolean, start_time text, enabled boolean, last_run_at text,"
    " total_run_count integer, date_changed text, description text, crontab_id integer,"
    " interval_id integer, solar_id integer, clocked_id integer",
}


class Tables:
    """Rows as django-celery-beat stores them."""

    def __init__(self) -> None:
        self._count = 0

    def insert(self, table: str, **values: Any) -> int:
        self._count += 1
        values = {"id": self._count, **values}
        marks = ", ".join(["%s"] * len(values))
        with connection.cursor() as cursor:
            cursor.execute(
                f"INSERT INTO django_celery_beat_{table} ({', '.join(values)}) VALUES ({marks})",
                list(values.values()),
            )
        return self._count

    def task(self, name: str, **values: Any) -> None:
        plain = {"task": "shop.tasks.report", "args": "[]", "kwargs": "{}", "headers": "{}"}
        flags = {"one_off": False, "enabled": True, "description": ""}
        self.insert("periodictask", **{"name": name, **plain, **flags, **values})

    def crontab(self, text: str, timezone: str = "UTC") -> int:
        names = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
        fields = dict(zip(names, text.split("|") if "|" in text else text.split(), strict=True))
        return self.insert("crontabschedule", timezone=timezone, **fields)


@pytest.fixture
def tables() -> Iterator[Tables]:
    with connection.cursor() as cursor:
        for table, columns in TABLES.items():
            cursor.execute(f"CREATE TABLE django_celery_beat_{table} (id integer, {columns})")
    yield Tables()
    with connection.cursor() as cursor:
        for table in TABLES:
            cursor.execute(f"DROP TABLE django_celery_beat_{table}")


def printed(*arguments: str) -> str:
    out = io.StringIO()
    call_command("jobs", "read-celery-beat", *arguments, stdout=out)
    return out.getvalue()


def declared() -> dict[str, Schedule]:
    """Run what is printed, as a ``jobs.py`` would; give what it declares."""

    @job("shop.tasks.report")
    def report(ctx: JobContext, payload: dict[str, JSON] | None) -> None: ...

    exec(compile(printed(), "jobs.py", "exec"), {})  # noqa: S102
    return {one.name: one for one in registry.all()}


def test_a_crontab_becomes_a_schedule(tables: Tables) -> None:
    tables.task(
        "Nightly",
        crontab_id=tables.crontab("30 2 * * mon-fri", "Europe/Paris"),
        kwargs='{"kind": "full", "deep": [1, null, true]}',
        queue="reports",
        description="Every 'night'\nof work",
    )
    found = declared()["Nightly"]
    assert (found.cron, found.timezone) == ("30 2 * * mon-fri", "Europe/Paris")
    assert found.payload == {"kind": "full", "deep": [1, None, True]}
    made = found.submission()
    assert (made.queue, made.handler) == ("reports", "shop.tasks.report")
    assert found.description == "Every 'night'\nof work"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("* * * * *", "* * * * *"),
        ("*/15 8-18/2 1,15 * *", "*/15 8-18/2 1,15 * *"),
        # Ranges of theirs wrap around.
        ("0 22-4 * * *", "0 0-4,22-23 * * *"),
        ("0 0 * * fri-mon", "0 0 * * 0,1,5,6"),
        ("0 20-3/2 * * *", "0 20,22,0,2 * * *"),
        ("0 0 * nov-feb *", "0 0 * 1,2,11,12 *"),
        ("0 0 * * sunday,Wednesday", "0 0 * * 0,3"),
        # Written out, and yet every day: with the other field they name both.
        ("0 0 1-31 * 1", "0 0 * * 1"),
        ("0 0 13 * 0-6", "0 0 13 * *"),
        ("0, 30|*|*|*|*", "0,30 * * * *"),
        ("*/60 * * * *", "0 * * * *"),
    ],
)
def test_their_fields_mean_the_same_here(tables: Tables, theirs: str, ours: str) -> None:
    tables.task("it", crontab_id=tables.crontab(theirs))
    assert declared()["it"].expression == parse(ours)


@pytest.mark.parametrize(
    ("every", "period", "ours"),
    [
        (1, "minutes", "* * * * *"),
        (120, "seconds", "*/2 * * * *"),
        (15, "minutes", "*/15 * * * *"),
        (1, "hours", "0 * * * *"),
        (60, "minutes", "0 * * * *"),
        (6, "hours", "0 */6 * * *"),
        (1, "days", "0 0 * * *"),
        (24, "hours", "0 0 * * *"),
        (7, "days", "0 0 * * 0"),
    ],
)
def test_an_interval_that_divides_evenly(
    tables: Tables, every: int, period: str, ours: str
) -> None:
    tables.task("it", interval_id=tables.insert("intervalschedule", every=every, period=period))
    assert declared()["it"].expression == parse(ours)
    assert "# 'it': it counted from its last run;" in printed()


def test_what_cannot_be_said_is_a_comment_that_says_why(tables: Tables) -> None:
    crontab = tables.crontab("0 0 * * *")
    tables.task("both days", crontab_id=tables.crontab("0 0 13 * fri"))
    tables.task("no such zone", crontab_id=tables.crontab("0 0 * * *", "Mars/Base"))
    tables.task("never", crontab_id=tables.crontab("0 0 31 2 *"))
    tables.task("strange", crontab_id=tables.crontab("0 x * * *"))
    tables.task("no step", crontab_id=tables.crontab("*/0 * * * *"))
    for every, period in ((10, "seconds"), (7, "minutes"), (2, "days"), (5, "microseconds")):
        key = tables.insert("intervalschedule", every=every, period=period)
        tables.task(f"each {every} {period}", interval_id=key)
    sun = tables.insert("solarschedule", event="sunset", latitude=1, longitude=2)
    tables.task("sun", solar_id=sun)
    clocked = tables.insert("clockedschedule", clocked_time="2030-01-01 00:00:00")
    tables.task("clocked", clocked_id=clocked)
    tables.task("once", crontab_id=crontab, one_off=True)
    tables.task("nothing")
    tables.task("no json", crontab_id=crontab, kwargs="{")
    tables.task("nan", crontab_id=crontab, kwargs='{"a": NaN}')
    tables.task("no dict", crontab_id=crontab, kwargs="[1]")
    reasons = {
        "both days": "here either would do",
        "no such zone": "timezone must be a name",
        "never": "never comes",
        "strange": "hour 'x' is not understood",
        "no step": "'*/0' is not understood",
        "each 10 seconds": "not of whole minutes",
        "each 7 minutes": "divides neither",
        "each 2 days": "divides neither",
        "each 5 microseconds": "not of whole minutes",
        "sun": "follows the sun (sunset)",
        "clocked": "run once, at 2030-01-01 00:00:00",
        "once": "run once: stage its job with run_at=",
        "nothing": "has no schedule",
        "no json": "kwargs are not JSON",
        "nan": "kwargs are not JSON",
        "no dict": "kwargs are no JSON dict",
    }
    text = printed()
    for name, reason in reasons.items():
        [line] = [one for one in text.splitlines() if repr(name) in one]
        assert line.startswith(f"# Not translated: {name!r} (task 'shop.tasks.report'): ")
        assert reason in line
    assert declared() == {}
    found = json.loads(printed("--json"))
    assert [one["name"] for one in found] == list(reasons)
    assert not any(one["translated"] for one in found)


def test_what_has_no_counterpart_is_noted(tables: Tables) -> None:
    crontab = tables.crontab("0 0 * * *")
    tables.task("positional", crontab_id=crontab, args="[1, 2]")
    tables.task("more", crontab_id=crontab, priority=200, expire_seconds=5, start_time="2030-01-01")
    tables.task("off", crontab_id=crontab, enabled=False)
    tables.task("celery.backend_cleanup", crontab_id=crontab, task="celery.backend_cleanup")
    text = printed()
    assert "# 'positional': its positional arguments were [1, 2]: name them." in text
    assert "# 'more': its priority was 200" in text
    assert "# 'more': it expired there" in text and "# 'more': it was to start at 2030" in text
    assert "cleanup" not in text
    # What was disabled stands there as a comment.
    assert set(declared()) == {"positional", "more"}
    assert "#     'off'," in text


@pytest.mark.parametrize(
    "evil",
    [
        "x\nimport os; os.abort()",
        "x'); import os; os.abort()#",
        'x"""\nraise SystemExit',
        "x\r\u2028\x0craise SystemExit",
    ],
)
def test_nothing_that_stands_in_a_row_becomes_code(tables: Tables, evil: str) -> None:
    crontab = tables.crontab("0 0 * * *")
    tables.task(evil, crontab_id=crontab, description=evil, kwargs=json.dumps({evil: evil}))
    tables.task(f"{evil}2", crontab_id=crontab, args=json.dumps([evil]), start_time=evil)
    tables.task(f"{evil}3", crontab_id=tables.crontab(f"{evil}|0|*|*|*"), task=evil)
    tables.task(f"{evil}4", clocked_id=tables.insert("clockedschedule", clocked_time=evil))
    tables.task(
        f"{evil}5", interval_id=tables.insert("intervalschedule", every=7, period=evil[:24])
    )
    tables.task(f"{evil}6", solar_id=tables.insert("solarschedule", event=evil))
    found = declared()
    assert set(found) == {evil, f"{evil}2"}
    assert found[evil].payload == {evil: evil}


def test_without_the_tables() -> None:
    with pytest.raises(CommandError, match="no table django_celery_beat_periodictask"):
        printed()
