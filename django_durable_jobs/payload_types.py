"""What a payload type may be, judged once at registration. Pure.

``check_type`` refuses with ``InvalidHandler`` what the codec cannot carry exactly, each
time with the place and a sentence that says what to write instead.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import types
import typing
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
from msgspec import inspect as mi

from .exceptions import InvalidHandler
from .model_id import ModelId

if TYPE_CHECKING:
    JSON: TypeAlias = dict[str, "JSON"] | list["JSON"] | str | int | float | bool | None
else:

    class _AnyJSON(type):
        def __instancecheck__(cls, value: object) -> bool:
            return value is None or isinstance(value, dict | list | str | int | float | bool)

    class JSON(metaclass=_AnyJSON):
        """Any plain JSON value, as a payload type or inside one: what ``Any`` may not say."""


JSON_TYPE: Any = JSON
# The form is JSON Schema's own word for it; msgspec writes no other.
_BASE64 = {"contentEncoding": "base64"}
Base64: TypeAlias = Annotated[bytes, msgspec.Meta(extra_json_schema=_BASE64)]
"""Bytes in a payload, stored as base64 text: what bare ``bytes`` may not say."""

_LOCAL = (
    "Define the classes that it names at module level, importable at run time "
    "(not under TYPE_CHECKING)."
)
SCALARS: dict[type[mi.Type], str] = {
    mi.NoneType: "null",
    mi.BoolType: "bool",
    mi.IntType: "int",
    mi.FloatType: "float",
    mi.StrType: "str",
    mi.BytesType: "bytes",
    mi.DateTimeType: "datetime",
    mi.DateType: "date",
    mi.TimeType: "time",
    mi.TimeDeltaType: "timedelta",
    mi.UUIDType: "uuid",
    mi.DecimalType: "decimal",
}
_REFUSED: dict[type[mi.Type], str] = {
    mi.AnyType: "is Any, or a list, dict or tuple without its item types: say what it holds, "
    "as in list[str], dict[str, int] or dict[str, JSON]",
    mi.SetType: "is a set, which has no order: use list[...]",
    mi.FrozenSetType: "is a frozenset, which has no order: use tuple[..., ...]",
    mi.NamedTupleType: "is a NamedTuple, whose field names JSON loses: use a dataclass",
    mi.BytesType: "is bytes without a declared form, and JSON has none: use "
    "django_durable_jobs.payloads.Base64",
    mi.ByteArrayType: "can be changed in place: use bytes, as django_durable_jobs.payloads.Base64",
    mi.MemoryViewType: "is a memoryview: use bytes, as django_durable_jobs.payloads.Base64",
}
_INDEXED = (list, tuple, dict, collections.abc.Sequence, collections.abc.Mapping)
RECORDS = (mi.DataclassType, mi.TypedDictType, mi.StructType)


def check_type(hint: Any) -> mi.Type:
    """Give msgspec's description of ``hint``, or raise ``InvalidHandler``."""
    _check_hint(hint, "payload", {})
    try:
        node = mi.type_info(hint)
    except Exception as error:  # msgspec raises what it meets; all of it is a refusal
        place, reason = _innermost(hint, "payload", error, set())
        raise InvalidHandler(f"The type of {place} is not supported: {reason}.") from error
    for where, item in walk(node):
        _check_shape(item, where)
    _check_datetimes(node)
    return node


def walk(node: mi.Type) -> Iterator[tuple[str, mi.Type]]:
    """Give a type and the types inside it, each once, with the places where they stand.

    Bytes whose form is declared are given as that declaration, not as bare bytes.
    """
    pending, seen = [("payload", node)], set()
    while pending:
        where, item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        yield where, item
        if not _is_base64(item):
            inside = [(f"{where}{piece}", part) for piece, part in parts(item)]
            pending += reversed(inside)


