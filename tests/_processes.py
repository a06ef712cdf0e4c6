"""Run Python in a process of its own, with settings of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 240


def environment(database: str | None = None, **changes: object) -> dict[str, str]:
    """Give the environment of a process with changed settings.

    ``database`` names one that exists; else the process gets a name of its own on SQLite,
    and on PostgreSQL the server's default database.
    """
    env = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests._variant",
        "TEST_SETTINGS": json.dumps(changes),
    }
    if database is not None:
        env["TEST_DATABASE_NAME"] = database
    return env


def python(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments to its end, warnings being errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def manage(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a management command to its end."""
    return python("-m", "django", *arguments, env=env)


def succeeded(result: subprocess.CompletedProcess[str]) -> str:
    """Give the output of a process that went well; show its errors if it did not."""
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
