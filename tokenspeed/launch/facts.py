"""What a report of a fault should hold about the place: versions, machine, caches. No torch, and nothing that waits."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from tokenspeed.recipes.cache_folder import cache_directory
from tokenspeed.recipes.catalogue import recipe_directories
from tokenspeed.recipes.machine import detect_machine
from tokenspeed.recipes.resolved import ResolvedConfig
from tokenspeed.telemetry.redaction import Redactor, known_secrets, secret_values

OUR_DISTRIBUTIONS = tuple(
    f"tokenspeed-appliance{suffix}"
    for suffix in ("", "-scheduler", "-kernel", "-kernel-cpu", "-kernel-triton", "-kernel-npu", "-mla", "-tui")
)
THIRD_PARTY = (
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
    "fastapi",
    "uvicorn",
    "pyzmq",
    "msgspec",
    "pydantic",
)

OUR_VARIABLES = (
    "TOKENSPEED_",
    "HF_",
    "OMP_",
    "MKL_",
    "CUDA_",
    "NVIDIA_",
    "ROCR_",
    "HIP_",
    "ASCEND_",
    "NCCL_",
    "HCCL_",
    "TRITON_",
)
"""Beginnings of the environment variables that change what we do."""


def redactor_of(config: ResolvedConfig) -> Redactor:
    """What blanks the secrets of a server: those of its environment, of its configuration, and its API keys."""
    return Redactor(known_secrets(config.api.api_key_file) | secret_values(config.env))


def environment_facts(redact: Redactor) -> dict[str, object]:
    """Returns the facts in the order in which they are shown; secrets are blanked."""
    machine = detect_machine()
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "machine": machine.summary,
        "isa": " ".join(machine.isa) or "none of the features kernels ask for",
        "cache": str(cache_directory()),
        "recipes": ", ".join(map(str, recipe_directories())),
        "variables": redact.values(_variables()),
        **{name: installed(name) or "not installed" for name in (*OUR_DISTRIBUTIONS, *THIRD_PARTY)},
    }


def _variables() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(OUR_VARIABLES)}


def installed(name: str) -> str | None:
    """The version of an installed distribution, else None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
