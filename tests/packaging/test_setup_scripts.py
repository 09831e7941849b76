"""The scripts of the set-up: what is missing is named before anything is downloaded, and a failing step says why."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder for PATH with this Python and nothing else but what the scripts themselves call."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "tail", "mkdir", "date", "sleep", "rm"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    # The interpreter under the virtual environment: a link to the latter would lose its home.
    (folder / "python3.11").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "python3.11").chmod(0o755)
    return folder


def preflight(programs: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs scripts/preflight.sh with a PATH of our own."""
    return subprocess.run(
        ["sh", str(ROOT / "scripts" / "preflight.sh"), *arguments],
        env={"PATH": str(programs), **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_missing_compiler_is_named_with_its_package(programs: Path) -> None:
    done = preflight(programs)
    assert done.returncode == 2
    assert "setup: no C++ compiler" in done.stderr
    assert "apt install g++" in done.stderr


def test_an_old_compiler_is_named(programs: Path) -> None:
    (programs / "g++").write_text("#!/bin/sh\nexit 1\n")
    (programs / "g++").chmod(0o755)
    done = preflight(programs)
    assert done.returncode == 2
    assert "g++ does not know C++20 with OpenMP" in done.stderr


def test_a_missing_python_is_named_with_its_package(programs: Path) -> None:
    (programs / "python3.11").unlink()
    done = preflight(programs)
    assert done.returncode == 2
    assert "no Python 3.11 or newer" in done.stderr
    assert "apt install python3 python3-venv python3-dev" in done.stderr
    assert "(PYTHON=python9)" in preflight(programs, "python9").stderr


def test_a_whole_machine_gets_its_python_named(programs: Path) -> None:
    done = preflight(programs, CXX=shutil.which("c++") or "", PATH=os.environ["PATH"] + os.pathsep + str(programs))
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.splitlines()[-1]).name.startswith("python")


def test_a_failing_step_shows_the_end_of_its_log(tmp_path: Path) -> None:
    step = str(ROOT / "scripts" / "step.sh")
    done = subprocess.run(
        ["sh", step, "name", "something", "sh", "-c", "echo the cause; exit 7"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 7
    assert "setup: something FAILED" in done.stderr
    assert "the cause" in done.stderr
    good = subprocess.run(
        ["sh", step, "name", "something", "true"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert good.stdout.splitlines()[0] == "setup: something ..."
    assert good.stdout.splitlines()[-1].endswith(" s")


def test_a_dry_make_asks_the_index_for_no_name_of_ours() -> None:
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", ".make/run", ".make/dev"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    local = [line for line in done.stdout.splitlines() if "--editable" in line]
    assert local
    assert all("--no-index" in line and "--no-deps" in line for line in local)
