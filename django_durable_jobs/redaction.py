"""What people are shown of a job's payload, result and checkpoint: the admin and the commands ask.

A project declares it beside a handler (``@ship.redact``). What cannot be judged is withheld.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from .conf import settings
from .handlers import registry
from .payloads import NotStorable, decode_json_text, encode_result

logger = logging.getLogger("django_durable_jobs")

PARTS = ("payload", "result", "checkpoint")


def limit() -> int:
    """Give how many characters of a text are read to be redacted; a longer one is withheld."""
    return int(max(settings.MAX_PAYLOAD_BYTES, settings.MAX_RESULT_BYTES))


def shown(handler: str | None, part: str, text: str | None) -> str | None:
    """Give what may be shown of a stored JSON text, itself JSON or a sentence in brackets.

    ``handler`` is the name of the job's handler, ``part`` one of ``PARTS``. Never raises.
    """
    if text is None or not registry.may_be_redacted(handler):
        return text
    hook = registry.redaction_of(handler)
    if hook is None:
        return "(not shown: its handler is not registered here, and others are redacted)"
    if len(text) > limit():
        return "(not shown: it is too long to be redacted)"
    try:
        return encode_result(hook(part, decode_json_text(text, part)), sys.maxsize)
    except NotStorable as error:
        why: Any = error
    except Exception as error:
        # Its words may be of what it was to hide.
        why = type(error).__name__
    logger.error("the redaction of handler %s failed: %s", handler, why)
    return "(not shown: its redaction failed)"
