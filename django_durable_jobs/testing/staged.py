"""``assert_staged()`` and ``refute_staged()``: which jobs the database really holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypedDict, Unpack

from .. import clock
from ..conf import settings
from ..handlers import registry
from ..instants import from_microseconds, to_microseconds
from ..models import Job
from ..payloads import CorruptPayload
from ..submission import encode_payload

# Test runners leave the frames of such a module out of a failure's traceback.
__unittest = True

SHOWN_JOBS = 10
SHOWN_CHARACTERS = 200
ANYTHING: Any = type("Anything", (), {"__repr__": lambda self: "anything"})()


class Fields(TypedDict, total=False):
    """What a staged job may be compared by, beside its handler and payload."""

    queue: str
    job_id: str
    scope: str
    dedupe_key: str | None
    concurrency_key: str | None
    run_at: datetime | timedelta | None
    priority: int


_TYPES: dict[str, tuple[type, ...]] = {
    "queue": (str,),
    "job_id": (str,),
    "scope": (str,),
    "dedupe_key": (str, type(None)),
    "concurrency_key": (str, type(None)),
    "run_at": (datetime, timedelta, type(None)),
    "priority": (int,),
}


def assert_staged(
    handler: Any = None,
    payload: Any = ANYTHING,
    *,
    count: int | None = None,
    among: Iterable[Job] | None = None,
    using: str | None = None,
    **fields: Unpack[Fields],
) -> Job:
    """Fail unless a job like this is staged; give it (of several, the one staged last).

    ``handler`` is the decorated object, ``"name"`` (any version) or ``("name", version)``;
    omitted, any. ``payload`` is compared as the typed value, or is a function that is given it
    and tells. Fields: ``queue``, ``job_id``, ``scope``, ``dedupe_key``, ``concurrency_key`` (as
    stored; None: no limit), ``priority``, ``run_at`` (as it was staged; None: none was given; a
    timedelta: from the ``FakeClock`` in force).
    What is omitted may be anything. ``count`` wants exactly so many.

    Reads the rows of the jobs' database, whatever their status (inside an open transaction:
    what that holds by now), or the jobs of ``among``, such as ``capture_staged()`` gives.
    Raises ``AssertionError`` that shows what is staged instead; ``InvalidSubmission`` for a
    handler that is not registered or a payload that it does not take, ``TypeError`` and
    ``ValueError`` for what no job can match.
    """
    __tracebackhide__ = True
    wanted = _wanted(handler, payload, fields)
    if count is not None and count < 1:
        raise ValueError("count is at least 1: use refute_staged() for none.")
    jobs = _jobs(among, using)
    found = [job for job in jobs if not wanted.differences(job)]
    if not found:
        raise AssertionError(f"No staged job is {wanted}. {_listed(jobs, wanted)}")
    if count is not None and len(found) != count:
        raise AssertionError(f"{len(found)} staged jobs are {wanted}, not {count}. {_listed(jobs)}")
    return found[-1]


def refute_staged(
    handler: Any = None,
    payload: Any = ANYTHING,
    *,
    among: Iterable[Job] | None = None,
    using: str | None = None,
    **fields: Unpack[Fields],
) -> None:
    """Fail if a job like this is staged; compares and raises as ``assert_staged()`` does."""
    __tracebackhide__ = True
    wanted = _wanted(handler, payload, fields)
    found = [job for job in _jobs(among, using) if not wanted.differences(job)]
    if found:
        raise AssertionError(f"No staged job may be {wanted}. {_listed(found)}")


@contextmanager
def capture_staged(*, using: str | None = None) -> Iterator[list[Job]]:
    """Give a list that holds, once the block has ended, the jobs that were staged inside it.

    One that only answered a repeated request is not among them: no row was made.
    """
    alias = using or settings.DATABASE
    before = {job.pk for job in Job.objects.using(alias).only("pk")}
    captured: list[Job] = []
    yield captured
    captured += [job for job in _jobs(None, alias) if job.pk not in before]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What jobs are compared with."""

    name: str | None
    version: int | None
    payload: Any
    fields: dict[str, Any]

    def differences(self, job: Job) -> list[str]:
        """Say what of the job is not as wanted."""
        found = []
        if self.name not in (None, job.handler) or self.version not in (None, job.handler_version):
            found.append("handler")
        elif self.payload is not ANYTHING and not self._has_payload(job):
            found.append("payload")
        return found + [
            name for name, value in self.fields.items() if _field(job, name, value) != value
        ]

    def _has_payload(self, job: Job) -> bool:
        payload = _payload(job)
        if payload is ANYTHING:
            return False
        return bool(self.payload(payload) if callable(self.payload) else payload == self.payload)

    def __str__(self) -> str:
        parts = ["of any handler" if self.name is None else f"of handler {self.name!r}"]
        if self.version is not None:
            parts.append(f"version {self.version}")
        if self.payload is not ANYTHING:
            parts.append(f"payload {_cut(repr(self.payload))}")
        return ", ".join(parts + [f"{name} {_told(value)}" for name, value in self.fields.items()])


