"""Errors put into words, for the log and to be stored, whatever an exception holds (3.14)."""

from __future__ import annotations

import inspect
import logging
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

from ..conf import settings
from ..exceptions import PermanentError, RetryLater
from ..instants import SECOND
from ..payloads import NotStorable, clean_text
from ..transitions.claims import ClaimedJob

logger = logging.getLogger("django_durable_jobs.worker")

# In bytes.
SUMMARY_LIMIT = 1_000
TRACEBACK_LIMIT = 20_000
FRAME_LIMIT = 400
# How much of one error is shown, and how many exceptions that it leads to are followed.
SHOWN_FRAMES = 40
SHOWN_CAUSES = 8
SHOWN_MEMBERS = 8
FOLLOWED = 100
_CAUSE = "\nThe cause of the following:\n\n"


class CompletionRolledBack(Exception):
    """The handler returned, and the transaction of its ``ctx.complete()`` did not commit."""


def named(job: ClaimedJob) -> str:
    """Name an attempt in a log line."""
    return f"job {job.job_id} (attempt {job.attempt_count} of handler {job.handler})"


def log_raised(who: str, error: BaseException) -> None:
    """Log that somebody raised an error, with the whole traceback if that has an end."""
    try:
        kind = type(error).__name__
        if _has_end(error):
            logger.error("%s raised %s", who, kind, exc_info=error)
        else:
            logger.error("%s raised %s\n%s", who, kind, _formatted(error))
    except BaseException as worse:
        # Without its traceback, which may be no better.
        logger.error("%s raised what cannot be logged (%s)", who, type(worse).__name__)


def log_timeout(job: ClaimedJob) -> None:
    """Log that an attempt ends by its timeout: for whoever ends it, so once for each."""
    logger.warning("%s passed its timeout", named(job))


def log_on_purpose(who: str, error: BaseException, delay: int | None) -> None:
    """Log that a handler raised ``PermanentError`` or ``RetryLater``, in its author's words.

    ``delay`` is in microseconds until the next execution; None where none follows.
    """
    said = _described(_message, error)
    told = said if said.isprintable() else ascii(said)[1:-1]
    then = "" if delay is None else f"; again in {delay / SECOND:g} s"
    logger.warning("%s raised %s on purpose%s%s", who, type(error).__name__, told, then)


def summary(error: BaseException, function: Callable[..., Any]) -> str:
    """Name the class and the code place; the message only where its author controls it (3.14).

    An error that was raised nowhere is told with the place of the handler's ``function``.
    """
    return _described(partial(_summary, function), error)


def stored_traceback(error: BaseException) -> str | None:
    """Format the traceback where the project opted in."""
    return _described(_formatted, error) if settings.ERROR_DETAIL == "traceback" else None


def _described(describe: Callable[[BaseException], str], error: BaseException) -> str:
    """Describe an exception; what its own code does meanwhile must not cost the outcome."""
    try:
        return describe(error)
    except BaseException as worse:
        logger.error("an exception could not be described (%s)", type(worse).__name__)
        return "an exception that cannot be described"


def _summary(function: Callable[..., Any], error: BaseException) -> str:
    kind = type(error)
    text = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    place = _place(error.__traceback__) or _place_of(function)
    return clean_text(f"{text} at {place}{_message(error)}", SUMMARY_LIMIT)


def _message(error: BaseException) -> str:
    """Give the message after a colon, if its author meant it to be read."""
    if not isinstance(error, AUTHORED) or not error.args:
        return ""
    text = clean_text(error.args[0], SUMMARY_LIMIT)
    return f": {text}" if text else ""


def _place_of(function: Callable[..., Any]) -> str:
    plain = inspect.unwrap(function)
    return f"{plain.__module__}:{plain.__name__}:{plain.__code__.co_firstlineno}"


def _place(trace: TracebackType | None) -> str:
    """Give the innermost place in the project's own code; without any, the innermost of all."""
    place = own = None
    while trace is not None:
        place = trace
        if not _is_library(trace.tb_frame.f_code.co_filename):
            own = trace
        trace = trace.tb_next
    shown = own or place
    if shown is None:
        return ""
    frame = shown.tb_frame
    module = frame.f_globals.get("__name__", "?")
    return f"{module}:{frame.f_code.co_name}:{shown.tb_lineno}"


AUTHORED = (PermanentError, RetryLater, NotStorable, CompletionRolledBack)
_PACKAGE = str(Path(__file__).parent.parent)
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]


def _is_library(file: str) -> bool:
    """Tell the files of this package, of installed packages and of Python itself."""
    return file.startswith((_PACKAGE, _STANDARD_LIBRARY, "<frozen")) or "site-packages" in file


def _formatted(error: BaseException) -> str:
    """Format a traceback in bounded work; ``traceback`` itself follows causes without end.

    The error comes last, as Python writes it, and before it as many of its causes as there
    is room for.
    """
    text = ""
    for one in islice(_causes(error), SHOWN_CAUSES):
        part = _formatted_alone(one)
        longer = f"{part}{_CAUSE}{text}" if text else part
        if len(longer.encode()) > TRACEBACK_LIMIT:
            break
        text = longer
    return clean_text(text, TRACEBACK_LIMIT)


def _formatted_alone(error: BaseException) -> str:
    """Format one exception with its frames, and below it what its group holds."""
    lines = traceback.format_tb(error.__traceback__, limit=-SHOWN_FRAMES)
    text = "".join(clean_text(line, FRAME_LIMIT) for line in lines) + _said(error)
    for one in islice(_leaves(error), SHOWN_MEMBERS):
        place = _place(one.__traceback__)
        text += f"  in the group: {_said(one).rstrip()}{f' at {place}' if place else ''}\n"
    return clean_text(text, TRACEBACK_LIMIT)


def _said(error: BaseException) -> str:
    kind = type(error)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    return f"{name}: {clean_text(error, SUMMARY_LIMIT)}\n"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Give an exception, its cause, that one's cause: once each, maybe without end."""
    seen: list[BaseException] = []  # kept, so that no later one has the identity of an earlier
    one: BaseException | None = error
    while one is not None and not any(one is known for known in seen):
        seen.append(one)
        yield one
        one = _cause(one)


def _cause(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Give the exceptions of a group and of the groups in it, of the first hundred looked at."""
    pending = list(_members(error))
    for _ in range(FOLLOWED):
        if not pending:
            return
        one = pending.pop(0)
        members = list(_members(one))
        if members:
            pending = members + pending
        else:
            yield one


def _members(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        yield from islice(error.exceptions, FOLLOWED)


def _has_end(error: BaseException) -> bool:
    """Tell that an exception leads to few others, by causes and by groups."""
    seen: dict[int, BaseException] = {}
    pending = [error]
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if len(seen) > FOLLOWED:
            return False
        pending += _members(one)
        for other in (one.__cause__, one.__context__):
            if other is not None:
                pending.append(other)
    return True
