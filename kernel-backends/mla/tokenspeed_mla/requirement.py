"""Where these kernels run."""

from dataclasses import dataclass
from importlib.util import find_spec

from tokenspeed_kernel.platform import PlatformInfo
from tokenspeed_kernel.registry import CapabilityRequirement

HOPPER = (9, 0)
BLACKWELLS = ((10, 0), (10, 3))


@dataclass(frozen=True, kw_only=True)
class CompilerRequirement(CapabilityRequirement):
    """An NVIDIA GPU, and nvidia-cutlass-dsl to compile for it.

    Attributes:
        architectures: the only (major, minor) ones it runs on; empty: any within the ends.
    """

    vendors: frozenset[str] = frozenset({"nvidia"})
    architectures: tuple[tuple[int, int], ...] = ()

    def refusal(self, platform: PlatformInfo) -> str | None:
        """Why ``platform`` does not do, or None where it does."""
        reason = super().refusal(platform)
        if reason is None and self.architectures and platform.architecture not in self.architectures:
            known = " or ".join(f"sm_{major}{minor}" for major, minor in self.architectures)
            return f"needs architecture {known}; this is {platform.architecture}"
        if reason is None and find_spec("cutlass") is None:
            return "needs the package nvidia-cutlass-dsl, which is not installed"
        return reason


WHERE_ATTENDED = CompilerRequirement(architectures=(HOPPER, *BLACKWELLS))
"""wgmma exists on sm_90 alone, tcgen05 on these two that the compiler makes code for."""

ON_ANY = CompilerRequirement(minimum_architecture=(8, 0))
