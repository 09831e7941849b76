"""Which solutions can do several operations together, as one part of an engine needs them."""

from collections.abc import Sequence

from tokenspeed_kernel.platform import PlatformInfo
from tokenspeed_kernel.registry import KernelRegistry


def solutions_of(registry: KernelRegistry, operations: Sequence[str], platform: PlatformInfo) -> dict[str, str | None]:
    """The solutions with a kernel for each of ``operations`` ("family.mode"), by name: why one does not run on
    ``platform``, or None where it does."""
    each = []
    for operation in operations:
        reasons: dict[str, str | None] = {}
        for kernel in registry.kernels(*operation.split(".")):
            reason = kernel.spec.capability.refusal(platform)
            solution = kernel.spec.solution
            reasons[solution] = reason if reasons.get(solution, reason) is not None else None
        each.append(reasons)
    shared = set.intersection(*map(set, each)) if each else set()
    return {
        solution: next((reasons[solution] for reasons in each if reasons[solution] is not None), None)
        for solution in sorted(shared)
    }
