"""The servers of this user: how they feel, what they write, how they end. Processes and containers alike."""

import os
import select
import signal
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

from tokenspeed.cli.output import say
from tokenspeed.cli.records import ServerError, ServerRecord, find_server, remove_record, running_servers
from tokenspeed.recipes.cache_folder import cache_directory

_PROBE_TIMEOUT_S = 2.0
_KILL_AFTER_S = 60.0


def stop_server(port: int | None, *, dry_run: bool = False) -> int:
    """Asks a server to drain and end, and waits for it; a second SIGTERM after a minute forces it."""
    record = find_server(port)
    if dry_run:
        say(f"would stop {record.name} on port {record.port} ({record.where}); nothing was stopped (dry run)")
        return 0
    say(f"stopping {record.name} on port {record.port} ({record.where}); open streams may finish")
    if record.container:
        _stop_container(record)
    else:
        end_process(record)
    say("stopped")
    return 0


def end_process(record: ServerRecord) -> None:
    """SIGTERM, and a second one after a minute; raises ServerError where the process outlives both."""
    try:
        descriptor = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return
    try:
        if not record.alive:  # it ended, and its pid may be another's
            return
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        if not _ended(descriptor, _KILL_AFTER_S):
            say("it still drains: forcing it")
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
            if not _ended(descriptor, _KILL_AFTER_S):
                raise ServerError(f"pid {record.pid} does not end; kill it: kill -9 {record.pid}")
    finally:
        os.close(descriptor)


def _stop_container(record: ServerRecord) -> None:
    from tokenspeed.cli.containers import stop_container

    if not stop_container(record.program, record.container, record.grace_s):
        way_out = f"{record.program} kill {record.container}"
        raise ServerError(f"container {record.container} does not end; kill it: {way_out}")
    remove_record(record)


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
        random = "  RANDOM weights" if record.random else ""
        say(f"{record.url}  {record.name}{random}  {record.where}  {shown}")
        if probes["ready"][0] not in (0, 200):
            say(f"  {probes['ready'][1]}")
    return 0 if ready else 1


def show_log(port: int | None, *, follow: bool) -> int:
    """Prints the log of a server in the background, also after its end when the port is given."""
    servers = [record for record in running_servers() if port in (None, record.port)]
    if len(servers) == 1 and servers[0].container:
        options = ["--follow"] if follow else []
        return subprocess.run([servers[0].program, "logs", *options, servers[0].container], check=False).returncode
    named = servers[0].log if len(servers) == 1 else ""
    path = Path(named) if named else log_path(port if port is not None else find_server(None).port)
    if not path.is_file():
        way_out = "only servers started with --detach (make run DETACH=1) or --log-file write one"
        raise ServerError(f"{path}: no such log; {way_out}")
    command = ["tail", "-n", "+1", "-F", str(path)] if follow else ["cat", str(path)]
    return subprocess.run(command, check=False).returncode


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


def _ended(descriptor: int, timeout_s: float) -> bool:
    """Waits for the process behind a pidfd."""
    return bool(select.select([descriptor], [], [], timeout_s)[0])
