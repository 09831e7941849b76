"""The planted bugs of scheduler/tests/mutations.toml: whoever changes the source changes them with it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_planted_bug_still_fits_the_source() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "mutate_scheduler.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) >= 20
