"""Where these kernels run: one requirement for both GPU vendors."""

import os
from dataclasses import dataclass
from importlib.util import find_spec

from tokenspeed_kernel.platform import PlatformInfo
from tokenspeed_kernel.registry import CapabilityRequirement

OLDEST_NVIDIA = (8, 0)
AMD_ARCHITECTURES = frozenset({"gfx942", "gfx950"})


def interpreted() -> bool:
    """Whether Triton runs kernels by its interpreter, on CPU tensors: TRITON_INTERPRET=1, for checks without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True, kw_only=True)
class TritonRequirement(CapabilityRequirement):
    """An NVIDIA GPU from sm_80 on or an AMD gfx942 or gfx950, and Triton; under the interpreter a CPU does."""

    vendors: frozenset[str] = frozenset({"amd", "nvidia"})

    def refusal(self, platform: PlatformInfo) -> str | None:
        """Why ``platform`` does not do, or None where it does."""
        reason = self._platform_refusal(platform)
        if reason is None and find_spec("triton") is None:
            return "needs the package triton, which is not installed"
        return reason

    def _platform_refusal(self, platform: PlatformInfo) -> str | None:
        if platform.vendor == "cpu" and interpreted():
            return None
        reason = super().refusal(platform)
        if reason is not None:
            return reason
        if platform.vendor == "amd" and platform.isa not in AMD_ARCHITECTURES:
            return f"runs on {' and '.join(sorted(AMD_ARCHITECTURES))}; this is {platform.isa}"
        if platform.vendor == "nvidia" and (platform.architecture is None or platform.architecture < OLDEST_NVIDIA):
            return f"needs architecture from {OLDEST_NVIDIA}; this is {platform.architecture}"
        return None
