"""The kit as its users have it: the built wheel, in projects of their own (tests/kit_project)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from tests._processes import ROOT, SECONDS, succeeded

PROJECT = ROOT / "tests" / "kit_project"
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel, unpacked: a directory of packages, entry points included.

    Where the suite runs without the tree beside it, the wheel is what is installed.
    """
    folder = tmp_path_factory.mktemp("wheel")
    if not (ROOT / "django_durable_jobs").is_dir():
        return folder
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    succeeded(subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS))
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def start(wheel: Path, folder: Path, *arguments: str, database: bool) -> subprocess.Popen[str]:
    """Start Python in a user's folder, warnings being errors, with nothing of this suite's."""
    ours = ("COV", "PYTEST", "TEST_", "DJANGO_SETTINGS_MODULE", "PY_COLORS", "FORCE_COLOR")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env["PYTHONPATH"] = str(wheel)
    if not database:
        env.pop("DATABASE_URL", None)
    return subprocess.Popen(
        [sys.executable, "-W", "error", *arguments],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def outputs(*processes: subprocess.Popen[str]) -> list[str]:
    """Wait for all; give what each wrote, if each went well."""
    written = [process.communicate(timeout=SECONDS)[0] for process in processes]
    for process, output in zip(processes, written, strict=True):
        assert process.returncode == 0, output
    return written


def test_under_both_test_cases_and_pytest_django(
    wheel: Path, tmp_path: Path, is_postgres: bool
) -> None:
    assert "DATABASE_URL" in os.environ or not is_postgres
    shutil.copytree(PROJECT, tmp_path / "project")
    # Beside each other: each makes test databases of its own.
    runs = [
        start(wheel, tmp_path / "project", *command, database=is_postgres)
        for command in (("manage.py", "test"), ("-m", "pytest", "-q", "-p", "no:cacheprovider"))
    ]
    by_django, by_pytest = outputs(*runs)
    classes = _count(r"    def test_", PROJECT)
    functions = _count(r"def test_", PROJECT)
    assert classes > 15
    assert functions > 8
    assert f"Ran {classes} tests" in by_django
    assert "skipped" not in by_django
    assert f"\n{classes + functions} passed" in by_pytest


def _count(start_of_line: str, folder: Path) -> int:
    found = (path.read_text() for path in folder.rglob("test_*.py"))
    return sum(len(re.findall(rf"(?m)^{start_of_line}", text)) for text in found)


def test_a_project_without_django_notices_nothing(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "test_alone.py").write_text(
        textwrap.dedent(
            """
            import sys

            def test_alone(request):
                plugins = request.config.pluginmanager
                assert plugins.has_plugin("django_durable_jobs_pytest"), "by the entry point"
                assert not [
                    name for name in sys.modules
                    if name.partition(".")[0] in ("django", "django_durable_jobs", "msgspec")
                ]
            """
        )
    )
    # pytest-django imports Django by itself.
    quiet = ("-m", "pytest", "-q", "-p", "no:django", "-p", "no:cacheprovider")
    (output,) = outputs(start(wheel, tmp_path, *quiet, database=False))
    assert "\n1 passed" in output


@pytest.mark.parametrize(
    ("name", "at_least"),
    [("testing.md", 9), ("crash_points.md", 4), ("exactly_once.md", 4), ("idempotent.md", 4)],
)
def test_every_recipe_of_the_documentation_runs_in_the_project(name: str, at_least: int) -> None:
    page = (ROOT / "docs" / name).read_text()
    recipes = re.findall(r"(?m)^```python\n(.*?)^```$", page, re.DOTALL)
    sources = [_dedented(path.read_text()) for path in PROJECT.rglob("*.py")]
    missing = [
        recipe for recipe in recipes if not any(_dedented(recipe) in source for source in sources)
    ]
    assert len(recipes) >= at_least
    assert not missing, missing[0]


def _dedented(text: str) -> str:
    """Leave out what is before each line: a recipe may stand in a class there, or alone here."""
    return "\n".join(line.strip() for line in text.strip().splitlines())
