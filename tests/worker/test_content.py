"""What a handler gives or raises is recorded whatever it holds (CONTRACT 3.14, FAULTS 17)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from django_durable_jobs import JobContext, PermanentError, RetryLater, job
from django_durable_jobs.handlers import Handler, Registry
from django_durable_jobs.models import Job, JobAttempt

from .support import drain, fresh, only_attempt

pytestmark = pytest.mark.django_db(transaction=True)

BIG = 50 * 1024 * 1024


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def cyclic() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


@dataclasses.dataclass
class Point:
    x: int
    y: int


def run_each(handler: Handler[..., Any], number: int) -> list[Job]:
    """Run one job for each number, one after another in one slot."""
    ran = [handler.submit(job_id=str(index)) for index in range(number)]
    drain()
    return [fresh(one) for one in ran]


def test_a_result_is_stored_as_json(handlers: Registry) -> None:
    results = [
        (None, None),
        (0, 0),
        ("a\0b", "a\0b"),
        ("\N{SNOWMAN}\U0001f600", "\N{SNOWMAN}\U0001f600"),
        ({"list": [1, 2.5, True, None]}, {"list": [1, 2.5, True, None]}),
        (Point(1, 2), {"x": 1, "y": 2}),
    ]

    @job("content.gives")
    def gives(ctx: JobContext) -> Any:
        return results[int(ctx.job_id)][0]

    for done, (_, stored) in zip(run_each(gives, len(results)), results, strict=True):
        assert (done.status, done.result) == ("succeeded", stored)


def test_a_result_that_is_not_json_ends_the_job_as_failed(handlers: Registry) -> None:
    results = [
        "\ud800",
        {"\udfff": 1},
        math.nan,
        [math.inf],
        {1: "an int key"},
        object(),
        lambda: None,
        2**70,
        "x" * (64 * 1024),
        nested(5000),
        cyclic(),
    ]

    @job("content.gives")
    def gives(ctx: JobContext) -> Any:
        return results[int(ctx.job_id)]

    for ended, result in zip(run_each(gives, len(results)), results, strict=True):
        # Running the handler again would give the same.
        kind = type(result).__name__
        assert (ended.status, ended.error_category) == ("failed", "invalid_result"), kind
        assert (ended.result, ended.attempt_count) == (None, 1)
        assert (only_attempt(ended).status, only_attempt(ended).outcome) == ("failed", "returned")


# Exceptions that fight back ------------------------------------------------------------------


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Leaving(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class Endless(Exception):
    @property
    def __cause__(self) -> BaseException:
        return Endless()


class Hidden(PermanentError):
    @property
    def args(self) -> Any:
        raise KeyboardInterrupt


class Nameless(Exception):
    pass


Nameless.__module__ = "\ud800\0"
Nameless.__qualname__ = "\0" * 5000


def with_cyclic_causes() -> Exception:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    return first


def with_many_causes() -> Exception:
    error = ValueError("the last")
    for number in range(3000):
        error.__cause__ = cause = ValueError(f"cause {number}")
        error = cause
    return error


def group_of_groups() -> BaseException:
    error: Exception = ValueError("inner")
    for _ in range(200):
        error = ExceptionGroup("group", [error])
    return error


ERRORS: dict[str, Callable[[], BaseException]] = {
    "NUL": lambda: PermanentError("a\0b"),
    "surrogate": lambda: PermanentError("a\ud800b"),
    "huge": lambda: PermanentError("x" * BIG),
    "long, to try again": lambda: RetryLater(1, "x" * 100_000),
    "long, another's": lambda: ValueError("x" * 100_000),
    "not text": lambda: PermanentError(nested(3)),
    "no arguments": lambda: PermanentError.__new__(PermanentError),
    "mute": Mute,
    "leaving": Leaving,
    "endless": Endless,
    "hidden": Hidden,
    "nameless": Nameless,
    "cyclic causes": with_cyclic_causes,
    "many causes": with_many_causes,
    "groups": group_of_groups,
}


@pytest.mark.parametrize("detail", ["safe", "traceback"])
def test_an_error_is_recorded_whatever_it_is(
    handlers: Registry, durable_jobs: Callable[..., None], detail: str
) -> None:
    durable_jobs(ERROR_DETAIL=detail)
    names = list(ERRORS)

    @job("content.raises", max_attempts=1)
    def raises(ctx: JobContext) -> None:
        raise ERRORS[names[int(ctx.job_id)]]()

    for name, ended in zip(names, run_each(raises, len(names)), strict=True):
        attempt = only_attempt(ended)
        found = (ended.status, attempt.status, attempt.outcome)
        assert found == ("failed", "failed", "raised"), name
        permanent = name in ("NUL", "surrogate", "huge", "not text", "no arguments", "hidden")
        assert ended.error_category == ("permanent" if permanent else "handler_error"), name
        assert 0 < len(ended.error_summary) <= 1000, name
        assert ended.error_summary == attempt.error_summary
        assert ended.error_traceback == attempt.error_traceback
        if detail == "safe":
            assert ended.error_traceback is None
        else:
            assert 0 < len(ended.error_traceback) <= 20_000, name


SECRET = "hunter2-in-a-payload"


@dataclasses.dataclass
class Login:
    password: str


def stored_errors(failed: Job) -> str:
    of_job = Job.objects.filter(pk=failed.pk).values(
        "error_category", "error_summary", "error_traceback", "progress_message", "result"
    )
    of_attempts = JobAttempt.objects.filter(job=failed).values(
        "error_category", "error_summary", "error_traceback"
    )
    return repr([*of_job, *of_attempts])


@pytest.mark.parametrize("detail", ["safe", "traceback"])
def test_a_stored_error_tells_the_class_and_the_place_and_no_content(
    handlers: Registry, durable_jobs: Callable[..., None], detail: str
) -> None:
    durable_jobs(ERROR_DETAIL=detail)

    @job("content.logs_in", max_attempts=1)
    def logs_in(ctx: JobContext, payload: Login) -> None:
        try:
            raise KeyError(payload.password)
        except KeyError as error:
            raise ValueError(f"cannot log in with {payload.password}") from error

    failed = logs_in.submit(Login(SECRET))
    drain()
    summary = fresh(failed).error_summary
    assert summary.startswith(f"ValueError at {__name__}:logs_in:")
    assert SECRET not in summary
    if detail == "safe":
        assert SECRET not in stored_errors(failed)
    else:
        # The project opted in to all of it, the cause included.
        text = fresh(failed).error_traceback
        assert "cannot log in with" in text
        assert text.index("KeyError") < text.index("ValueError: cannot")
        assert "raise ValueError" in text


def test_a_result_that_is_refused_is_not_quoted(handlers: Registry) -> None:
    @job("content.leaks")
    def leaks(ctx: JobContext, payload: Login) -> Any:
        return {"password": payload.password, "object": object()}

    failed = leaks.submit(Login(SECRET))
    drain()
    assert fresh(failed).error_category == "invalid_result"
    assert "object" in fresh(failed).error_summary
    assert SECRET not in stored_errors(failed)


def test_a_corrupt_payload_is_not_quoted(handlers: Registry, caplog: Any) -> None:
    @job("content.reads")
    def reads(ctx: JobContext, payload: Login) -> None:
        raise AssertionError("it must not run")

    corrupt = reads.submit(Login("x"))
    Job.objects.filter(pk=corrupt.pk).update(payload=f'{{"password": "{SECRET}"}}')
    drain()
    assert fresh(corrupt).blocked_reason == "corrupt_payload"
    assert SECRET not in stored_errors(corrupt)
    assert SECRET not in caplog.text


def test_a_progress_message_is_never_refused(handlers: Registry) -> None:
    messages = [
        ("a\0b", "a\N{REPLACEMENT CHARACTER}b"),
        ("a\ud800b", "a\N{REPLACEMENT CHARACTER}b"),
        ("x" * 501, "x" * 499 + "…"),
        ("x" * BIG, "x" * 499 + "…"),
        (17, "17"),
        (Mute(), "<Mute without text>"),
    ]

    @job("content.reports")
    def reports(ctx: JobContext) -> None:
        ctx.progress(0.5, messages[int(ctx.job_id)][0])

    for done, (_, stored) in zip(run_each(reports, len(messages)), messages, strict=True):
        assert (done.status, done.progress_message) == ("succeeded", stored)


def test_a_checkpoint_that_is_not_json_is_refused_to_the_handler(handlers: Registry) -> None:
    values = ["\ud800", math.nan, object(), "x" * (64 * 1024), nested(5000), cyclic()]

    @job("content.keeps")
    def keeps(ctx: JobContext) -> str:
        ctx.checkpoint({"good": "\0"})
        with pytest.raises(ValueError, match="JSON"):
            ctx.checkpoint(values[int(ctx.job_id)])
        return "went on"

    for done in run_each(keeps, len(values)):
        assert (done.status, done.result) == ("succeeded", "went on")
        assert done.checkpoint == {"good": "\0"}
