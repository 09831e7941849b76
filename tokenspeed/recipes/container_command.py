"""The command line that runs a container, for docker and podman."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tokenspeed.recipes.container import DEFAULT_PORT, INHERITED, USER, ContainerSpec

_STACK_BYTES = 64 << 20
_EVERY_ADDRESS = ("0.0.0.0", "::")


class ContainerError(RuntimeError):
    """A container that cannot be run as described; the message has the line that mends it."""


@dataclass(frozen=True, kw_only=True)
class ContainerEngine:
    """A program that runs containers.

    Attributes:
        program: "docker" or "podman".
        version: as it tells it.
        rootless: whether it runs without root, so that ids inside are other ids outside.
        uid: of the operator, 0 for root.
    """

    program: Literal["docker", "podman"]
    version: str = ""
    rootless: bool = False
    uid: int = 0


def run_command(
    spec: ContainerSpec, engine: ContainerEngine, environment: Mapping[str, str], *, detach: bool = False
) -> list[str]:
    """Returns the arguments that run ``spec``; ``environment`` is the caller's. Raises ContainerError."""
    # In the background it is kept after its end, for its log and its exit code.
    command = [engine.program, "run", "--name", spec.name, "--detach" if detach else "--rm", "--init"]
    command += ["--read-only", "--tmpfs", "/tmp:rw,exec,nosuid,nodev,mode=1777"]
    command += ["--cap-drop", "all", "--security-opt", "no-new-privileges"]
    command += _identity(engine)
    command += _devices(spec, engine)
    command += ["--shm-size", str(spec.shm_bytes)]
    if spec.memlock:
        command += ["--ulimit", "memlock=-1:-1", "--ulimit", f"stack={_STACK_BYTES}"]
    for volume in spec.volumes:
        command += ["--volume", f"{volume.source}:{volume.target}{':ro' if volume.read_only else ''}"]
    for secret in spec.secrets:
        command += ["--volume", f"{secret.file}:{secret.target}:ro"]
    for name, value in spec.environment.items():
        command += ["--env", f"{name}={value}"]
    command += [part for name in INHERITED if environment.get(name) for part in ("--env", name)]
    command += ["--publish", f"{_published(spec.host)}{spec.port}:{spec.port}"]
    if spec.port != DEFAULT_PORT:  # the image's own health check asks the default port
        ask = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{spec.port}/live', timeout=2)"
        command += ["--health-cmd", f'python -c "{ask}"']
    command += ["--stop-timeout", str(spec.grace_s)]
    return [*command, spec.image, *spec.arguments]


def shell_lines(command: list[str], image: str) -> list[str]:
    """The command as it is typed: an option a line, and the image with its arguments on the last."""
    options, arguments = command[: command.index(image)], command[command.index(image) :]
    lines: list[list[str]] = [[]]
    for part in options:
        if part.startswith("--") and len(lines[-1]) > 1:
            lines.append([])
        lines[-1].append(part)
    return (" \\\n  ".join(shlex.join(line) for line in [*lines, arguments])).splitlines()


def _identity(engine: ContainerEngine) -> list[str]:
    """Who it is inside: the operator where that is possible, so that the operator's files can be read."""
    if engine.program == "podman" and engine.rootless:
        return ["--userns", "keep-id:uid=10001,gid=0", "--user", USER]
    if engine.rootless or engine.uid == 0:
        return ["--user", USER]
    return ["--user", f"{engine.uid}:0"]


def _devices(spec: ContainerSpec, engine: ContainerEngine) -> list[str]:
    options = [part for device in (*spec.cdi_devices, *spec.devices) for part in ("--device", device)]
    if spec.gpus:
        if engine.program == "podman":
            raise ContainerError(
                "podman hands NVIDIA devices over by CDI, and there is no specification in /etc/cdi or /var/run/cdi; "
                "write it: nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
            )
        options += ["--gpus", spec.gpus]
    if spec.groups and engine.program == "podman" and engine.rootless:
        return [*options, "--group-add", "keep-groups"]
    return [*options, *(part for group in spec.groups for part in ("--group-add", group))]


def _published(host: str) -> str:
    if host in _EVERY_ADDRESS:
        return ""
    return f"[{host}]:" if ":" in host else f"{host}:"
