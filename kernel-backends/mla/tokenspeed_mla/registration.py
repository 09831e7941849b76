"""Registers the kernels: the entry point of the group ``tokenspeed_kernel.plugins``. Imports no compiler."""

from collections.abc import Mapping

from tokenspeed_kernel.ops.merge import MERGE_SIGNATURE
from tokenspeed_kernel.ops.ragged import RAGGED_SIGNATURE
from tokenspeed_kernel.page_sizes import PAGE_SIZE_TRAIT
from tokenspeed_kernel.registry import Band, CapabilityRequirement, KernelFunction, KernelSpec, register_kernel
from tokenspeed_kernel.signature import BFLOAT16, FLOAT8_E4M3, FLOAT32, FormatSignature, TensorFormat
from tokenspeed_kernel.traits import TraitBound, one_of
from tokenspeed_mla import operations
from tokenspeed_mla.addressing import EXPANDED, LATENT, PAGE_SIZES, ROTARY, VALUE
from tokenspeed_mla.requirement import ON_ANY, WHERE_ATTENDED

SOLUTION = "mla_cute"

COMPILED_ONLY = "compiled_only"
"""Tag of a kernel that was compiled for its GPU and has never run on one; what was proved besides says docs/design."""

_READ: dict[str, TraitBound] = {
    "latent_dim": one_of(LATENT),
    "rotary_dim": one_of(ROTARY),
    PAGE_SIZE_TRAIT: one_of(*PAGE_SIZES),
    "activations": one_of("bfloat16"),
}


def _reads(kv: TensorFormat) -> frozenset[FormatSignature]:
    return frozenset({FormatSignature.of(input=FLOAT32, kv=kv)})


def _register(
    mode: str,
    kernel: KernelFunction,
    capability: CapabilityRequirement,
    signatures: frozenset[FormatSignature],
    traits: Mapping[str, TraitBound],
    suffix: str = "",
) -> None:
    spec = KernelSpec(
        name=f"{SOLUTION}_{mode}{suffix}",
        family="attention",
        mode=mode,
        solution=SOLUTION,
        capability=capability,
        signatures=signatures,
        traits=traits,
        band=Band.SPECIALISED,
        tags=frozenset({"deterministic", COMPILED_ONLY}),
    )
    register_kernel(spec)(kernel)


def register() -> None:
    """Registers every kernel of this package."""
    readers: tuple[tuple[str, KernelFunction], ...] = (
        ("mla_decode", operations.decode),
        ("mla_decode_partial", operations.decode_partial),
        ("mla_extend", operations.extend),
    )
    for mode, kernel in readers:
        _register(mode, kernel, WHERE_ATTENDED, _reads(BFLOAT16), _READ)
        _register(mode, kernel, WHERE_ATTENDED, _reads(FLOAT8_E4M3), _READ, "_e4m3")
    expanded: dict[str, TraitBound] = {
        "head_dim": one_of(EXPANDED),
        "value_dim": one_of(VALUE),
        "q_per_kv": one_of(1),
        "causal": one_of(False, True),
        "activations": one_of("bfloat16"),
    }
    _register("ragged", operations.ragged, WHERE_ATTENDED, frozenset({RAGGED_SIGNATURE}), expanded)
    merged = frozenset({MERGE_SIGNATURE})
    _register("merge_partials", operations.merge_partials, ON_ANY, merged, {"head_dim": one_of(LATENT)})
