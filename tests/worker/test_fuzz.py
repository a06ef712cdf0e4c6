"""Random bytes in the payload column: each row is run if it is whole, else blocked (FAULTS 6)."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from django.db import connection, transaction
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from django_durable_jobs import JobContext, JobSubmission, job
from django_durable_jobs.dialects.base import JOBS
from django_durable_jobs.handlers import Handler, registry
from django_durable_jobs.models import Job, JobAttempt
from django_durable_jobs.payloads import JSON, CorruptPayload, ModelId, codec_for
from tests.payloads.kinds import Article, Everything, Line, Order, Point

from .support import drain

pytestmark = pytest.mark.django_db(transaction=True)

HINTS = [Line, Order, Point, Everything, JSON, ModelId[Article], list[float], dict[str, Line]]
WHOLE = [b'{"sku":"a"}', b'{"number":1,"lines":[{"sku":"b","count":2}]}', b"[1,2.5]", b"null"]
WHOLE += [b'{"type":"point","xAxis":1}', b'{"a":{"sku":"\\u0000"}}', b'"\xf0\x9f\x98\x80"']


@st.composite
def bent(draw: st.DrawFn) -> bytes:
    """A payload with a piece of it cut out, doubled or written over."""
    whole = draw(st.sampled_from(WHOLE))
    at = draw(st.integers(0, len(whole)))
    return whole[:at] + draw(st.binary(max_size=4)) + whole[draw(st.integers(0, len(whole))) :]


bytes_of_payload = (
    st.binary(max_size=60)
    | st.sampled_from(WHOLE)
    | bent()
    | st.text(max_size=20).map(lambda text: json.dumps(text).encode())
    | st.sampled_from([b"[" * 50_000, b'{"a":' * 5000, b"1" * 100_000, b'"' + b"\xff" * 9999])
)
rows = st.tuples(st.sampled_from(range(len(HINTS))), bytes_of_payload, st.booleans())


def stored(data: bytes) -> bytes:
    """Give what a column of this database can hold of some bytes: PostgreSQL's text is Unicode."""
    if connection.vendor == "sqlite":
        return data
    return data.decode(errors="replace").replace("\0", "\N{REPLACEMENT CHARACTER}").encode()


def write(rows: list[tuple[Any, ...]]) -> None:
    """Write handler, fingerprint, payload and its hash of jobs, past the codec."""
    text = "CAST(%s AS TEXT)" if connection.vendor == "sqlite" else "convert_from(%s, 'UTF8')"
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.executemany(
            f"UPDATE {JOBS} SET handler = %s, fingerprint = %s, payload = {text},"
            " payload_sha256 = %s WHERE id = %s",
            rows,
        )


def is_whole(hint: Any, data: bytes) -> bool:
    try:
        codec_for(hint).decode(data.decode())
    except (CorruptPayload, UnicodeDecodeError):
        return False
    return True


def handler_of(number: int, hint: Any) -> Handler[..., Any]:
    def handler(ctx: JobContext, payload: Any) -> None: ...

    handler.__annotations__["payload"] = hint
    return job(f"fuzz.{number}")(handler)


@settings(
    max_examples=5,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(st.lists(rows, min_size=30, max_size=60))
def test_any_bytes_in_the_payload_are_run_or_blocked(given_rows: list[Any]) -> None:
    with registry.temporary():
        handlers = [handler_of(number, hint) for number, hint in enumerate(HINTS)]

        @job("fuzz.healthy")
        def healthy(ctx: JobContext) -> None: ...

        jobs = Job.objects.submit_many(
            JobSubmission.create(healthy) for _ in range(2 * len(given_rows))
        )
        expected: dict[int, tuple[str, str | None, int]] = {
            one.pk: ("succeeded", None, 1) for one in jobs
        }
        written = []
        for one, (number, data, honest) in zip(jobs[::2], given_rows, strict=True):
            data, handler = stored(data), handlers[number]
            sha256 = hashlib.sha256(data).hexdigest() if honest else "0" * 64
            written.append((handler.name, handler.fingerprint, data, sha256, one.pk))
            if not (honest and is_whole(HINTS[number], data)):
                expected[one.pk] = ("blocked", "corrupt_payload", 0)
        write(written)
        drain(threads=4)
    try:
        found = Job.objects.values_list("pk", "status", "blocked_reason", "attempt_count")
        assert {pk: tuple(rest) for pk, *rest in found} == expected
        ran = sum(count for _, _, count in expected.values())
        assert JobAttempt.objects.count() == ran
        assert len(list(Job.objects.all())) == len(expected), "and all of it can be read"
    finally:
        Job.objects.all().delete()
