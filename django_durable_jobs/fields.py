"""The column types of our tables: instants, text that is always readable, JSON kept as text."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import date, datetime
from typing import TYPE_CHECKING, Any

from django.core import exceptions
from django.db import models
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext_lazy as _

from .dialects import dialect_for
from .instants import from_microseconds, to_microseconds
from .payloads import decode_json_text, decode_text, encode_result, warn_unreadable

if TYPE_CHECKING:
    _Field = models.Field[Any, Any]
    _CharField = models.CharField[Any, Any]
    _TextField = models.TextField[Any, Any]
else:
    # The classes take no type arguments while running.
    _Field, _CharField, _TextField = models.Field, models.CharField, models.TextField


class InstantField(_Field):
    """An instant, stored as microseconds since 1970 UTC, an aware UTC datetime in Python.

    Takes aware datetimes in ``filter()``, ``update()`` and ``save()`` (naive ones as
    ``instants.to_microseconds`` says) and gives aware UTC back under any ``USE_TZ``,
    ``TIME_ZONE`` and session zone.
    """

    description = _("Instant (UTC, to the microsecond)")
    empty_strings_allowed = False

    def get_internal_type(self) -> str:
        return "BigIntegerField"

    def from_db_value(self, value: int | None, expression: Any, connection: Any) -> Any:
        return None if value is None else from_microseconds(value)

    def to_python(self, value: Any) -> datetime | None:
        if value is None or isinstance(value, datetime):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return from_microseconds(value)
        try:
            parsed = parse_datetime(value) if isinstance(value, str) else None
        except ValueError:  # well formatted, but no such date or time
            parsed = None
        if parsed is None:
            raise exceptions.ValidationError(
                _("“%(value)s” is not a datetime."), code="invalid", params={"value": value}
            )
        return parsed

    def get_prep_value(self, value: Any) -> Any:
        value = super().get_prep_value(value)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        if isinstance(value, datetime):
            return to_microseconds(value)
        if isinstance(value, str):
            parsed = self.to_python(value)
            return None if parsed is None else to_microseconds(parsed)
        if isinstance(value, date):
            raise TypeError(f"{self.name} takes a datetime; a date names no instant")
        raise TypeError(f"{self.name} takes a datetime, not {type(value).__name__}")

    def value_from_object(self, obj: Any) -> str | None:
        """Give ISO text in UTC: the JSON serializer would cut a datetime to milliseconds."""
        stored = self.get_prep_value(super().value_from_object(obj))
        return None if stored is None else from_microseconds(stored).isoformat()

    def value_to_string(self, obj: Any) -> str:
        return self.value_from_object(obj) or ""

    def formfield(self, **kwargs: Any) -> Any:
        from django import forms

        return super().formfield(**{"form_class": forms.DateTimeField, **kwargs})


class _Readable:
    """Text that SQLite holds and Python cannot decode reads as None and is logged (3.14).

    There the driver would fail the whole query, so the column is read as bytes. Within the
    database it stays text, as in a subquery.
    """

    name: str

    def select_format(self, compiler: Any, sql: str, params: Any) -> tuple[str, Any]:
        if compiler.query.subquery:
            return sql, params
        return dialect_for(compiler.using).undecoded(sql), params

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        text = decode_text(value)
        if text is None and value is not None:
            warn_unreadable(self.name, "not UTF-8")
        return text


if TYPE_CHECKING:
    # For the types of what they hold.
    ReadableCharField, ReadableTextField = models.CharField, models.TextField
else:

    class ReadableCharField(_Readable, _CharField):
        """A ``CharField`` whose rows can be read whatever the column holds."""

    class ReadableTextField(_Readable, _TextField):
        """A ``TextField`` whose rows can be read whatever the column holds."""


class JSONTextField(_Readable, _TextField):
    """A JSON value kept as text, decoded in Python; what cannot be decoded reads as None."""

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        return decode_json_text(value, self.name)

    def get_prep_value(self, value: Any) -> Any:
        return None if value is None else encode_result(value, sys.maxsize)

    def to_python(self, value: Any) -> Any:
        return value

    def value_to_string(self, obj: Any) -> Any:
        """Give the value itself for the serializers, as Django's JSONField does."""
        return self.value_from_object(obj)


def columns_of(fields: Iterable[models.Field[Any, Any]], row: str, alias: str) -> str:
    """Write the columns of ``row`` for a raw query of models, each as its field reads it."""
    undecoded = dialect_for(alias).undecoded
    return ", ".join(
        f"{undecoded(f'{row}.{field.column}')} AS {field.column}"
        if isinstance(field, _Readable)
        else f"{row}.{field.column}"
        for field in fields
    )
