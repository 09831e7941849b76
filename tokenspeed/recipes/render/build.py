"""From a resolution to a deployment: what a file needs to know, in figures."""

from dataclasses import replace
from pathlib import Path

from tokenspeed.recipes.catalogue import configs_directory
from tokenspeed.recipes.container import container_spec, vendor_of
from tokenspeed.recipes.document import RecipeError, read_document
from tokenspeed.recipes.machine import Machine
from tokenspeed.recipes.plan import Plan
from tokenspeed.recipes.render.deployment import Deployment
from tokenspeed.recipes.resolve import Resolution
from tokenspeed.recipes.resolved import GIB
from tokenspeed.recipes.schema import HuggingFaceWeights

NO_TOKEN = "/dev/null"
"""Stands for the file of the token where none is named: an empty one, which is as good as no token."""

_DEVICE_HOST_BYTES = 16 * GIB
_DEVICE_HOST_BYTES_EACH = 8 * GIB
"""Host memory of a process that computes on devices: a start, and so the file says."""


def deployment_of(
    resolution: Resolution, machine: Machine, plan: Plan, command: tuple[str, ...], *, monitoring: bool
) -> Deployment:
    """Builds the deployment; raises RecipeError where the configuration suits one machine at hand only."""
    keys, parallel = resolution.keys, resolution.keys.parallel
    if keys.api.port == 0:
        raise RecipeError("api.port is 0, which takes a free port at each start; a file needs a number: --port 8000")
    gated = isinstance(resolution.weights, HuggingFaceWeights)
    spec = container_spec(resolution, machine, portable=True, token_file=NO_TOKEN if gated else "")
    vendor = vendor_of(resolution)
    ranks = parallel.tp * parallel.dp * parallel.pp
    if ranks % parallel.nodes:
        raise RecipeError(f"{ranks} ranks (tp x dp x pp) cannot be shared equally by {parallel.nodes} nodes")
    folder = _own_folder(resolution)
    return Deployment(
        container=replace(spec, name=resolution.name),
        recipe=resolution.name,
        profile=resolution.profile,
        status=resolution.status,
        command=command,
        missing=tuple(resolution.missing),
        recipe_folder=str(folder) if folder else "",
        recipe_files={path.name: path.read_text() for path in _recipe_files(resolution)} if folder else {},
        devices=0 if vendor == "cpu" else ranks // parallel.nodes,
        architectures=_architectures(resolution, machine),
        nodes=parallel.nodes,
        weight_bytes=plan.facts.weight_bytes,
        memory_bytes=_memory_bytes(resolution, plan, ranks // parallel.nodes),
        monitoring=monitoring,
    )


def _own_folder(resolution: Resolution) -> Path | None:
    """The recipe's folder where the recipe is the operator's own; None for one that every image has."""
    if resolution.loaded is None:
        return None
    folder = resolution.loaded.path.absolute().parent
    return None if folder == (configs_directory() / "recipes").absolute() else folder


def _recipe_files(resolution: Resolution) -> list[Path]:
    """The recipe's file, and the one beside it that it extends."""
    assert resolution.loaded is not None
    path = resolution.loaded.path
    base = read_document(path).data.get("extends")
    beside = path.parent / f"{base}.yaml"
    return [path, beside] if base and beside.is_file() else [path]


def _architectures(resolution: Resolution, machine: Machine) -> tuple[str, ...]:
    """Of the machine's devices, else those that the profile was made for."""
    vendor = vendor_of(resolution)
    found = tuple(kind.arch for kind in machine.accelerators if kind.vendor == vendor and kind.arch)
    if found or resolution.loaded is None:
        return found
    return tuple(resolution.loaded.recipe.profiles[resolution.profile].when.arch)


def _memory_bytes(resolution: Resolution, plan: Plan, ranks: int) -> int:
    """Host memory of one node's processes, in whole GiB."""
    keys = resolution.keys
    if vendor_of(resolution) != "cpu":
        return _DEVICE_HOST_BYTES + ranks * _DEVICE_HOST_BYTES_EACH + _whole_gib(keys.kv.host_bytes)
    needed = plan.fixed_bytes + plan.pool_bytes
    if not keys.kv.bytes:
        # A cache that sizes itself takes a quarter of what the limit leaves beside the weights.
        needed = max(needed, plan.facts.weight_bytes + keys.kv.host_bytes + 4 * plan.pool_bytes)
    return _whole_gib(needed)


def _whole_gib(count: int) -> int:
    return -(-count // GIB) * GIB
