"""Any text in any field of an outcome ends the attempt in one pass, stored alike (3.14).

What must be stored is computed here, without a database: so both store the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from django_durable_jobs import JobContext, PermanentError, RetryLater, job
from django_durable_jobs.handlers import registry
from django_durable_jobs.models import Job
from tests._rows import stored_bytes

from .support import attempts, drain, fresh

pytestmark = pytest.mark.django_db(transaction=True)

RESULT_LIMIT = 3000
# Surrogates and NUL often, and lengths around the limits of 500 and 1,000 bytes.
texts = st.text(
    st.characters() | st.sampled_from("\0\ud800\udfff\ufeff\u2028\U0010ffff'\"\\%s{}…"), max_size=40
) | st.builds(
    lambda text, times: text * times,
    st.text(st.characters() | st.sampled_from("é\0\ud800\U0001f600"), min_size=1, max_size=3),
    st.sampled_from([125, 166, 167, 250, 333, 500, 501, 1001]),
)


def cleaned(text: str, limit: int) -> bytes:
    """What a field of so many bytes holds of a text."""
    whole = "".join("\ufffd" if c == "\0" or "\ud800" <= c <= "\udfff" else c for c in text)
    if len(whole.encode()) <= limit:
        return whole.encode()
    kept = ""
    for character in whole:
        if len((kept + character + "…").encode()) > limit:
            break
        kept += character
    return (kept + "…").encode()


def as_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def is_storable(value: Any) -> bool:
    try:
        return len(as_json(value)) <= RESULT_LIMIT
    except UnicodeEncodeError:
        return False


def summary_of(error: Exception, failed: Job, message: str) -> bytes:
    """The class, the place, and the message, cut twice: by itself and with what is before."""
    told = fresh(failed).error_summary
    # Without a message nothing follows the place.
    head = told[: told.index(": ") + 2] if message else told
    name = f"{type(error).__module__}.{type(error).__name__}"
    assert head.startswith(f"{name} at {__name__}:raises")
    return cleaned(head + cleaned(message, 1000).decode(), 1000)


@pytest.fixture(autouse=True)
def _small_results(durable_jobs: Callable[..., None]) -> None:
    durable_jobs(MAX_RESULT_BYTES=RESULT_LIMIT)


@settings(
    max_examples=5,
    # A shorter example would cost minutes, and says no more.
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(st.lists(texts, min_size=10, max_size=15))
def test_any_text_in_any_field_ends_the_attempt_in_one_pass(given_texts: list[str]) -> None:
    def text_of(ctx: JobContext) -> str:
        return given_texts[int(ctx.job_id.split("/")[0])]

    with registry.temporary():

        @job("text.returns")
        def returns(ctx: JobContext) -> Any:
            text = text_of(ctx)
            ctx.progress(0.5, text)
            try:
                ctx.checkpoint({"kept": text})
            except ValueError:
                assert not is_storable({"kept": text})
            return {text: [text]}

        @job("text.raises", max_attempts=1)
        def raises(ctx: JobContext) -> None:
            raise PermanentError(text_of(ctx))

        @job("text.raises_later", max_attempts=1)
        def raises_later(ctx: JobContext) -> None:
            try:
                raise ValueError(text_of(ctx))
            except ValueError as error:
                raise RetryLater(0, text_of(ctx)) from error

        ran = {
            handler: [handler.submit(job_id=f"{n}/{handler.name}") for n in range(len(given_texts))]
            for handler in (returns, raises, raises_later)
        }
        drain()
    try:
        for number, text in enumerate(given_texts):
            check_returned(ran[returns][number], text)
            for handler in (raises, raises_later):
                check_raised(ran[handler][number], text)
    finally:
        Job.objects.all().delete()


def check_returned(one: Job, text: str) -> None:
    [attempt] = attempts(one)
    if is_storable({text: [text]}):
        assert (fresh(one).status, attempt.status) == ("succeeded", "succeeded")
        assert stored_bytes(one, "result") == as_json({text: [text]})
        assert fresh(one).result == {text: [text]}
        assert stored_bytes(one, "checkpoint") == as_json({"kept": text})
    else:
        assert (fresh(one).status, fresh(one).error_category) == ("failed", "invalid_result")
        assert (attempt.status, attempt.outcome) == ("failed", "returned")
    assert stored_bytes(one, "progress_message") == cleaned(text, 500)


def check_raised(one: Job, text: str) -> None:
    [attempt] = attempts(one)
    assert (fresh(one).status, attempt.status) == ("failed", "failed")
    error = PermanentError() if fresh(one).error_category == "permanent" else RetryLater(0)
    expected = summary_of(error, one, text)
    assert stored_bytes(one, "error_summary") == expected
    assert stored_bytes(attempt, "error_summary") == expected
