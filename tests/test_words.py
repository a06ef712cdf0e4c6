"""Numbers with what they count, as operators and logs are told."""

from __future__ import annotations

import pytest

from django_durable_jobs.words import counted


@pytest.mark.parametrize(
    ("number", "noun", "said"),
    [
        (0, "job", "0 jobs"),
        (1, "live worker", "1 live worker"),
        (2, "live worker", "2 live workers"),
        (1, "worker process", "1 worker process"),
        (16, "worker process", "16 worker processes"),
    ],
)
def test_a_number_agrees_with_what_it_counts(number: int, noun: str, said: str) -> None:
    assert counted(number, noun) == said
