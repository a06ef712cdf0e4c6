"""Processes that are replaced on purpose: by time, by memory, for new code (CONTRACT 4.9)."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from django_durable_jobs.models import Job
from django_durable_jobs.worker.lifetime import HeartbeatFile, Lifetime, resident_bytes
from tests._marks import no_database

from ..testapp import jobs
from .conftest import StartWorker
from .support import QUICK, Gate, attempts, fresh, until

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_process_that_has_run_its_time_finishes_beside_its_successor(
    start_worker: StartWorker, gate: Gate, tmp_path: Path
) -> None:
    heartbeat = tmp_path / "alive"
    old = jobs.gated.submit(jobs.Gate(**gate.payload("old")))
    worker = start_worker(
        "--processes=1", "--threads=1", "--max-runtime=0.5", f"--heartbeat-file={heartbeat}"
    )
    first = gate.begun("old").split()[0]
    until(lambda: "claims nothing more: it has run for its time" in worker.output())
    new = jobs.gated.submit(jobs.Gate(**gate.payload("new")))
    assert gate.begun("new").split()[0] != first
    assert fresh(old).status == "running"
    # Touched all the time, by the supervisor.
    before = heartbeat.stat().st_mtime_ns
    until(lambda: heartbeat.stat().st_mtime_ns > before, "the next beat")
    for name in ("old", "new"):
        gate.open(name)
    until(lambda: all(fresh(one).status == "succeeded" for one in (old, new)))
    worker.send()
    assert worker.ends() == 0, worker.output()
    assert [len(attempts(one)) for one in (old, new)] == [1, 1]
    assert not heartbeat.exists()


def test_a_single_process_that_grew_too_big_ends_with_0_after_its_job(
    start_worker: StartWorker, gate: Gate, tmp_path: Path
) -> None:
    heartbeat = tmp_path / "alive"
    one = jobs.gated.submit(jobs.Gate(**gate.payload("one")))
    worker = start_worker(
        "--processes=0", "--max-memory=1", f"--heartbeat-file={heartbeat}", "--threads=1"
    )
    gate.begun("one")
    until(lambda: "MiB of memory" in worker.output())
    until(heartbeat.exists)
    gate.open("one")
    assert worker.ends() == 0, worker.output()
    assert fresh(one).status == "succeeded"
    assert not heartbeat.exists()


def test_a_lifetime_ends_by_whichever_comes_first() -> None:
    used = resident_bytes() // 2**20
    assert 10 < used < 4000
    assert not Lifetime(seconds=None, mebibytes=None).look()
    assert not Lifetime(seconds=60, mebibytes=2 * used).look()
    assert Lifetime(seconds=60, mebibytes=used // 2).look()
    assert not Lifetime(seconds=60, mebibytes=used // 2).look(has_worked=False)
    timed = Lifetime(seconds=0.01, mebibytes=None)
    time.sleep(0.02)
    assert not timed.is_over
    assert timed.look()
    assert timed.is_over


def test_a_heartbeat_file_that_cannot_be_written_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeartbeatFile, "EVERY_SECONDS", 0)
    beat = HeartbeatFile(tmp_path / "gone" / "file")
    for _ in range(3):
        beat.touch()
    assert caplog.text.count("the heartbeat file cannot be written") == 1
    (tmp_path / "gone").mkdir()
    beat.touch()
    assert (tmp_path / "gone" / "file").exists()
    beat.remove()
    beat.remove()
    assert os.listdir(tmp_path / "gone") == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_runtime": 0}, "--max-runtime must be a number of seconds above 0"),
        ({"max_runtime": float("nan")}, "--max-runtime must be"),
        ({"max_memory": 0}, "--max-memory must be a whole number"),
        ({"heartbeat_file": "/proc/none/file"}, "--heartbeat-file .* cannot be written"),
        ({"heartbeat_file": "/proc"}, "--heartbeat-file .* is a folder: name a file in it"),
        ({"reload": True, "drain": True}, "not with --drain or --once"),
        ({"reload": True}, "on the command line only"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CommandError, match=sentence) as caught:
        call_command("runjobs", verbosity=0, **options)
    assert caught.value.returncode == 2


CODE = """
from django_durable_jobs import job

@job("reloaded.version")
def version(ctx, payload: int) -> int:
    return {version}
"""


@no_database
def test_new_code_is_taken_up_once_the_running_job_has_ended(
    start_worker: StartWorker, gate: Gate, tmp_path: Path
) -> None:
    code = tmp_path / "reloaded" / "jobs.py"
    code.parent.mkdir()
    (code.parent / "__init__.py").touch()
    code.write_text(CODE.format(version=1))
    (tmp_path / "reloaded_settings.py").write_text(
        "from tests.worker.settings_short import *\nINSTALLED_APPS += ['reloaded']\n"
    )
    running = jobs.gated.submit(jobs.Gate(**gate.payload("running")))
    worker = start_worker(
        "--reload",
        durable_jobs=QUICK,
        variables={
            "DJANGO_SETTINGS_MODULE": "reloaded_settings",
            "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
        },
    )
    gate.begun("running")
    # A broken state of it first, as one types.
    broken = "def ("
    until(
        # A change before its first look is not seen, as with runserver.
        lambda: code.write_text(broken) and "has changed" in worker.output(),
        "the change to be seen",
    )
    gate.open("running")
    until(lambda: "SyntaxError" in worker.output(), "the error to be shown")
    assert fresh(running).status == "succeeded"
    # At once: who looked while the file is being written would start once more.
    new = code.with_suffix(".new")
    new.write_text(CODE.format(version=2))
    new.replace(code)
    until(lambda: worker.output().count("Worker ") == 2, "the new start")
    worker.send()
    assert worker.ends() == 0, worker.output()
    assert len(attempts(running)) == 1
    assert not Job.objects.exclude(status="succeeded").exists()
