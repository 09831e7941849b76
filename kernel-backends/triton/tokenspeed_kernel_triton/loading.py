"""Brings the device's code in, and Triton with it, at the first use of a kernel."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch

from tokenspeed_kernel.serving_guard import note_compilation
from tokenspeed_kernel_triton.compiler_options import compiler_options
from tokenspeed_kernel_triton.device import architecture_of
from tokenspeed_kernel_triton.requirement import interpreted


def _note(*, fn: Any, **_details: Any) -> None:
    note_compilation(f"triton {getattr(fn, 'name', fn)}")


@cache
def _prepare() -> None:
    """Corrects the interpreter, or has every compilation counted, which none may be while serving."""
    if interpreted():
        from tokenspeed_kernel_triton.interpreter import mend

        mend()
    else:
        from triton import knobs

        knobs.runtime.jit_post_compile_hook = _note


def power_of_two(size: int, least: int = 1) -> int:
    """The smallest power of two from ``least`` on that holds ``size``: what a block of a kernel may have."""
    return max(least, 1 << max(0, size - 1).bit_length())


@cache
def device_code(module: str) -> Any:
    """The module of ``kernels`` with this name. Raises ImportError where Triton is missing."""
    _prepare()
    return import_module(f"tokenspeed_kernel_triton.kernels.{module}")


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel, or what to compile for it (ahead.py).

    Attributes:
        module, function: of the device's code, in ``kernels``.
        grid: blocks along each axis.
        arguments: of the kernel, up to its constants.
        constants: what it is compiled for.
        warps, stages: of a block, and of its loops' pipelines.
    """

    module: str
    function: str
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 1

    def run(self) -> None:
        """Puts it on the device's present stream."""
        kernel = getattr(device_code(self.module), self.function)
        options = {"num_warps": self.warps, "num_stages": self.stages, **self._present_options()}
        kernel[self.grid](*self.arguments, **self.constants, **options)

    def options(self, architecture: str) -> dict[str, int]:
        """What the compiler of an architecture is told for it beside warps and stages."""
        byte_cache = self.function == "attend" and self.arguments[2].dtype is torch.uint8
        return compiler_options(architecture, self.function, self.constants, byte_cache)

    def _present_options(self) -> dict[str, int]:
        if interpreted():
            return {}
        tensor = next(argument for argument in self.arguments if isinstance(argument, torch.Tensor))
        return self.options(architecture_of(tensor.device))
