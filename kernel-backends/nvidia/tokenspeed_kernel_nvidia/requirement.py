"""Where FlashInfer's kernels run, and why they do not elsewhere."""

import os
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tokenspeed_kernel.platform import PlatformInfo
from tokenspeed_kernel.wrapped_library import LibraryRequirement


def has_compiler() -> bool:
    """Whether FlashInfer finds the CUDA compiler, or the package that makes it unnecessary."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    found = shutil.which("nvcc") is not None or (Path(home) / "bin" / "nvcc").is_file()
    return found or find_spec("flashinfer_jit_cache") is not None


@dataclass(frozen=True, kw_only=True)
class FlashInferRequirement(LibraryRequirement):
    """An NVIDIA GPU, a FlashInfer whose signatures tests/kernel_nvidia holds our calls to, and its compiler."""

    vendors: frozenset[str] = frozenset({"nvidia"})
    minimum_architecture: tuple[int, int] | None = (8, 0)
    distribution: str = "flashinfer-python"
    oldest: tuple[int, ...] = (0, 7, 4)
    too_new: tuple[int, ...] = (0, 8)
    drivers: tuple[tuple[int, tuple[int, ...]], ...] = ((12, (525, 60, 13)), (13, (580, 65, 6)))

    def refusal(self, platform: PlatformInfo) -> str | None:
        """Why ``platform`` does not do, or None where it does."""
        reason = super().refusal(platform)
        if reason is None and not has_compiler():
            return "needs nvcc (CUDA_HOME names its toolkit) or the package flashinfer-jit-cache: neither is here"
        return reason


PLANNED = FlashInferRequirement()
"""FlashInfer's own kernels, of the generations FA2 and FA3."""

BY_TABLE = FlashInferRequirement(
    minimum_architecture=(10, 0),
    maximum_architecture=(10, 3),
    modules=(
        ("flashinfer_cubin", "needs the package flashinfer-cubin: without it these kernels are fetched while serving"),
    ),
)
"""Kernels of TensorRT-LLM, which come as machine code for sm_100 and sm_103."""
