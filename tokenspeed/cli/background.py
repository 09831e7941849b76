"""A server in the background: this very command again, detached from the terminal, with a log of its own."""

import os
import subprocess
import sys
import time
from pathlib import Path

from tokenspeed.cli.output import say
from tokenspeed.cli.servers import log_path

_POLL_S = 0.2
_SHOWN_LINES = 20
READY = "ready: "
"""What the log's line begins with that tells the way in (launch.banner prints it)."""

LINES_AFTER_READY = 2
"""The curl line, and how to watch."""


def spawn_detached(arguments: list[str], port: int, *, outlives: bool = True) -> int:
    """Starts this very command in the background on ``port``, waits until it is ready, and returns the exit code.

    Args:
        outlives: whether it goes on where this process is interrupted while it waits.
    """
    path = log_path(port)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():  # a server that is being replaced still writes to it
        path.replace(path.with_suffix(".previous.log"))
    command = [sys.executable, "-m", "tokenspeed.cli", *without_detach(arguments), "--port", str(port)]
    with path.open("ab") as log:
        environment = {**os.environ, "TOKENSPEED_LOG": str(path)}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    say(f"starting in the background, pid {process.pid}; log: {path}")
    try:
        return _await_ready(process, path)
    except KeyboardInterrupt:
        if not outlives:
            process.terminate()
            process.wait()
        raise


def _await_ready(process: "subprocess.Popen[bytes]", path: Path) -> int:
    while process.poll() is None:
        lines = path.read_text(errors="replace").splitlines()
        ready = next((index for index, line in enumerate(lines) if says_ready(line)), None)
        if ready is not None and len(lines) > ready + LINES_AFTER_READY:
            say(*lines[max(0, ready - 1) : ready + LINES_AFTER_READY + 1])
            return 0
        time.sleep(_POLL_S)
    say(*path.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])
    return process.returncode or 1


def says_ready(line: str) -> bool:
    """Whether it is the line with the way in, as text or as a JSON record."""
    return line.startswith(READY) or f'"message":"{READY}' in line


def without_detach(arguments: list[str]) -> list[str]:
    """The arguments without --detach and without a port, which is decided by now."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip or argument == "--detach" or argument.startswith("--port="):
            skip = False
        elif argument == "--port":
            skip = True
        else:
            kept.append(argument)
    return kept
