"""``@job``, the handler object and the registry."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import datetime
import functools
import inspect
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from django.contrib.auth.models import User
from django.test import override_settings

from django_durable_jobs import handlers
from django_durable_jobs.exceptions import InvalidHandler, InvalidSubmission
from django_durable_jobs.handlers import Handler, autodiscover, job, registry
from django_durable_jobs.payloads import ModelId
from tests._marks import shown

if TYPE_CHECKING:
    from nowhere import Context, Unknown


@dataclasses.dataclass
class Ship:
    order: int
    carrier: str = "post"


@pytest.fixture(autouse=True)
def own_registry() -> Iterator[None]:
    with registry.temporary():
        yield


def declare(name: Any = "t.handler", **options: Any) -> Handler[Any, Any]:
    @job(name, **options)
    def handler(ctx: Any, payload: Ship) -> str:
        """Ship an order."""
        return f"{ctx} {payload.order}"

    return handler


# Declaring -----------------------------------------------------------------------------------


def test_the_defaults_are_those_of_the_contract() -> None:
    made = declare()
    assert (made.name, made.version, made.key) == ("t.handler", 1, ("t.handler", 1))
    assert (made.queue, made.priority, made.retry_on_interrupt) == ("default", 0, True)
    assert made.max_attempts is made.timeout is made.backoff is made.concurrency is None
    assert made.concurrency_key is made.on_finish is None
    assert made.takes_payload
    assert not made.is_async
    assert made.fingerprint == made.codec.fingerprint


def test_what_is_not_said_comes_from_the_settings() -> None:
    made = declare()
    with override_settings(DURABLE_JOBS={"MAX_ATTEMPTS": 9, "TIMEOUT_SECONDS": 12}):
        assert (made.effective_max_attempts, made.effective_timeout) == (9, 12.0)
    said = declare("t.said", max_attempts=2, timeout=5)
    assert (said.effective_max_attempts, said.effective_timeout) == (2, 5.0)


def test_every_option_is_kept() -> None:
    def key(payload: Ship) -> str:
        return payload.carrier

    def done(event: Any) -> None: ...

    made = declare(
        version=3,
        queue="mail",
        priority=-100,
        max_attempts=1000,
        timeout=datetime.timedelta(minutes=1),
        retry_on_interrupt=False,
        backoff=[1, 2],
        concurrency=2,
        concurrency_key=key,
        on_finish=done,
    )
    assert (made.version, made.queue, made.priority, made.max_attempts) == (3, "mail", -100, 1000)
    assert (made.timeout, made.retry_on_interrupt, made.backoff) == (60.0, False, (1.0, 2.0))
    assert (made.concurrency, made.concurrency_key, made.on_finish) == (2, key, done)


def test_the_decorated_object_is_still_the_function() -> None:
    made = declare()
    assert made("ctx", Ship(5)) == "ctx 5"
    assert (made.__name__, made.__doc__) == ("handler", "Ship an order.")
    assert made.__module__ == __name__
    assert list(inspect.signature(made).parameters) == ["ctx", "payload"]
    assert inspect.unwrap(made) is made.func
    assert repr(made) == "<Handler t.handler v1>"


def test_an_async_handler_gives_its_coroutine() -> None:
    @job("t.async")
    async def handler(ctx: Any) -> int:
        return 7

    assert handler.is_async
    assert not handler.takes_payload
    assert asyncio.run(handler(None)) == 7


def test_a_handler_cannot_be_changed_and_copies_as_itself() -> None:
    made = declare()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.queue = "other"  # type: ignore[misc]
    assert copy.deepcopy(made) is made
    assert copy.copy(made) is made


def test_annotations_of_names_inside_a_function_resolve() -> None:
    @dataclasses.dataclass
    class Local:
        value: int

    @job("t.local")
    def handler(ctx: Context, payload: Local) -> Unknown: ...

    assert handler.codec.decode('{"value":1}') == Local(1)


def test_annotations_resolve_through_a_closure() -> None:
    @dataclasses.dataclass
    class Local:
        value: int

    def build() -> Handler[Any, Any]:
        @job("t.closure")
        def handler(ctx: Any, payload: Local) -> Local:
            return Local(1)

        return handler

    assert build().codec.decode('{"value":1}') == Local(1)


def test_a_handler_in_a_function_may_name_itself() -> None:
    @job("t.itself")
    def handler(ctx: Any, payload: Ship) -> Handler[Any, Any]:
        return handler

    assert handler(None, Ship(1)) is handler


def test_a_wrapped_function_is_read_through() -> None:
    def plain(ctx: Any, payload: Ship) -> int:
        return 1

    @functools.wraps(plain)
    def wrapper(*args: Any) -> int:
        return plain(*args)

    assert job("t.wrapped")(wrapper).codec.type_hint is Ship


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": ""}, "name must have 1 to 100"),
        ({"name": " "}, "name must not be blank"),
        ({"name": "x" * 101}, "1 to 100"),
        ({"name": "a\0"}, "NUL"),
        ({"name": 5}, "name must be str"),
        ({"version": 0}, "version must be a whole number"),
        ({"version": "1"}, "version"),
        ({"version": True}, "version"),
        ({"version": 2**31}, "version"),
        ({"version": None}, "version"),
        ({"queue": ""}, "queue"),
        ({"queue": None}, "queue must be str"),
        ({"priority": 101}, "priority must be a whole number from -100 to 100"),
        ({"priority": 1.0}, "priority"),
        ({"max_attempts": 0}, "max_attempts must be a whole number from 1 to 1000"),
        ({"max_attempts": 1001}, "max_attempts"),
        ({"timeout": 0}, "timeout must be a number of seconds above 0"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": math.inf}, "timeout"),
        ({"timeout": math.nan}, "timeout"),
        ({"timeout": "5"}, "timeout"),
        ({"timeout": True}, "timeout"),
        ({"retry_on_interrupt": 1}, "retry_on_interrupt must be True or False"),
        ({"backoff": "slow"}, "backoff must be seconds"),
        ({"concurrency": 0}, "concurrency must be a whole number"),
        ({"concurrency_key": "scope"}, "needs concurrency="),
        ({"concurrency": 1, "concurrency_key": "tenant"}, 'or "scope"'),
        ({"concurrency": 1, "concurrency_key": 5}, "concurrency_key must be a plain"),
        ({"concurrency": 1, "concurrency_key": lambda: "x"}, "exactly one argument"),
        ({"on_finish": "done"}, "on_finish must be a plain"),
        ({"on_finish": lambda: None}, "exactly one argument"),
    ],
    ids=shown,
)
def test_an_option_that_cannot_work_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidHandler, match="Handler ") as caught:
        declare(**options)
    assert says in str(caught.value)
    assert registry.get("t.handler", 1) is None


def test_callbacks_must_not_be_async() -> None:
    async def callback(argument: Any) -> None: ...

    for options in ({"on_finish": callback}, {"concurrency": 1, "concurrency_key": callback}):
        with pytest.raises(InvalidHandler, match="not async"):
            declare(**options)
    assert declare(on_finish=dir).on_finish is dir  # has no signature to read


def test_a_missing_name_is_answered_with_what_to_write() -> None:
    def handler(ctx: Any) -> None: ...

    with pytest.raises(InvalidHandler, match="@job needs a name"):
        job(handler)  # type: ignore[arg-type]


def no_parameters() -> None: ...
def three(ctx: Any, payload: Ship, more: int) -> None: ...
def keyword_only(ctx: Any, *, payload: Ship) -> None: ...
def keyword_extra(ctx: Any, payload: Ship, *, more: int = 1) -> None: ...
def starred(*args: Any) -> None: ...
def keywords(ctx: Any, **kwargs: Any) -> None: ...
def with_default(ctx: Any, payload: Ship | None = None) -> None: ...
def bare(ctx: Any, payload) -> None: ...  # type: ignore[no-untyped-def]
def unknown(ctx: Any, payload: Unknown) -> None: ...
def anything(ctx: Any, payload: Any) -> None: ...
def row(ctx: Any, payload: User) -> None: ...
def generator(ctx: Any) -> Iterator[int]:
    yield 1


async def async_generator(ctx: Any) -> Any:
    yield 1


class NotAFunction:
    def __call__(self, ctx: Any) -> None: ...


@pytest.mark.parametrize(
    ("func", "says"),
    [
        (no_parameters, "takes 0 parameters"),
        (three, "takes 3 parameters"),
        (keyword_only, "keyword-only"),
        (keyword_extra, "keyword-only"),
        (starred, "*args"),
        (keywords, "**kwargs"),
        (with_default, "no defaults"),
        (bare, "Annotate the parameter 'payload'"),
        (unknown, "cannot be resolved"),
        (anything, "say what it holds"),
        (row, "ModelId[User]"),
        (generator, "generator"),
        (async_generator, "generator"),
        (NotAFunction, "not a type"),
        (NotAFunction(), "not a NotAFunction"),
        (functools.partial(three, 1), "not a partial"),
    ],
)
def test_a_function_that_is_no_handler_is_refused(func: Any, says: str) -> None:
    with pytest.raises(InvalidHandler, match="Handler 't.bad'") as caught:
        job("t.bad")(func)
    assert says in str(caught.value)
    assert registry.get("t.bad", 1) is None


def test_a_handler_cannot_be_decorated_twice() -> None:
    with pytest.raises(InvalidHandler, match="not a Handler"):
        job("t.again")(declare())


# The registry --------------------------------------------------------------------------------


def test_two_handlers_of_one_name_and_version_are_refused() -> None:
    declare()
    with pytest.raises(InvalidHandler) as caught:
        declare()
    assert str(caught.value).count("test_handlers.declare") == 2
    registry.register(declare(version=2))  # once more the same one: nothing happens


def test_a_submission_names_its_handler_in_three_ways() -> None:
    first, second = declare(version=1), declare(version=10)
    declare("t.other", version=99)
    assert registry.resolve(first) is first
    assert registry.resolve("t.handler") is second
    assert registry.resolve(("t.handler", 1)) is first
    assert registry.get("t.handler", 10) is second
    assert registry.get("t.handler", 2) is None
    assert [made.key for made in registry.all() if made.name.startswith("t.")] == [
        ("t.handler", 1),
        ("t.handler", 10),
        ("t.other", 99),
    ]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("t.handlr", "Did you mean t.handler?"),
        ("nothing like it", "Is its jobs.py in an installed app?"),
        (("t.handler", 7), "('t.handler', 7) is not registered, though"),
        (("t.handlr", 1), "Did you mean t.handler?"),
        (5, "not int"),
        (None, "not NoneType"),
        (("t.handler",), "not tuple"),
        (("t.handler", "1"), "not tuple"),
        (three, "not function"),
        ("os.system", "No handler is named 'os.system'"),
    ],
)
def test_what_is_not_registered_is_refused_with_what_is_close(spec: Any, says: str) -> None:
    declare()
    with pytest.raises(InvalidSubmission) as caught:
        registry.resolve(spec)
    assert says in str(caught.value)


def test_a_forgotten_handler_does_not_resolve() -> None:
    made = declare()
    registry.unregister("t.handler", 1)
    registry.unregister("t.handler", 1)
    with pytest.raises(InvalidSubmission, match="No handler is named"):
        registry.resolve(made)


def test_temporary_forgets_what_came_and_brings_back_what_went() -> None:
    kept = declare()
    with pytest.raises(RuntimeError), registry.temporary() as inside:
        assert inside is registry
        declare("t.inside")
        registry.unregister("t.handler", 1)
        raise RuntimeError
    assert registry.get("t.inside", 1) is None
    assert registry.get("t.handler", 1) is kept


def test_a_timeout_above_the_setting_is_found_when_settings_are_there() -> None:
    before = registry.problems()
    declare(timeout=50)
    registry.validate()
    with override_settings(DURABLE_JOBS={"MAX_TIMEOUT_SECONDS": 40, "TIMEOUT_SECONDS": 30}):
        with pytest.raises(InvalidHandler, match="MAX_TIMEOUT_SECONDS"):
            registry.validate()
        assert any("timeout=50" in problem for problem in registry.problems())
    assert registry.problems() == before == []


def test_a_model_that_is_not_there_is_found_by_validate() -> None:
    LostId = ModelId["shop.Nothing"]  # noqa: N806

    @job("t.lost")
    def handler(ctx: Any, payload: LostId) -> None: ...

    with pytest.raises(InvalidHandler, match=r"'t.lost' .*no model of an installed app"):
        registry.validate()


def test_autodiscover_imports_jobs_modules_and_judges_them(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr(handlers, "autodiscover_modules", imported.append)
    declare(timeout=5000)
    autodiscover(validate=False)
    with pytest.raises(InvalidHandler, match="timeout=5000"):
        autodiscover()
    assert imported == ["jobs", "jobs"]


# Concurrency keys ----------------------------------------------------------------------------


def test_the_key_is_none_the_handler_the_scope_or_the_functions() -> None:
    assert declare("t.a").concurrency_key_for(Ship(1), "s") is None
    assert declare("t.b", concurrency=1).concurrency_key_for(Ship(1), "s") == "t.b"
    scoped = declare("t.c", concurrency=1, concurrency_key="scope")
    assert scoped.concurrency_key_for(Ship(1), "tenant") == "scope:tenant"
    assert scoped.concurrency_key_for(Ship(1), "") == "scope:"
    made = declare("t.d", concurrency=1, concurrency_key=lambda payload: payload.carrier)
    assert made.concurrency_key_for(Ship(1, "dhl"), "s") == "dhl"
    free = declare("t.e", concurrency=1, concurrency_key=lambda payload: None)
    assert free.concurrency_key_for(Ship(1), "s") is None


def test_the_longest_scope_has_a_key_of_its_own() -> None:
    scoped = declare(concurrency=1, concurrency_key="scope")
    keys = {scoped.concurrency_key_for(None, "é" * 199 + end) for end in "ab"}
    assert len(keys) == 2
    assert all(key is not None and len(key) <= 200 for key in keys)


@pytest.mark.parametrize("key", ["", " ", "x" * 201, 5, "a\0", "\ud800"])
def test_a_key_that_cannot_be_stored_is_refused(key: Any) -> None:
    made = declare(concurrency=1, concurrency_key=lambda payload: key)
    with pytest.raises(InvalidSubmission, match='handler ".+": concurrency_key must'):
        made.concurrency_key_for(Ship(1), "")


def test_a_key_function_that_raises_is_a_refusal() -> None:
    made = declare(concurrency=1, concurrency_key=lambda payload: payload.nothing)
    with pytest.raises(InvalidSubmission, match="raised AttributeError"):
        made.concurrency_key_for(Ship(1), "")


# Doors ---------------------------------------------------------------------------------------


class Doors:
    """Stands for ``Job.objects`` and tells what it was asked."""

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            return name, args, options

        async def acall(*args: Any, **options: Any) -> Any:
            return name, args, options

        return acall if name.startswith("a") else call


@pytest.fixture
def doors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_jobs", Doors)


@pytest.mark.usefixtures("doors")
@pytest.mark.parametrize("name", ["stage", "submit", "enqueue", "asubmit", "aenqueue"])
def test_a_door_hands_over_the_handler_the_payload_and_the_options(name: str) -> None:
    made: Any = declare()
    found = getattr(made, name)(Ship(1), job_id="j", using="other")
    if name.startswith("a"):
        found = asyncio.run(found)
    assert found == (name, (made, Ship(1)), {"job_id": "j", "using": "other"})


@pytest.mark.usefixtures("doors")
@pytest.mark.parametrize("name", ["stage", "submit", "enqueue", "asubmit", "aenqueue"])
def test_a_door_for_many_makes_a_submission_of_each_payload(name: str) -> None:
    from django_durable_jobs.submission import JobSubmission

    made: Any = declare()
    ready = JobSubmission.create(made, Ship(3), queue="own")
    payloads = iter([Ship(1), Ship(2), ready])
    found = getattr(made, f"{name}_many")(payloads, using="other", queue="mail")
    if name.startswith("a"):
        found = asyncio.run(found)
    door, (submissions,), options = found
    assert (door, options) == (f"{name}_many", {"using": "other"})
    assert [one.queue for one in submissions] == ["mail", "mail", "own"]
    assert [one.payload for one in submissions] == [
        '{"order":1,"carrier":"post"}',
        '{"order":2,"carrier":"post"}',
        '{"order":3,"carrier":"post"}',
    ]


def test_the_doors_are_those_of_the_manager() -> None:
    from django_durable_jobs.models import Job

    assert handlers._jobs() is Job.objects or isinstance(handlers._jobs(), type(Job.objects))
