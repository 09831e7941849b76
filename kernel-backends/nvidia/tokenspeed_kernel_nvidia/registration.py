"""Registers the kernels: the entry point of the group ``tokenspeed_kernel.plugins``. Imports no library."""

from collections.abc import Callable, Mapping
from typing import Any

from tokenspeed_kernel.page_sizes import PAGE_SIZE_TRAIT
from tokenspeed_kernel.recording import PLANS_ON_HOST
from tokenspeed_kernel.registry import Band, CapabilityRequirement, KernelFunction, KernelSpec, register_kernel
from tokenspeed_kernel.signature import BFLOAT16, FLOAT32, FormatSignature
from tokenspeed_kernel.traits import MultipleOf, Range, TraitBound, one_of
from tokenspeed_kernel_nvidia import by_table, planned, planned_mla
from tokenspeed_kernel_nvidia.library import PLAN_BYTES, SCRATCH_BYTES
from tokenspeed_kernel_nvidia.requirement import BY_TABLE, PLANNED

SOLUTION = "flashinfer"
TABLE_SOLUTION = "flashinfer_table"
"""The library's kernels that read our page tables; the others are planned for each forward."""

TAGS = frozenset({"compiled_only", "reads_whole_pages"})
"""None of these calls was made on a GPU yet; keys and values that nobody sees are multiplied by 0."""

_ROUNDED = frozenset({FormatSignature.of(input=FLOAT32, kv=BFLOAT16)})
_ANY: dict[str, TraitBound] = {
    "q_per_kv": Range(1),
    "causal": one_of(True),
    "windowed": one_of(False, True),
    "activations": one_of("bfloat16"),
}
_PLANNED: dict[str, TraitBound] = {**_ANY, "head_dim": one_of(64, 128, 256), PAGE_SIZE_TRAIT: MultipleOf(1)}
_BY_TABLE: dict[str, TraitBound] = {
    **_ANY,
    "head_dim": one_of(64, 128, 256),
    PAGE_SIZE_TRAIT: one_of(16, 32, 64),
    "sinks": one_of(False, True),
    "soft_cap": one_of(False),
}
_LATENT: dict[str, TraitBound] = {
    "latent_dim": one_of(512),
    "rotary_dim": one_of(64),
    "activations": one_of("bfloat16"),
}


def _scratch(plans: int) -> Callable[[Mapping[str, Any]], int]:
    return lambda _traits: SCRATCH_BYTES + plans * PLAN_BYTES


def _register(
    mode: str,
    kernel: KernelFunction,
    traits: Mapping[str, TraitBound],
    capability: CapabilityRequirement = PLANNED,
    solution: str = SOLUTION,
    variant: str = "",
) -> None:
    planned = solution == SOLUTION
    spec = KernelSpec(
        name=f"{solution}_attention_{mode}{variant}",
        family="attention",
        mode=mode,
        solution=solution,
        capability=capability,
        signatures=_ROUNDED,
        traits=traits,
        band=Band.SPECIALISED,
        workspace=_scratch(1 if planned else 0),
        tags=TAGS | {PLANS_ON_HOST} if planned else TAGS,
    )
    register_kernel(spec)(kernel)


def register() -> None:
    """Registers every kernel of this package."""
    for mode, kernel in (("decode", planned.decode), ("extend", planned.extend)):
        # The library's variant with sinks has no soft cap.
        _register(mode, kernel, {**_PLANNED, "sinks": one_of(False), "soft_cap": one_of(False, True)})
        _register(mode, kernel, {**_PLANNED, "sinks": one_of(True), "soft_cap": one_of(False)}, variant="_sinks")
    _register("mla_decode", planned_mla.mla_decode, {**_LATENT, PAGE_SIZE_TRAIT: MultipleOf(1)})
    for mode, kernel in (("decode", by_table.decode), ("extend", by_table.extend)):
        _register(mode, kernel, _BY_TABLE, BY_TABLE, TABLE_SOLUTION)
    _register("mla_decode", by_table.mla_decode, {**_LATENT, PAGE_SIZE_TRAIT: one_of(32, 64)}, BY_TABLE, TABLE_SOLUTION)
