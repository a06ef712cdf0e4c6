"""One request to make a job: checked and serialized at once (CONTRACT 1.1 to 1.3)."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from .clock import host_now
from .exceptions import InvalidSubmission
from .handlers import registry
from .instants import from_microseconds, to_microseconds
from .payloads import check_text, payload_sha256

if TYPE_CHECKING:
    from .handlers import Handler
    from .models import Job

# The range of Django Tasks, so that code moves without a change.
PRIORITY_MIN, PRIORITY_MAX = -100, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmission:
    """One request to make a job: checked, serialized and immutable from the start (1.2).

    Made by ``create``. Keep it to repeat the request: a timedelta has become an instant.
    """

    scope: str
    scope_hash: str
    job_id: str
    handler: str
    handler_version: int
    payload: str
    payload_sha256: str
    fingerprint: str
    queue: str
    priority: int
    run_at: datetime | None
    max_attempts: int
    dedupe_key: str | None
    concurrency_key: str | None
    timeout: float
    retry_on_interrupt: bool
    schedule: str | None = None
    scheduled_for: datetime | None = None

    @classmethod
    def create(
        cls,
        handler: Any,
        payload: Any = None,
        *,
        job_id: str | None = None,
        scope: str = "",
        queue: str | None = None,
        priority: int | None = None,
        run_at: datetime | timedelta | None = None,
        max_attempts: int | None = None,
        dedupe_key: str | None = None,
    ) -> JobSubmission:
        """Check and serialize a request; ``InvalidSubmission`` says what to change.

        ``handler`` is the decorated object, ``"name"`` (its highest version) or
        ``("name", version)``. The database is not touched.
        """
        found = registry.resolve(handler)
        text = encode_payload(found, payload)
        scope = check_text("scope", scope, 0, 200)
        return cls(
            scope=scope,
            scope_hash=scope_digest(scope),
            job_id=_text("job_id", job_id, 200) or new_job_id(),
            handler=found.name,
            handler_version=found.version,
            payload=text,
            payload_sha256=payload_sha256(text),
            fingerprint=found.fingerprint,
            queue=_text("queue", queue, 100) or found.queue,
            priority=_whole("priority", priority, found.priority, PRIORITY_MIN, PRIORITY_MAX),
            run_at=_instant(run_at),
            max_attempts=_whole(
                "max_attempts", max_attempts, found.effective_max_attempts, 1, 1000
            ),
            dedupe_key=_text("dedupe_key", dedupe_key, 200),
            concurrency_key=found.concurrency_key_for(payload, scope),
            timeout=float(found.effective_timeout),
            retry_on_interrupt=found.retry_on_interrupt,
        )

    @property
    def identity(self) -> tuple[str, str]:
        return (self.scope_hash, self.job_id)

    @property
    def key(self) -> tuple[str, str, str] | None:
        """The live key that the job would hold, if it has one (1.5)."""
        return None if self.dedupe_key is None else (self.scope_hash, self.handler, self.dedupe_key)

    def same_request(self, job: Job) -> bool:
        """Compare with a stored job, as it was submitted (1.3)."""
        return self._request() == (
            job.handler,
            job.handler_version,
            job.payload,
            job.submitted_queue,
            job.submitted_priority,
            job.max_attempts,
            job.dedupe_key,
            job.initial_run_at,
        )

    def same_as(self, other: JobSubmission) -> bool:
        return self._request() == other._request()

    def _request(self) -> tuple[Any, ...]:
        return (
            self.handler,
            self.handler_version,
            self.payload,
            self.queue,
            self.priority,
            self.max_attempts,
            self.dedupe_key,
            self.run_at,
        )


_OPTIONS = frozenset(
    {"job_id", "scope", "queue", "priority", "run_at", "max_attempts", "dedupe_key"}
)


def make_submission(handler: Any, payload: Any, options: dict[str, Any]) -> JobSubmission:
    """Do as ``JobSubmission.create``; an unknown option is an ``InvalidSubmission`` too."""
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        hint = "" if payload is not None else " A payload is one object, given before the options."
        raise InvalidSubmission(
            f"unknown option {', '.join(unknown)}: use {', '.join(sorted(_OPTIONS))}, using.{hint}"
        )
    return JobSubmission.create(handler, payload, **options)


def scope_digest(scope: str) -> str:
    """Give the SHA-256 of a scope's UTF-8 bytes, in hexadecimal (1.1)."""
    check_text("scope", scope, 0, 200)
    return hashlib.sha256(scope.encode()).hexdigest()


def new_job_id() -> str:
    """Make a unique id that sorts by time: a UUID of version 7 (RFC 9562)."""
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return str(uuid.UUID(int=value))


def encode_payload(handler: Handler[..., Any], payload: Any) -> str:
    """Give the payload's text; ``InvalidSubmission`` names the handler and what is wrong."""
    if not handler.takes_payload and payload is not None:
        raise InvalidSubmission(
            f'handler "{handler.name}" takes no payload: leave it out, or declare'
            " handler(ctx, payload: T)."
        )
    try:
        return handler.codec.encode(payload)
    except InvalidSubmission as error:
        if payload is None:
            raise InvalidSubmission(
                f'handler "{handler.name}" takes a payload, and none was given.'
            ) from None
        raise InvalidSubmission(f'handler "{handler.name}": {error}') from None


def _text(name: str, value: str | None, maximum: int) -> str | None:
    return None if value is None else check_text(name, value, 1, maximum)


def _whole(name: str, value: object, default: int, low: int, high: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidSubmission(f"{name} must be a whole number from {low} to {high}.")
    # Plain, as text is: a driver may refuse a list that mixes int with a subclass of it.
    return int(value)


def _instant(run_at: datetime | timedelta | None) -> datetime | None:
    """Turn a delay into an instant, by this host's clock, and any instant into UTC (0)."""
    if run_at is None:
        return None
    try:
        if isinstance(run_at, timedelta):
            return from_microseconds(host_now()) + run_at
        if isinstance(run_at, datetime):
            return from_microseconds(to_microseconds(run_at))
    except OverflowError:
        raise InvalidSubmission("run_at lies outside the years 1 to 9999.") from None
    except ValueError as error:
        raise InvalidSubmission(f"run_at: {error}.") from None
    raise InvalidSubmission(
        f"run_at must be an aware datetime or a timedelta, not {type(run_at).__name__}."
    )
