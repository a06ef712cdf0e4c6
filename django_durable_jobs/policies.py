"""Which handlers' policies cannot hold on a database (CONTRACT 4.6)."""

from __future__ import annotations

from .conf import settings
from .dialects import dialect_for
from .handlers import registry


def lease_problems(alias: str) -> list[str]:
    """Say which timeouts the lease cannot hold on SQLite, where renewals may fail."""
    lease = dialect_for(alias).longest_timeout()
    if lease is None:
        return []
    found = []
    if lease <= settings.TIMEOUT_SECONDS:
        found.append(
            f'DURABLE_JOBS["LEASE_SECONDS"] ({lease:g}) must be longer than "TIMEOUT_SECONDS"'
            f" ({settings.TIMEOUT_SECONDS:g}) on SQLite: raise the one or lower the other."
        )
    found += [
        f'handler "{handler.name}" has a timeout of {handler.effective_timeout:g} s, and on'
        f' SQLite DURABLE_JOBS["LEASE_SECONDS"] ({lease:g}) must be longer.'
        for handler in registry.all()
        if handler.timeout is not None and handler.effective_timeout >= lease
    ]
    return found
