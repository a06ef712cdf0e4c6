"""Behind PgBouncer in transaction mode with two server connections (FAULTS 12, CONTRACT 4.4)."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from django.db import connection

from .._postgres import UNPRIVILEGED_USERS
from ..testapp import jobs
from .conftest import StartWorker
from .support import QUICK, Gate, attempts, fresh, until

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="a pooler of PostgreSQL"),
    pytest.mark.skipif(PROGRAM is None, reason="pgbouncer is not installed"),
]


@pytest.fixture
def pooled_url(tmp_path: Path) -> Iterator[str]:
    """The URL of this test's server through a pooler of its own."""
    server = connection.settings_dict
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ini = tmp_path / "pgbouncer.ini"
    ini.write_text(
        "[databases]\n"
        f"* = host=127.0.0.1 port={server['PORT']} user={server['USER']}"
        f" password={server['PASSWORD']}\n"
        "[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
        "auth_type = any\npool_mode = transaction\ndefault_pool_size = 2\n"
        # It refuses to run as root.
        + (f"user = {UNPRIVILEGED_USERS[-1]}\n" if os.geteuid() == 0 else "")
    )
    log = (tmp_path / "pgbouncer.log").open("wb")
    pooler = subprocess.Popen(
        [str(PROGRAM), "-q", str(ini)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )
    url = f"postgres://{server['USER']}:any@127.0.0.1:{port}/postgres"
    try:
        until(lambda: pooler.poll() is None and _accepts(port), "the pooler")
        yield url
    finally:
        pooler.kill()
        pooler.wait()
        log.close()


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def test_a_worker_behind_a_pooler_of_transactions(
    start_worker: StartWorker, gate: Gate, pooled_url: str
) -> None:
    held = jobs.gated.submit(jobs.Gate(**gate.payload("held")))
    failing = [jobs.holding.submit(jobs.Gate(**gate.payload(name))) for name in ("a", "b")]
    lines = [jobs.line.submit(jobs.Line(str(gate.folder / "lines"), n)) for n in range(40)]
    for name in ("a", "b"):
        gate.open(name)
    worker = start_worker(
        "--processes=0",
        "--threads=4",
        durable_jobs={**QUICK, "LEASE_SECONDS": 30},
        variables={"DATABASE_URL": f"{pooled_url}?DISABLE_SERVER_SIDE_CURSORS=True"},
    )
    gate.begun("held")
    until(lambda: all(fresh(one).status == "succeeded" for one in (*lines, *failing)))
    until(lambda: "announcements of new work do not arrive" in worker.output(), "the warning")
    # Renewed through the pooler, beyond its first lease.
    expiry = fresh(held).lease_expires_at
    until(lambda: (fresh(held).lease_expires_at - expiry).total_seconds() > 1, "renewals")
    gate.open("held")
    until(lambda: fresh(held).status == "succeeded")
    worker.send()
    assert worker.ends() == 0, worker.output()
    assert {len(attempts(one)) for one in (held, *failing, *lines)} == {1}
    assert len((gate.folder / "lines").read_text().split()) == len(lines)
    assert "Traceback" not in worker.output()
    # Nothing of ours stays behind in the sessions that others get next.
    name = connection.settings_dict["NAME"]
    with (
        psycopg.connect(pooled_url, dbname=name, prepare_threshold=None) as one,
        psycopg.connect(pooled_url, dbname=name, prepare_threshold=None) as two,
    ):
        for session in (one, two):
            for setting, expected in (
                ("lock_timeout", "0"),
                ("transaction_isolation", "read committed"),
            ):
                assert session.execute(f"SHOW {setting}").fetchone() == (expected,)
