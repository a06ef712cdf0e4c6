"""``--reload``: start the worker anew once its code has changed, for development."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from django.utils import autoreload

from .loop import DRAINED
from .signals import Stop, held_back

logger = logging.getLogger("django_durable_jobs.worker")

AGAIN_SECONDS = 1.0


class Reloading:
    """Watch the code as Django's ``runserver`` does, and stop the worker when it changes.

    The worker ends as it does by a signal, so that no running job is lost; then this process
    becomes a new one. Code that does not load is waited for until it does.
    """

    def __init__(self) -> None:
        self._changed = threading.Event()
        self._on_change: Callable[[], None] = lambda: None

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call ``on_change`` from a thread of its own, once a file has changed."""
        self._on_change = on_change
        autoreload.file_changed.connect(self._notice)
        reloader = autoreload.get_reloader()
        threading.Thread(
            target=reloader.run,
            args=(threading.main_thread(),),
            name="durable-reload",
            daemon=True,
        ).start()

    def begin_again(self, code: int, stop: Stop) -> int:
        """Start anew if the end came by a change and not by a stop; else give the exit code."""
        if stop.is_asked() or not self._changed.is_set():
            return code
        command = autoreload.get_child_arguments()
        while not _loads(command):
            if stop.wait(AGAIN_SECONDS):
                return DRAINED
        sys.stdout.flush()
        sys.stderr.flush()
        # What is sent meanwhile waits for the handlers of the process that this one becomes.
        with held_back():
            if stop.is_asked():
                return DRAINED
            os.execv(command[0], command)  # noqa: S606 - it is the command that we are

    def _notice(self, sender: Any, file_path: Any, **extra: Any) -> bool:
        logger.info("%s has changed; the worker begins again once its jobs have ended", file_path)
        self._changed.set()
        self._on_change()
        # Or Django would end this thread.
        return True


def _loads(command: list[str]) -> bool:
    """Try whether the changed project can be loaded; its error is shown."""
    arguments = list(command)
    arguments[arguments.index("runjobs") :] = ["runjobs", "--help"]
    tried = subprocess.run(  # noqa: S603 - likewise
        arguments, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False
    )
    return tried.returncode == 0
