"""``tokenspeed env``: at once, without torch; and as one file to send."""

import json
import os
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tokenspeed.cli.environment import write_report
from tokenspeed.cli.records import ServerError
from tokenspeed.launch.crash import LONGEST_FILE

TOKEN = "hf_" + "aB3" * 8


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with three crashes and five logs."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("TOKENSPEED_CACHE", str(cache))
    monkeypatch.setenv("HF_TOKEN", "a-token-of-another-shape")
    for number in range(3):
        folder = cache / "crashes" / f"2026010{number}T000000Z-tiny"
        folder.mkdir(parents=True)
        (folder / "engine.log").write_text(f"{number} {TOKEN} a-token-of-another-shape\n")
    (cache / "logs").mkdir()
    for number in range(5):
        log = cache / "logs" / f"800{number}.log"
        log.write_text("x" * LONGEST_FILE + f"the end of {number}")
        os.utime(log, (number, number))
    return cache


def test_a_report_has_the_newest_and_no_secrets(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.tar.gz"
    assert write_report(str(report)) == 0
    assert "crashes/20260102T000000Z-tiny/engine.log" in capsys.readouterr().out
    assert stat.S_IMODE(report.stat().st_mode) == 0o600
    with tarfile.open(report) as archive:
        files = {member.name.removeprefix("tokenspeed-report/"): archive.extractfile(member) for member in archive}
        texts = {name: file.read().decode() for name, file in files.items() if file is not None}
    assert sorted(texts) == [
        "crashes/20260101T000000Z-tiny/engine.log",
        "crashes/20260102T000000Z-tiny/engine.log",
        "environment.json",
        "logs/8002.log",
        "logs/8003.log",
        "logs/8004.log",
    ]
    assert texts["crashes/20260102T000000Z-tiny/engine.log"] == "2 *** ***\n"
    assert len(texts["logs/8004.log"]) == LONGEST_FILE and texts["logs/8004.log"].endswith("the end of 4")
    facts = json.loads(texts["environment.json"])
    assert facts["variables"]["HF_TOKEN"] == "***" and "gemm.linear" in facts


def test_a_report_overwrites_nothing_and_names_what_is_wrong(cache: Path, tmp_path: Path) -> None:
    there = tmp_path / "report.tar.gz"
    there.write_text("mine")
    with pytest.raises(ServerError, match="is there already: choose another name"):
        write_report(str(there))
    assert there.read_text() == "mine"
    with pytest.raises(ServerError, match=r"absent/report\.tar\.gz cannot be written: No such file or directory"):
        write_report(str(tmp_path / "absent" / "report.tar.gz"))


def test_env_imports_no_torch() -> None:
    code = (
        "import sys; from tokenspeed.cli.environment import show_environment; "
        "show_environment(as_json=True, kernels=False); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kernels"] == "tokenspeed env --kernels lists them"
