"""What a handler gives or raises is recorded whatever it holds (CONTRACT 3.14, FAULTS 17)."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction

from django_durable_jobs import JobContext, PermanentError, RetryLater, job
from django_durable_jobs.handlers import Handler, Registry
from django_durable_jobs.models import Job, JobAttempt
from django_durable_jobs.payloads import OptionalResult
from django_durable_jobs.testing import drain as kit_drain

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


class Exits(dict[str, int]):
    """Its own code ends the interpreter, were it not caught."""

    def __iter__(self) -> Any:
        raise SystemExit(3)

    keys = items = values = __iter__


def test_a_result_whose_code_raises_an_exit_ends_the_attempt(handlers: Registry) -> None:
    @job("content.exits")
    def exits(ctx: JobContext) -> Any:
        return Exits(a=1)

    (done,) = run_each(exits, 1)
    assert (done.status, done.error_category) == ("failed", "invalid_result")
    assert "SystemExit" in (done.error_summary or "")
    exits.submit()
    (attempt,) = kit_drain()
    assert (attempt.status, attempt.outcome) == ("failed", "returned")


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
        assert f"NotStorable at {__name__}:gives:" in ended.error_summary, kind


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


class Untraceable(Exception):
    @property
    def __traceback__(self) -> Any:
        raise SystemExit(3)


class Bottomless(ExceptionGroup[Exception]):
    """A group that holds a new group of its own kind each time it is looked into."""

    @property
    def exceptions(self) -> Any:
        return (Bottomless("inner", [ValueError()]),)


def local_class() -> Exception:
    class Local(Exception):
        pass

    return Local("x")


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


def group_of_endless_ones() -> BaseException:
    return BaseExceptionGroup("group", [Endless(), Mute(), Leaving()])


def group_of_many() -> BaseException:
    return ExceptionGroup("group", [ValueError(number) for number in range(50_000)])


def from_thousands_of_frames() -> BaseException:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        deep(5000)
    except ValueError as error:
        return error
    finally:
        sys.setrecursionlimit(limit)
    raise AssertionError


def deep(left: int) -> None:
    if not left:
        raise ValueError("at the bottom")
    deep(left - 1)


def without_end() -> None:
    without_end()


def from_recursion() -> BaseException:
    try:
        without_end()
    except RecursionError as error:
        return error
    raise AssertionError


def from_a_long_line() -> BaseException:
    try:
        exec(compile(f"{' ' * 100_000}1 / 0", "<made>", "exec"))  # noqa: S102
    except (ZeroDivisionError, IndentationError) as error:
        return error
    raise AssertionError


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
    "endless group": group_of_endless_ones,
    "wide group": group_of_many,
    "bottomless group": lambda: Bottomless("outer", [ValueError()]),
    "untraceable": Untraceable,
    "local class": local_class,
    "thousands of frames": from_thousands_of_frames,
    "recursion": from_recursion,
    "a long line": from_a_long_line,
}


@pytest.mark.parametrize("detail", ["safe", "traceback"])
def test_an_error_is_recorded_whatever_it_is(
    handlers: Registry, durable_jobs: Callable[..., None], detail: str, caplog: Any
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
        assert 0 < len(ended.error_summary.encode()) <= 1000, name
        assert ended.error_summary == attempt.error_summary
        assert ended.error_traceback == attempt.error_traceback
        if detail == "safe":
            assert ended.error_traceback is None
        else:
            assert 0 < len(ended.error_traceback.encode()) <= 20_000, name
        # One line in the log for each, whatever it is.
        said = [text for text in caplog.messages if f"job {ended.job_id} (attempt 1" in text]
        assert len(said) == 1, name


def test_an_error_of_a_local_class_deep_down_is_told_by_class_and_place(
    handlers: Registry, durable_jobs: Callable[..., None]
) -> None:
    durable_jobs(ERROR_DETAIL="traceback")

    @job("content.raises", max_attempts=1)
    def raises(ctx: JobContext) -> None:
        raise (local_class, from_thousands_of_frames)[int(ctx.job_id)]()

    local, deep_down = run_each(raises, 2)
    name = f"{__name__}.local_class.<locals>.Local"
    assert local.error_summary.startswith(f"{name} at {__name__}:raises:")
    assert local.error_traceback.endswith(f"{name}: x\n")
    assert deep_down.error_summary.startswith(f"ValueError at {__name__}:deep:")
    assert deep_down.error_traceback.endswith("ValueError: at the bottom\n")


def test_a_group_tells_what_it_holds(
    handlers: Registry, durable_jobs: Callable[..., None], caplog: Any
) -> None:
    durable_jobs(ERROR_DETAIL="traceback")

    @job("content.raises", max_attempts=1)
    def raises(ctx: JobContext) -> None:
        inner = ExceptionGroup("inner", [KeyError("a"), OSError("b")])
        raise ExceptionGroup("outer", [ValueError("c"), inner]) from TypeError("d")

    (failed,) = run_each(raises, 1)
    told = failed.error_traceback
    assert "TypeError: d" in told
    for line in ("ValueError: c", "KeyError: 'a'", "OSError: b"):
        assert f"  in the group: {line}\n" in told
        assert line in caplog.text
    assert f"ExceptionGroup at {__name__}:raises:" in failed.error_summary


def test_the_log_has_the_whole_traceback(handlers: Registry, caplog: Any) -> None:
    @job("content.raises", max_attempts=1)
    def raises(ctx: JobContext) -> None:
        try:
            deep(300)
        except ValueError as error:
            raise KeyError("x" * 30_000) from error

    run_each(raises, 1)
    text = caplog.text
    assert "at the bottom" in text
    assert "x" * 30_000 in text
    assert "direct cause" in text


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


def test_a_result_that_is_optional_never_fails_the_attempt(handlers: Registry, caplog: Any) -> None:
    results = [object(), math.nan, "x" * (64 * 1024), cyclic(), {"fine": [1]}]

    @job("content.returns")
    def returns(ctx: JobContext) -> OptionalResult:
        return OptionalResult(results[int(ctx.job_id)])

    @job("content.completes")
    def completes(ctx: JobContext) -> None:
        with transaction.atomic():
            ctx.complete(OptionalResult(results[int(ctx.job_id) - 100]))

    ran = [returns.submit(job_id=str(number)) for number in range(len(results))]
    ran += [completes.submit(job_id=str(100 + number)) for number in range(len(results))]
    drain()
    for number, one in enumerate(ran):
        expected = {"fine": [1]} if number % len(results) == 4 else None
        assert (fresh(one).status, fresh(one).result) == ("succeeded", expected)
        left_out = f"job {one.job_id} goes without its result" in caplog.text
        assert left_out == (expected is None)


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
        ("x" * 500, "x" * 500),
        ("x" * 501, "x" * 497 + "…"),
        ("\U0001f600" * 126, "\U0001f600" * 124 + "…"),
        ("x" * BIG, "x" * 497 + "…"),
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
