"""Run the shop and a worker on this machine: `make serve`.

HOST (127.0.0.1) and PORT (8000) say where; DATABASE_URL which database, a SQLite
file beside this one unless set. Ctrl-C or SIGTERM stops both: no new request is
taken and no new job claimed, then what is under way is finished.
"""

import os
import signal
import sys
import time
from contextlib import suppress

import processes

# Beyond the time that the worker gives its jobs. What takes longer is stuck.
EXTRA_SECONDS = 30


def main():
    processes.set_up_django()
    from django.core.management import call_command

    processes.prepare_database()
    address = f"{os.environ.get('HOST', '127.0.0.1')}:{os.environ.get('PORT', '8000')}"
    print(f"The shop    http://{address}/")
    print(f"The admin   http://{address}/admin/")
    call_command("create_operator")
    print("Ctrl-C stops both.", flush=True)
    return serve(address)


def serve(address):
    """Run web and worker until told to stop, or until one of them ends."""
    signals = []  # kept, not raised: a child must not be lost between its start and its name
    processes.on_stop(lambda number, frame: signals.append(number))
    children = {
        "web": processes.start("serve_web", address),
        "worker": processes.start("runjobs"),
    }
    while not signals and not ended(children):
        time.sleep(0.1)
    by_itself = ended(children)
    with suppress(OSError):  # the terminal may be gone
        for name in by_itself:
            print(f"The {name} process ended by itself.", file=sys.stderr)
        print("Stopping: finishing what is under way.", flush=True)
    return stop(children, signals) or (1 if by_itself else 0)


def ended(children):
    return [name for name, child in children.items() if child.poll() is not None]


def stop(children, signals):
    """Stop web and worker; a second signal stops the worker at once."""
    from django.conf import settings

    deadline = time.monotonic() + settings.DURABLE_JOBS["SHUTDOWN_SECONDS"] + EXTRA_SECONDS
    tell(children)
    seen = len(signals)
    while len(ended(children)) < len(children) and time.monotonic() < deadline:
        if len(signals) > seen:
            seen = len(signals)
            tell(children)
        time.sleep(0.1)
    codes = {processes.wait(child, 0) for child in children.values()}
    # A child that was still starting ends by our signal itself, which is well too.
    return max((abs(code) for code in codes - {-signal.SIGTERM}), default=0)


def tell(children):
    for child in children.values():
        child.terminate()


if __name__ == "__main__":
    sys.exit(main())
