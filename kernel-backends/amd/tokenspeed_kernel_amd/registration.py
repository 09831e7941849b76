"""Registers the kernels: the entry point of the group ``tokenspeed_kernel.plugins``. Imports no library."""

from collections.abc import Mapping

from tokenspeed_kernel.ops.gemm import linear_signature
from tokenspeed_kernel.ops.moe import experts_signature
from tokenspeed_kernel.ops.norm import NORM_SIGNATURE
from tokenspeed_kernel.page_sizes import PAGE_SIZE_TRAIT
from tokenspeed_kernel.recording import PLANS_ON_HOST
from tokenspeed_kernel.registry import Band, KernelFunction, KernelSpec, register_kernel
from tokenspeed_kernel.signature import BFLOAT16, FLOAT32, WEIGHT_FORMATS, FormatSignature
from tokenspeed_kernel.traits import MultipleOf, Range, TraitBound, one_of
from tokenspeed_kernel_amd import attention, latent, linear, moe, rows
from tokenspeed_kernel_amd.requirement import ON_AITER

SOLUTION = "aiter"

UNRUN = "compiled_only"
"""Tag of all of them: none of these calls was made on a GPU yet."""

WHOLE_PAGES = "reads_whole_pages"
"""Tag of those that multiply keys and values that nobody sees by 0."""

_ROUNDED_CACHE = frozenset({FormatSignature.of(input=FLOAT32, kv=BFLOAT16)})
_ROUNDED: dict[str, TraitBound] = {"activations": one_of("bfloat16")}
_READ: dict[str, TraitBound] = {
    **_ROUNDED,
    "head_dim": Range(16, 256),
    "q_per_kv": Range(1),
    PAGE_SIZE_TRAIT: one_of(16, 32, 64, 128),
    "causal": one_of(True),
    "windowed": one_of(False, True),
    "sinks": one_of(False, True),
    "soft_cap": one_of(False, True),
}
_LATENT: dict[str, TraitBound] = {
    **_ROUNDED,
    "latent_dim": one_of(512),
    "rotary_dim": one_of(64),
    PAGE_SIZE_TRAIT: MultipleOf(1),
}
_PRODUCT: dict[str, TraitBound] = {**_ROUNDED, "n": Range(1), "k": MultipleOf(128)}
_MIXTURE: dict[str, TraitBound] = {
    **_ROUNDED,
    "hidden": MultipleOf(moe.COLUMNS),
    "intermediate": MultipleOf(moe.COLUMNS),
    "activation": one_of("silu"),
    "biased": one_of(False),
}


def _register(
    operation: str,
    kernel: KernelFunction,
    signatures: frozenset[FormatSignature],
    traits: Mapping[str, TraitBound],
    *tags: str,
) -> None:
    family, mode = operation.split(".")
    spec = KernelSpec(
        name=f"{SOLUTION}_{family}_{mode}",
        family=family,
        mode=mode,
        solution=SOLUTION,
        capability=ON_AITER,
        signatures=signatures,
        traits=traits,
        band=Band.SPECIALISED,
        tags=frozenset({UNRUN, *tags}),
    )
    register_kernel(spec)(kernel)


def register() -> None:
    """Registers every kernel of this package."""
    _register("attention.decode", attention.decode, _ROUNDED_CACHE, _READ, WHOLE_PAGES)
    _register("attention.extend", attention.extend, _ROUNDED_CACHE, _READ, WHOLE_PAGES)
    _register("attention.mla_decode", latent.mla_decode, _ROUNDED_CACHE, _LATENT, PLANS_ON_HOST)
    norms = frozenset({NORM_SIGNATURE})
    _register("norm.rms", rows.rms, norms, {})
    _register("norm.fused_add_rms", rows.fused_add_rms, norms, {})
    eight = frozenset({linear_signature(WEIGHT_FORMATS["fp8_blocks"])})
    _register("gemm.linear", linear.make_linear, eight, _PRODUCT)
    _register("moe.experts", moe.make_experts, frozenset({experts_signature(BFLOAT16, BFLOAT16)}), _MIXTURE)
