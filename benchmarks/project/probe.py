"""Run one probe of one side inside Django: ``probe.py durable_app enqueue '{"count": 100}'``.

Prints what the probe returns as JSON.
"""

import importlib
import json
import sys

import django
from django.db import connections


def main() -> None:
    app, name, arguments = sys.argv[1:]
    django.setup()
    probe = getattr(importlib.import_module(f"{app}.probes"), name)
    try:
        answer = probe(**json.loads(arguments))
    finally:
        # SQLite copies its log into the file when the last connection closes.
        connections.close_all()
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
