"""Show that the promises hold, from an empty database to the proof: `make demo`.

The parent places orders and delivers messages; a real worker process does the
jobs; then the business tables are asked what came of it (demonstration.py).
Exits with 0 only if everything is as it should be.

DATABASE_URL runs it on that database; without it a fresh SQLite file is made.
"""

import os
import shutil
import signal
import sys
from urllib.parse import quote

import processes

FOLDER = processes.HERE / ".demo"


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    os.environ.setdefault("DATABASE_URL", f"sqlite:///{quote(str(FOLDER / 'demo.sqlite3'))}")
    processes.on_stop(signal.default_int_handler)
    processes.set_up_django()
    processes.prepare_database()
    from django.db import connections

    import demonstration

    log = FOLDER / "worker.log"
    try:
        demonstration.run(log)
    except demonstration.UnexpectedError as error:
        show_end_of(log)
        print(f"\nThe demo failed. {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        connections.close_all()
    return 0


def show_end_of(log):
    """What the worker said last is most often the reason."""
    if log.exists():
        print("\nThe end of the worker's log:", file=sys.stderr)
        print(*log.read_text().splitlines()[-10:], sep="\n", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
