"""A real server process for tests: `tokenspeed serve` on a free port, with what it printed."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

START_TIMEOUT_S = 120.0


def until(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """Returns the first true value of ``condition``; fails naming ``what`` after the timeout."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"timed out waiting until {what}")


class RunningServer:
    """Use as a context manager; ``client`` speaks HTTP to it, ``output`` is what it printed so far."""

    def __init__(self, target: str | Path, *flags: str, environment: dict[str, str] | None = None) -> None:
        self.command = [sys.executable, "-m", "tokenspeed.cli", "serve", str(target), "--port", "0", *flags]
        self._environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}
        self._lines: list[str] = []
        self.url = ""

    def __enter__(self) -> "RunningServer":
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self._environment
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        until(lambda: self.url or self.process.poll() is not None, "the server is ready", START_TIMEOUT_S)
        assert self.url, f"the server ended before it was ready:\n{self.output}"
        self.client = httpx.Client(base_url=self.url, timeout=120)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.stop()
        self._reader.join(10)

    def stop(self) -> int:
        """SIGTERM, then waits; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the server did not end after SIGTERM:\n{self.output}") from None

    @property
    def output(self) -> str:
        return "".join(self._lines)

    @property
    def model(self) -> str:
        return str(self.client.get("/v1/models").json()["data"][0]["id"])

    @property
    def admin(self) -> str:
        """The URL of the admin port, of a server that was given ``--admin-port 0``."""
        (address,) = re.findall(r"administration at (http://127\.0\.0\.1:\d+)", self.output)
        return str(address)

    def state(self) -> dict[str, Any]:
        """The engine's snapshot, as the dashboard gets it."""
        return dict(self.client.get("/v1/internal/state").json())

    def engine_pids(self) -> list[int]:
        """The process ids of the server's children that run an engine rank."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if b"tokenspeed.launch.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            if line.startswith("ready: "):
                self.url = line.split(" at ")[1].strip().removesuffix("/v1")


def run_cli(*arguments: str, environment: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    """Runs the command line to its end."""
    command: Sequence[str] = [sys.executable, "-m", "tokenspeed.cli", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TOKENSPEED_ENGINE": "native", **(environment or {})},
    )
