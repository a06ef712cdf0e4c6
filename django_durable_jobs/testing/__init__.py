"""Test helpers that use the production code (CONTRACT 7.2)."""

from .attempts import HeldAttempt, claim, expire_lease, run_attempt
from .clock import FakeClock
from .contexts import TestContext, context
from .crashing import CrashPointFailed, crash_points
from .draining import drain
from .life import CrashPoint
from .scheduling import run_schedules
from .staged import assert_staged, capture_staged, refute_staged

__all__ = [
    "CrashPoint",
    "CrashPointFailed",
    "FakeClock",
    "HeldAttempt",
    "TestContext",
    "assert_staged",
    "capture_staged",
    "claim",
    "context",
    "crash_points",
    "drain",
    "expire_lease",
    "refute_staged",
    "run_attempt",
    "run_schedules",
]
