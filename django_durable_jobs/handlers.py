"""Handlers: the ``@job`` decorator, the object that it gives, and the registry.

A name from the database resolves only through ``registry``; nothing is imported by name
(CONTRACT 2.4). Declaring a handler reads no settings and needs no loaded apps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from django.utils.module_loading import autodiscover_modules

from . import declaration
from .conf import settings as conf
from .declaration import SCOPE, ConcurrencyKey
from .exceptions import InvalidHandler, InvalidSubmission
from .payloads import Codec, check_text, codec_for
from .retry import Backoff, Policy, validate_backoff

if TYPE_CHECKING:
    from .events import FinishEvent
    from .managers import JobManager
    from .models import Job
    from .submission import JobSubmission

RedactionHook = Callable[[str, Any], Any]
P = ParamSpec("P")
R = TypeVar("R")
MAX_VERSION = 2_147_483_647


def job(
    name: str,
    *,
    version: int = 1,
    queue: str = "default",
    priority: int = 0,
    max_attempts: int | None = None,
    timeout: float | None = None,
    retry_on_interrupt: bool = True,
    backoff: Backoff = None,
    concurrency: int | None = None,
    concurrency_key: ConcurrencyKey = None,
    on_finish: Callable[[FinishEvent], object] | None = None,
) -> Callable[[Callable[P, R]], Handler[P, R]]:
    """Register ``def handler(ctx)`` or ``def handler(ctx, payload: T)``, sync or async.

    ``timeout`` is in seconds; ``max_attempts`` counts executions, the first included;
    omitted, both come from the settings. ``on_finish`` is a plain function of a
    ``FinishEvent``, called in the transaction that ends the job (CONTRACT 3.8). The decorated
    object still calls as the plain function. Every option is checked here:
    ``InvalidHandler`` (CONTRACT 2.1).
    """
    if callable(name):
        raise InvalidHandler('@job needs a name: write @job("orders.ship") above the function.')
    options = dict(locals())

    def decorate(func: Callable[P, R]) -> Handler[P, R]:
        try:
            handler = _build(func, options, sys._getframe(1).f_locals)
        except (InvalidHandler, InvalidSubmission) as error:
            raise InvalidHandler(f"Handler {name!r:.120}: {error}") from error
        registry.register(handler)
        return handler

    return decorate


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Handler(Generic[P, R]):
    """A registered handler: its policy, its codec and the plain function. Immutable."""

    name: str
    version: int
    queue: str
    priority: int
    max_attempts: int | None
    timeout: float | None
    retry_on_interrupt: bool
    backoff: Policy
    concurrency: int | None
    concurrency_key: ConcurrencyKey
    on_finish: Callable[[FinishEvent], object] | None
    func: Callable[P, R]
    codec: Codec
    takes_payload: bool
    is_async: bool

    def __post_init__(self) -> None:
        for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
            object.__setattr__(self, attribute, getattr(self.func, attribute))
        object.__setattr__(self, "__wrapped__", self.func)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the plain function, as a unit test does."""
        return self.func(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Handler {self.name} v{self.version}>"

    def __reduce__(self) -> str:
        # Copies and pickles as functions do: by reference.
        return str(self.func.__qualname__)

    @property
    def key(self) -> tuple[str, int]:
        """What the registry knows it by: name and version."""
        return self.name, self.version

    @property
    def fingerprint(self) -> str:
        """The hash of the payload's schema; needs loaded apps if it holds a ``ModelId``."""
        return self.codec.fingerprint

    @property
    def effective_max_attempts(self) -> int:
        """Its own ``max_attempts``, else ``MAX_ATTEMPTS``."""
        return int(conf.MAX_ATTEMPTS) if self.max_attempts is None else self.max_attempts

    @property
    def effective_timeout(self) -> float:
        """Its own timeout in seconds, else ``TIMEOUT_SECONDS``."""
        return float(conf.TIMEOUT_SECONDS) if self.timeout is None else self.timeout

    def redact(self, hook: RedactionHook) -> RedactionHook:
        """Say what people are shown of this name's jobs, in all versions.

        A decorator over ``def hook(part, value)``: ``part`` is ``"payload"``, ``"result"`` or
        ``"checkpoint"``, ``value`` its plain JSON, and what it gives is shown instead.
        """
        registry.redact(self.name, hook)
        return hook

    def concurrency_key_for(self, payload: Any, scope: str) -> str | None:
        """Give the key that a job's place is counted under; ``None``: no limit.

        ``InvalidSubmission`` if the handler's function raises or gives what is neither
        ``None`` nor text of 1 to 200 characters (CONTRACT 3.12).
        """
        if self.concurrency is not None and callable(self.concurrency_key):
            return self._key_of_payload(self.concurrency_key, payload)
        return self.stored_key(None, scope)

    def stored_key(self, key: str | None, scope: str | None) -> str | None:
        """Give the key of a stored job; one from before there was a limit may have none yet.

        ``None`` for no limit, and where only the payload could tell.
        """
        if key is not None or self.concurrency is None or callable(self.concurrency_key):
            return key
        if self.concurrency_key is None:
            return self.name
        return None if scope is None else _scope_key(scope)

    def unkeyed_of(self, scope_hash: str | None) -> str | None:
        """Tell which jobs without a key count with one: ``""`` all, else those of that scope."""
        if self.concurrency is None or callable(self.concurrency_key):
            return None
        return "" if self.concurrency_key is None else scope_hash

    def _key_of_payload(self, function: Callable[[Any], str | None], payload: Any) -> str | None:
        try:
            key = function(payload)
        except Exception as error:
            raise InvalidSubmission(
                f"The concurrency_key function of {self.name} raised {type(error).__name__}."
            ) from error
        name = f'handler "{self.name}": concurrency_key'
        return None if key is None else check_text(name, key, 1, 200)

    def stage(self, payload: Any = None, **options: Any) -> Job:
        """Insert in the caller's transaction: ``Job.objects.stage(self, payload, ...)``."""
        return _jobs().stage(self, payload, **options)

    def submit(self, payload: Any = None, **options: Any) -> Job:
        """Insert in a transaction of its own: ``Job.objects.submit(self, payload, ...)``."""
        return _jobs().submit(self, payload, **options)

    def enqueue(self, payload: Any = None, **options: Any) -> Job:
        """Join an open transaction or make one: ``Job.objects.enqueue(self, payload, ...)``."""
        return _jobs().enqueue(self, payload, **options)

    async def asubmit(self, payload: Any = None, **options: Any) -> Job:
        """Do as ``submit()``, from async code."""
        return await _jobs().asubmit(self, payload, **options)

    async def aenqueue(self, payload: Any = None, **options: Any) -> Job:
        """Do as ``enqueue()``, from async code."""
        return await _jobs().aenqueue(self, payload, **options)

    def stage_many(
        self, payloads: Iterable[Any], *, using: str | None = None, **options: Any
    ) -> list[Job]:
        """Stage one job per payload, all with ``options``; a ``JobSubmission`` stays as it is."""
        return _jobs().stage_many(self._submissions(payloads, options), using=using)

    def submit_many(
        self, payloads: Iterable[Any], *, using: str | None = None, **options: Any
    ) -> list[Job]:
        """Submit one job per payload; see ``stage_many``."""
        return _jobs().submit_many(self._submissions(payloads, options), using=using)

    def enqueue_many(
        self, payloads: Iterable[Any], *, using: str | None = None, **options: Any
    ) -> list[Job]:
        """Enqueue one job per payload; see ``stage_many``."""
        return _jobs().enqueue_many(self._submissions(payloads, options), using=using)

    async def asubmit_many(
        self, payloads: Iterable[Any], *, using: str | None = None, **options: Any
    ) -> list[Job]:
        """Do as ``submit_many()``, from async code."""
        return await _jobs().asubmit_many(self._submissions(payloads, options), using=using)

    async def aenqueue_many(
        self, payloads: Iterable[Any], *, using: str | None = None, **options: Any
    ) -> list[Job]:
        """Do as ``enqueue_many()``, from async code."""
        return await _jobs().aenqueue_many(self._submissions(payloads, options), using=using)

    def _submissions(self, payloads: Iterable[Any], options: dict[str, Any]) -> list[JobSubmission]:
        from .submission import JobSubmission, make_submission

        # Text and mappings are iterable, and each is one payload.
        if isinstance(payloads, str | bytes | Mapping) or not isinstance(payloads, Iterable):
            raise InvalidSubmission(
                f"give an iterable of payloads, not one {type(payloads).__name__}:"
                " write [payload], or use the door for one."
            )
        return [
            item if isinstance(item, JobSubmission) else make_submission(self, item, options)
            for item in payloads
        ]


class Registry:
    """The handlers of this process, by name and version."""

    def __init__(self) -> None:
        self._handlers: dict[tuple[str, int], Handler[..., Any]] = {}
        self._redactions: dict[str, RedactionHook] = {}

    def register(self, handler: Handler[..., Any]) -> None:
        """Add a handler; a second one of its name and version is an ``InvalidHandler``."""
        other = self._handlers.setdefault(handler.key, handler)
        if other is not handler:
            raise InvalidHandler(
                f"Two handlers are named {handler.name!r} version {handler.version}: "
                f"{_place(other)} and {_place(handler)}. Rename one or raise its version. (A test"
                " that declares one asks for the fixture durable_handlers, which forgets it.)"
            )

    def get(self, name: str, version: int) -> Handler[..., Any] | None:
        """Give the handler of exactly this name and version, or ``None``."""
        return self._handlers.get((name, version))

    def resolve(self, spec: object) -> Handler[..., Any]:
        """Give the handler that a submission names.

        ``spec`` is a handler, ``"name"`` (its highest version) or ``("name", version)``.
        What is not registered is an ``InvalidSubmission`` that names what is close.
        """
        found: Handler[..., Any] | None = None
        if isinstance(spec, Handler):
            found = spec if self._handlers.get(spec.key) is spec else None
        elif isinstance(spec, str):
            found = self._highest(spec)
        elif _is_key(spec):
            found = self._handlers.get(spec)  # type: ignore[call-overload]
        else:
            raise InvalidSubmission(
                'handler must be a function decorated with @job, "name" or ("name", version), '
                f"not {type(spec).__name__}."
            )
        if found is None:
            raise InvalidSubmission(self._unknown(spec))
        return found

    def redact(self, name: str, hook: RedactionHook) -> None:
        """Declare what is shown of the jobs of a name; see ``Handler.redact``."""
        declaration.plain_function("redact", hook, 2)
        if self._redactions.setdefault(name, hook) is not hook:
            raise InvalidHandler(f"Handler {name!r:.120} has a redaction already: keep one.")

    def redaction_of(self, name: str | None) -> RedactionHook | None:
        """Give the redaction that was declared for a name, or ``None``."""
        return None if name is None else self._redactions.get(name)

    def may_be_redacted(self, name: str | None) -> bool:
        """Tell that a redaction is declared for the name, or might be where it is registered."""
        is_known = any(known == name for known, _ in tuple(self._handlers))
        return name in self._redactions or (bool(self._redactions) and not is_known)

    def all(self) -> tuple[Handler[..., Any], ...]:
        """Give every handler, by name and version."""
        return tuple(sorted(self._handlers.values(), key=lambda handler: handler.key))

    def problems(self) -> list[str]:
        """Say what needs settings and loaded apps to be judged, for the system checks."""
        return [problem for handler in self.all() for problem in _problems(handler)]

    def validate(self) -> None:
        """Raise ``InvalidHandler`` with the first of ``problems()``."""
        for problem in self.problems():
            raise InvalidHandler(problem)

    def unregister(self, name: str, version: int) -> None:
        """Forget a handler, in tests; one that is not there is no error."""
        self._handlers.pop((name, version), None)

    @contextlib.contextmanager
    def temporary(self) -> Iterator[Registry]:
        """Forget at the end what was registered inside, and bring back the rest; for tests."""
        handlers, redactions = dict(self._handlers), dict(self._redactions)
        try:
            yield self
        finally:
            self._handlers, self._redactions = handlers, redactions

    def _highest(self, name: str) -> Handler[..., Any] | None:
        versions = [version for known, version in tuple(self._handlers) if known == name]
        return self._handlers.get((name, max(versions))) if versions else None

    def _unknown(self, spec: object) -> str:
        names = sorted({name for name, _ in self._handlers})
        name = spec.name if isinstance(spec, Handler) else spec[0] if _is_key(spec) else spec  # type: ignore[index]
        if name in names:
            shown = spec.key if isinstance(spec, Handler) else spec
            return f"The handler {shown!r:.150} is not registered, though others of its name are."
        close = difflib.get_close_matches(str(name)[:100], names, n=3)
        hint = (
            f"Did you mean {', '.join(close)}?" if close else "Is its jobs.py in an installed app?"
        )
        return f"No handler is named {name!r:.120}. {hint}"


registry = Registry()


def autodiscover(*, validate: bool = True) -> None:
    """Import the ``jobs`` module of every installed app, then check what was registered.

    ``InvalidHandler`` for a handler that these settings cannot run; ``validate=False``
    leaves that to the system checks and the worker's start.
    """
    autodiscover_modules("jobs")
    if validate:
        registry.validate()


def _build(
    func: Callable[P, R], options: dict[str, Any], local_names: dict[str, Any]
) -> Handler[P, R]:
    """Check the options and the function; read as the list of the rules of CONTRACT 2.1."""
    shape = declaration.read(func, local_names)
    concurrency = declaration.whole_or_none("concurrency", options["concurrency"], 1, 1_000_000)
    return Handler(
        name=check_text("name", options["name"], 1, 100),
        version=declaration.whole("version", options["version"], 1, MAX_VERSION),
        queue=check_text("queue", options["queue"], 1, 100),
        priority=declaration.whole("priority", options["priority"], -100, 100),
        max_attempts=declaration.whole_or_none("max_attempts", options["max_attempts"], 1, 1000),
        timeout=declaration.timeout(options["timeout"]),
        retry_on_interrupt=declaration.flag("retry_on_interrupt", options["retry_on_interrupt"]),
        backoff=validate_backoff(options["backoff"]),
        concurrency=concurrency,
        concurrency_key=declaration.concurrency_key(options["concurrency_key"], concurrency),
        on_finish=declaration.plain_function("on_finish", options["on_finish"]),
        func=func,
        codec=codec_for(shape.payload_type if shape.takes_payload else None),
        takes_payload=shape.takes_payload,
        is_async=shape.is_async,
    )


def _scope_key(scope: str) -> str:
    """Give the key of a scope: readable, and at most 200 characters for any scope."""
    key = f"{SCOPE}:{scope}"
    return key if len(key) <= 200 else f"{SCOPE}:{hashlib.sha256(scope.encode()).hexdigest()}"


def _problems(handler: Handler[..., Any]) -> Iterator[str]:
    limit = conf.MAX_TIMEOUT_SECONDS
    if handler.effective_timeout > limit:
        yield (
            f"Handler {handler.name!r} ({_place(handler)}): timeout={handler.effective_timeout:g} "
            f'is above DURABLE_JOBS["MAX_TIMEOUT_SECONDS"] = {limit:g}: lower it or raise that.'
        )
    try:
        handler.fingerprint  # noqa: B018  # resolves the models that the payload names
    except InvalidHandler as error:
        yield f"Handler {handler.name!r} ({_place(handler)}): {error}"


def _is_key(spec: object) -> bool:
    return (
        isinstance(spec, tuple)
        and len(spec) == 2
        and isinstance(spec[0], str)
        and type(spec[1]) is int
    )


def _place(handler: Handler[..., Any]) -> str:
    func = inspect.unwrap(handler.func)
    code = getattr(func, "__code__", None)
    line = f":{code.co_firstlineno}" if code else ""
    return f"{func.__module__}.{func.__qualname__}{line}"


def _jobs() -> JobManager:
    """Give ``Job.objects``; imported when used, so that handlers need no loaded apps."""
    from .models import Job

    return Job.objects
