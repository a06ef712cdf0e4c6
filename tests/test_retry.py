"""When a job is tried again: number, sequence, function and the default."""

from __future__ import annotations

import datetime
import logging
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_durable_jobs.exceptions import InvalidHandler
from django_durable_jobs.retry import (
    MAX_DELAY_SECONDS,
    backoff_seconds,
    retry_later_seconds,
    to_seconds,
    validate_backoff,
)
from tests._marks import shown

ERROR = ValueError("x")


class Fixed:
    """Draws a given share of the interval."""

    def __init__(self, share: float) -> None:
        self.share = share

    def uniform(self, a: float, b: float) -> float:
        return a + (b - a) * self.share


def seconds(policy: Any, attempt: int = 1, *, share: float = 1.0, **options: Any) -> Any:
    limits = {"base": 1, "cap": 300, **options}
    return backoff_seconds(validate_backoff(policy), ERROR, attempt, rng=Fixed(share), **limits)


def test_the_default_doubles_up_to_the_cap() -> None:
    top = [seconds(None, attempt) for attempt in range(1, 12)]
    assert top == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert [seconds(None, attempt, share=0) for attempt in (1, 2, 10)] == [0.5, 1, 150]


@given(
    st.integers(-5, 10**6),
    st.floats(0, 31_536_000),
    st.floats(0, 31_536_000),
    st.integers(0, 2**32),
)
def test_the_default_lies_in_the_upper_half(
    attempt: int, base: float, cap: float, seed: int
) -> None:
    delay = min(cap, base * 2.0 ** min(max(attempt, 1) - 1, 200))
    rng = random.Random(seed)
    found = backoff_seconds(None, ERROR, attempt, base=base, cap=cap, rng=rng)
    assert found is not None
    assert delay / 2 <= found <= delay <= cap


def test_the_draw_is_even_and_random_without_a_source() -> None:
    found = [backoff_seconds(None, ERROR, 3, base=1, cap=300) for _ in range(500)]
    assert all(value is not None and 2 <= value <= 4 for value in found)
    assert len(set(found)) > 400


def test_a_huge_attempt_does_not_overflow() -> None:
    assert seconds(None, 10**6) == 300
    assert seconds(None, 10**6, base=1e-300) <= 300
    assert seconds(None, 10**6, base=0) == 0


def test_a_number_counts_as_it_is() -> None:
    assert seconds(5, 9, cap=1) == 5.0
    assert seconds(0) == 0.0
    assert seconds(datetime.timedelta(minutes=1)) == 60.0


def test_the_last_of_a_sequence_repeats() -> None:
    policy = [1, 2.5, datetime.timedelta(seconds=9)]
    assert [seconds(policy, attempt) for attempt in (0, 1, 2, 3, 4, 10**6)] == [1, 1, 2.5, 9, 9, 9]


def test_a_changed_list_changes_nothing() -> None:
    given_list = [1]
    policy = validate_backoff(given_list)
    given_list[0] = 99
    assert policy == (1.0,)


def test_a_function_decides_by_exception_and_attempt() -> None:
    seen: list[Any] = []

    def backoff(exception: BaseException, attempt: int) -> float:
        seen.append((exception, attempt))
        return attempt * 2

    assert seconds(backoff, 4) == 8.0
    assert seen == [(ERROR, 4)]
    assert seconds(lambda exception, attempt: None) is None
    assert seconds(lambda exception, attempt: datetime.timedelta(seconds=3)) == 3.0


@pytest.mark.parametrize(
    "answer",
    [-1, math.nan, math.inf, -math.inf, "5", True, MAX_DELAY_SECONDS + 1, 10**400, object()],
    ids=shown,
)
def test_a_function_that_gives_no_delay_is_logged_and_the_default_taken(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "django_durable_jobs"):
        assert seconds(lambda exception, attempt: answer, 3) == 4
    assert type(answer).__name__ in caplog.text


def test_what_a_function_raises_is_for_the_caller_to_see_to() -> None:
    with pytest.raises(ZeroDivisionError):
        seconds(lambda exception, attempt: 1 // 0, 3)


class Callback:
    def __call__(self, exception: BaseException, attempt: int) -> int:
        return 7


def test_any_callable_of_two_arguments_is_a_policy() -> None:
    assert seconds(Callback()) == 7
    assert seconds(lambda *args: 6) == 6
    assert validate_backoff(max) is max  # has no signature to read
    assert validate_backoff(None) is None


async def asynchronous(exception: BaseException, attempt: int) -> int:
    return 1


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (-1, "seconds from 0"),
        (math.nan, "seconds from 0"),
        (math.inf, "seconds from 0"),
        (True, "seconds from 0"),
        (10**400, "seconds from 0"),
        (MAX_DELAY_SECONDS * 2, "ten years"),
        (datetime.timedelta(days=-1), "seconds from 0"),
        ("exponential", "seconds from 0"),
        (b"x", "seconds from 0"),
        ({1, 2}, "seconds from 0"),
        ([], "empty sequence"),
        ([1, None], "seconds from 0"),
        ([1, [2]], "seconds from 0"),
        (lambda exception: 1, "(exception, attempt)"),
        (lambda: 1, "(exception, attempt)"),
        (asynchronous, "async"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_policy_that_cannot_work_is_refused_at_registration(policy: Any, says: str) -> None:
    with pytest.raises(InvalidHandler) as caught:
        validate_backoff(policy)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("delay", "expected"),
    [
        (5, 5.0),
        (0.5, 0.5),
        (datetime.timedelta(minutes=1), 60.0),
        (-3, 0.0),
        (datetime.timedelta(days=-1), 0.0),
        (MAX_DELAY_SECONDS * 5, MAX_DELAY_SECONDS),
        (datetime.timedelta.max, MAX_DELAY_SECONDS),
    ],
)
def test_retry_later_is_bounded(delay: Any, expected: float) -> None:
    assert retry_later_seconds(delay) == expected


@pytest.mark.parametrize(
    "delay", [math.nan, math.inf, -math.inf, "5", None, True, 10**400, -(10**400)]
)
def test_retry_later_without_a_delay_is_logged(
    delay: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "django_durable_jobs"):
        assert retry_later_seconds(delay) is None
    assert "RetryLater" in caplog.text


def test_to_seconds_takes_numbers_and_timedeltas() -> None:
    assert to_seconds(1) == 1.0
    assert to_seconds(datetime.timedelta(seconds=2)) == 2.0
    assert to_seconds(-1) is None
    assert to_seconds("1") is None