def field_names(node: mi.Type) -> frozenset[str]:
    """Collect the field names of every record in the type: text that messages may show."""
    fields = (field for _, item in walk(node) if isinstance(item, RECORDS) for field in item.fields)
    return frozenset(name for field in fields for name in (field.name, field.encode_name))


def takes_only_aware(node: mi.Type) -> bool:
    """Tell that the type holds datetimes, and none that is declared naive."""
    zones = _zones(node)
    return bool(zones) and False not in zones.values()


def holds_model_ids(node: mi.Type) -> bool:
    return any(_is_model_id(item) for _, item in walk(node))


# Annotations: what msgspec's own description does not show any more -----------------------


def _check_hint(hint: Any, where: str, seen: dict[int, Any]) -> None:
    if id(hint) in seen:
        return
    seen[id(hint)] = hint  # kept, so that no later hint gets the same id
    if any("secret" in name.lower() for name in _names(hint)):
        raise InvalidHandler(
            f"The type of {where} is a secret: payloads are stored as readable text. "
            "Pass an id and read the secret in the handler."
        )
    _check_class(hint, where)
    for part, path in _hint_parts(hint, where):
        _check_hint(part, path, seen)


def _names(hint: Any) -> Iterator[str]:
    """Name the class, NewType or alias, and the classes of ``Annotated`` marks."""
    yield str(getattr(hint, "__name__", ""))
    for mark in getattr(hint, "__metadata__", ()):
        yield (mark if isinstance(mark, type) else type(mark)).__name__


def _check_class(hint: Any, where: str) -> None:
    callables = (collections.abc.Callable, types.FunctionType, type)
    if hint is Any or hint is object:
        raise InvalidHandler(f"The type of {where} is {_show(hint)}: say what it holds.")
    if hint in callables or typing.get_origin(hint) in callables:
        raise InvalidHandler(
            f"The type of {where} is a callable, which cannot be stored: pass the name of a "
            "choice (an Enum) and look the function up in the handler."
        )
    if isinstance(hint, type) and _is_model(hint):
        raise InvalidHandler(
            f"The type of {where} is the model {hint.__name__}: use ModelId[{hint.__name__}] "
            "and read the row in the handler."
        )


def _is_model(cls: type) -> bool:
    from django.db.models import Model

    return issubclass(cls, Model)


def _hint_parts(hint: Any, where: str) -> Iterator[tuple[Any, str]]:
    for attribute in ("__supertype__", "__value__"):  # of a NewType, of a ``type`` statement
        if (meant := getattr(hint, attribute, None)) is not None:
            yield meant, where
    origin = typing.get_origin(hint)
    if origin is not None and origin is not typing.Literal:
        inside = f"{where}[...]" if origin in _INDEXED else where
        yield from ((part, inside) for part in typing.get_args(hint) if not isinstance(part, str))
    cls = origin or hint
    if isinstance(cls, type) and _is_record_class(cls):
        for name, part in _class_hints(cls, where).items():
            yield part, f"{where}.{name}"


def _is_record_class(cls: type) -> bool:
    return (
        dataclasses.is_dataclass(cls)
        or typing.is_typeddict(cls)
        or issubclass(cls, msgspec.Struct)
        or hasattr(cls, "__attrs_attrs__")
    )


