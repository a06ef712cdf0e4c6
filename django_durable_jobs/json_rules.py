"""What JSON text may hold, and the proof that it holds a value exactly. Pure.

Used for payloads and for results alike: what one database would refuse or change (NaN,
lone surrogates, integers beyond 64 bits, depth, size) is refused before any is touched.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import math
import re
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from .model_id import INT_MAX, INT_MIN, ModelId
from .payload_types import JSON_TYPE

MAX_DEPTH = 100
_MOMENTS = (datetime.date, datetime.time, datetime.timedelta, uuid.UUID)
_SURROGATE = re.compile("[\ud800-\udfff]")
_SAFE_REASON = re.compile(
    r"Expected `[\w |.\[\], ]+`, got `[\w ]+`|Object missing required field `\w+`"
)
_SAFE_PATH = re.compile(r"`\$[\w.\[\]]*`")


class Refused(Exception):
    """A value cannot be written; the path and the reason never show it."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason


def encode(value: object, limit: int, names: frozenset[str]) -> str:
    """Give the JSON text, of at most ``limit`` UTF-8 bytes; raise ``Refused`` and nothing else.

    ``names`` are the keys that a path may show; every other key is data.
    """
    try:
        _examine(value, limit, names)
        data = ENCODER.encode(value)
        if len(data) > limit:
            raise _too_large(limit)
        return data.decode()
    except Refused:
        raise
    except Exception as error:  # code of the value's own class, or a kind msgspec does not know
        reason = f"{type(value).__name__} cannot be written ({type(error).__name__})"
        raise Refused("$", reason) from None


def enc_hook(value: object) -> Any:
    """Write what msgspec does not know: our ids, and subclasses of plain types."""
    if isinstance(value, ModelId):
        return value.wire
    for plain, convert in _PLAIN.items():
        if isinstance(value, plain):
            return convert(value)
    raise NotImplementedError


def dec_hook(kind: Any, raw: object) -> Any:
    """Read the two types of ours: plain JSON as it is, and ids."""
    return raw if kind is JSON_TYPE else kind.from_wire(raw)


# Bound now: while a test freezes the time, datetime.datetime is another class.
_DECIMAL, _DATETIME, _DATE = decimal.Decimal, datetime.datetime, datetime.date
_PLAIN: dict[type, Callable[[Any], Any]] = {
    str: str.__str__,
    int: int.__pos__,
    float: float.__pos__,
    decimal.Decimal: lambda value: _DECIMAL(value),
    datetime.datetime: lambda value: _DATETIME.combine(value.date(), value.timetz()),
    datetime.date: lambda value: _DATE(value.year, value.month, value.day),
}
ENCODER = msgspec.json.Encoder(enc_hook=enc_hook)


def _examine(value: object, limit: int, names: frozenset[str]) -> None:
    """Refuse what JSON or a database cannot hold; iterative and bounded by ``limit``.

    Every value takes at least a byte, so a shared or cyclic structure that would unfold
    without end passes the limit or the depth first.
    """
    pending: list[tuple[object, str, int]] = [(value, "$", 0)]
    left = limit
    while pending:
        item, path, depth = pending.pop()
        children = _children(item, path, names)
        if children is None:
            left -= _check_leaf(item, path)
        else:
            if depth >= MAX_DEPTH:
                raise Refused("$", f"it is nested deeper than {MAX_DEPTH} levels")
            for child, child_path in children:
                pending.append((child, child_path, depth + 1))
            left -= 2
        if left < 0 or len(pending) > limit:
            raise _too_large(limit)


def _too_large(limit: int) -> Refused:
    return Refused("$", f"it is larger than {limit} bytes")


def _children(
    item: object, path: str, names: frozenset[str]
) -> Iterator[tuple[object, str]] | None:
    """Give what a container holds, with paths; ``None`` for a leaf."""
    if isinstance(item, list | tuple):
        return ((child, f"{path}[{index}]") for index, child in enumerate(item))
    if isinstance(item, dict):
        return (_entry(key, child, path, names) for key, child in item.items())
    record = _record_fields(item)
    if record is None:
        return None
    return ((getattr(item, name), f"{path}.{name}") for name in record if hasattr(item, name))


def _entry(key: object, child: object, path: str, names: frozenset[str]) -> tuple[object, str]:
    """Check a key. Keys are data: only those that are fields of the type are shown."""
    if not isinstance(key, str):
        raise Refused(path, f"a key is {type(key).__name__}; keys must be str")
    _check_leaf(key, path)
    return child, f"{path}.{key}" if key in names else f"{path}[...]"


def _record_fields(item: object) -> tuple[str, ...] | None:
    kind = type(item)
    if isinstance(item, msgspec.Struct):
        return item.__struct_fields__
    if (fields := getattr(kind, "__dataclass_fields__", None)) is not None:
        return tuple(fields)
    if (attributes := getattr(kind, "__attrs_attrs__", None)) is not None:
        return tuple(attribute.name for attribute in attributes)
    return None


