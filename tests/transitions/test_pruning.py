"""Pruning beside open transactions: what they hold is passed over (CONTRACT 3.13)."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from django.db import connection

from django_durable_jobs.dialects.base import JOBS
from django_durable_jobs.models import Job
from django_durable_jobs.transitions import pruning
from tests._rows import job_row
from tests.racing import held

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite locks no rows"),
]


LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


def ended() -> list[int]:
    rows = [job_row(status="succeeded", finished_at=LONG_AGO) for _ in range(3)]
    return [job.pk for job in Job.objects.bulk_create(rows)]


@pytest.mark.parametrize(
    "lock",
    [
        pytest.param("FOR NO KEY UPDATE", id="changed"),
        pytest.param("FOR KEY SHARE", id="referred to by a row that is being inserted"),
    ],
)
def test_what_an_open_transaction_holds_is_passed_over(lock: str) -> None:
    _, middle, _ = ended()

    def hold() -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT 1 FROM {JOBS} WHERE id = %s {lock}", [middle])

    with held(hold):
        assert pruning.prune("default", days=1) == 2
        assert Job.objects.get().pk == middle
    assert pruning.prune("default", days=1) == 1