def _class_hints(cls: type, where: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except Exception as error:  # a name that cannot be resolved, or a broken annotation
        raise InvalidHandler(
            f"The annotations of {cls.__name__} (type of {where}) cannot be resolved "
            f"({error}). {_LOCAL}"
        ) from error


def _show(hint: Any) -> str:
    return str(getattr(hint, "__name__", hint))


def _innermost(hint: Any, where: str, error: Exception, seen: set[int]) -> tuple[str, Exception]:
    """Give the innermost place that msgspec refuses by itself, and what it says of that."""
    seen.add(id(hint))
    for part, place in _hint_parts(hint, where):
        if id(part) in seen:
            continue
        try:
            mi.type_info(part)
        except Exception as inner:
            return _innermost(part, place, inner, seen)
    return where, error


# Nodes: what msgspec understood ------------------------------------------------------------


def _check_shape(node: mi.Type, where: str) -> None:
    if isinstance(node, mi.DictType):
        key = type(bare(node.key_type))
        if key is mi.AnyType:
            raise InvalidHandler(f"The type of {where} {_REFUSED[key]}.")
        if key is not mi.StrType:
            raise InvalidHandler(f"The keys of {where} must be str: JSON has no others.")
    elif isinstance(node, mi.EnumType):
        if issubclass(node.cls, enum.Flag):
            raise InvalidHandler(f"{where} is a Flag, which has no fixed set of values: use int.")
    elif isinstance(node, mi.StructType) and node.cls.__struct_config__.omit_defaults:
        raise InvalidHandler(
            f"The Struct of {where} omits defaults, so that a later default would change what "
            "stored payloads mean: leave out omit_defaults=True."
        )
    elif isinstance(node, mi.CustomType):
        _check_custom(node.cls, where)
    elif type(node) in _REFUSED:
        raise InvalidHandler(f"The type of {where} {_REFUSED[type(node)]}.")
    elif not _is_supported(node):
        raise InvalidHandler(f"The type of {where} is not one that a payload can hold.")


def _check_custom(cls: Any, where: str) -> None:
    if cls is JSON_TYPE:
        return
    if isinstance(cls, type) and issubclass(cls, ModelId):
        if cls._target is None:
            raise InvalidHandler(f"{where} is a ModelId without its model: write ModelId[Article].")
        return
    raise InvalidHandler(
        f"The type of {where}, {_show(cls)}, is not one that a payload can hold: use a dataclass, "
        "a TypedDict, a msgspec.Struct or plain JSON types."
    )


def _check_datetimes(node: mi.Type) -> None:
    """Refuse a type in which some datetimes are declared naive and others declare nothing."""
    zones = _zones(node)
    if False not in zones.values():
        return
    for where, tz in zones.items():
        if tz is None:
            raise InvalidHandler(
                f"{where} does not say which datetimes it takes, and others of the type are "
                "naive: write Annotated[datetime, msgspec.Meta(tz=True)]."
            )


def _zones(node: mi.Type) -> dict[str, bool | None]:
    return {where: item.tz for where, item in walk(node) if isinstance(item, mi.DateTimeType)}


def _is_base64(node: mi.Type) -> bool:
    if not isinstance(node, mi.Metadata) or type(bare(node)) is not mi.BytesType:
        return False
    return _BASE64.items() <= (node.extra_json_schema or {}).items()


def _is_model_id(node: mi.Type) -> bool:
    return isinstance(node, mi.CustomType) and node.cls is not JSON_TYPE


def _is_supported(node: mi.Type) -> bool:
    containers = (mi.ListType, mi.VarTupleType, mi.TupleType, mi.UnionType, mi.LiteralType)
    return type(node) in SCALARS or isinstance(node, (*containers, *RECORDS, mi.Metadata))


def parts(node: mi.Type) -> Iterator[tuple[str, mi.Type]]:
    """Give the types inside a type, each with the piece of path that leads to it."""
    if isinstance(node, mi.Metadata):
        yield "", node.type
    elif isinstance(node, mi.ListType | mi.VarTupleType):
        yield "[...]", node.item_type
    elif isinstance(node, mi.TupleType):
        yield from ((f"[{index}]", part) for index, part in enumerate(node.item_types))
    elif isinstance(node, mi.DictType):
        yield "[...]", node.value_type
    elif isinstance(node, mi.UnionType):
        yield from (("", part) for part in node.types)
    elif isinstance(node, RECORDS):
        yield from ((f".{field.name}", field.type) for field in node.fields)


def bare(node: mi.Type) -> mi.Type:
    return bare(node.type) if isinstance(node, mi.Metadata) else node
