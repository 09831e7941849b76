"""Registers the kernels: the entry point of the group ``tokenspeed_kernel.plugins``. Imports no torch_npu."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tokenspeed_kernel.ops.activation import ACTIVATION_SIGNATURE, GATED_ACTIVATIONS
from tokenspeed_kernel.ops.gemm import linear_signature
from tokenspeed_kernel.ops.mla_expanded import expanded_signature
from tokenspeed_kernel.ops.moe import ROUTE_SIGNATURE, experts_signature
from tokenspeed_kernel.ops.norm import NORM_SIGNATURE
from tokenspeed_kernel.ops.rotary import ROTARY_SIGNATURE
from tokenspeed_kernel.page_sizes import PAGE_SIZE_TRAIT
from tokenspeed_kernel.registry import Band, KernelFunction, KernelSpec, register_kernel
from tokenspeed_kernel.signature import BFLOAT16, FLOAT16, FLOAT32, FormatSignature
from tokenspeed_kernel.traits import MultipleOf, Range, TraitBound, one_of
from tokenspeed_kernel_npu import attention, elementwise, latent, linear, moe, prologue
from tokenspeed_kernel_npu.fused import MOST_PER_KV, TND_HEAD_DIM
from tokenspeed_kernel_npu.pages import copied_bytes
from tokenspeed_kernel_npu.requirement import NpuRequirement

SOLUTION = "npu"

NEVER_RUN = "compiled_only"
"""Tag, shared with the GPUs' kernels, of one that has never run on its hardware."""

_FUSED = ("npu_fused_infer_attention_score_v2",)
_ROTARY_MOST = 894  # elements of a head that npu_rotary_mul turns

_WRITTEN = frozenset(FormatSignature.of(input=FLOAT32, kv=kv) for kv in (FLOAT32, BFLOAT16, FLOAT16))
_READ = frozenset({FormatSignature.of(input=FLOAT32, kv=BFLOAT16)})
_ROUNDED: dict[str, TraitBound] = {"activations": one_of("bfloat16")}

_READ_TRAITS: dict[str, TraitBound] = {
    **_ROUNDED,
    "head_dim": MultipleOf(16, 512),
    "q_per_kv": Range(1, MOST_PER_KV),
    PAGE_SIZE_TRAIT: MultipleOf(16, 512),
    "causal": one_of(True),
    "windowed": one_of(False, True),
    "sinks": one_of(False, True),
}
_PROLOGUE_TRAITS: dict[str, TraitBound] = {
    "head_dim": MultipleOf(2, _ROTARY_MOST),
    "q_per_kv": Range(1),
    "qk_norm": one_of(False, True),
    "partial_rotary": one_of(False, True),
}
_LATENT_TRAITS: dict[str, TraitBound] = {
    **_ROUNDED,
    "latent_dim": one_of(latent.LATENT),
    "rotary_dim": one_of(latent.ROTARY),
    PAGE_SIZE_TRAIT: MultipleOf(1),
}
_EXPANDED_TRAITS: dict[str, TraitBound] = {
    **_LATENT_TRAITS,
    "plain_dim": one_of(TND_HEAD_DIM),
    "value_dim": one_of(TND_HEAD_DIM),
}


def _register(
    operation: str,
    kernel: KernelFunction,
    operators: Iterable[str],
    signatures: Iterable[FormatSignature],
    traits: Mapping[str, TraitBound] | None = None,
    *,
    form: str = "",
    workspace: Callable[[Mapping[str, Any]], int] | None = None,
) -> None:
    """``form``: what the name has behind it where an operation has several kernels."""
    family, mode = operation.split(".")
    spec = KernelSpec(
        name=f"npu_{family}_{mode}{form}",
        family=family,
        mode=mode,
        solution=SOLUTION,
        capability=NpuRequirement(operators=frozenset(operators)),
        signatures=frozenset(signatures),
        traits=traits or {},
        band=Band.PERFORMANT,
        workspace=workspace,
        tags=frozenset({NEVER_RUN}),  # no "deterministic": how the operators add up is for a device to show
    )
    register_kernel(spec)(kernel)


