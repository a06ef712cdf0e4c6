"""What JSON text may hold, and the proof that it holds a value exactly. Pure.

Used for payloads and for results alike: what one database would refuse or change (NaN,
lone surrogates, integers beyond 64 bits, depth, size) is refused before any is touched.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import math
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import count
from typing import Any

import msgspec

from .exceptions import InvalidSubmission
from .model_id import INT_MAX, INT_MIN, ModelId, is_instance
from .payload_types import JSON_TYPE

MAX_DEPTH = 100
_PATH_LIMIT = 80
_ABSENT: Any = object()
_CONTAINERS = (list, tuple, dict)
_ATOMS = (bool, datetime.date, datetime.time, datetime.timedelta, uuid.UUID, msgspec.UnsetType)
_SURROGATE = re.compile("[\ud800-\udfff]")
# A key of plain JSON is data, but mostly a name, without which no path would lead anywhere.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,39}")
_SAFE_REASON = re.compile(
    r"Expected `[\w |.\[\], ]+`, got `[\w ]+`|Object missing required field `\w+`"
)
_PIECE = re.compile(r"\[\.\.\.\]|\[\d+\]|\.\w+")
_SAFE_PATH = re.compile(r"`\$[\w.\[\]]*`")


# Where a value stands: the place of what holds it, and its index or key there. Written out
# only for what is refused.
Place = tuple[Any, int | str] | None


class Refused(Exception):
    """A value cannot be written; the reason never shows it."""

    def __init__(self, place: Place, reason: str) -> None:
        super().__init__(place, reason)
        self.place = place
        self.reason = reason


def path(place: Place, names: frozenset[str]) -> str:
    """Write a place as in ``$.items[3].price``; a key is shown if it is a field or like a name."""
    pieces = []
    while place is not None:
        place, step = place
        if isinstance(step, int):
            pieces.append(f"[{step}]")
        else:
            pieces.append(f".{step}" if step in names or _NAME.fullmatch(step) else "[...]")
    whole = f"${''.join(reversed(pieces))}"
    return whole if len(whole) <= _PATH_LIMIT else f"{whole[:_PATH_LIMIT]}..."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What else a value may hold; by default what a result may.

    ``naive``: datetimes without an offset. ``instances``: rows of models, each of which
    stands for its id.
    """

    naive: bool = True
    instances: bool = False


def encode(value: object, limit: int, rules: Rules) -> str:
    """Give the JSON text, of at most ``limit`` UTF-8 bytes; raise ``Refused`` and nothing else."""
    try:
        _examine(value, limit, rules)
        data = ENCODER.encode(value)
        if len(data) > limit:
            raise _too_large(limit)
        return data.decode()
    except Refused:
        raise
    except Exception as error:  # code of the value's own class, or a kind msgspec does not know
        reason = f"{type(value).__name__} cannot be written ({type(error).__name__})"
        raise Refused(None, reason) from None


def enc_hook(value: Any) -> Any:
    """Write what msgspec does not know: our ids, and subclasses of plain types."""
    if isinstance(value, ModelId):
        return value.wire
    if is_instance(value):
        return ModelId(value).wire
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


def _examine(value: object, limit: int, rules: Rules) -> None:
    """Refuse what JSON or a database cannot hold; in bounded time and in little memory.

    Every value takes at least a byte, so a shared or cyclic structure that would unfold
    without end passes the limit or the depth first.
    """
    left = limit
    levels: list[tuple[Iterator[tuple[object, Any]], Place]] = [(iter([(value, None)]), None)]
    while levels:
        inside, above = levels[-1]
        for item, step in inside:
            place = None if step is None else (above, step)
            # By far the most values are of these two: no more is asked of them.
            if type(item) is str:
                left -= _check_text(item, place)
            elif type(item) is int:
                left -= _check_number(item, place)
            elif isinstance(item, _CONTAINERS) and len(item) > left:
                raise _too_large(limit)
            elif (children := _children(item, place)) is None:
                left -= _check_leaf(item, place, rules)
            elif len(levels) > MAX_DEPTH:
                raise Refused(place, f"it is nested deeper than {MAX_DEPTH} levels")
            else:
                left -= 2
                levels.append((iter(children), place))
                break
            if left < 0:
                raise _too_large(limit)
        else:
            levels.pop()
    if left < 0:
        raise _too_large(limit)


def _too_large(limit: int) -> Refused:
    return Refused(None, f"it is larger than {limit} bytes")