def _check_leaf(item: object, path: str) -> int:
    """Refuse a single value; give the bytes that it takes at least."""
    if item is None or isinstance(item, (bool, msgspec.UnsetType, *_MOMENTS)):
        return 1
    if isinstance(item, ModelId):
        return _check_leaf(item.wire, path)
    if isinstance(item, enum.Enum):
        return _check_leaf(item.value, path)
    if isinstance(item, int | float | decimal.Decimal):
        return _check_number(item, path)
    if isinstance(item, str):
        if not str.isascii(item) and _SURROGATE.search(item):
            raise Refused(path, "text holds a lone surrogate, which is not Unicode")
        return str.__len__(item) + 2
    if isinstance(item, bytes | bytearray):
        return len(item) + 2
    raise Refused(path, f"{type(item).__name__} is not a JSON type")


def _check_number(item: int | float | decimal.Decimal, path: str) -> int:
    if isinstance(item, int):
        if not INT_MIN <= item <= INT_MAX:
            raise Refused(path, "an int is beyond 64 bits: use str or Decimal")
    elif not (math.isfinite(item) if isinstance(item, float) else item.is_finite()):
        raise Refused(path, f"{type(item).__name__} is NaN or infinite, which is not JSON")
    return 1


# Exactness -----------------------------------------------------------------------------------


def compare(value: Any, decoded: Any, path: str) -> None:
    """Refuse a value that is not what a handler would be given for its text."""
    kind = type(decoded)
    if kind in (str, int, float):
        same = _is_same_scalar(value, decoded, kind)
    elif kind in (list, tuple):
        same = _is_same_items(value, decoded, path)
    elif kind is dict:
        same = type(value) is dict and len(value) == len(decoded)
        for key in decoded if same else ():
            compare(value[key], decoded[key], f"{path}[...]")
    elif (fields := _record_fields(decoded)) is not None:
        same = type(value) is kind
        for name in fields if same else ():
            compare(getattr(value, name), getattr(decoded, name), f"{path}.{name}")
    else:
        same = _is_same_leaf(value, decoded)
    if not same:
        raise Refused(path, _difference(value, kind))


def _is_same_scalar(value: Any, decoded: Any, kind: type) -> bool:
    """Take subclasses (``TextChoices``, ``SafeString``), and an int for a float, by value."""
    wanted = (int, float) if kind is float else kind
    return isinstance(value, wanted) and not isinstance(value, bool) and bool(value == decoded)


def _is_same_items(value: Any, decoded: Any, path: str) -> bool:
    if type(value) is not type(decoded) or len(value) != len(decoded):
        return False
    for index, (given, read) in enumerate(zip(value, decoded, strict=True)):
        compare(given, read, f"{path}[{index}]")
    return True


def _is_same_leaf(value: Any, decoded: Any) -> bool:
    if isinstance(decoded, ModelId):
        return isinstance(value, ModelId) and value == decoded
    if not isinstance(value, type(decoded)):
        return False
    if isinstance(decoded, datetime.datetime):
        # Aware datetimes of a repeated hour never equal one of another zone.
        offsets = value.utcoffset() == decoded.utcoffset()
        return bool(offsets and value.replace(tzinfo=None) == decoded.replace(tzinfo=None))
    return bool(value == decoded)


def _difference(value: object, kind: type) -> str:
    if isinstance(value, int) and kind is float and not isinstance(value, bool):
        return "this int is not exact as a float"
    if type(value) is not kind:
        return f"expected {kind.__name__}, got {type(value).__name__}"
    if kind is dict:
        return "it has keys that its type does not have"
    return f"this {kind.__name__} does not come back from JSON as it is"


def check_complete(text: str, value: object) -> None:
    """Refuse a text that says more than the value that was read from it."""
    if ENCODER.encode(value) != text.encode():
        read = msgspec.to_builtins(value, enc_hook=enc_hook)
        if not _covers(read, msgspec.json.decode(text)):
            raise Refused("$", "it has fields that its type does not have")


def _covers(read: Any, written: Any) -> bool:
    """Tell whether every field of the text was read. Types are msgspec's business, not ours."""
    if isinstance(written, dict) and isinstance(read, dict):
        return all(key in read and _covers(read[key], part) for key, part in written.items())
    if isinstance(written, list) and isinstance(read, list | tuple):
        return all(map(_covers, read, written))
    return True


def refusal(error: Exception) -> Refused:
    """Say what is wrong; of msgspec's words only those that cannot hold a value."""
    if isinstance(error, Refused):
        return error
    text, _, place = str(error).partition(" - at ")
    path = place.strip("`") if _SAFE_PATH.fullmatch(place) else "$"
    if _SAFE_REASON.fullmatch(text):
        return Refused(path, text[0].lower() + text[1:].replace("`", ""))
    return Refused(path, "a value is not one that its type allows")
