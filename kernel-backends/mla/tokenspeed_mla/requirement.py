"""Where these kernels run."""

from dataclasses import dataclass
from importlib.util import find_spec

from tokenspeed_kernel.platform import PlatformInfo
from tokenspeed_kernel.registry import CapabilityRequirement

HOPPER = (9, 0)


@dataclass(frozen=True, kw_only=True)
class CompilerRequirement(CapabilityRequirement):
    """An NVIDIA GPU, and nvidia-cutlass-dsl to compile for it."""

    vendors: frozenset[str] = frozenset({"nvidia"})

    def refusal(self, platform: PlatformInfo) -> str | None:
        """Why ``platform`` does not do, or None where it does."""
        reason = super().refusal(platform)
        if reason is None and find_spec("cutlass") is None:
            return "needs the package nvidia-cutlass-dsl, which is not installed"
        return reason


ON_HOPPER = CompilerRequirement(minimum_architecture=HOPPER, maximum_architecture=HOPPER)
"""wgmma exists on sm_90 alone."""

ON_ANY = CompilerRequirement(minimum_architecture=(8, 0))
