"""``context()``: a handler called as the plain function that it is."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from django_durable_jobs import JobCancelled, job
from django_durable_jobs.testing import context


def test_a_handler_is_called_plainly_with_a_context_that_records():
    @job("testing.plain")
    def plain(ctx, payload: dict[str, int]) -> int:
        ctx.check()
        ctx.progress(0.5, "half")
        ctx.checkpoint({"row": ctx.checkpoint_value + payload["n"]})
        ctx.fence()
        ctx.complete(None)
        ctx.complete("done")
        return ctx.attempt

    minute = datetime(2026, 3, 1, 2, 30, tzinfo=UTC)
    ctx = context(attempt=2, checkpoint_value=40, scheduled_for=minute)
    assert plain(ctx, {"n": 2}) == 2
    assert (ctx.scheduled_for, context().scheduled_for) == (minute, None)
    assert ctx.reported.progress == [(0.5, "half")]
    assert ctx.reported.checkpoints == [{"row": 42}]
    assert ctx.reported.completed == [None, "done"]
    with pytest.raises(JobCancelled):
        plain(context(cancelled=True), {"n": 2})
    with pytest.raises(ValueError, match="number from 0 to 1"):
        context().progress(2)
