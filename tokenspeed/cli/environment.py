"""``env``: what a report of a fault should hold."""

import json
import pkgutil
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from tokenspeed.cli.output import say
from tokenspeed.recipes.catalogue import recipe_directories
from tokenspeed.recipes.machine import detect_machine
from tokenspeed.recipes.weights import cache_directory

OUR_DISTRIBUTIONS = tuple(
    f"tokenspeed-appliance{suffix}" for suffix in ("", "-scheduler", "-kernel", "-kernel-cpu", "-tui")
)
THIRD_PARTY = (
    "torch",
    "numpy",
    "tokenizers",
    "gguf",
    "safetensors",
    "fastapi",
    "uvicorn",
    "pyzmq",
    "msgspec",
    "pydantic",
)


def show_environment(*, as_json: bool) -> int:
    """Prints versions, the machine and the kernels."""
    machine = detect_machine()
    facts: dict[str, object] = {
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "machine": machine.summary,
        "isa": " ".join(machine.isa) or "none of the features kernels ask for",
        "cache": str(cache_directory()),
        "recipes": ", ".join(map(str, recipe_directories())),
        **{name: installed(name) or "not installed" for name in (*OUR_DISTRIBUTIONS, *THIRD_PARTY)},
        "attention backends": _files_of("tokenspeed.device.attention.backends"),
        "sampling backends": _files_of("tokenspeed.device.sampling.backends"),
        **_kernels(),
    }
    if as_json:
        say(json.dumps(facts, indent=2))
    else:
        width = max(map(len, facts))
        say(*(f"{name:<{width}}  {value}" for name, value in facts.items()))
    return 0


def _files_of(package: str) -> str:
    """The modules of a package of which each file is a backend; nothing of it is imported."""
    found = find_spec(package)
    places = found.submodule_search_locations if found is not None else None
    return ", ".join(sorted(module.name for module in pkgutil.iter_modules(places))) if places else "none"


def _kernels() -> dict[str, str]:
    """Per operation the kernels that run on this machine."""
    if installed("torch") is None:
        return {"kernels": "not known without torch"}
    from tokenspeed_kernel.platform import current_platform
    from tokenspeed_kernel.plugins.loading import loaded_registry

    registry, here = loaded_registry(), current_platform()
    return {
        operation.name: ", ".join(
            kernel.spec.name
            for kernel in registry.kernels(operation.family, operation.mode)
            if kernel.spec.capability.refusal(here) is None
        )
        for operation in registry.operations()
    }


def installed(name: str) -> str | None:
    """The version of an installed distribution, else None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