def _wanted(handler: Any, payload: Any, fields: Fields) -> _Wanted:
    """Refuse what no job can ever match: it would make ``refute_staged()`` true of anything."""
    for name, value in fields.items():
        if name not in _TYPES:
            known = ", ".join(_TYPES)
            raise TypeError(f"a staged job is not compared by {name!r}: use {known}.")
        if not isinstance(value, _TYPES[name]) or isinstance(value, bool):
            raise TypeError(f"{name} cannot be of type {type(value).__name__}.")
    found = None if handler is None else registry.resolve(handler)
    if payload is not ANYTHING and not callable(payload):
        if found is None:
            raise TypeError("a payload is compared as its handler's type: give the handler too.")
        encode_payload(found, payload)
    compared: dict[str, Any] = dict(fields)
    if compared.get("run_at") is not None:
        compared["run_at"] = _instant(compared["run_at"])
    by_name = isinstance(handler, str)
    return _Wanted(
        name=None if found is None else found.name,
        version=None if found is None or by_name else found.version,
        payload=payload,
        fields=compared,
    )


def _instant(run_at: datetime | timedelta) -> datetime:
    if isinstance(run_at, datetime):
        return from_microseconds(to_microseconds(run_at))
    now = clock.replaced()
    if now is None:
        raise ValueError("a run_at of now and a timedelta is met under a FakeClock only.")
    return from_microseconds(now) + run_at


def _jobs(among: Iterable[Job] | None, using: str | None) -> list[Job]:
    if among is not None:
        return list(among)
    return list(Job.objects.using(using or settings.DATABASE).order_by("pk"))


def _payload(job: Job) -> Any:
    """Give the typed payload; ``ANYTHING`` where no handler of this process can read it."""
    handler = registry.get(job.handler, job.handler_version)
    if handler is None or handler.fingerprint != job.fingerprint:
        return ANYTHING
    try:
        return handler.codec.decode(job.payload)
    except CorruptPayload:
        return ANYTHING


def _field(job: Job, name: str, wanted: Any = None) -> Any:
    if name != "run_at":
        return getattr(job, name)
    # The instant that it was staged for; ``run_at`` itself moves with each retry.
    return job.initial_run_at or (None if wanted is None else job.created_at)


def _listed(jobs: list[Job], wanted: _Wanted | None = None) -> str:
    """Show jobs, those first that differ least from what was wanted."""
    if not jobs:
        return "No job is staged at all."
    told = [(job, [] if wanted is None else wanted.differences(job)) for job in jobs]
    told.sort(key=lambda one: ("handler" in one[1], len(one[1])))
    lines = [_line(job, differences) for job, differences in told[:SHOWN_JOBS]]
    left = len(told) - len(lines)
    return "\n".join(["Staged:", *lines] + ([f"  and {left} more"] if left else []))


def _line(job: Job, differences: list[str]) -> str:
    payload = _payload(job)
    text = job.payload if payload is ANYTHING else repr(payload)
    fields = ", ".join(f"{name} {_told(_field(job, name))}" for name in _TYPES)
    other = f" (other: {', '.join(differences)})" if differences else ""
    return f"  {job.handler} version {job.handler_version}, payload {_cut(text)}, {fields}{other}"


def _told(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else repr(value)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
