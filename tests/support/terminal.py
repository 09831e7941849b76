"""A real terminal for a program that draws: tmux holds it, keys go in, and the screen comes out as text."""

import os
import shlex
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from running_server import until

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


class Terminal:
    """Runs a command in a terminal of its own; use as a context manager.

    Args:
        command: program and arguments.
        folder: where the exit status is put.
        size: columns and rows.
        environment: beside this process's own.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        *,
        size: tuple[int, int] = (120, 40),
        environment: dict[str, str] | None = None,
    ) -> None:
        self._status = folder / f"status-{uuid.uuid4().hex}"
        self._socket = f"tokenspeed-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._script = f"{shlex.join(command)}; echo $? > {shlex.quote(str(self._status))}"
        self._size = size
        # Whoever runs the tests may have said how large their own terminal is.
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "TMUX")}
        self._environment = {**inherited, "TERM": "xterm-256color", **(environment or {})}

    def __enter__(self) -> "Terminal":
        columns, rows = self._size
        self._tmux("-f", os.devnull, "new-session", "-d", "-x", str(columns), "-y", str(rows), self._script)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._status.exists():
            self._tmux("kill-server")

    def screen(self) -> str:
        """What is on the screen, without colours."""
        return self._tmux("capture-pane", "-p").stdout

    def press(self, *keys: str) -> None:
        """Keys by tmux's names: a letter, Enter, Escape, Down, PageDown ..."""
        self._tmux("send-keys", *keys)

    def shows(self, condition: str | Callable[[str], object], timeout_s: float = 60.0) -> str:
        """The first screen that has these words, or that the condition holds for."""
        holds = (lambda text: condition in text) if isinstance(condition, str) else condition
        seen = ""

        def look() -> str:
            nonlocal seen
            seen = self.screen()
            return seen if holds(seen) else ""

        try:
            return str(until(look, f"the screen shows {condition}", timeout_s))
        except AssertionError as error:
            raise AssertionError(f"{error}; the last one was\n{seen}") from None

    def ended(self, timeout_s: float = 60.0) -> int:
        """The exit status, once there is one."""
        return int(until(lambda: self._status.exists() and self._status.read_text().strip(), "it ends", timeout_s))

    def _tmux(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = ["tmux", "-L", self._socket, *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=self._environment, check=False, timeout=30)


def tokenspeed(*arguments: str) -> list[str]:
    """The command line ``tokenspeed ARGUMENTS`` of this checkout."""
    return [sys.executable, "-m", "tokenspeed.cli", *arguments]
