"""What is stored of each kind of schema: the description, its hash, and the exact text."""

from __future__ import annotations

import hashlib

import pytest

from django_durable_jobs.fingerprints import description
from django_durable_jobs.payloads import codec_for
from tests._marks import no_database

from .schemas import GOLDEN, SCHEMAS

pytestmark = no_database


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_stored_form_of_a_schema_stays_as_it_is(name: str) -> None:
    """Another fingerprint would block every waiting job of every user; another text is another
    request where a submission is repeated."""
    hint, value = SCHEMAS[name]
    codec = codec_for(hint)
    found = {
        "description": description(codec.node),
        "fingerprint": codec.fingerprint,
        "text": codec.encode(value),
    }
    assert found == GOLDEN[name]
    assert codec.decode(found["text"]) == value
    assert hashlib.sha256(found["description"].encode()).hexdigest()[:32] == found["fingerprint"]


def test_the_file_holds_what_is_tested_and_no_more() -> None:
    assert list(GOLDEN) == list(SCHEMAS)