def _children(item: object, place: Place) -> Iterable[tuple[object, int | str]] | None:
    """Give what a container holds, each with its index or key; ``None`` for a leaf."""
    if isinstance(item, list | tuple):
        return zip(item, count(), strict=False)
    if isinstance(item, dict):
        for key in item:
            if not isinstance(key, str):
                raise Refused(place, f"a key is {type(key).__name__}; keys must be str")
            _check_text(key, place)
        return zip(item.values(), item, strict=True)
    kind: Any = type(item)
    record = _record_fields(kind)
    if record is None:
        return None
    found = ((getattr(item, name, _ABSENT), name) for name in record)
    return [(child, name) for child, name in found if child is not _ABSENT]


@lru_cache(maxsize=1024)
def _record_fields(kind: Any) -> tuple[str, ...] | None:
    if issubclass(kind, msgspec.Struct):
        return tuple(kind.__struct_fields__)
    if (fields := getattr(kind, "__dataclass_fields__", None)) is not None:
        return tuple(fields)
    if (attributes := getattr(kind, "__attrs_attrs__", None)) is not None:
        return tuple(attribute.name for attribute in attributes)
    return None


def _check_leaf(item: object, place: Place, rules: Rules) -> int:
    """Refuse a single value; give the bytes that it takes at least."""
    if isinstance(item, enum.Enum):
        return _check_leaf(item.value, place, rules)
    if isinstance(item, str):
        return _check_text(item, place)
    if item is None or isinstance(item, _ATOMS):
        if not rules.naive and isinstance(item, datetime.datetime):
            _refuse_naive(item, place)
        return 1
    if isinstance(item, ModelId):
        return _check_leaf(item.wire, place, rules)
    if isinstance(item, int | float | decimal.Decimal):
        return _check_number(item, place)
    if isinstance(item, bytes | bytearray):
        return len(item) + 2
    if rules.instances and is_instance(item):
        return _check_leaf(_id_of(item, place), place, rules)
    raise Refused(place, f"{type(item).__name__} is not a JSON type")


def _check_text(text: str, place: Place) -> int:
    if not str.isascii(text) and _SURROGATE.search(text):
        raise Refused(place, "text holds a lone surrogate, which is not Unicode")
    return str.__len__(text) + 2


def _id_of(instance: Any, place: Place) -> ModelId[Any]:
    try:
        return ModelId(instance)
    except InvalidSubmission as error:
        raise Refused(place, str(error).removesuffix(".")) from None


