"""Where these kernels run."""

from dataclasses import dataclass

from tokenspeed_kernel.platform import PlatformInfo
from tokenspeed_kernel.registry import CapabilityRequirement
from tokenspeed_kernel_npu.operators import lacking


@dataclass(frozen=True, kw_only=True)
class NpuRequirement(CapabilityRequirement):
    """An Ascend NPU, and a torch_npu that has what the kernel calls.

    Attributes:
        operators: names of torch_npu's operators.
    """

    vendors: frozenset[str] = frozenset({"npu"})
    operators: frozenset[str] = frozenset()

    def refusal(self, platform: PlatformInfo) -> str | None:
        """Why ``platform`` does not do, or None where it does. torch_npu is imported on an NPU only."""
        return super().refusal(platform) or lacking(self.operators)
