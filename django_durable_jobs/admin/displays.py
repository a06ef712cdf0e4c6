"""How a value looks on a page: escaped, bounded, and told by words rather than by colour."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from django.utils import formats
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _

from ..instants import exact, local
from ..models import Job, JobAttempt

EMPTY = "-"
# How much of a long text a page shows; the rest never leaves the database.
TEXT_CAP = 4000


def badge(row: Job | JobAttempt) -> SafeString:
    """Show a status as its word in a frame whose class names it."""
    return format_html(
        '<span class="durable-status durable-status-{}">{}</span>',
        row.status,
        row.get_status_display(),
    )


def instant(value: datetime | None) -> SafeString | str:
    """Show an instant in the current time zone, also where ``USE_TZ`` is False.

    The exact instant is in the ``datetime`` attribute, the seconds in the tooltip.
    """
    if value is None:
        return EMPTY
    return format_html(
        '<time datetime="{}" title="{}">{}</time>',
        value.astimezone(UTC).isoformat(),
        exact(value),
        formats.date_format(local(value), "DATETIME_FORMAT", use_l10n=True),
    )


def instant_with_seconds(value: datetime | None) -> SafeString | str:
    """Show an instant as ``instant`` does, and its exact local time behind it."""
    if value is None:
        return EMPTY
    return format_html('{} <span class="durable-exact">{}</span>', instant(value), exact(value))


def progress(fraction: float) -> SafeString:
    """Show a fraction from 0 to 1 as a bar and as a number."""
    percent = f"{fraction * 100:.0f}%"
    return format_html(
        '<progress class="durable-progress" max="1" value="{}" aria-label="{}"></progress> {}',
        f"{fraction:.4f}",
        _("progress"),
        percent,
    )


def progress_with_message(fraction: float, message: str) -> SafeString:
    return format_html('{} <span class="durable-wrap">{}</span>', progress(fraction), message)


def long_text(head: str | None, size: int | None) -> SafeString | str:
    """Show the head of a text as it is, escaped; ``size`` is the length of the whole."""
    if head is None:
        return EMPTY
    shown = head[:TEXT_CAP]
    block = format_html('<pre class="durable-text">{}</pre>', shown)
    if size is None or size <= len(shown):
        return block
    cut = _("The first %(shown)d of %(size)d characters.") % {"shown": len(shown), "size": size}
    return format_html('{}<p class="durable-note">{}</p>', block, cut)


def error(row: Any, traceback_head: str | None, traceback_size: int | None) -> SafeString | str:
    """Show the category, the summary and, folded, the traceback of a job or an attempt."""
    if not (row.error_category or row.error_summary or traceback_head):
        return EMPTY
    summary = "" if row.error_summary is None else row.error_summary[:TEXT_CAP]
    parts = format_html(
        '<strong>{}</strong> <span class="durable-wrap">{}</span>',
        row.error_category or "",
        summary,
    )
    if not traceback_head:
        return parts
    return format_html(
        "{}<details><summary>{}</summary>{}</details>",
        parts,
        _("traceback"),
        long_text(traceback_head, traceback_size),
    )


def lines(items: list[str]) -> SafeString | str:
    """Show sentences one below the other."""
    if not items:
        return EMPTY
    rows = [format_html("<li>{}</li>", item) for item in items]
    return format_html('<ul class="durable-lines">{}</ul>', mark_safe("".join(rows)))  # noqa: S308
