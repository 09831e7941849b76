"""The servers of this user on this machine: who runs, how they feel, how they end."""

import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenspeed.cli.output import say
from tokenspeed.recipes.weights import cache_directory

_POLL_S = 0.2
_PROBE_TIMEOUT_S = 2.0
_KILL_AFTER_S = 60.0
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class ServerError(RuntimeError):
    """Something about a running or starting server that the operator can mend."""


@dataclass(frozen=True)
class ServerRecord:
    """One running server. ``started`` is the process's start time in clock ticks: a pid alone may be reused."""

    pid: int
    started: int
    name: str
    host: str
    port: int
    log: str = ""

    @classmethod
    def of_this_process(cls, name: str, host: str, port: int) -> "ServerRecord":
        """The record of the process that calls."""
        log = os.environ.get("TOKENSPEED_LOG", "")
        return cls(os.getpid(), _start_time(os.getpid()) or 0, name, host, port, log)

    @property
    def url(self) -> str:
        """Where a client on this machine reaches it."""
        host = _EVERY_ADDRESS.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether that very process still runs."""
        return _start_time(self.pid) == self.started


@contextmanager
def record_running(record: ServerRecord) -> Iterator[None]:
    """Keeps the record on disk while the server runs, for stop, status and logs."""
    path = _records() / f"{record.port}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(record)))
    except OSError as error:
        say(f"note: {path} cannot be written ({error}); stop, status and logs will not find this server")
        yield
        return
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def running_servers() -> list[ServerRecord]:
    """The live servers, by port; records of dead ones are removed."""
    found = []
    for path in sorted(_records().glob("*.json")):
        try:
            record = ServerRecord(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue
        if record.alive:
            found.append(record)
        else:
            path.unlink(missing_ok=True)
    return found


def find_server(port: int | None) -> ServerRecord:
    """The server on ``port``, or the only one; raises ServerError."""
    servers = running_servers()
    if port is not None:
        servers = [record for record in servers if record.port == port]
    if len(servers) == 1:
        return servers[0]
    if servers:
        ports = ", ".join(str(record.port) for record in servers)
        raise ServerError(f"several servers run (ports {ports}): say which with --port")
    where = f" on port {port}" if port is not None else ""
    raise ServerError(f"no server of yours runs{where}; start one: tokenspeed run smollm2-135m")


def stop_server(port: int | None) -> int:
    """Asks a server to drain and end, and waits for it; a second SIGTERM after a minute forces it."""
    record = find_server(port)
    descriptor = os.pidfd_open(record.pid)
    try:
        if not record.alive:  # it ended, and its pid may be another's
            return 0
        say(f"stopping {record.name} on port {record.port} (pid {record.pid}); open streams may finish")
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        if not _ended(descriptor, _KILL_AFTER_S):
            say("it still drains: forcing it")
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
            if not _ended(descriptor, _KILL_AFTER_S):
                raise ServerError(f"pid {record.pid} does not end; kill it: kill -9 {record.pid}")
    finally:
        os.close(descriptor)
    say("stopped")
    return 0


def show_status(port: int | None) -> int:
    """Prints each server with its three probes; 0 where all are ready, else 1."""
    servers = [find_server(port)] if port is not None else running_servers()
    if not servers:
        say("no server of yours runs")
        return 1
    ready = True
    for record in servers:
        probes = {name: probe(f"{record.url}/{name}") for name in ("live", "ready", "progress")}
        ready = ready and probes["ready"][0] == 200
        shown = "  ".join(f"{name} {code or 'no answer'}" for name, (code, _) in probes.items())
        say(f"{record.url}  {record.name}  pid {record.pid}  {shown}")
        if probes["ready"][0] not in (0, 200):
            say(f"  {probes['ready'][1]}")
    return 0 if ready else 1


def show_log(port: int | None, *, follow: bool) -> int:
    """Prints the log of a detached server, also after its end when the port is given."""
    path = log_path(port if port is not None else find_server(None).port)
    if not path.is_file():
        raise ServerError(f"{path}: no such log; only servers started with --detach (make run DETACH=1) write one")
    command = ["tail", "-n", "+1", "-F", str(path)] if follow else ["cat", str(path)]
    return subprocess.run(command, check=False).returncode


def spawn_detached(arguments: list[str], host: str, port: int) -> int:
    """Starts this very command in the background on ``port``, waits until it is ready, and returns the exit code."""
    path = log_path(port)
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tokenspeed.cli", *without_detach(arguments), "--port", str(port)]
    with path.open("wb") as log:
        environment = {**os.environ, "TOKENSPEED_LOG": str(path)}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    say(f"starting in the background, pid {process.pid}; log: {path}")
    record = ServerRecord(process.pid, 0, "", host, port)
    while process.poll() is None:
        if probe(f"{record.url}/ready")[0] == 200:
            say(*path.read_text(errors="replace").splitlines()[-4:])
            return 0
        time.sleep(_POLL_S)
    say(*path.read_text(errors="replace").splitlines()[-20:])
    return process.returncode or 1


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


def probe(url: str) -> tuple[int, str]:
    """GETs a probe: (status, first 300 characters of the body), status 0 where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=_PROBE_TIMEOUT_S) as answer:
            return answer.status, answer.read(300).decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read(300).decode(errors="replace")
    except (OSError, ValueError):
        return 0, ""


def log_path(port: int) -> Path:
    """Where a detached server on ``port`` writes."""
    return cache_directory() / "logs" / f"{port}.log"


def _records() -> Path:
    return cache_directory() / "run"


def _start_time(pid: int) -> int | None:
    """The process's start in clock ticks after boot; None where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the command in brackets and may hold anything, so count from its end.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def _ended(descriptor: int, timeout_s: float) -> bool:
    """Waits for the process behind a pidfd."""
    return bool(select.select([descriptor], [], [], timeout_s)[0])
