"""Runs the checks of ``emulated`` in a process of their own: PyTorch keeps a device that was once installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run_checks(only: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "python_files=check_*.py"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    variables["TOKENSPEED_TEST_EMULATED"] = "1"
    ended = subprocess.run(
        [*command, "-m", only, str(HERE / "emulated")],
        cwd=HERE.parents[1],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_what_an_emulated_device_shows_in_seconds() -> None:
    run_checks("not long")


@pytest.mark.long
def test_every_architecture_on_an_emulated_device() -> None:
    run_checks("long")
