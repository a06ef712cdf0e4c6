"""The typed JSON codec of payloads, and the rules for results and stored text. Pure.

One rule for every database: what one of them would refuse or change (NaN, lone
surrogates, integers beyond 64 bits, depth, size) is refused here, before it is touched.
Messages name paths and types, never values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import re
from functools import cached_property
from typing import Any

import msgspec

from . import fingerprints, json_rules, payload_types
from .conf import settings as conf
from .exceptions import InvalidSubmission
from .model_id import ModelId
from .payload_types import JSON, Base64

__all__ = [
    "JSON",
    "Base64",
    "Codec",
    "CorruptPayload",
    "ModelId",
    "NotStorable",
    "OptionalResult",
    "check_text",
    "clean_text",
    "codec_for",
    "decode_json_text",
    "decode_text",
    "encode_result",
    "encode_return",
    "payload_sha256",
]

MARK = "…"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
logger = logging.getLogger("django_durable_jobs")

_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


class CorruptPayload(ValueError):
    """A stored payload is not of its handler's type; internal, the job becomes blocked."""


class NotStorable(ValueError):
    """A result or checkpoint cannot be stored as JSON; the message names classes only."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Codec:
    """Write and read the values of one type as exact JSON text; made by ``codec_for``."""

    type_hint: Any
    node: msgspec.inspect.Type = dataclasses.field(repr=False)
    decoder: msgspec.json.Decoder[Any] = dataclasses.field(repr=False)
    names: frozenset[str] = dataclasses.field(repr=False)
    rules: json_rules.Rules = dataclasses.field(repr=False)
    only_aware: bool = dataclasses.field(repr=False)

    def encode(self, value: object) -> str:
        """Give the JSON text of ``value``, which must be of the type as it stands.

        Nothing is coerced and nothing is lost: the text is read back and compared.
        Raises ``InvalidSubmission`` naming the path and the types, never a value.
        """
        text = ""
        try:
            text = json_rules.encode(value, conf.MAX_PAYLOAD_BYTES, self.rules)
            decoded = self.decoder.decode(text)
            json_rules.compare(value, decoded)
            json_rules.check_complete(text, decoded)
        except Exception as error:  # what msgspec or a class of the payload raises
            path, reason = json_rules.refusal(error, self.names)
            if json_rules.is_other_record(value, self.type_hint):
                path, reason = "$", json_rules.expected(self.type_hint, value)
            with contextlib.suppress(Exception):
                path = self._with_keys(path, text)
            raise InvalidSubmission(f"The payload is refused at {path}: {reason}.") from None
        return text

    def _with_keys(self, path: str, text: str) -> str:
        """Put the keys into a path of msgspec's, which writes ``[...]`` for each."""
        if "[...]" not in path or not text:
            return path
        return json_rules.path(json_rules.place_of(path, text, self.decoder), self.names)

    def decode(self, text: str) -> Any:
        """Give the value of a stored text; raise ``CorruptPayload`` if it is not of the type.

        Strict: a field that the type does not have is refused as well.
        """
        try:
            value = self.decoder.decode(text)
            json_rules.check_complete(text, value)
            if self.only_aware:
                json_rules.refuse_naive(value)
        except Exception as error:
            path, reason = json_rules.refusal(error, self.names)
            raise CorruptPayload(f"{reason} (at {path})") from None
        return value

    @cached_property
    def fingerprint(self) -> str:
        """The hash of the schema; needs loaded apps if the type holds a ``ModelId``."""
        return fingerprints.fingerprint(self.node)


_WHOLE: dict[Any, Any] = {None: type(None), dict: dict[str, JSON], list: list[JSON]}


def codec_for(type_hint: Any) -> Codec:
    """Make the codec of a payload type; ``None`` for a handler without payload.

    Raises ``InvalidHandler``, with a sentence that says what to write instead, for secret
    types, models, bare ``Any``, callables, sets and everything that msgspec cannot carry
    exactly. String annotations inside classes are resolved from their modules. A bare
    ``dict`` or ``list`` as the whole payload is a JSON object or array.
    """
    hint = _WHOLE.get(type_hint, type_hint) if isinstance(type_hint, type | None) else type_hint
    node = payload_types.check_type(hint)
    only_aware = payload_types.takes_only_aware(node)
    return Codec(
        type_hint=type_hint,
        node=node,
        decoder=msgspec.json.Decoder(hint, dec_hook=json_rules.dec_hook),
        names=payload_types.field_names(node),
        rules=json_rules.Rules(naive=not only_aware, instances=payload_types.holds_model_ids(node)),
        only_aware=only_aware,
    )


