"""Runs ``checks`` in a process of its own, in which ``simulated/torch_npu`` stands in for torch_npu: operators are
registered once a process, and the rest of the suite is to see none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run_checks(only: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-o", "python_files=check_*.py", "-m", only, str(HERE / "checks")]
    left_out = ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER")
    variables = {name: value for name, value in os.environ.items() if name not in left_out}
    variables["PYTHONPATH"] = os.pathsep.join(str(path) for path in (HERE / "simulated", HERE / "checks"))
    variables["OMP_NUM_THREADS"] = "1"  # the tensors are small, and other tests run beside
    ended = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_what_the_stand_in_shows_in_seconds() -> None:
    run_checks("not long")


@pytest.mark.long
def test_everything_the_stand_in_shows() -> None:
    run_checks("long")
