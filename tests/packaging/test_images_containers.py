"""Builds every image and looks at it in containers, as "make image-test" does; SKIPs where the tools are not here."""

import subprocess
import sys

import pytest

from scripts.image_facts import ROOT, VENDORS


@pytest.mark.long
@pytest.mark.parametrize("vendor", VENDORS)
def test_the_image_keeps_its_promises(vendor: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.image_test", vendor], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.stdout.startswith("SKIP"):
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
