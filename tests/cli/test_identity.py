"""What the process takes on before anything else: its umask."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = "import sys; from pathlib import Path; from tokenspeed.cli.identity import settle_umask; settle_umask()\n"


@pytest.mark.parametrize(("value", "mode"), [("002", 0o775), ("0077", 0o700), ("", 0o755), ("9", 0o755), ("x", 0o755)])
def test_the_umask_is_what_the_variable_says(value: str, mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    command = [sys.executable, "-c", PROGRAM + f"Path({str(folder)!r}).mkdir()"]
    environment = {**os.environ, "TOKENSPEED_UMASK": value}
    subprocess.run(command, env=environment, check=True, umask=0o022)
    assert stat.S_IMODE(folder.stat().st_mode) == mode
