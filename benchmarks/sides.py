"""The two sides, and how the workers of each are started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Side:
    """One job system: its Django settings and the app that holds its job and its probes."""

    name: str
    title: str
    app: str
    settings: str


DURABLE = Side(
    name="durable",
    title="django-durable-jobs",
    app="durable_app",
    settings="durable_settings",
)
PEER = Side(
    name="peer",
    title="django-tasks-db",
    app="peer_app",
    settings="peer_settings",
)


@dataclass(frozen=True, kw_only=True)
class Workers:
    """One configuration of worker processes."""

    side: Side
    what: str
    arguments: tuple[str, ...]
    ends_itself: bool = False


PLAIN = Workers(
    side=DURABLE,
    what="16 threads each (the default)",
    arguments=("runjobs", "--processes", "0"),
)
THREADS_32 = Workers(
    side=DURABLE,
    what="32 threads each",
    arguments=("runjobs", "--processes", "0", "--threads", "32"),
)
# One task at a time for each process: it has no other mode. --batch never sleeps while there
# are tasks and ends by itself, --verbosity 0 spares it two lines of log for each task.
PEER_BEST = Workers(
    side=PEER,
    what="--batch, no delays, no log",
    arguments=(
        "db_worker",
        "--batch",
        "--interval=0.01",
        "--no-startup-delay",
        "--no-reload",
        "--verbosity=0",
    ),
    ends_itself=True,
)
