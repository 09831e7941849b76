"""What is known of the servers of this user on this machine: one file each, by port, while they run."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenspeed.cli.output import say
from tokenspeed.recipes.cache_folder import cache_directory

_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class ServerError(RuntimeError):
    """Something about a running or starting server that the operator can mend."""


@dataclass(frozen=True)
class ServerRecord:
    """One running server.

    Attributes:
        pid: its process; of a container the program that shows its output, 0 where it runs in the background.
        started: the process's start time in clock ticks: a pid alone may be reused.
        name: the served name.
        log: the file it logs to, "" for none.
        container, program: the container's name and what runs it; "" for a process of this machine.
        grace_s: how long a container may drain.
        random: its weights are random: it is not the model it is named after.
    """

    pid: int
    started: int
    name: str
    host: str
    port: int
    log: str = ""
    container: str = ""
    program: str = ""
    grace_s: int = 0
    random: bool = False

    @classmethod
    def of_this_process(cls, name: str, host: str, port: int, *, log: str = "", random: bool = False) -> "ServerRecord":
        """The record of the process that calls; ``log`` is the file its records go to, where it has one."""
        log = log or os.environ.get("TOKENSPEED_LOG", "")
        return cls(os.getpid(), start_time(os.getpid()) or 0, name, host, port, log, random=random)

    @property
    def url(self) -> str:
        """Where a client on this machine reaches it."""
        host = _EVERY_ADDRESS.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether that very process, or the container, still runs."""
        if self.container and not self.pid:
            from tokenspeed.cli.containers import container_runs

            return container_runs(self.program, self.container)
        return start_time(self.pid) == self.started

    @property
    def where(self) -> str:
        """The process or container, for a person."""
        return f"container {self.container} ({self.program})" if self.container else f"pid {self.pid}"


def record_path(port: int) -> Path:
    """The file of the server on ``port``."""
    return cache_directory() / "run" / f"{port}.json"


def write_record(record: ServerRecord) -> None:
    """Puts the record on disk, whole or not at all; where that cannot be, says what will not find the server."""
    path = record_path(record.port)
    draft = path.with_suffix(f".{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(asdict(record)))
        draft.replace(path)
    except OSError as error:
        say(f"note: {path} cannot be written ({error}); stop, status and logs will not find this server")


def remove_record(record: ServerRecord) -> None:
    """Takes the record off the disk, unless another server has taken the port over meanwhile."""
    if _read(record_path(record.port)) == record:
        record_path(record.port).unlink(missing_ok=True)


def running_servers() -> list[ServerRecord]:
    """The live servers, by port; records of dead ones are removed."""
    found = []
    for path in (cache_directory() / "run").glob("*.json"):
        record = _read(path)
        if record is None:
            continue
        if record.alive:
            found.append(record)
        else:
            remove_record(record)
    return sorted(found, key=lambda record: record.port)


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


def _read(path: Path) -> ServerRecord | None:
    try:
        return ServerRecord(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def start_time(pid: int) -> int | None:
    """The process's start in clock ticks after boot; None where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the command in brackets and may hold anything, so count from its end.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])
