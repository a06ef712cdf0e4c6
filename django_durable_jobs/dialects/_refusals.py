"""Why PostgreSQL let nobody in, by code: libpq keeps the SQLSTATE of a failed connection to itself.

It shows it in one place, its trace of the protocol (libpq 18 and later; psycopg 3 gives access to
it on Linux). So the connection that has failed is tried once more, traced into memory: the trace
may hold a password, and is read for that code alone.
"""

from __future__ import annotations

import os
import re
import select
import time
from typing import Any

# How long that try may take; a network that swallows it tells nothing.
TRY_SECONDS = 10.0

_CODE = re.compile(
    rb'^B\t\d+\tErrorResponse\t S "[^"]*" V "[A-Z]+" C "([0-9A-Z]{5})"', re.MULTILINE
)


def refusal_codes(failed: Any) -> list[str]:
    """Give the SQLSTATEs by which servers refuse the connection that has failed so.

    ``failed`` is the ``pgconn`` of psycopg's error. One for each host that answers; none where
    nobody does, where the connection succeeds now, or where they cannot be learned.
    """
    if not hasattr(os, "memfd_create"):
        return []
    from psycopg import NotSupportedError
    from psycopg.conninfo import make_conninfo
    from psycopg.pq import PGconn, Trace

    asked = {one.keyword.decode(): one.val.decode() for one in failed.info if one.val is not None}
    trace = os.memfd_create("trace")
    try:
        connection = PGconn.connect_start(make_conninfo(**asked).encode())
        try:
            connection.trace(trace)
            connection.set_trace_flags(Trace.SUPPRESS_TIMESTAMPS)
            _wait(connection)
            connection.untrace()
        except NotSupportedError:
            return []
        finally:
            connection.finish()
        return [code.decode() for code in _CODE.findall(_text(trace))]
    finally:
        os.close(trace)


def _wait(connection: Any) -> None:
    """Wait for the end of the try, good or bad."""
    from psycopg.pq import PollingStatus

    end = time.monotonic() + TRY_SECONDS
    while (left := end - time.monotonic()) > 0:
        status = connection.connect_poll()
        if status == PollingStatus.READING:
            select.select([connection.socket], [], [], left)
        elif status == PollingStatus.WRITING:
            select.select([], [connection.socket], [], left)
        else:
            return


def _text(file: int) -> bytes:
    return os.pread(file, os.fstat(file).st_size, 0)
