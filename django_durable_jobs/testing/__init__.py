"""Test helpers that use the production code (CONTRACT 7.2)."""

from .clock import FakeClock
from .contexts import context
from .draining import drain

__all__ = ["FakeClock", "context", "drain"]
