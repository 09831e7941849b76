"""Runs the checks of ``interpreted`` and ``ahead``, each kind in a process of its own: whether Triton interprets is
settled when it is imported."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tokenspeed_kernel.plugins.loading import loaded_registry

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

SPECS = [kernel.spec for kernel in loaded_registry().kernels() if kernel.spec.solution.startswith("triton")]

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed")


def run_checks(target: Path, only: str, **environment: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"]
    command += ["-o", "python_files=check_*.py", "-m", only, str(target)]
    variables = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1", **environment}
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "TRITON_INTERPRET"):
        if name not in environment:
            variables.pop(name, None)
    ended = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@needs_triton
def test_what_the_interpreter_shows_in_seconds() -> None:
    run_checks(HERE / "interpreted", "not long", TRITON_INTERPRET="1")


@needs_triton
def test_what_compiles_in_seconds() -> None:
    run_checks(HERE / "ahead", "not long")


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize("file", sorted((HERE / "interpreted").glob("check_*.py")), ids=lambda path: path.stem)
def test_everything_the_interpreter_shows(file: Path) -> None:
    run_checks(file, "long or not long", TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.long
def test_everything_compiles() -> None:
    run_checks(HERE / "ahead", "long")
