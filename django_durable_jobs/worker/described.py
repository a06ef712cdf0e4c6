"""Errors put into words, for the log and to be stored, whatever an exception holds (3.14)."""

from __future__ import annotations

import logging
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import TracebackType

from ..conf import settings
from ..exceptions import PermanentError, RetryLater
from ..payloads import NotStorable, clean_text
from ..transitions.claims import ClaimedJob

logger = logging.getLogger("django_durable_jobs.worker")

SUMMARY_LIMIT = 1_000
TRACEBACK_LIMIT = 20_000
CHAIN_LIMIT = 8
LOGGED_CHAIN_LIMIT = 100
FRAME_LIMIT = 50


def named(job: ClaimedJob) -> str:
    """Name an attempt in a log line."""
    return f"job {job.job_id} (attempt {job.attempt_count} of handler {job.handler})"


def log_raised(who: str, error: BaseException) -> None:
    """Log that somebody raised an error, with the whole traceback if it has an end."""
    try:
        kind = type(error).__name__
        if _has_end(error):
            logger.error("%s raised %s", who, kind, exc_info=error)
        else:
            logger.error("%s raised %s\n%s", who, kind, _formatted(error))
    except BaseException:
        logger.exception("%s raised what cannot be logged", who)


def summary(error: BaseException) -> str:
    """Name the class and the code place; the message only where its author controls it (3.14)."""
    return _described(_summary, error)


def stored_traceback(error: BaseException) -> str | None:
    """Format the traceback where the project opted in."""
    return _described(_formatted, error) if settings.ERROR_DETAIL == "traceback" else None


def _described(describe: Callable[[BaseException], str], error: BaseException) -> str:
    """Describe an exception; what its own code does meanwhile must not cost the outcome."""
    try:
        return describe(error)
    except BaseException:
        logger.exception("an exception could not be described")
        return "an exception that cannot be described"


def _summary(error: BaseException) -> str:
    kind = type(error)
    text = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    place = _place(error.__traceback__)
    if place:
        text += f" at {place}"
    if isinstance(error, PermanentError | RetryLater | NotStorable) and error.args:
        text += f": {clean_text(error.args[0], SUMMARY_LIMIT)}"
    return clean_text(text, SUMMARY_LIMIT)


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


_PACKAGE = str(Path(__file__).parent.parent)
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]


def _is_library(file: str) -> bool:
    """Tell the files of this package, of installed packages and of Python itself."""
    return file.startswith((_PACKAGE, _STANDARD_LIBRARY, "<frozen")) or "site-packages" in file


def _formatted(error: BaseException) -> str:
    """Format a traceback in bounded work; ``traceback`` itself follows causes without end."""
    parts: list[str] = []
    for one in islice(_chain(error), CHAIN_LIMIT):
        frames = "".join(traceback.format_tb(one.__traceback__, limit=-FRAME_LIMIT))
        kind = type(one)
        said = clean_text(one, SUMMARY_LIMIT)
        parts.append(f"{frames}{kind.__module__}.{kind.__qualname__}: {said}\n")
    joint = "\nThe cause of the following:\n\n"
    return clean_text(joint.join(reversed(parts)), TRACEBACK_LIMIT)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Give an exception, its cause, that one's cause: once each, maybe without end."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _has_end(error: BaseException) -> bool:
    return sum(1 for _ in islice(_chain(error), LOGGED_CHAIN_LIMIT)) < LOGGED_CHAIN_LIMIT
