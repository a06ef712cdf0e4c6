"""``DURABLE_JOBS``: every key's default, its rule, and what a wrong value is told."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from django_durable_jobs import conf
from django_durable_jobs.conf import KEYS, SETTING, settings

DEFAULTS = {
    "DATABASE": "default",
    "QUEUES": None,
    "PROCESSES": 1,
    "THREADS": 16,
    "POLL_SECONDS": 1.0,
    "LEASE_SECONDS": 60,
    "RETRY_BASE_SECONDS": 1,
    "RETRY_MAX_SECONDS": 300,
    "SHUTDOWN_SECONDS": 30,
    "TIMEOUT_SECONDS": 30,
    "TIMEOUT_GRACE_SECONDS": 10,
    "MAX_TIMEOUT_SECONDS": 3600,
    "MAX_ATTEMPTS": 3,
    "MAX_PAYLOAD_BYTES": 1024 * 1024,
    "MAX_RESULT_BYTES": 64 * 1024,
    "ERROR_DETAIL": "safe",
    "NOTIFY": True,
    "LOCK_TIMEOUT_SECONDS": 5,
    "PRUNE_AFTER_DAYS": None,
}
# The lowest and the highest value of each number; beside them it is refused.
SECONDS = {
    "POLL_SECONDS": (0.01, 3600),
    "LEASE_SECONDS": (0.1, 7200),
    "RETRY_BASE_SECONDS": (0, 300),
    "RETRY_MAX_SECONDS": (1, 31_536_000),
    "SHUTDOWN_SECONDS": (0, 31_536_000),
    "TIMEOUT_SECONDS": (0.001, 3600),
    "TIMEOUT_GRACE_SECONDS": (0, 31_536_000),
    "MAX_TIMEOUT_SECONDS": (30, 31_536_000),
    "LOCK_TIMEOUT_SECONDS": (0.001, 3600),
}
COUNTS = {
    "PROCESSES": (0, 1000),
    "THREADS": (1, 1000),
    "MAX_ATTEMPTS": (1, 1000),
    "MAX_PAYLOAD_BYTES": (1, 1024**3),
    "MAX_RESULT_BYTES": (1, 1024**3),
}
NUMBERS = [*SECONDS, *COUNTS, "PRUNE_AFTER_DAYS"]


class Given:
    """Set ``DURABLE_JOBS`` for a while."""

    def __init__(self) -> None:
        self._open: list[override_settings] = []

    def __call__(self, **values: Any) -> list[str]:
        """Set the dict and give ``problems()``."""
        return self.whole(values)

    def whole(self, value: Any) -> list[str]:
        change = override_settings(**{SETTING: value})
        change.enable()
        self._open.append(change)
        return conf.problems()

    def close(self) -> None:
        while self._open:
            self._open.pop().disable()


@pytest.fixture
def given() -> Iterator[Given]:
    one = Given()
    yield one
    one.close()


# Defaults and good values ---------------------------------------------------------------------


@pytest.mark.parametrize("name", KEYS)
def test_a_default(name: str, given: Given) -> None:
    assert given() == []
    assert getattr(settings, name) == DEFAULTS[name]


def test_the_documentation_has_every_key_with_its_default() -> None:
    page = Path(__file__).parent.parent / "docs" / "settings.md"
    rows = re.findall(r"^\| `([A-Z_]+)` \| `([^`]+)`", page.read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == list(KEYS)
    assert {name: ast.literal_eval(text) for name, text in rows} == DEFAULTS


def test_there_are_no_other_keys() -> None:
    assert KEYS.keys() == DEFAULTS.keys()
    with pytest.raises(AttributeError, match="no key TURBO"):
        _ = settings.TURBO


def test_the_setting_may_be_missing() -> None:
    from django.conf import settings as django_settings

    with override_settings(**{SETTING: {}}):
        delattr(django_settings, SETTING)
        settings.reset()
        assert conf.problems() == []
        assert settings.THREADS == 16


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name, ends in (SECONDS | COUNTS).items() for value in ends),
        ("POLL_SECONDS", 0.5),
        ("LEASE_SECONDS", 90.5),
        ("QUEUES", ["mails", "reports"]),
        ("QUEUES", ("mails",)),
        ("QUEUES", ["q" * 100]),
        ("ERROR_DETAIL", "safe"),
        ("ERROR_DETAIL", "traceback"),
        ("NOTIFY", False),
        ("PRUNE_AFTER_DAYS", None),
        ("PRUNE_AFTER_DAYS", 0.5),
        ("PRUNE_AFTER_DAYS", 36_500),
    ],
)
def test_a_good_value_is_taken(name: str, value: Any, given: Given) -> None:
    assert given(**{name: value}) == []
    assert getattr(settings, name) == value


def test_error_detail_follows_debug() -> None:
    with override_settings(DEBUG=True, **{SETTING: {}}):
        assert settings.ERROR_DETAIL == "traceback"
    with override_settings(DEBUG=True, **{SETTING: {"ERROR_DETAIL": "safe"}}):
        assert settings.ERROR_DETAIL == "safe"
    assert settings.ERROR_DETAIL == "safe"


def test_the_rule_is_written_for_people(given: Given) -> None:
    [problem] = given(TIMEOUT_SECONDS="soon")
    assert problem == (
        'DURABLE_JOBS["TIMEOUT_SECONDS"] must be a number of seconds from 0.001 to 31536000,'
        " not 'soon'."
    )


# Bad values -----------------------------------------------------------------------------------

BAD = [
    *((name, value) for name in NUMBERS for value in ("1", True, False, [], Decimal(30))),
    *((name, float(value)) for name in NUMBERS for value in ("nan", "inf", "-inf")),
    *((name, 10**400) for name in NUMBERS),
    *((name, None) for name in NUMBERS if name != "PRUNE_AFTER_DAYS"),
    *((name, low - 0.001) for name, (low, _) in SECONDS.items() if low < 1),
    ("POLL_SECONDS", 3600.001),
    ("LOCK_TIMEOUT_SECONDS", 3600.001),
    ("TIMEOUT_SECONDS", 31_536_001),
    *((name, low - 1) for name, (low, _) in COUNTS.items()),
    *((name, high + 1) for name, (_, high) in COUNTS.items()),
    *((name, 10.0) for name in COUNTS),
    ("LEASE_SECONDS", 7200.001),
    ("MAX_TIMEOUT_SECONDS", 0),
    ("RETRY_MAX_SECONDS", -1),
    ("PRUNE_AFTER_DAYS", 0),
    ("PRUNE_AFTER_DAYS", -1),
    ("PRUNE_AFTER_DAYS", 36_501),
    ("DATABASE", ""),
    ("DATABASE", None),
    ("DATABASE", 1),
    ("QUEUES", []),
    ("QUEUES", "mails"),
    ("QUEUES", {"mails"}),
    ("QUEUES", ["mails", 5]),
    ("QUEUES", [""]),
    ("QUEUES", ["  "]),
    ("QUEUES", ["q" * 101]),
    ("QUEUES", ["q" + " " * 100]),
    ("ERROR_DETAIL", "full"),
    ("ERROR_DETAIL", None),
    ("ERROR_DETAIL", True),
    ("NOTIFY", 1),
    ("NOTIFY", "yes"),
    ("NOTIFY", None),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda part: repr(part)[:30])
def test_a_bad_value_is_told_by_its_rule(name: str, value: Any, given: Given) -> None:
    [problem] = given(**{name: value})
    assert problem.startswith(f'{SETTING}["{name}"] must be {KEYS[name].rule}, not ')
    assert problem.endswith(".") and "\n" not in problem
    with pytest.raises(ImproperlyConfigured) as caught:
        _ = settings.THREADS
    assert str(caught.value) == problem


def test_a_long_value_is_cut(given: Given) -> None:
    [problem] = given(QUEUES="q" * 5000)
    assert len(problem) < 300


def test_every_problem_is_told_at_once(given: Given) -> None:
    problems = given(THREADS=0, LEASE_SECONDS="60", COLOUR="red")
    assert len(problems) == 3
    with pytest.raises(ImproperlyConfigured, match="COLOUR"):
        _ = settings.POLL_SECONDS


@pytest.mark.parametrize("value", [None, [], "LEASE_SECONDS", [("THREADS", 1)]])
def test_the_setting_must_be_a_dict(value: Any, given: Given) -> None:
    [problem] = given.whole(value)
    assert problem == f"{SETTING} must be a dict, not {type(value).__name__}."
    with pytest.raises(ImproperlyConfigured, match="must be a dict"):
        _ = settings.THREADS


# Unknown keys ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("LEASE_SECOND", "Did you mean LEASE_SECONDS?"),
        ("lease_seconds", "Did you mean LEASE_SECONDS?"),
        ("THREAD", "Did you mean THREADS?"),
        ("COLOUR", "Known keys: DATABASE, QUEUES, "),
        (5, "Known keys: DATABASE, "),
    ],
)
def test_an_unknown_key_is_an_error_with_a_suggestion(key: Any, hint: str, given: Given) -> None:
    [problem] = given.whole({key: 1})
    assert problem.startswith(f"{SETTING} has no key {key!r}.")
    assert hint in problem


# Contradictions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"DATABASE": "elsewhere"}, "'elsewhere', which is not in DATABASES (default)"),
        ({"TIMEOUT_SECONDS": 3601}, 'must not be above "MAX_TIMEOUT_SECONDS"'),
        ({"MAX_TIMEOUT_SECONDS": 29}, 'must not be above "MAX_TIMEOUT_SECONDS"'),
        ({"RETRY_BASE_SECONDS": 301}, 'must not be above "RETRY_MAX_SECONDS"'),
        ({"RETRY_MAX_SECONDS": 0.5}, 'must not be above "RETRY_MAX_SECONDS"'),
    ],
    ids=str,
)
def test_values_that_contradict_each_other(values: dict[str, Any], told: str, given: Given) -> None:
    [problem] = given(**values)
    assert told in problem
    with pytest.raises(ImproperlyConfigured, match="DURABLE_JOBS"):
        _ = settings.THREADS


# Reading --------------------------------------------------------------------------------------


def test_a_change_is_seen_and_undone() -> None:
    with override_settings(**{SETTING: {"LEASE_SECONDS": 7}}):
        assert settings.LEASE_SECONDS == 7
        with override_settings(**{SETTING: {"LEASE_SECONDS": 8}}):
            assert settings.LEASE_SECONDS == 8
        assert settings.LEASE_SECONDS == 7
    assert settings.LEASE_SECONDS == 60


def test_another_setting_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _ = settings.THREADS

    def read_again(self: Any) -> dict[str, Any]:
        raise AssertionError("the settings were read again")

    monkeypatch.setattr(type(settings), "_read", read_again)
    with override_settings(LANGUAGE_CODE="de"):
        assert settings.THREADS == 16


def test_a_bad_value_is_told_until_it_is_mended() -> None:
    with override_settings(**{SETTING: {"THREADS": 0}}):
        for _ in range(2):
            with pytest.raises(ImproperlyConfigured):
                _ = settings.THREADS
    assert settings.THREADS == 16


@pytest.mark.parametrize("value", [True, False])
def test_use_tz_is_read_when_asked(value: bool) -> None:
    with override_settings(USE_TZ=value):
        assert conf.use_tz() is value
