"""The handlers of the old and of the new release, which a rolling deploy has side by side."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django_durable_jobs import JobContext, job
from django_durable_jobs.handlers import Handler

Handlers = dict[str, Handler[..., Any]]


@dataclass
class ShipV1:
    order: int


@dataclass
class Ship:
    order: int
    carrier: str = "post"


@dataclass
class Bill:
    order: int


@dataclass
class BillInCents:
    order: int
    cents: int


def old() -> Handlers:
    """The release that is being replaced."""

    @job("release.ship")
    def ship(ctx: JobContext, payload: ShipV1) -> str:
        return f"old: {payload}"

    @job("release.bill")
    def bill(ctx: JobContext, payload: Bill) -> str:
        return f"old: {payload}"

    return {"ship": ship, "bill": bill}


def new() -> Handlers:
    """The next one: a second version beside the first, a new handler, and a careless change."""

    @job("release.ship", version=2)
    def ship(ctx: JobContext, payload: Ship) -> str:
        return f"new: {payload}"

    @job("release.ship", version=1)
    def ship_v1(ctx: JobContext, payload: ShipV1) -> str:
        return ship(ctx, Ship(order=payload.order))

    # Another schema under the old version, as it should not be done.
    @job("release.bill")
    def bill(ctx: JobContext, payload: BillInCents) -> str:
        return f"new: {payload}"

    @job("release.thank")
    def thank(ctx: JobContext) -> str:
        return "new: thanks"

    return {"ship": ship, "ship_v1": ship_v1, "bill": bill, "thank": thank}


RELEASES: dict[str, Callable[[], Handlers]] = {"old": old, "new": new}

if release := os.environ.get("TEST_RELEASE"):
    RELEASES[release]()