def refuse_naive(value: object) -> None:
    """Refuse a decoded value that holds a datetime without an offset."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, datetime.datetime):
            _refuse_naive(item, None)
        elif (children := _children(item, None)) is not None:
            pending += [child for child, _ in children]


def _refuse_naive(moment: datetime.datetime, place: Place) -> None:
    if moment.utcoffset() is None:
        raise Refused(place, "this datetime is naive: give an aware one")


def _check_number(item: int | float | decimal.Decimal, place: Place) -> int:
    if isinstance(item, int):
        if not INT_MIN <= item <= INT_MAX:
            raise Refused(place, "an int is beyond 64 bits: use str or Decimal")
    elif not (math.isfinite(item) if isinstance(item, float) else item.is_finite()):
        raise Refused(place, f"{type(item).__name__} is NaN or infinite, which is not JSON")
    return 1


# Exactness -----------------------------------------------------------------------------------


def compare(value: Any, decoded: Any, place: Place = None) -> None:
    """Refuse a value that is not what a handler would be given for its text."""
    kind: Any = type(decoded)
    if kind in (str, int, float):
        same = _is_same_scalar(value, decoded, kind)
    elif kind in (list, tuple):
        same = _is_same_items(value, decoded, place)
    elif kind is dict:
        same = type(value) is dict and len(value) == len(decoded)
        for key in decoded if same else ():
            compare(value[key], decoded[key], (place, key))
    elif (fields := _record_fields(kind)) is not None:
        same = type(value) is kind
        for name in fields if same else ():
            compare(getattr(value, name), getattr(decoded, name), (place, name))
    else:
        same = _is_same_leaf(value, decoded)
    if not same:
        raise Refused(place, _difference(value, kind))


def _is_same_scalar(value: Any, decoded: Any, kind: type) -> bool:
    """Take subclasses (``TextChoices``, ``SafeString``), and an int for a float, by value."""
    wanted = (int, float) if kind is float else kind
    return isinstance(value, wanted) and not isinstance(value, bool) and bool(value == decoded)


def _is_same_items(value: Any, decoded: Any, place: Place) -> bool:
    if type(value) is not type(decoded) or len(value) != len(decoded):
        return False
    for index, (given, read) in enumerate(zip(value, decoded, strict=True)):
        compare(given, read, (place, index))
    return True


def _is_same_leaf(value: Any, decoded: Any) -> bool:
    if isinstance(decoded, ModelId):
        return _names_same_row(value, decoded)
    if not isinstance(value, type(decoded)):
        return False
    if isinstance(decoded, datetime.datetime):
        # Aware datetimes of a repeated hour never equal one of another zone.
        offsets = value.utcoffset() == decoded.utcoffset()
        return bool(offsets and value.replace(tzinfo=None) == decoded.replace(tzinfo=None))
    return bool(value == decoded)


def _names_same_row(value: Any, decoded: ModelId[Any]) -> bool:
    if is_instance(value):
        try:
            value = type(decoded)(value)
        except InvalidSubmission:  # a row of another model
            return False
    return isinstance(value, ModelId) and value == decoded


def _difference(value: object, kind: type) -> str:
    if isinstance(value, int) and kind is float and not isinstance(value, bool):
        return "this int is not exact as a float"
    if type(value) is not kind:
        return expected(kind, value)
    if kind is dict:
        return "it has keys that its type does not have"
    return f"this {kind.__name__} does not come back from JSON as it is"


def expected(kind: type, value: object) -> str:
    """Say of which class a value should be, and of which it is."""
    text = f"expected {kind.__name__}, got {type(value).__name__}"
    if issubclass(kind, ModelId):
        text += f": write ModelId[{kind.model_class().__name__}](pk)"
    return text


def is_other_record(value: object, kind: Any) -> bool:
    """Tell that a value is of a class with fields, and not of the one that is asked for."""
    given: Any = type(value)
    if not isinstance(kind, type) or given is kind:
        return False
    return _record_fields(kind) is not None and _record_fields(given) is not None


def check_complete(text: str, value: object) -> None:
    """Refuse a text that says more than the value that was read from it."""
    if ENCODER.encode(value) != text.encode():
        read = msgspec.to_builtins(value, enc_hook=enc_hook)
        if not _covers(read, msgspec.json.decode(text)):
            raise Refused(None, "it has fields that its type does not have")


def _covers(read: Any, written: Any) -> bool:
    """Tell whether every field of the text was read. Types are msgspec's business, not ours."""
    if isinstance(written, dict) and isinstance(read, dict):
        return all(key in read and _covers(read[key], part) for key, part in written.items())
    if isinstance(written, list) and isinstance(read, list | tuple):
        return all(map(_covers, read, written))
    return True


def refusal(error: Exception, names: frozenset[str]) -> tuple[str, str]:
    """Give the path and the reason; of msgspec's words only those that cannot hold a value."""
    if isinstance(error, Refused):
        return path(error.place, names), error.reason
    text, _, where = str(error).partition(" - at ")
    where = where.strip("`") if _SAFE_PATH.fullmatch(where) else "$"
    if _SAFE_REASON.fullmatch(text):
        return where, text[0].lower() + text[1:].replace("`", "")
    return where, "a value is not one that its type allows"


def place_of(where: str, text: str, decoder: msgspec.json.Decoder[Any]) -> Place:
    """Give the place that a path of msgspec's means, which names no keys of a dict.

    Of each dict on the way half the keys are left out, again and again, until the one is left
    without which the error is another.
    """
    tree = inside = msgspec.json.decode(text)
    place: Place = None
    for piece in _PIECE.findall(where):
        step: int | str = piece[1:]
        if piece == "[...]":
            step = _failing_key(tree, inside, decoder)
        elif piece[0] == "[":
            step = int(piece[1:-1])
        place, inside = (place, step), inside[step]
    return place


def _failing_key(tree: Any, inside: dict[str, Any], decoder: msgspec.json.Decoder[Any]) -> str:
    words = _words(tree, decoder)
    while len(inside) > 1:
        keys = list(inside)
        half = {key: inside.pop(key) for key in keys[: len(keys) // 2]}
        if _words(tree, decoder) != words:
            inside.clear()
            inside.update(half)
    return next(iter(inside))


def _words(tree: Any, decoder: msgspec.json.Decoder[Any]) -> str:
    try:
        decoder.decode(ENCODER.encode(tree))
    except Exception as error:
        return str(error)
    return ""
