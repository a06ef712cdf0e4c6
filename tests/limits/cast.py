"""Handlers under limits that do what the test tells them, and every way to end their attempts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.db import transaction

from django_durable_jobs import JobContext, PermanentError, RetryLater, job
from django_durable_jobs.handlers import registry
from django_durable_jobs.transitions import claims, outcomes
from django_durable_jobs.transitions.claims import ClaimedJob
from django_durable_jobs.transitions.outcomes import Outcome
from django_durable_jobs.worker.execution import Dispatch, context_for, execute, prepare

from .overlap import Limit, of_handler, of_payload, of_scope

Act = Callable[[JobContext], None]


@dataclass
class Key:
    key: str | None = None


def returns(ctx: JobContext) -> None: ...


def is_tried_again(ctx: JobContext) -> None:
    raise RetryLater(0)


def fails(ctx: JobContext) -> None:
    raise PermanentError("as it was told")


def is_stopped(ctx: JobContext) -> None:
    ctx.mark_stop_requested()
    ctx.check()


def completes(ctx: JobContext) -> None:
    with transaction.atomic():
        ctx.complete()


ACTS: list[Act] = [returns, is_tried_again, fails, is_stopped, completes]


class Cast:
    """One handler for each kind of key: by itself, by scope, by payload; each with its number."""

    def __init__(self, **numbers: int) -> None:
        self.numbers = numbers
        self._told: dict[str, Act] = {}
        self._keys: dict[str, Any] = {
            "whole": (None, of_handler),
            "scoped": ("scope", of_scope),
            "keyed": (lambda payload: payload.key, of_payload),
        }
        self.handlers = {name: self._declare(name) for name in numbers}

    def renumber(self, name: str, number: int) -> None:
        """Let the code have another number, as after a deploy."""
        registry.unregister(f"limits.{name}", 1)
        self.numbers[name] = number
        self.handlers[name] = self._declare(name)

    @property
    def limits(self) -> dict[str, Limit]:
        return {
            f"limits.{name}": Limit(number=number, key=self._keys[name][1])
            for name, number in self.numbers.items()
        }

    def _declare(self, name: str) -> Any:
        @job(
            f"limits.{name}",
            concurrency=self.numbers[name],
            concurrency_key=self._keys[name][0],
            # Some are queued again by a recovery, some end with it.
            retry_on_interrupt=name != "keyed",
            max_attempts=1000,
            timeout=0.01,
        )
        def handler(ctx: JobContext, payload: Key) -> None:
            self._told.pop(ctx.token, returns)(ctx)

        return handler

    def play(self, claimed: ClaimedJob, act: Act) -> Outcome | None:
        """Run the handler of a claimed job; give what is left to be written of its end."""
        dispatch = prepare(claimed)
        assert isinstance(dispatch, Dispatch)
        self._told[claimed.token] = act
        ctx = context_for("default", claimed, enforce_timeout=False)
        return execute(dispatch, ctx, lambda handler, *given: handler.func(*given))

    def end(self, held: list[ClaimedJob], act: Callable[[], Act]) -> None:
        """Let each act, and write in one group what is left."""
        ends = [end for one in held if (end := self.play(one, act())) is not None]
        outcomes.finish("default", ends, wait=True)


def claim(limit: int, *, worker: str = "somebody", lease: float = 60) -> list[ClaimedJob]:
    lanes = claims.queued_lanes("default")
    return claims.claim("default", lanes, limit=limit, worker=worker, lease_seconds=lease)
