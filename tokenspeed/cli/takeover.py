"""A running server's place for another model: ``run NAME --replace``. No stream is dropped, no connection refused."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tokenspeed.cli.output import say
from tokenspeed.cli.records import ServerError, ServerRecord, find_server, running_servers, write_record
from tokenspeed.cli.servers import end_process
from tokenspeed.recipes.machine import Machine

if TYPE_CHECKING:  # the launch room loads what a dry run does not need
    from tokenspeed.launch.handover import Place

ReplaceMode = Literal["", "ready", "after"]
"""When the old server retires: as soon as the new one is ready (memory for both), or before the new one loads."""


def server_to_replace(mode: ReplaceMode, port: int | None) -> ServerRecord | None:
    """The server whose place is taken; None where nothing is replaced. Raises ServerError."""
    if not mode:
        return None
    if not [record for record in running_servers() if port in (None, record.port)]:
        say("note: no server of yours runs there, so there is nothing to replace")
        return None
    record = find_server(port)
    if record.container:
        raise ServerError(
            f"{record.name} runs in a container, whose port cannot be shared: tokenspeed stop --port {record.port}, "
            "then run again"
        )
    return record


def machine_without(record: ServerRecord, machine: Machine) -> Machine:
    """The machine once that server has ended: its memory counts as free."""
    freed = sum(_proportional_bytes(pid) for pid in _family_of(record.pid))
    return replace(machine, free_bytes=min(machine.memory_bytes, machine.free_bytes + freed))


def take_place(record: ServerRecord, successor: ServerRecord, mode: ReplaceMode) -> "Place":
    """Gets the listening socket of ``record``'s server; "after" retires it at once and waits for its end.

    The successor is on record from that moment on, and not before: until then the port is the other's. Raises
    ServerError.
    """
    from tokenspeed.launch.handover import HandoverError, Place, receive_listener

    try:
        listener = receive_listener(record.pid)
    except HandoverError as error:
        raise ServerError(f"{error}; stop it (tokenspeed stop --port {record.port}) and run again") from error
    if mode == "after":
        say(f"retiring {record.name} ({record.where}); its streams may finish, new requests wait")
        end_process(record)
        write_record(successor)
        return Place(listener, retire=lambda: None)

    def retire() -> None:
        say(f"retiring {record.name} ({record.where}); its streams may finish")
        write_record(successor)
        if record.alive:
            os.kill(record.pid, signal.SIGTERM)

    return Place(listener, retire)


def _family_of(pid: int) -> list[int]:
    """The process and all its descendants."""
    found = [pid]
    for parent in found:
        try:
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        except OSError:
            continue
        found.extend(int(child) for child in children)
    return found


def _proportional_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
