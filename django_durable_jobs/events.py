"""What the package tells a project's own functions: frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishEvent:
    """The end of a job, as its handler's ``on_finish`` gets it (CONTRACT 3.8).

    ``status`` is the job's new one, always terminal: ``succeeded``, ``failed``, ``cancelled``
    or ``interrupted``. ``outcome`` is what the handler itself did in its last attempt, number
    ``attempt``: ``returned``, ``raised`` or ``stopped``. ``result`` is the job's as it reads
    back from JSON, None unless it succeeded; ``error_category`` the job's, None where it
    succeeded or was cancelled.
    """

    job_id: str
    scope: str
    handler: str
    attempt: int
    status: str
    outcome: str
    result: Any
    error_category: str | None