def _register_attention() -> None:
    writes = ("npu_rms_norm", "npu_rotary_mul", "npu_scatter_nd_update_")
    _register("attention.gqa_prologue", prologue.gqa_prologue, writes, _WRITTEN, _PROLOGUE_TRAITS)
    latents: dict[str, TraitBound] = {
        "latent_dim": Range(1),
        "rotary_dim": MultipleOf(2, _ROTARY_MOST),
        "plain_dim": Range(1),
    }
    _register("attention.mla_prologue", prologue.mla_prologue, writes, _WRITTEN, latents)
    for mode, kernel, traits in (
        ("decode", attention.decode, _READ_TRAITS),
        ("extend", attention.extend, _READ_TRAITS),
        ("mla_decode", latent.decode, _LATENT_TRAITS),
        ("mla_extend", latent.extend, _LATENT_TRAITS),
    ):
        _register(f"attention.{mode}", kernel, _FUSED, _READ, traits, workspace=copied_bytes)
    expanded = {expanded_signature(BFLOAT16, BFLOAT16)}
    _register(
        "attention.mla_extend_expanded",
        latent.make_extend_expanded,
        _FUSED,
        expanded,
        _EXPANDED_TRAITS,
        workspace=lambda _traits: latent.EXPANDED_BYTES,
    )


def _register_rows() -> None:
    _register("norm.rms", elementwise.rms, ("npu_rms_norm",), {NORM_SIGNATURE})
    _register("norm.fused_add_rms", elementwise.fused_add_rms, ("npu_add_rms_norm",), {NORM_SIGNATURE})
    for mode, operator in (
        ("silu_and_mul", "npu_swiglu"),
        ("clamped_swiglu", "npu_clipped_swiglu"),
        ("clamped_silu", "npu_clipped_swiglu"),
    ):
        _register(f"activation.{mode}", getattr(elementwise, mode), (operator,), {ACTIVATION_SIGNATURE})
    axes: dict[str, TraitBound] = {
        "head_dim": Range(2, _ROTARY_MOST),
        "interleaved": one_of(False, True),
        "axes": Range(1),
    }
    _register("rotary.apply", elementwise.rotary_apply, ("npu_rotary_mul",), {ROTARY_SIGNATURE}, axes)


def _register_products() -> None:
    sizes: dict[str, TraitBound] = {**_ROUNDED, "n": Range(1), "k": Range(1)}
    _register("gemm.linear", linear.make_linear, ("aten::mm.dtype",), {linear_signature(BFLOAT16)}, sizes)
    mixture: dict[str, TraitBound] = {
        **_ROUNDED,
        "hidden": Range(16, 65535),
        "intermediate": Range(16, 32767),
        "activation": one_of(*GATED_ACTIVATIONS),
        "biased": one_of(False),
    }
    operators = (
        "npu_clipped_swiglu",
        "npu_grouped_matmul",
        "npu_moe_finalize_routing",
        "npu_moe_init_routing_v2",
        "npu_swiglu",
    )
    _register("moe.experts", moe.make_experts, operators, {experts_signature(BFLOAT16, BFLOAT16)}, mixture)


def _register_routing() -> None:
    softmax: dict[str, TraitBound] = {
        "experts": Range(1),
        "top_k": Range(1, 1024),
        "scoring": one_of("softmax"),
        "corrected": one_of(False),
        "grouped": one_of(False),
    }
    operators = ("npu_moe_gating_top_k_softmax_v2",)
    _register("moe.route", moe.make_softmax_route, operators, {ROUTE_SIGNATURE}, softmax, form="_softmax")
    sigmoid: dict[str, TraitBound] = {
        "experts": Range(3, moe.MOST_ROUTED),
        "top_k": Range(1),
        "scoring": one_of("sigmoid"),
        "corrected": one_of(True),
        "grouped": one_of(False, True),
    }
    operators = ("npu_moe_gating_top_k",)
    _register("moe.route", moe.make_sigmoid_route, operators, {ROUTE_SIGNATURE}, sigmoid, form="_sigmoid")


def register() -> None:
    """Registers every kernel of this package."""
    _register_attention()
    _register_rows()
    _register_products()
    _register_routing()
