"""Brings AITER in at the first use of a kernel."""

from functools import cache
from importlib import import_module
from typing import Any

import torch

from tokenspeed_kernel.serving_guard import note_compilation


@cache
def library_module(module: str) -> Any:
    """A module of the library, such as "mla". Raises ImportError where it is missing or broken."""
    return import_module(f"aiter.{module}")


@cache
def note_variant(name: str, *facts: Any) -> None:
    """A kernel is called for the first time with these facts, for which the library may compile. None may be while
    serving, so the guard counts it."""
    note_compilation(f"aiter {name} ({', '.join(map(str, facts))})")


@cache
def architecture_of(device: torch.device) -> str:
    """Such as "gfx950"."""
    return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
