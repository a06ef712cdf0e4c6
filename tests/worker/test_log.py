"""What a worker writes down: a line for each end, text or JSON, in one piece (CONTRACT 4.9)."""

from __future__ import annotations

import io
import json
import logging
import re
from typing import Any

import pytest
from django.core.management import call_command
from django.db import transaction

from django_durable_jobs import JobContext, job
from django_durable_jobs.handlers import Registry
from django_durable_jobs.worker import log

from ..testapp import jobs
from .conftest import StartWorker
from .support import drain

pytestmark = pytest.mark.django_db(transaction=True)

END = re.compile(
    r"job (\d+) (\S+|'.*') of (\S+) on (\S+), attempt (\d): (\w+) after (\d+\.\d{3}) s, (\w+)$"
)


@pytest.fixture
def ends(handlers: Registry) -> dict[str, Any]:
    """Jobs that end in every way, by their ids."""

    @job("log.returns")
    def returns(ctx: JobContext) -> None: ...

    @job("log.completes")
    def completes(ctx: JobContext) -> None:
        with transaction.atomic():
            ctx.complete()

    @job("log.raises", max_attempts=2, backoff=1000)
    def raises(ctx: JobContext) -> None:
        raise ValueError("a secret")

    made = [
        returns.submit(job_id="fine"),
        returns.submit(job_id="two\nlines", queue="other"),
        completes.submit(job_id="completed"),
        raises.submit(job_id="raised"),
    ]
    return {one.job_id: one for one in made}


def command(*arguments: str, **options: Any) -> str:
    err = io.StringIO()
    call_command("runjobs", "--drain", *arguments, stdout=io.StringIO(), stderr=err, **options)
    return err.getvalue()


def test_each_end_is_one_readable_line(ends: dict[str, Any]) -> None:
    lines = command("--log-format=text").splitlines()
    found = {match[2]: match.groups()[2:] for line in lines if (match := END.search(line))}
    seconds = {key: float(groups[4]) for key, groups in found.items()}
    assert {key: (*groups[:4], groups[5]) for key, groups in found.items()} == {
        "fine": ("log.returns", "default", "1", "returned", "succeeded"),
        r"'two\nlines'": ("log.returns", "other", "1", "returned", "succeeded"),
        "completed": ("log.completes", "default", "1", "returned", "succeeded"),
        "raised": ("log.raises", "default", "1", "raised", "scheduled"),
    }
    assert all(0 <= one < 30 for one in seconds.values())


def test_json_lines_hold_every_value_and_the_traceback(ends: dict[str, Any]) -> None:
    records = [json.loads(line) for line in command("--log-format=json").splitlines()]
    by_id = {one["job_id"]: one for one in records if "job_id" in one}
    assert by_id.keys() == ends.keys()
    two = by_id["two\nlines"]
    assert (two["job"], two["queue"], two["attempt"]) == (ends["two\nlines"].pk, "other", 1)
    assert (two["outcome"], two["status"], two["scope"]) == ("returned", "succeeded", "")
    assert all({"time", "level", "logger", "message"} <= one.keys() for one in records)
    (error,) = [one for one in records if one["level"] == "ERROR"]
    assert "ValueError: a secret" in error["exception"]
    # Only errors.
    assert command("--log-format=json", verbosity=0) == ""


def test_the_project_s_handlers_get_a_record_for_each(
    ends: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "django_durable_jobs"):
        drain()
    records = [one for one in caplog.records if hasattr(one, "outcome")]
    assert sorted(one.job_id for one in records) == sorted(ends)  # type: ignore[attr-defined]
    assert all(END.search(one.getMessage()) for one in records)


def test_under_django_s_default_logging_it_is_seen_without_an_option(
    start_worker: StartWorker, tmp_path: Any
) -> None:
    one = jobs.line.submit(jobs.Line(file=str(tmp_path / "lines"), number=1))
    worker = start_worker("--drain")
    assert worker.ends() == 0
    (line,) = [line for line in worker.output().splitlines() if END.search(line)]
    assert f"INFO job {one.pk} {one.job_id} of testapp.line on default" in line


def test_lines_go_out_in_pieces_that_a_pipe_takes_whole() -> None:
    pieces: list[str] = []
    lines = log.Lines(pieces.append, log.TEXT)
    long = "x" * (log.CHUNK + 1)
    ends = [
        log.Ended(
            job=number,
            job_id=long if number == 50 else "id",
            scope="",
            handler="h",
            queue="q",
            attempt=1,
            seconds=0.5,
            outcome="returned",
            status="succeeded",
        )
        for number in range(100)
    ]
    lines.show(ends)
    written = "".join(pieces).splitlines()
    assert [END.search(line)[1] for line in written] == [str(one.job) for one in ends]  # type: ignore[index]
    assert all(piece.endswith("\n") for piece in pieces)
    assert [len(piece) > log.CHUNK for piece in pieces].count(True) == 1
    assert 3 < len(pieces) < 10


def test_the_log_is_put_back_as_it_was() -> None:
    def state() -> list[Any]:
        loggers = [logging.getLogger(name) for name in (log.LOGGER, log.logger.name)]
        return [(one.level, one.propagate, list(one.handlers)) for one in loggers]

    before = state()
    undo = log.show_log(lambda text: None, 1, log.JSON)
    assert state() != before
    undo()
    assert state() == before
    # Under pytest the root logger has handlers: nothing is shown twice.
    undo = log.show_log(lambda text: None, 1)
    assert state() == before
    undo()
