"""``demo``: a real engine in a pool that is too small for what is asked of it, and the dashboard beside it.

The server and the load are processes of their own; both end with the dashboard, also where its terminal goes away.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenspeed.cli.output import say
from tokenspeed.cli.records import ServerError
from tokenspeed.cli.temporary_server import temporary_server
from tokenspeed.recipes.cache_folder import cache_directory

SERVER = (
    "--max-model-len", "1600",
    "--max-num-seqs", "16",
    "--kv-cache-gb", "0.055",
    "--host-cache-gb", "0.1",
    "--headroom-tokens", "16",
    "--block-granularity", "32",
    "--drain-seconds", "0",
)  # fmt: skip
"""About 2,500 tokens, for sessions that want twice as much: requests wait, give way to others, and come back. Nobody
waits for the answers once the dashboard is closed."""

LOAD = (
    "--workload", "sessions",
    "--concurrency", "14",
    "--turns", "4",
    "--prefix-len", "128",
    "--input-len", "64:144",
    "--output-len", "96:192",
    "--duration", "3600",
    "--seed", "7",
)  # fmt: skip
"""Agents at work: all begin with the same instructions, and every turn sends all that was said."""

_END_S = 10.0


def run_demo(target: str, dashboard: list[str], *, dry_run: bool) -> int:
    """Serves ``target``, loads it and shows it until the dashboard is closed; returns the dashboard's exit code.

    ``dashboard``: options for ``tokenspeed top``. Raises ServerError where the server does not start.
    """
    arguments = ["serve", target, "--host", "127.0.0.1", *SERVER]
    load = ["bench", "serve", *LOAD]
    if dry_run:
        say(f"would start   tokenspeed {' '.join(arguments)}", f"would load it tokenspeed {' '.join(load)}")
        say("would show it tokenspeed top", "nothing was started (dry run)")
        return 0
    from tokenspeed.cli.dashboard import show_dashboard

    for ending in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(ending, _end)
    say("a small server is starting, and clients that ask more than it holds; everything ends with the key q")
    with temporary_server(arguments, target) as url, _load([*load, "--url", url]):
        return show_dashboard(["--url", url, *dashboard])


def _end(number: int, frame: object) -> None:
    """By default these end the process at once, and the server would stay."""
    del frame
    raise SystemExit(128 + number)


@contextmanager
def _load(arguments: list[str]) -> Iterator[None]:
    """Runs ``tokenspeed ARGUMENTS`` meanwhile, its words in a file; says so where it ended before."""
    log = cache_directory() / "logs" / "demo-load.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as words:
        process = subprocess.Popen(
            [sys.executable, "-m", "tokenspeed.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is the dashboard's
        )
    try:
        yield
        if process.poll() is not None:
            raise ServerError(f"the clients of the demo ended early: {_last_line(log)} (all of it: {log})")
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code unknown, {log} is empty"
