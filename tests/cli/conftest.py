"""One operator's machine for the tests of the command line: a cache of their own, and no container by accident."""

import sys
from pathlib import Path

import pytest
from command_line import Command, Outcome

from tokenspeed.cli import main as command


@pytest.fixture(autouse=True)
def own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records, logs and downloads of a test stay in its folder; images of this machine are not looked for."""
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TOKENSPEED_ENGINE", "native")
    monkeypatch.delenv("TOKENSPEED_RECIPES", raising=False)
    monkeypatch.delenv("TOKENSPEED_VENDOR", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def tokenspeed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command line in this process; a traceback would be an error of the test."""

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["tokenspeed", *arguments])
        with pytest.raises(SystemExit) as ended:
            command.main()
        printed = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), printed.out, printed.err)

    return run
