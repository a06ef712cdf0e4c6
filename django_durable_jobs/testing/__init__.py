"""Test helpers that use the production code (CONTRACT 7.2)."""

from .attempts import HeldAttempt, claim, expire_lease, run_attempt
from .clock import FakeClock
from .contexts import TestContext, context
from .draining import drain

__all__ = [
    "FakeClock",
    "HeldAttempt",
    "TestContext",
    "claim",
    "context",
    "drain",
    "expire_lease",
    "run_attempt",
]
