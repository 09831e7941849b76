"""What a file for compose or Kubernetes says beyond the container itself, and the sentences at its top."""

import math
import re
import shlex
from dataclasses import dataclass, field

from tokenspeed.recipes.container import USER, ContainerSpec
from tokenspeed.recipes.resolved import GIB

TEMPORARY_BYTES = GIB
"""Bound of /tmp: the ZeroMQ sockets, and what compilers leave there."""

RECIPES_FOLDER = "/etc/tokenspeed/recipes"
"""Where a recipe that the image does not have is mounted."""

DOWNLOAD_BYTES_PER_S = 100_000_000
READ_BYTES_PER_S = 500_000_000
START_S = 180
"""What a first start is given: a download at 1 Gbit/s, reading from disk, and the rest (compilation, warm-up)."""

UNKNOWN_START_S = 7200
"""Where nobody has told how large the weights are."""

UID, GID = (int(part) for part in USER.split(":"))


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """One model as it is deployed.

    Attributes:
        container: what runs.
        recipe, profile, status: what it was made from; profile "" for a bare path.
        missing: what the profile asks for that the engine does not have.
        command: the line that writes the file again.
        recipe_folder, recipe_files: where the recipe lies, and its files by name with their text, where the image does
            not have it; else empty.
        devices: accelerators of one node.
        architectures: of those devices, any of which will do.
        nodes: machines that share the model.
        weight_bytes: 0 unknown.
        memory_bytes: host memory of one node's process.
        monitoring: whether Prometheus and Grafana are to watch it.
    """

    container: ContainerSpec
    recipe: str
    profile: str
    status: str
    command: tuple[str, ...]
    missing: tuple[str, ...] = ()
    recipe_folder: str = ""
    recipe_files: dict[str, str] = field(default_factory=dict)
    devices: int = 0
    architectures: tuple[str, ...] = ()
    nodes: int = 1
    weight_bytes: int = 0
    memory_bytes: int = 0
    monitoring: bool = False

    @property
    def name(self) -> str:
        """A name that host names may have: lower case, digits and dashes."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.recipe.lower()).strip("-")
        return f"{slug}-smoke" if self.profile == "smoke" else slug or "tokenspeed"

    @property
    def start_s(self) -> int:
        """How long a first start may take before something is wrong with it, in seconds."""
        if not self.weight_bytes and self.profile != "smoke":
            return UNKNOWN_START_S
        taken = START_S + self.weight_bytes / DOWNLOAD_BYTES_PER_S + self.weight_bytes / READ_BYTES_PER_S
        return math.ceil(taken / 30) * 30

    @property
    def cache_bytes(self) -> int:
        """Disk for weights, compile caches and a second revision's difference: whole tens of GiB."""
        return math.ceil((self.weight_bytes * 1.2 + 10 * GIB) / (10 * GIB)) * 10 * GIB

    @property
    def secret(self) -> str:
        """Name of the Kubernetes secret that holds what the container reads as files."""
        return f"{self.name}-secrets"

    def environment(self) -> dict[str, str]:
        """The container's, and where to look for a recipe that the image does not have."""
        own = {"TOKENSPEED_RECIPES": RECIPES_FOLDER} if self.recipe_folder else {}
        return {**self.container.environment, **own}


def header(deployment: Deployment, how: str) -> str:
    """The top of a file: what it is, how it was made, and what to change. No comment signs."""
    profile = f", profile {deployment.profile} ({deployment.status})" if deployment.profile else ""
    lines = [
        f"{deployment.recipe}{profile} on {deployment.container.vendor}.",
        f"Written by: {shlex.join(deployment.command)}",
    ]
    if deployment.missing:
        lines += ["", "UNSUPPORTED: this version's engine refuses to start it. It asks for"]
        lines += [f"  {feature}" for feature in deployment.missing]
        lines += ["so the file shows what the deployment will look like."]
    return "\n".join([*lines, "", how])


def size_text(count: int) -> str:
    """Bytes as Kubernetes writes them: the largest binary unit that loses nothing."""
    for power, unit in ((4, "Ti"), (3, "Gi"), (2, "Mi"), (1, "Ki")):
        if count and count % 1024**power == 0:
            return f"{count // 1024**power}{unit}"
    return str(count)


def minutes_text(seconds: int) -> str:
    """Seconds for a person."""
    return f"{seconds} s" if seconds < 300 else f"{round(seconds / 60)} minutes"
