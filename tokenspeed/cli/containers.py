"""Container engines on this machine, by their command lines: docker and podman. Every question is bounded in time."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import Literal

from tokenspeed.recipes.container_command import ContainerEngine

ASK_S = 5.0
_REGISTRY_S = 15.0
_STOP_MARGIN_S = 30.0

IMAGE_LABEL = "tokenspeed.vendor"
"""Every image of this project has it."""

_PUBLISHED = re.compile(r"(?P<host>[\d.]*):(?P<port>\d+)->")
"""An address and port of the host in what the programs tell of ports."""

Program = Literal["docker", "podman"]
PROGRAMS: tuple[Program, ...] = ("docker", "podman")


@dataclass(frozen=True)
class EngineState:
    """What became of one program: ``engine`` where it can run containers, else ``reason`` why not."""

    program: Program
    engine: ContainerEngine | None = None
    reason: str = ""


def engine_state(program: Program) -> EngineState:
    """Asks a program for its version, and whether it works without root."""
    if shutil.which(program) is None:
        return EngineState(program, reason="not installed")
    template = "{{json .}}"
    try:
        told = subprocess.run(
            [program, "info", "--format", template], capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except subprocess.TimeoutExpired:
        return EngineState(program, reason=f"it did not answer within {ASK_S:.0f} s")
    except OSError as error:
        return EngineState(program, reason=str(error))
    try:
        facts = json.loads(told.stdout)
    except ValueError:
        facts = {}
    engine = _engine(program, facts)
    if told.returncode != 0 or engine is None:
        return EngineState(program, reason=_daemon_reason(program, facts, told.stderr))
    return EngineState(program, engine)


def _engine(program: Program, facts: dict[str, object]) -> ContainerEngine | None:
    """docker tells the daemon's facts flat, podman (also under docker's name) in sections."""
    host, version = facts.get("host"), facts.get("version")
    if isinstance(host, dict):
        security = host.get("security")
        rootless = bool(isinstance(security, dict) and security.get("rootless"))
        number = version.get("Version", "") if isinstance(version, dict) else ""
        return ContainerEngine(program="podman", version=str(number), rootless=rootless, uid=os.getuid())
    number = facts.get("ServerVersion")
    if not isinstance(number, str) or not number:
        return None
    options = facts.get("SecurityOptions")
    rootless = isinstance(options, list) and any("name=rootless" in str(option) for option in options)
    return ContainerEngine(program=program, version=number, rootless=rootless, uid=os.getuid())


def _daemon_reason(program: Program, facts: dict[str, object], errors: str) -> str:
    told = facts.get("ServerErrors")
    lines = [str(line) for line in told] if isinstance(told, list) else errors.strip().splitlines()
    return f"{program} is installed but does not work: {lines[-1] if lines else 'it says nothing'}"


def has_image(engine: ContainerEngine, image: str) -> bool:
    """Whether an image is on this machine."""
    return _succeeds(ASK_S, engine.program, "image", "inspect", image)


def image_labels(engine: ContainerEngine, image: str) -> dict[str, str]:
    """The labels of an image that is here; empty where it has none or cannot be read."""
    told = _output(engine.program, "image", "inspect", "--format", "{{json .Config.Labels}}", image)
    try:
        labels = json.loads(told)
    except ValueError:
        return {}
    return {str(name): str(value) for name, value in labels.items()} if isinstance(labels, dict) else {}


def can_pull(engine: ContainerEngine, image: str) -> bool:
    """Whether a registry has the image; asks it, and gives up after a while."""
    return _succeeds(_REGISTRY_S, engine.program, "manifest", "inspect", image)


def container_runs(program: str, name: str) -> bool:
    """Whether a container of this name runs."""
    return _output(program, "container", "inspect", "--format", "{{.State.Running}}", name).strip() == "true"


@dataclass(frozen=True)
class PublishedContainer:
    """A container of one of this project's images, and where clients of this machine reach its port."""

    name: str
    url: str


def published_containers(program: str) -> list[PublishedContainer]:
    """Those that run and publish a port; none where the program is not here or does not answer."""
    if shutil.which(program) is None:
        return []
    told = _output(program, "ps", "--filter", f"label={IMAGE_LABEL}", "--format", "{{.Names}}\t{{.Ports}}")
    found = []
    for line in told.splitlines():
        name, _, ports = line.partition("\t")
        port = _PUBLISHED.search(ports)
        if name and port is not None:
            found.append(PublishedContainer(name, f"http://{_reached_by(port['host'])}:{port['port']}"))
    return found


def _reached_by(host: str) -> str:
    """The address by which this machine reaches what listens on ``host``."""
    return "127.0.0.1" if host in ("", "0.0.0.0") else host


def exit_code(program: str, name: str) -> int | None:
    """Of a container that ended; None where there is none."""
    told = _output(program, "container", "inspect", "--format", "{{.State.ExitCode}}", name).strip()
    return int(told) if told.isdigit() else None


def remove_ended(program: str, name: str) -> None:
    """Removes a container of this name that has ended: it was kept for its log. One that runs stays."""
    _succeeds(ASK_S, program, "rm", name)


def stop_container(program: str, name: str, grace_s: int) -> bool:
    """Asks a container to end and waits for it: SIGTERM, after the grace SIGKILL; False where it still runs."""
    if not _succeeds(grace_s + _STOP_MARGIN_S, program, "stop", "--time", str(grace_s), name):
        return not container_runs(program, name)
    return True


def _succeeds(timeout_s: float, *command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=timeout_s, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
