"""Run the shop and a worker on this machine: `make serve`.

HOST (127.0.0.1) and PORT (8000) say where; DATABASE_URL which database, a SQLite
file beside this one unless set. Ctrl-C or SIGTERM stops both: no new request is
taken and no new job claimed, then what is under way is finished.
"""

import os
import signal
import sys
import time

import processes

STOP_SECONDS = 60


class Stop(BaseException):
    """Raised in the main thread by SIGINT and SIGTERM."""


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
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, raise_stop)
    children = {}
    try:
        children["web"] = processes.start("serve_web", address)
        children["worker"] = processes.start("runjobs")
        while all(child.poll() is None for child in children.values()):
            time.sleep(0.2)
        ended = next(name for name, child in children.items() if child.poll() is not None)
        print(f"The {ended} process ended by itself: stopping.", file=sys.stderr)
        return stop(children) or 1
    except Stop:
        return stop(children)


def raise_stop(number, frame):
    raise Stop


def stop(children):
    """Stop web first, then the worker; a second signal stops the worker at once."""
    print("Stopping: finishing what is under way.", flush=True)
    for child in children.values():
        child.terminate()
    while True:
        try:
            codes = [processes.wait(child, STOP_SECONDS) for child in children.values()]
            return max(map(abs, codes), default=0)
        except Stop:
            for child in children.values():
                child.terminate()


if __name__ == "__main__":
    sys.exit(main())
