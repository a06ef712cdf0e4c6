"""When a failed job is tried again: from a policy to a number of seconds. Pure.

A backoff that misbehaves must not cost the job its outcome: an answer that cannot be used
is logged and the default is taken (CONTRACT 3.4).
"""

from __future__ import annotations

import datetime
import inspect
import logging
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from asgiref.sync import iscoroutinefunction

from .exceptions import InvalidHandler

MAX_DELAY_SECONDS = 10 * 365 * 86_400.0
logger = logging.getLogger("django_durable_jobs")

Seconds = int | float | datetime.timedelta
BackoffFunction = Callable[[BaseException, int], Seconds | None]
Backoff = Seconds | Sequence[Seconds] | BackoffFunction | None
Policy = float | tuple[float, ...] | BackoffFunction | None


class _Random(Protocol):
    def uniform(self, a: float, b: float, /) -> float: ...


def backoff_seconds(
    policy: Policy,
    exception: BaseException,
    attempt: int,
    *,
    base: float,
    cap: float,
    rng: _Random | Any = random,
) -> float | None:
    """Give the seconds to wait after attempt ``attempt`` (from 1); ``None``: do not retry.

    ``policy`` is what ``validate_backoff`` gave. A number counts as it is, a sequence by
    attempt (the last one repeats), a function decides by itself. Without one: ``base``
    doubled per attempt up to ``cap``, drawn evenly from its upper half. A function that
    gives no delay of 0 seconds to ten years is logged and the default is used; what it
    raises is the caller's to see to.
    """
    if policy is None:
        return _default(attempt, base, cap, rng)
    if isinstance(policy, tuple):
        return policy[min(max(attempt, 1), len(policy)) - 1]
    if not callable(policy):
        return float(policy)
    answer = policy(exception, attempt)
    if answer is None:
        return None
    seconds = to_seconds(answer)
    if seconds is None:
        logger.error(
            "A backoff function gave a %s that is no delay of 0 seconds to ten years; "
            "the default backoff is used.",
            type(answer).__name__,
        )
        return _default(attempt, base, cap, rng)
    return seconds


def retry_later_seconds(delay: object) -> float | None:
    """Give the seconds of a ``RetryLater``, at least 0 and at most ten years.

    A negative delay (a moment that has just passed) is 0. ``None``, logged: it is no
    delay at all, and the handler's own backoff applies.
    """
    seconds = _number(delay)
    if seconds is None or not math.isfinite(seconds):
        logger.error("RetryLater has a delay that is no number of seconds; backoff applies.")
        return None
    return min(max(seconds, 0.0), MAX_DELAY_SECONDS)


def validate_backoff(policy: object) -> Policy:
    """Check ``backoff=`` at registration and give it in the form that is used.

    Numbers and timedeltas become float seconds, sequences tuples. Raises
    ``InvalidHandler`` for anything else.
    """
    if policy is None:
        return None
    if callable(policy):
        return _checked_function(policy)
    if isinstance(policy, Sequence) and not isinstance(policy, str | bytes | bytearray):
        if not policy:
            raise InvalidHandler("backoff is an empty sequence: give at least one delay.")
        return tuple(_checked_delay(item) for item in policy)
    return _checked_delay(policy)


def to_seconds(value: object) -> float | None:
    """Give seconds (a number or timedelta) as float; ``None`` outside 0 to ten years."""
    seconds = _number(value)
    if seconds is None or not 0 <= seconds <= MAX_DELAY_SECONDS:
        return None
    return seconds


def _number(value: object) -> float | None:
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _default(attempt: int, base: float, cap: float, rng: _Random) -> float:
    # Beyond 2 ** 200 every base that is not 0 has passed every cap.
    delay = min(cap, base * 2.0 ** min(max(attempt, 1) - 1, 200))
    return rng.uniform(delay / 2, delay)


def _checked_delay(value: object) -> float:
    seconds = to_seconds(value)
    if seconds is None:
        raise InvalidHandler(
            "backoff must be seconds from 0 to ten years (a number or timedelta), a sequence "
            f"of those, or a function of (exception, attempt); it holds {value!r:.50}."
        )
    return seconds


def _checked_function(function: Callable[..., Any]) -> BackoffFunction:
    if iscoroutinefunction(function):
        raise InvalidHandler("backoff must be a plain function, not an async one.")
    try:
        inspect.signature(function).bind(None, 1)
    except TypeError:
        raise InvalidHandler("The backoff function must take (exception, attempt).") from None
    except ValueError:  # a callable of C code without a signature: taken on trust
        pass
    return function
