"""Instants as integers of microseconds since 1970 UTC, the form they are stored in.

An integer has no zone: order and equality are exact on both databases whatever
``USE_TZ``, ``TIME_ZONE`` and the session's zone say (CONTRACT 0).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from django.utils import timezone

from .conf import use_tz

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SECOND = 1_000_000


def from_microseconds(value: int) -> datetime:
    """Give the aware UTC datetime of a stored instant."""
    return EPOCH + timedelta(microseconds=value)


def to_microseconds(value: datetime) -> int:
    """Give the stored form of an instant.

    A naive value is taken in ``TIME_ZONE`` where ``USE_TZ`` is False, as Django does;
    with ``USE_TZ`` it raises ``ValueError``.
    """
    if timezone.is_naive(value):
        if use_tz():
            raise ValueError("a naive datetime names no instant; give an aware one")
        value = timezone.make_aware(value, timezone.get_default_timezone())
    return (value - EPOCH) // timedelta(microseconds=1)


def seconds_to_microseconds(seconds: float) -> int:
    return round(seconds * SECOND)


def local(value: datetime) -> datetime:
    """Give an instant in the current time zone, also where ``USE_TZ`` is False.

    In UTC where that zone's date would lie outside the years 1 to 9999.
    """
    try:
        return timezone.localtime(value)
    except OverflowError:
        return value.astimezone(UTC)


def exact(value: datetime) -> str:
    """Show an instant to the second in the current time zone, as ``local`` says."""
    return f"{local(value):%Y-%m-%d %H:%M:%S %Z}"
