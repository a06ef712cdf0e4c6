"""What a payload type may be, judged once at registration, and its fingerprint. Pure.

``check_type`` refuses with ``InvalidHandler`` what the codec cannot carry exactly, each
time with a sentence that says what to write instead. ``fingerprint`` hashes a canonical
description of what is left.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import hashlib
import json
import types
import typing
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, cast

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
ALGORITHM = "1"
_LOCAL = (
    "Define the classes that it names at module level, importable at run time "
    "(not under TYPE_CHECKING)."
)
_SCALARS: dict[type[mi.Type], str] = {
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
    mi.ByteArrayType: "can be changed in place: use bytes",
    mi.MemoryViewType: "is a memoryview: use bytes",
}
_RECORDS = (mi.DataclassType, mi.TypedDictType, mi.StructType)


def check_type(hint: Any) -> mi.Type:
    """Give msgspec's description of ``hint``, or raise ``InvalidHandler``."""
    _check_hint(hint, "payload", {})
    try:
        node = mi.type_info(hint)
    except Exception as error:  # msgspec raises what it meets; all of it is a refusal
        raise InvalidHandler(f"The payload type is not supported: {error}.") from error
    _check_node(node, "payload", set())
    return node


def fingerprint(node: mi.Type) -> str:
    """Hash the description of a type: 32 hexadecimal characters, equal in every process."""
    text = json.dumps([ALGORITHM, _describe(node, [])], separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def field_names(node: mi.Type) -> frozenset[str]:
    """Collect the field names of every record in the type: text that messages may show."""
    names: set[str] = set()
    pending, seen = [node], set()
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, _RECORDS):
            names.update(name for field in item.fields for name in (field.name, field.encode_name))
        pending += [part for _, part in _parts(item)]
    return frozenset(names)


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
        yield from ((part, where) for part in typing.get_args(hint) if not isinstance(part, str))
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


# Nodes: what msgspec understood ------------------------------------------------------------


def _check_node(node: mi.Type, where: str, seen: set[int]) -> None:
    if id(node) in seen:
        return
    seen.add(id(node))
    _check_shape(node, where)
    for name, part in _parts(node):
        _check_node(part, f"{where}{name}", seen)


def _check_shape(node: mi.Type, where: str) -> None:
    if isinstance(node, mi.DictType):
        key = type(_bare(node.key_type))
        if key in _REFUSED:
            raise InvalidHandler(f"The type of {where} {_REFUSED[key]}.")
        if key is not mi.StrType:
            raise InvalidHandler(f"The keys of {where} must be str: JSON has no others.")
    elif isinstance(node, mi.EnumType):
        if issubclass(node.cls, enum.Flag):
            raise InvalidHandler(f"{where} is a Flag, which has no fixed set of values: use int.")
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


def _is_supported(node: mi.Type) -> bool:
    containers = (mi.ListType, mi.VarTupleType, mi.TupleType, mi.UnionType, mi.LiteralType)
    return type(node) in _SCALARS or isinstance(node, (*containers, *_RECORDS, mi.Metadata))


def _parts(node: mi.Type) -> Iterator[tuple[str, mi.Type]]:
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
    elif isinstance(node, _RECORDS):
        yield from ((f".{field.name}", field.type) for field in node.fields)


def _bare(node: mi.Type) -> mi.Type:
    return _bare(node.type) if isinstance(node, mi.Metadata) else node


# The description -----------------------------------------------------------------------------


def _describe(node: mi.Type, above: list[int]) -> Any:
    """Describe a type in plain JSON; ``above`` holds the records that it stands in."""
    node = _bare(node)
    if type(node) in _SCALARS:
        return [_SCALARS[type(node)], _constraints(node)]
    if isinstance(node, mi.LiteralType):
        return ["literal", _values(node.values)]
    if isinstance(node, mi.EnumType):
        return ["enum", _values(member.value for member in node.cls)]
    if isinstance(node, mi.CustomType):
        if node.cls is JSON_TYPE:
            return ["json"]
        return cast("type[ModelId[Any]]", node.cls).describe()
    if isinstance(node, _RECORDS):
        return _describe_record(node, above)
    inner = [_describe(part, above) for _, part in _parts(node)]
    if isinstance(node, mi.UnionType):
        return ["union", sorted(inner, key=json.dumps)]
    return [type(node).__name__.removesuffix("Type").lower(), inner, _constraints(node)]


def _describe_record(node: Any, above: list[int]) -> Any:
    if id(node) in above:
        return ["ref", len(above) - above.index(id(node))]
    inside = [*above, id(node)]
    fields = [
        [field.encode_name, field.required, _describe(field.type, inside)] for field in node.fields
    ]
    if isinstance(node, mi.TypedDictType):  # whose keys have no order
        fields.sort(key=lambda field: str(field[0]))
    if not isinstance(node, mi.StructType):
        return ["object", fields]
    return ["object", fields, node.tag_field, node.tag, node.array_like]


def _constraints(node: mi.Type) -> dict[str, Any]:
    """Give what ``msgspec.Meta`` asks of the value, by name; nothing that is not asked."""
    found = {name: getattr(node, name) for name in node.__struct_fields__}
    return {
        name: value for name, value in found.items() if isinstance(value, bool | int | float | str)
    }


def _values(values: Any) -> list[list[Any]]:
    plain = ([type(value).__name__, value] for value in values)
    return sorted(plain, key=json.dumps)
