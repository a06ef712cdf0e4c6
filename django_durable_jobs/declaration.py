"""What ``@job`` is given, judged: the function under it, and its options. Pure."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

from asgiref.sync import iscoroutinefunction

from .exceptions import InvalidHandler
from .retry import to_seconds

ConcurrencyKey = Callable[[Any], str | None] | str | None
SCOPE = "scope"

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_SHAPES = "write def handler(ctx) or def handler(ctx, payload: T)"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What ``@job`` needs to know about a function."""

    takes_payload: bool
    payload_type: Any
    is_async: bool


def read(func: Any, local_names: dict[str, Any]) -> Shape:
    """Judge the function; raise ``InvalidHandler`` if it is no handler.

    ``local_names`` are those of the place that the decorator stands in, so that string
    annotations resolve for handlers inside functions too. Only the payload's annotation
    is resolved: what annotates ``ctx`` may be imported under ``TYPE_CHECKING``.
    """
    _check_kind(func)
    parameters = list(_signature(func).parameters.values())
    _check_parameters(parameters)
    takes_payload = len(parameters) == 2
    hint = _payload_type(func, parameters[1], local_names) if takes_payload else None
    return Shape(takes_payload=takes_payload, payload_type=hint, is_async=is_async(func))


def is_async(function: Any) -> bool:
    """Tell whether calling it gives a coroutine."""
    return bool(iscoroutinefunction(function))


def accepts(function: Callable[..., Any], count: int) -> bool:
    """Tell whether it can be called with ``count`` positional arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # C code without a signature: taken on trust
        return True
    return True


def _check_kind(func: Any) -> None:
    if not inspect.isfunction(func):
        raise InvalidHandler(f"@job decorates a function, not a {type(func).__name__}; {_SHAPES}.")
    plain = inspect.unwrap(func)
    if inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
        raise InvalidHandler("The handler is a generator, which would never run: do not yield.")


def _check_parameters(parameters: list[inspect.Parameter]) -> None:
    if any(parameter.kind not in _POSITIONAL for parameter in parameters):
        raise InvalidHandler(f"*args, **kwargs and keyword-only parameters are refused: {_SHAPES}.")
    if not 1 <= len(parameters) <= 2:
        raise InvalidHandler(f"It takes {len(parameters)} parameters: {_SHAPES}.")
    if any(parameter.default is not parameter.empty for parameter in parameters):
        raise InvalidHandler(
            "Its parameters must have no defaults: both are always given. For a payload that "
            "may be left out, annotate it T | None."
        )


def _payload_type(func: Any, parameter: inspect.Parameter, local_names: dict[str, Any]) -> Any:
    if parameter.annotation is parameter.empty:
        raise InvalidHandler(
            f"Annotate the parameter {parameter.name!r}: its type is what payloads are checked by."
        )
    plain = inspect.unwrap(func)
    holder = types.SimpleNamespace(__annotations__={"payload": parameter.annotation})
    try:
        names = {**local_names, **_closure(plain)}
        return typing.get_type_hints(holder, plain.__globals__, names, include_extras=True)[
            "payload"
        ]
    except Exception as error:  # whatever evaluating the annotation raises
        raise InvalidHandler(
            f"The annotation of {parameter.name!r} cannot be resolved ({error}). Import the type "
            "at run time, not under TYPE_CHECKING."
        ) from error


def _closure(func: types.FunctionType) -> dict[str, Any]:
    """Give the names of the functions around; those not bound yet (its own maybe) are left out."""
    found = {}
    for name, cell in zip(func.__code__.co_freevars, func.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def _signature(func: Any) -> inspect.Signature:
    if sys.version_info >= (3, 14):  # pragma: no cover (annotations are evaluated lazily)
        import annotationlib

        return inspect.signature(func, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(func)


# The options ---------------------------------------------------------------------------------


def whole(name: str, value: Any, low: int, high: int) -> int:
    """Give a whole number in the range, or raise ``InvalidHandler``."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidHandler(
            f"{name} must be a whole number from {low} to {high}, not {value!r:.50}."
        )
    return int(value)


def whole_or_none(name: str, value: Any, low: int, high: int) -> int | None:
    """Do as ``whole``, for an option that may be left out."""
    return None if value is None else whole(name, value, low, high)


def timeout(value: Any) -> float | None:
    """Give seconds above 0; that they are not above the setting is checked with settings."""
    if value is None:
        return None
    seconds = to_seconds(value)
    if not seconds:
        raise InvalidHandler(f"timeout must be a number of seconds above 0, not {value!r:.50}.")
    return seconds


def flag(name: str, value: Any) -> bool:
    """Give True or False, and take nothing else for one of them."""
    if not isinstance(value, bool):
        raise InvalidHandler(f"{name} must be True or False, not {value!r:.50}.")
    return value


def concurrency_key(value: Any, concurrency: int | None) -> ConcurrencyKey:
    """Give ``None``, ``"scope"`` or a function of the payload (CONTRACT 3.12)."""
    if value is None:
        return None
    if concurrency is None:
        raise InvalidHandler("concurrency_key needs concurrency=: how many may run per key?")
    if isinstance(value, str):
        if value != SCOPE:
            raise InvalidHandler(
                f'concurrency_key must be a function of the payload or "scope", not {value!r:.50}.'
            )
        return SCOPE
    function: Callable[[Any], str | None] = plain_function("concurrency_key", value)
    return function


def plain_function(name: str, function: Any, count: int = 1) -> Any:
    """Give a plain function that can be called with so many arguments, or ``None``."""
    if function is None:
        return None
    takes = "one argument" if count == 1 else f"{count} arguments"
    if not callable(function) or is_async(function):
        raise InvalidHandler(f"{name} must be a plain (not async) function of {takes}.")
    if not accepts(function, count):
        raise InvalidHandler(f"The function given as {name} must take exactly {takes}.")
    return function
