"""The fingerprint of a payload's schema: the hash of a description in plain JSON. Pure.

The description says everything that decides which stored texts the type reads, and what
they mean, and nothing else. Every word of it stands here or comes from the project's own
types, so that no version of Python or of a library changes it. docs/payloads.md has the
format; another format is another ``VERSION``.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, cast

from msgspec import inspect as mi

from .model_id import ModelId
from .payload_types import JSON_TYPE, RECORDS, SCALARS, bare, parts

VERSION = "1"

_NUMBER = ("gt", "ge", "lt", "le", "multiple_of")
_LENGTH = ("min_length", "max_length")
_CONSTRAINTS: dict[type[mi.Type], tuple[str, ...]] = {
    mi.IntType: _NUMBER,
    mi.FloatType: _NUMBER,
    mi.StrType: (*_LENGTH, "pattern"),
    mi.BytesType: _LENGTH,
    mi.DateTimeType: ("tz",),
    mi.TimeType: ("tz",),
    mi.ListType: _LENGTH,
    mi.VarTupleType: _LENGTH,
    mi.DictType: _LENGTH,
}
_CONTAINERS: dict[type[mi.Type], str] = {
    mi.ListType: "list",
    mi.VarTupleType: "vartuple",
    mi.TupleType: "tuple",
}


def fingerprint(node: mi.Type) -> str:
    """Hash the description of a type: 32 hexadecimal characters, equal everywhere."""
    return hashlib.sha256(description(node).encode()).hexdigest()[:32]


def description(node: mi.Type) -> str:
    """Write the description of a type, its version first, in the exact text that is hashed."""
    return json.dumps([VERSION, _describe(node, [])], separators=(",", ":"), sort_keys=True)


def _describe(node: mi.Type, above: list[int]) -> Any:
    """Describe a type; ``above`` holds the records that it stands in, the outermost first."""
    node = bare(node)
    if type(node) in SCALARS:
        return [SCALARS[type(node)], _constraints(node)]
    if isinstance(node, mi.LiteralType):
        return ["literal", _sorted([type(value).__name__, value] for value in node.values)]
    if isinstance(node, mi.EnumType):
        return ["enum", _sorted(_member(member) for member in node.cls)]
    if isinstance(node, mi.CustomType):
        if node.cls is JSON_TYPE:
            return ["json"]
        return cast("type[ModelId[Any]]", node.cls).describe()
    if isinstance(node, RECORDS):
        return _describe_record(node, above)
    if isinstance(node, mi.DictType):
        inside = [_describe(node.key_type, above), _describe(node.value_type, above)]
        return ["dict", inside, _constraints(node)]
    inside = [_describe(part, above) for _, part in parts(node)]
    if isinstance(node, mi.UnionType):
        return ["union", _sorted(inside)]
    return [_CONTAINERS[type(node)], inside, _constraints(node)]


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
    asked = {name: getattr(node, name) for name in _CONSTRAINTS.get(type(node), ())}
    plain = float if isinstance(node, mi.FloatType) else lambda value: value
    return {name: plain(value) for name, value in asked.items() if value is not None}


def _member(member: Any) -> list[Any]:
    """Give a member's type and value; a number's meaning is its name, so that counts too.

    ``auto()`` numbers members by their place: one that is put in between would silently
    give the others' numbers another meaning.
    """
    value = member.value
    kind = type(value).__name__
    return [kind, value, member.name] if isinstance(value, int) else [kind, value]


def _sorted(items: Any) -> list[Any]:
    return sorted(items, key=json.dumps)
