"""What demo.py and serve.py share: preparing the database, child processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def set_up_django():
    """Load the project, or end with a sentence that says what is missing."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "config.settings"  # whatever else is exported
    try:
        import django

        django.setup()
    except ModuleNotFoundError as error:
        sys.exit(f"The Python package {error.name!r} is missing: start this with make.")


def prepare_database():
    """Migrate and fill the database, unless it is somebody else's."""
    from django.core.management import call_command
    from django.db import connection

    tables = connection.introspection.table_names()
    if tables and "shop_order" not in tables:
        sys.exit("DATABASE_URL leads to a database with other tables: give an empty one.")
    call_command("migrate", verbosity=0)
    call_command("seed_shop", verbosity=0)


def on_stop(handler):
    """Call a signal handler on Ctrl-C, on SIGTERM, and when the terminal is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, handler)


def start(*arguments, **options):
    """Start `manage.py` with these arguments as a child process.

    In a session of its own, so that Ctrl-C reaches only us: we stop our children
    in their order, and a worker takes a second signal as "stop at once".
    """
    command = [sys.executable, str(HERE / "manage.py"), *arguments]
    return subprocess.Popen(command, start_new_session=True, **options)


def wait(process, seconds):
    """Give the exit code of a process that was told to stop, or kill it.

    With its session, that is: a worker has processes of its own.
    """
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()
