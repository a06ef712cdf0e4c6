"""What people are shown of a job's payload, result and checkpoint: the admin and the commands ask.

A project declares it beside a handler (``@ship.redact``). What cannot be judged is withheld.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from .conf import settings
from .handlers import registry
from .payloads import NotStorable, decode_json_text, encode_result

if TYPE_CHECKING:
    from .models import Job

logger = logging.getLogger("django_durable_jobs")

PARTS = ("payload", "result", "checkpoint")


def limit() -> int:
    """Give how many characters of a text are read to be redacted; a longer one is withheld."""
    return int(max(settings.MAX_PAYLOAD_BYTES, settings.MAX_RESULT_BYTES))


class Withheld(str):
    """A sentence in place of what is not shown."""

    __slots__ = ()


def shown(handler: str | None, part: str, text: str | None) -> str | None:
    """Give what may be shown of a stored JSON text, itself JSON or a sentence in brackets.

    ``handler`` is the name of the job's handler, ``part`` one of ``PARTS``. Never raises.
    """
    if text is None or not registry.may_be_redacted(handler):
        return text
    if len(text) > limit():
        return Withheld("(not shown: it is too long to be redacted)")
    value = decode_json_text(text, part)
    if value is None and text != "null":
        return Withheld("(not shown: it cannot be read)")
    answer = shown_value(handler, part, value)
    return answer if isinstance(answer, Withheld) else encode_result(answer, sys.maxsize)


def shown_value(handler: str | None, part: str, value: Any) -> Any:
    """Do as ``shown`` for a decoded value; what it gives is plain JSON or ``Withheld``."""
    if value is None or not registry.may_be_redacted(handler):
        return value
    hook = registry.redaction_of(handler)
    if hook is None:
        return Withheld("(not shown: its handler is not registered here, and others are redacted)")
    try:
        return decode_json_text(encode_result(hook(part, value), sys.maxsize), part)
    except NotStorable as error:
        why: Any = error
    except Exception as error:
        # Its words may be of what it was to hide.
        why = type(error).__name__
    logger.error("the redaction of handler %s failed: %s", handler, why)
    return Withheld("(not shown: its redaction failed)")


def shown_parts(job: Job) -> dict[str, Any]:
    """Give what may be shown of a job: the payload's text, the decoded result and checkpoint."""
    return {
        "payload": shown(job.handler, "payload", job.payload),
        "result": shown_value(job.handler, "result", job.result),
        "checkpoint": shown_value(job.handler, "checkpoint", job.checkpoint),
    }
