"""The suite's settings with short leases and an impatient shutdown."""

from tests.settings import *  # noqa: F403

DURABLE_JOBS = {
    "LEASE_SECONDS": 3,
    "POLL_SECONDS": 0.2,
    "SHUTDOWN_SECONDS": 1,
    "TIMEOUT_SECONDS": 20,
    "TIMEOUT_GRACE_SECONDS": 2,
    "RETRY_BASE_SECONDS": 0.1,
    "RETRY_MAX_SECONDS": 1,
    "LOCK_TIMEOUT_SECONDS": 1,
}
