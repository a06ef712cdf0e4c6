"""The only reader of ``django.conf.settings``: the one dict ``DURABLE_JOBS``.

``settings.LEASE_SECONDS`` gives the configured or the default value; it is read when
asked for and again after ``setting_changed``, never at import. ``problems()`` says
everything that is wrong with the dict, for the system checks and the worker's start.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

SETTING = "DURABLE_JOBS"
# A century; a date much earlier would lie before year 1.
_MAX_DAYS = 36_500


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of ``DURABLE_JOBS``: its default and the rule that its value must meet."""

    default: Any
    rule: str
    accepts: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(low: float, high: float) -> Callable[[Any], bool]:
    # NaN is in no range.
    return lambda value: _is_number(value) and low <= value <= high


def _integer(low: int, high: int) -> Callable[[Any], bool]:
    def accepts(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

    return accepts


def _seconds(default: float | int, low: float, high: float = 31_536_000) -> Key:
    rule = f"a number of seconds from {low:.10g} to {high:.10g}"
    return Key(default=default, rule=rule, accepts=_number(low, high))


def _count(default: int, low: int, high: int) -> Key:
    return Key(
        default=default,
        rule=f"a whole number from {low} to {high}",
        accepts=_integer(low, high),
    )


def _is_queue_list(value: Any) -> bool:
    if value is None:
        return True
    if isinstance(value, str) or not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(name, str) and name.strip() and len(name) <= 100 for name in value)


KEYS: dict[str, Key] = {
    "DATABASE": Key(
        default="default",
        rule="the alias of a database in DATABASES",
        accepts=lambda value: isinstance(value, str) and value != "",
    ),
    "QUEUES": Key(
        default=None,
        rule="None (any queue) or a list of queue names",
        accepts=_is_queue_list,
    ),
    "PROCESSES": _count(1, 0, 1000),
    "THREADS": _count(16, 1, 1000),
    "POLL_SECONDS": _seconds(1.0, 0.01, 3600),
    "LEASE_SECONDS": _seconds(60, 0.1, 7200),
    "RETRY_BASE_SECONDS": _seconds(1, 0),
    "RETRY_MAX_SECONDS": _seconds(300, 0),
    "SHUTDOWN_SECONDS": _seconds(30, 0),
    "TIMEOUT_SECONDS": _seconds(30, 0.001),
    "TIMEOUT_GRACE_SECONDS": _seconds(10, 0),
    "MAX_TIMEOUT_SECONDS": _seconds(3600, 0.001),
    "MAX_ATTEMPTS": _count(3, 1, 1000),
    "MAX_PAYLOAD_BYTES": _count(1024 * 1024, 1, 1024**3),
    "MAX_RESULT_BYTES": _count(64 * 1024, 1, 1024**3),
    "ERROR_DETAIL": Key(
        default=None,
        rule='"safe" or "traceback"',
        accepts=lambda value: value in ("safe", "traceback"),
    ),
    "NOTIFY": Key(
        default=True, rule="True or False", accepts=lambda value: isinstance(value, bool)
    ),
    "LOCK_TIMEOUT_SECONDS": _seconds(5, 0.001, 3600),
    "PRUNE_AFTER_DAYS": Key(
        default=None,
        rule=f"None (keep everything) or a number of days above 0, at most {_MAX_DAYS}",
        accepts=lambda value: value is None or (_is_number(value) and 0 < value <= _MAX_DAYS),
    ),
}


class Settings:
    """Attribute access to ``DURABLE_JOBS`` with defaults; unknown names raise."""

    def __init__(self) -> None:
        self._values: dict[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name not in KEYS:
            raise AttributeError(f"DURABLE_JOBS has no key {name}")
        # One read of the attribute: another thread may reset it in between.
        values = self._values
        if values is None:
            values = self._values = self._read()
        return values[name]

    def reset(self) -> None:
        self._values = None

    def _read(self) -> dict[str, Any]:
        found = problems()
        if found:
            raise ImproperlyConfigured(found[0])
        given = getattr(django_settings, SETTING, {})
        values = {name: given.get(name, key.default) for name, key in KEYS.items()}
        if values["ERROR_DETAIL"] is None:
            values["ERROR_DETAIL"] = "traceback" if django_settings.DEBUG else "safe"
        return values


def problems() -> list[str]:
    """Say in one sentence each what is wrong with ``DURABLE_JOBS`` and what to write instead."""
    given = getattr(django_settings, SETTING, {})
    if not isinstance(given, dict):
        return [f"{SETTING} must be a dict, not {type(given).__name__}."]
    found = [_unknown(name) for name in given if name not in KEYS]
    found += [
        f'{SETTING}["{name}"] must be {key.rule}, not {given[name]!r:.100}.'
        for name, key in KEYS.items()
        if name in given and not key.accepts(given[name])
    ]
    return found or _contradictions(given)


def _unknown(name: object) -> str:
    close = difflib.get_close_matches(str(name).upper(), KEYS, n=1)
    hint = f" Did you mean {close[0]}?" if close else f" Known keys: {', '.join(KEYS)}."
    return f"{SETTING} has no key {name!r:.100}.{hint}"


def _contradictions(given: dict[str, Any]) -> list[str]:
    def value(name: str) -> Any:
        return given.get(name, KEYS[name].default)

    found = []
    if value("DATABASE") not in django_settings.DATABASES:
        known = ", ".join(sorted(django_settings.DATABASES))
        found.append(
            f'{SETTING}["DATABASE"] is {value("DATABASE")!r}, which is not in DATABASES ({known}).'
        )
    if value("TIMEOUT_SECONDS") > value("MAX_TIMEOUT_SECONDS"):
        found.append(f'{SETTING}["TIMEOUT_SECONDS"] must not be above "MAX_TIMEOUT_SECONDS".')
    if value("RETRY_BASE_SECONDS") > value("RETRY_MAX_SECONDS"):
        found.append(f'{SETTING}["RETRY_BASE_SECONDS"] must not be above "RETRY_MAX_SECONDS".')
    return found


def use_tz() -> bool:
    """Tell whether the project runs with ``USE_TZ``."""
    return bool(django_settings.USE_TZ)


settings = Settings()


def _reset(*, setting: str, **_: Any) -> None:
    if setting in (SETTING, "DEBUG", "DATABASES"):
        settings.reset()


setting_changed.connect(_reset, dispatch_uid="django_durable_jobs.conf")
