"""The supervisor over children that hang, crash, retire or do not end (CONTRACT 4.5, 4.7)."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from django_durable_jobs.worker.lifeline import ChildEnd, lifeline
from django_durable_jobs.worker.supervisor import Child, Limits, OwnTime, Supervisor
from tests._marks import no_database

from .support import PATIENCE, ROOT, children_of, is_alive, until

pytestmark = no_database


class Supervised:
    """A supervisor in a process of its own, and who worked under it."""

    def __init__(self, folder: Path, work: str, count: int, *, command: list[str]) -> None:
        self.folder = folder
        self._log = folder / "log"
        with self._log.open("wb") as output:
            self.popen = subprocess.Popen(
                [*command, sys.executable, "-m", "tests.worker.supervised_work"]
                + [str(folder), work, str(count)],
                cwd=ROOT,
                env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def starts(self) -> list[tuple[int, int, float]]:
        """Number, pid and time of each child that was started."""
        path = self.folder / "starts"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(one[0]), int(one[1]), float(one[2])) for one in map(str.split, lines)]

    def started(self, count: int) -> list[int]:
        """Wait for so many starts; give the pids by number, then by time."""
        until(lambda: len(self.starts()) >= count, f"{count} starts of\n{self.output()}")
        return [pid for _, pid, _ in sorted(self.starts(), key=lambda one: (one[0], one[2]))]

    def output(self) -> str:
        return self._log.read_text()

    def ends(self) -> int:
        return self.popen.wait(PATIENCE)

    def end_now(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[..., Supervised]]:
    started: list[Supervised] = []

    def start(work: str, count: int, command: list[str] | None = None) -> Supervised:
        started.append(Supervised(tmp_path, work, count, command=command or []))
        return started[-1]

    yield start
    for one in started:
        one.end_now()


@pytest.mark.parametrize("how", ["hold", "sigstop"])
def test_a_child_whose_interpreter_hangs_is_killed_and_replaced_its_busy_neighbour_not(
    supervise: Callable[..., Supervised], how: str
) -> None:
    began = time.monotonic()
    supervisor = supervise(how, 2)
    hung, successor, neighbour = supervisor.started(3)
    assert not is_alive(hung)
    # No less than the bound, and the pause before its successor.
    told = re.search(rf"process {hung} has been silent for (\S+) s and is", supervisor.output())
    assert told is not None and float(told[1]) >= 5
    assert f"worker process {hung} ended with -9 and is replaced in 0.5 s" in supervisor.output()
    assert [at - began > 5.5 for number, _, at in supervisor.starts() if number == 0][1:] == [True]
    supervisor.popen.terminate()
    assert supervisor.ends() == 0, supervisor.output()
    assert not is_alive(successor)
    assert not is_alive(neighbour)
    assert len(supervisor.starts()) == 3


@pytest.mark.parametrize("how", ["halted", "deaf"])
def test_a_stop_ends_with_4_although_a_child_does_not_end(
    supervise: Callable[..., Supervised], how: str
) -> None:
    supervisor = supervise(how, 1)
    (child,) = supervisor.started(1)
    supervisor.popen.terminate()
    began = time.monotonic()
    assert supervisor.ends() == 4, supervisor.output()
    assert time.monotonic() - began < PATIENCE / 2
    assert not is_alive(child)
    complaint = "does not end" if how == "deaf" else "has been silent"
    assert f"worker process {child} {complaint}" in supervisor.output()


def test_children_that_end_are_replaced_after_growing_pauses(
    supervise: Callable[..., Supervised],
) -> None:
    supervisor = supervise("crash", 1)
    supervisor.started(3)
    times = [at for _, _, at in supervisor.starts()]
    pauses = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    assert pauses[0] > 0.5
    assert pauses[1] > 1
    # One line for each end, with the pause after it.
    until(lambda: supervisor.output().count("ended with 3") >= 3, "the third end")
    told = re.findall(r"ended with 3 and is replaced in (\S+) s", supervisor.output())
    assert told[:3] == ["0.5", "1", "2"]
    supervisor.popen.terminate()
    assert supervisor.ends() in (0, 3), supervisor.output()


def test_the_pause_is_bounded_and_forgotten_by_a_child_that_lived() -> None:
    supervisor = Supervisor(1, lambda number, parent, stop: 0, Limits(silence=1, stop=1))
    (place,) = supervisor._places
    ours, theirs = lifeline()
    child = Child(pid=0, line=ours, born=0, heard=0)
    pauses = [supervisor._put_off(place, child.born) for _ in range(2000)]
    assert pauses[:7] == [0.5, 1, 2, 4, 8, 16, 30]
    assert set(pauses[7:]) == {30}
    supervisor._time.now = 60
    assert supervisor._put_off(place, child.born) == 0.5
    theirs.close()
    ours.close()


def test_a_start_that_the_system_refuses_is_tried_again(
    supervise: Callable[..., Supervised],
) -> None:
    supervisor = supervise("refused", 2)
    supervisor.started(3)
    assert [number for number, _, _ in supervisor.starts()].count(0) == 2
    assert supervisor.output().count("cannot be started") == 2
    # One line for each child: of the starts that were refused nothing is left open.
    until(lambda: count_of_sockets(supervisor.popen.pid) == 2, "the other ends to be closed")
    supervisor.popen.terminate()
    assert supervisor.ends() == 0, supervisor.output()


def count_of_sockets(pid: int) -> int:
    count = 0
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            count += os.readlink(one).startswith("socket:")
    return count


def test_it_knows_how_children_end_where_their_end_was_ignored(
    supervise: Callable[..., Supervised],
) -> None:
    ignore = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    command = [sys.executable, "-c", f"{ignore}; os.execv(sys.argv[1], sys.argv[1:])"]
    supervisor = supervise("serve", 1, command)
    (child,) = supervisor.started(1)
    os.kill(child, signal.SIGKILL)
    supervisor.started(2)
    supervisor.popen.terminate()
    assert supervisor.ends() == 0, supervisor.output()


def test_a_pause_of_the_whole_machine_is_nobodys_silence(
    supervise: Callable[..., Supervised],
) -> None:
    supervisor = supervise("serve", 2)
    pids = supervisor.started(2)
    os.killpg(supervisor.popen.pid, signal.SIGSTOP)
    time.sleep(5.5)  # Longer than the bound.
    # The supervisor looks before any child could say a word.
    began = time.monotonic()
    os.kill(supervisor.popen.pid, signal.SIGCONT)
    time.sleep(0.3)
    os.killpg(supervisor.popen.pid, signal.SIGCONT)
    alone = time.monotonic() - began
    time.sleep(0.5)
    if alone > 3:
        pytest.skip("this test stood still itself: its children's silence was a real one")
    assert supervisor.started(2) == pids
    assert [is_alive(pid) for pid in pids] == [True, True]
    supervisor.popen.terminate()
    assert supervisor.ends() == 0, supervisor.output()


def test_own_time_counts_a_jump_of_the_clock_as_one_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 100.2, 3700.0, 3700.5])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    own = OwnTime(_seen=time.monotonic())
    passed = []
    for _ in range(3):
        own.tick()
        passed.append(round(own.now, 3))
    assert passed == [0.2, 1.2, 1.7]


def test_a_child_that_retires_finishes_beside_one_successor(
    supervise: Callable[..., Supervised],
) -> None:
    supervisor = supervise("retire", 1)
    first, second = supervisor.started(2)
    # The second retires too, and waits for the first to end before it has a successor.
    until(lambda: supervisor.output().count("retires") == 1, "the first to retire")
    time.sleep(0.5)
    assert len(supervisor.starts()) == 2
    assert [is_alive(pid) for pid in (first, second)] == [True, True]
    (supervisor.folder / f"{first}.go").touch()
    third = supervisor.started(3)[-1]
    assert not is_alive(first)
    assert is_alive(second)
    (supervisor.folder / f"{second}.go").touch()
    until(lambda: not Path(f"/proc/{second}").exists(), "the second to be buried")
    assert is_alive(third)
    supervisor.popen.terminate()
    # How the retired ones ended does not count.
    assert supervisor.ends() == 0, supervisor.output()


def test_a_child_that_retires_is_heard_although_its_line_was_full() -> None:
    ours, theirs = lifeline()
    with closing(ours), theirs:
        with suppress(BlockingIOError):
            while True:
                theirs.send(b".", socket.MSG_DONTWAIT)
        child = ChildEnd(theirs)
        child.retire()
        while (heard := ours.heard())[0]:
            assert heard == (True, False)
        child.beat()
        assert ours.heard() == (True, True)


def test_a_child_that_somebody_ends_is_replaced(supervise: Callable[..., Supervised]) -> None:
    supervisor = supervise("serve", 1)
    (child,) = supervisor.started(1)
    # Ignored until its handlers are in place.
    until(lambda: is_gone_after(child, signal.SIGTERM), "its end")
    supervisor.started(2)
    supervisor.popen.terminate()
    assert supervisor.ends() == 0, supervisor.output()


def is_gone_after(pid: int, number: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    return not is_alive(pid)


def test_as_pid_1_it_buries_orphans_and_obeys_sigterm(
    supervise: Callable[..., Supervised],
) -> None:
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if not shutil.which("unshare") or subprocess.run([*command, "true"], check=False).returncode:
        pytest.skip("this user may make no PID namespace")
    supervisor = supervise("orphans", 1, command)
    result = supervisor.folder / "unburied"
    until(lambda: result.exists() and result.read_text(), "the count")
    unburied, _, _, _, parent = result.read_text().split()
    assert (unburied, parent) == ("0", "1")
    # unshare itself waits for PID 1 of the namespace.
    (inner,) = children_of(supervisor.popen.pid)
    os.kill(inner, signal.SIGTERM)
    assert supervisor.ends() == 0, supervisor.output()
