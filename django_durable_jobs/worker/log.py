"""What a worker writes down: one line for each event, as text or as JSON.

Where the project's logging shows our loggers nowhere, the command shows them through a handler
of its own. That one takes the ends of a group of attempts at once, since they come by thousands
a second; the project's handlers get a record for each.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

from ..transitions.outcomes import FinishReport, Outcome
from .held import Held

LOGGER = "django_durable_jobs"
logger = logging.getLogger(f"{LOGGER}.worker")

TEXT, JSON = "text", "json"
FORMATS = (TEXT, JSON)
LEVELS = {0: logging.ERROR, 1: logging.INFO, 2: logging.DEBUG, 3: logging.DEBUG}
# A pipe takes so many bytes whole, whoever else writes to it.
CHUNK = 4000


class Ended(NamedTuple):
    """The end of an attempt that is written: what the handler did, and what the job is now.

    A tuple, since thousands are made in a second.
    """

    job: int
    job_id: str
    scope: str
    handler: str
    queue: str
    attempt: int
    seconds: float
    outcome: str
    status: str

    @classmethod
    def of(cls, held: Held, outcome: str, status: str) -> Ended:
        job = held.job
        return cls(
            job=job.id,
            job_id=job.job_id,
            scope=job.scope,
            handler=job.handler,
            queue=job.queue,
            attempt=job.attempt_count,
            seconds=round(held.seconds, 6),
            outcome=outcome,
            status=status,
        )

    def __str__(self) -> str:
        return (
            f"job {self.job} {_plain(self.job_id)} of {self.handler} on {_plain(self.queue)},"
            f" attempt {self.attempt}: {self.outcome} after {self.seconds:.3f} s, {self.status}"
        )


def log_group(held: dict[str, Held], ended: list[Outcome], report: FinishReport) -> None:
    """Write a line for each end that was written, and for each that was not."""
    if logger.isEnabledFor(logging.INFO):
        refused = {one.token for one in (*report.lost, *report.damaged)}
        log_ends(
            Ended.of(held[one.token], one.outcome, report.written[one.job])
            for one in ended
            if one.job in report.written and one.token in held and one.token not in refused
        )
    for outcome in report.lost:
        logger.warning("job %d: its end came after its lease; it is not written", outcome.job)
    for outcome in report.damaged:
        logger.error("job %d has no open attempt row; it is left unchanged", outcome.job)


def log_ends(ends: Iterable[Ended]) -> None:
    if _shown is not None:
        _shown.show(ends)
        return
    for one in ends:
        logger.info("%s", one, extra=one._asdict())


class Lines(logging.Handler):
    """Write each record as one line of text, with its traceback below, or of JSON."""

    def __init__(self, write: Callable[[str], object], kind: str) -> None:
        super().__init__()
        self._write = write
        self._is_json = kind == JSON
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self._json(record) if self._is_json else self.format(record)
            self._write(f"{text}\n")
        except Exception:
            self.handleError(record)

    def show(self, ends: Iterable[Ended]) -> None:
        """Write a line for each end, many at a time."""
        record = logger.makeRecord(logger.name, logging.INFO, "", 0, "", (), None)
        self.acquire()
        try:
            lines = self._json_ends(record, ends) if self._is_json else self._ends(record, ends)
            for chunk in _chunks(lines):
                self._write(chunk)
        except Exception:
            self.handleError(record)
        finally:
            self.release()

    def _ends(self, record: logging.LogRecord, ends: Iterable[Ended]) -> Iterator[str]:
        record.message = ""
        start = self.formatter.formatMessage(self._stamped(record)) if self.formatter else ""
        return (f"{start}{one}\n" for one in ends)

    def _stamped(self, record: logging.LogRecord) -> logging.LogRecord:
        if self.formatter is not None:
            record.asctime = self.formatter.formatTime(record)
        return record

    def _json_ends(self, record: logging.LogRecord, ends: Iterable[Ended]) -> Iterator[str]:
        for one in ends:
            yield f"{json.dumps({**_described(record, str(one)), **one._asdict()})}\n"

    def _json(self, record: logging.LogRecord) -> str:
        described = _described(record, record.getMessage())
        if record.exc_info and self.formatter is not None:
            described["exception"] = self.formatter.formatException(record.exc_info)
        return json.dumps(described)


_shown: Lines | None = None


def show_log(
    write: Callable[[str], object], verbosity: int, kind: str | None = None
) -> Callable[[], None]:
    """Show the log where the project shows it nowhere, or in the format asked for; give the undo.

    With ``kind`` the project's handlers get nothing, so that no line comes twice.
    """
    global _shown
    ours = logging.getLogger(LOGGER)
    if kind is None and any(one.handlers for one in (logging.getLogger(), ours, logger)):
        return lambda: None
    before = ours.level, ours.propagate, ours.handlers, logger.handlers, _shown
    handler = Lines(write, kind or TEXT)
    ours.setLevel(LEVELS.get(verbosity, logging.DEBUG))
    ours.handlers, logger.handlers = [handler], []
    ours.propagate = kind is None
    _shown = handler

    def undo() -> None:
        global _shown
        level, ours.propagate, ours.handlers, logger.handlers, _shown = before
        ours.setLevel(level)

    return undo


def _described(record: logging.LogRecord, message: str) -> dict[str, Any]:
    return {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname,
        "logger": record.name,
        "message": message,
    }


def _plain(text: str) -> str:
    """Keep a name that a caller chose on one line."""
    return text if text.isprintable() else ascii(text)


def _chunks(lines: Iterable[str]) -> Iterator[str]:
    """Join lines, never more at once than a pipe takes whole."""
    chunk: list[str] = []
    size = 0
    for line in lines:
        if chunk and size + len(line) > CHUNK:
            yield "".join(chunk)
            chunk, size = [], 0
        chunk.append(line)
        size += len(line)
    if chunk:
        yield "".join(chunk)