def payload_sha256(text: str) -> str:
    """Hash the exact text: SHA-256 over its UTF-8 bytes, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def encode_result(value: object, limit: int) -> str:
    """Give the JSON text of a result or checkpoint of at most ``limit`` UTF-8 bytes.

    No type is declared, so dataclasses, datetimes, UUIDs and the like become their JSON
    forms and read back as those. Raises ``NotStorable`` and nothing else.
    """
    try:
        return json_rules.encode(value, limit, json_rules.Rules())
    except json_rules.Refused as refused:
        raise NotStorable(f"Not storable as JSON: {refused.reason}.") from None


class OptionalResult:
    """A result that the job can do without: ``return OptionalResult(report)``.

    It is stored as ``report`` would be. If that is not JSON or above ``MAX_RESULT_BYTES``,
    the job succeeds without a result, and the log says so; else it would have failed
    (``invalid_result``, CONTRACT 3.14). ``ctx.complete()`` takes it too.
    """

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


def encode_return(value: object, limit: int, job_id: str) -> str | None:
    """Give the text of what a handler gave as its result, ``None`` for none.

    Raises ``NotStorable``, but for an ``OptionalResult``, which is left out.
    """
    given = value.value if isinstance(value, OptionalResult) else value
    try:
        return None if given is None else encode_result(given, limit)
    except NotStorable as error:
        if given is value:
            raise
        logger.warning("job %s goes without its result: %s", job_id, error)
        return None


def decode_json_text(text: Any, column: str = "JSON") -> Any:
    """Read stored JSON; what cannot be read is logged and reads as ``None``."""
    if text is None:
        return None
    try:
        return msgspec.json.decode(text)
    except Exception as error:
        warn_unreadable(column, type(error).__name__)
        return None


def decode_text(value: Any) -> str | None:
    """Read stored text that may have come as bytes; ``None`` if it is not UTF-8."""
    if value is None or isinstance(value, str):
        return value
    try:
        return bytes(value).decode()
    except UnicodeDecodeError:
        return None


def warn_unreadable(column: str, why: str) -> None:
    logger.warning("Stored %s cannot be read (%s): it reads as None.", column, why)


def clean_text(value: object, limit: int) -> str:
    """Make text of ``value`` that every database takes; never raise, never refuse.

    NUL and surrogates become U+FFFD. Beyond ``limit`` UTF-8 bytes it is cut at a character,
    and the mark is the last one. Only the first ``limit`` characters are worked on.
    """
    limit = max(limit, 0)
    text = _text_of(value)[: limit + 1]
    data = _UNSTORABLE.sub(REPLACEMENT, text).encode()
    if len(data) <= limit:
        return data.decode()
    mark = MARK if len(MARK.encode()) <= limit else ""
    return data[: limit - len(mark.encode())].decode(errors="ignore") + mark


def check_text(name: str, value: object, minimum: int, maximum: int) -> str:
    """Give ``value`` back as plain ``str`` if it may be stored, else ``InvalidSubmission``.

    Refused, never repaired: another type, NUL, a lone surrogate, fewer or more characters
    than allowed, and blank text where ``minimum`` is at least 1.
    """
    if not isinstance(value, str):
        raise InvalidSubmission(f"{name} must be str, not {type(value).__name__}.")
    text = str.__str__(value)
    if not minimum <= len(text) <= maximum:
        raise InvalidSubmission(
            f"{name} must have {minimum} to {maximum} characters; it has {len(text)}."
        )
    if _UNSTORABLE.search(text):
        raise InvalidSubmission(f"{name} must not hold NUL or a lone surrogate.")
    if minimum and not text.strip():
        raise InvalidSubmission(f"{name} must not be blank.")
    return text


def _text_of(value: object) -> str:
    """Give a plain ``str``, whatever ``__str__`` does."""
    try:
        return str.__str__(value if isinstance(value, str) else str(value))
    except BaseException:  # "never raises" includes an exit raised inside __str__
        return f"<{type.__dict__['__name__'].__get__(type(value))} without text>"
