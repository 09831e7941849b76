"""Registers the kernels: the entry point of the group ``tokenspeed_kernel.plugins``. Imports no Triton."""

from collections.abc import Callable, Mapping
from itertools import product, starmap
from typing import Any

from tokenspeed_kernel.ops.activation import ACTIVATION_SIGNATURE, GATED_ACTIVATIONS
from tokenspeed_kernel.ops.causal_conv import CONV_SIGNATURE
from tokenspeed_kernel.ops.gated_delta import DECAYS, DELTA_SIGNATURE
from tokenspeed_kernel.ops.gated_norm import GATES
from tokenspeed_kernel.ops.gemm import linear_signature
from tokenspeed_kernel.ops.kv_cache import ATTENTION_SIGNATURES
from tokenspeed_kernel.ops.merge import MERGE_SIGNATURE
from tokenspeed_kernel.ops.mla_tiling import TILE_ROWS
from tokenspeed_kernel.ops.moe import ROUTE_SIGNATURE, SCORINGS, experts_signature
from tokenspeed_kernel.ops.norm import NORM_SIGNATURE
from tokenspeed_kernel.ops.rotary import ROTARY_SIGNATURE
from tokenspeed_kernel.ops.sampling import SAMPLING_SIGNATURE
from tokenspeed_kernel.page_sizes import PAGE_SIZE_TRAIT
from tokenspeed_kernel.registry import Band, KernelFunction, KernelSpec, register_kernel
from tokenspeed_kernel.signature import BFLOAT16, FLOAT8_E4M3, FLOAT32, WEIGHT_FORMATS, FormatSignature
from tokenspeed_kernel.traits import MultipleOf, Range, TraitBound, one_of
from tokenspeed_kernel_triton import (
    attention,
    elementwise,
    gated_delta_chunks,
    linear,
    moe,
    recurrent,
    rotary,
    sampling,
    verify,
)
from tokenspeed_kernel_triton.configs import PROCESSORS
from tokenspeed_kernel_triton.fp4_registration import register_fp4
from tokenspeed_kernel_triton.paged_attention import workspace_bytes
from tokenspeed_kernel_triton.planes import QUANTISED
from tokenspeed_kernel_triton.registration_entries import register_entries
from tokenspeed_kernel_triton.registration_weights import register_weights
from tokenspeed_kernel_triton.requirement import TritonRequirement

SOLUTION = "triton"
ROUNDED_SOLUTION = "triton_bf16"
"""Attention and products whose operands are rounded to bfloat16: chosen only where the caller allows it."""

CHUNKED_SOLUTION = "triton_chunked"
"""The rule over chunks of tokens: a token's bits hang on its chunk, so the objective determinism does not take it."""

COMPILED_ONLY = "compiled_only"
"""Tag of a kernel that was compiled for GPUs and run by the interpreter, and has never run on a GPU."""

MAX_HEAD_DIM = 256
MAX_LATENT_DIM = 512
MAX_ROTARY_DIM = 64

_ROUNDED_ATTENTION = frozenset(FormatSignature.of(input=FLOAT32, kv=kv) for kv in (BFLOAT16, FLOAT8_E4M3))

_READ: dict[str, TraitBound] = {
    "head_dim": Range(1, MAX_HEAD_DIM),
    "q_per_kv": Range(1),
    PAGE_SIZE_TRAIT: MultipleOf(1),
    "causal": one_of(True),
    "windowed": one_of(False, True),
    "sinks": one_of(False, True),
    "soft_cap": one_of(False, True),
}
_PROLOGUE: dict[str, TraitBound] = {
    "head_dim": MultipleOf(2, MAX_HEAD_DIM),
    "q_per_kv": Range(1),
    "qk_norm": one_of(False, True),
    "partial_rotary": one_of(False, True),
}
_LATENT: dict[str, TraitBound] = {
    "latent_dim": Range(1, MAX_LATENT_DIM),
    "rotary_dim": MultipleOf(2, MAX_ROTARY_DIM),
}
_LATENT_PROLOGUE: dict[str, TraitBound] = {**_LATENT, "plain_dim": Range(1)}
_LATENT_READ: dict[str, TraitBound] = {
    **_LATENT,
    PAGE_SIZE_TRAIT: MultipleOf(1),
}


def _register(
    operation: str,
    kernel: KernelFunction,
    signatures: frozenset[FormatSignature],
    traits: Mapping[str, TraitBound] | None = None,
    *,
    solution: str = SOLUTION,
    by_row: bool = False,
    band: Band = Band.PORTABLE,
    workspace: Callable[[Mapping[str, Any]], int] | None = None,
) -> None:
    """``by_row``: each row is computed alone, so its bits depend on no other."""
    family, mode = operation.split(".")
    spec = KernelSpec(
        name=f"triton_{family}_{mode}" + solution.removeprefix(SOLUTION),
        family=family,
        mode=mode,
        solution=solution,
        capability=TritonRequirement(),
        signatures=signatures,
        traits=traits or {},
        band=band,
        workspace=workspace,
        tags=frozenset({"deterministic", COMPILED_ONLY, *(("row_invariant",) if by_row else ())}),
    )
    register_kernel(spec)(kernel)


def _of_splits(rows: int, width: str) -> Callable[[Mapping[str, Any]], int]:
    """Bytes of the partial outputs of one tile with a split for each processor of the largest device, which is what a
    request alone takes; ``width`` is the trait that says how wide an output is. A call's own: workspace_bytes."""

    def needed(traits: Mapping[str, Any]) -> int:
        return workspace_bytes(1, rows, max(PROCESSORS.values()), int(traits[width]))

    return needed


_WORKSPACE = {"decode": _of_splits(16, "head_dim"), "mla_decode": _of_splits(TILE_ROWS, "latent_dim")}


def _register_attention() -> None:
    for mode, exact, rounded, traits in (
        ("decode", attention.decode, attention.rounded_decode, _READ),
        ("extend", attention.extend, attention.rounded_extend, _READ),
        ("mla_decode", attention.mla_decode, attention.rounded_mla_decode, _LATENT_READ),
        ("mla_decode_partial", attention.mla_decode_partial, attention.rounded_mla_decode_partial, _LATENT_READ),
        ("mla_extend", attention.mla_extend, attention.rounded_mla_extend, _LATENT_READ),
    ):
        needed = _WORKSPACE.get(mode)
        _register(f"attention.{mode}", exact, ATTENTION_SIGNATURES, traits, workspace=needed)
        rounding: dict[str, TraitBound] = {**traits, "activations": one_of("bfloat16")}
        _register(
            f"attention.{mode}", rounded, _ROUNDED_ATTENTION, rounding, solution=ROUNDED_SOLUTION, workspace=needed
        )
    merged = frozenset({MERGE_SIGNATURE})
    _register("attention.merge_partials", attention.merge_partials, merged, {"head_dim": Range(1, MAX_LATENT_DIM)})


def _register_rows() -> None:
    for operation, kernel in (("norm.rms", elementwise.rms), ("norm.fused_add_rms", elementwise.fused_add_rms)):
        _register(operation, kernel, frozenset({NORM_SIGNATURE}), by_row=True)
    gates: dict[str, TraitBound] = {"gate": one_of(*GATES)}
    _register("norm.gated_rms", elementwise.gated_rms, frozenset({NORM_SIGNATURE}), gates, by_row=True)
    for mode in (
        "silu_and_mul",
        "gelu_tanh_and_mul",
        "clamped_swiglu",
        "clamped_silu",
        "sigmoid_gate",
        "add",
        "scale_rows",
    ):
        kernel = getattr(elementwise, mode)
        _register(f"activation.{mode}", kernel, frozenset({ACTIVATION_SIGNATURE}), by_row=True)
    axes: dict[str, TraitBound] = {"head_dim": Range(2), "interleaved": one_of(False, True), "axes": Range(1)}
    _register("rotary.apply", rotary.apply, frozenset({ROTARY_SIGNATURE}), axes, by_row=True)
    _register("attention.gqa_prologue", rotary.gqa_prologue, ATTENTION_SIGNATURES, _PROLOGUE, by_row=True)
    _register("attention.mla_prologue", rotary.mla_prologue, ATTENTION_SIGNATURES, _LATENT_PROLOGUE, by_row=True)


def _register_products() -> None:
    sizes: dict[str, TraitBound] = {"n": Range(0), "k": Range(1)}
    taken = frozenset(map(linear_signature, WEIGHT_FORMATS.values()))
    rounded = frozenset(linear_signature(WEIGHT_FORMATS[name]) for name in ("bfloat16", *QUANTISED))
    _register("gemm.linear", linear.make_linear, taken, sizes)
    rounding: dict[str, TraitBound] = {**sizes, "activations": one_of("bfloat16")}
    _register("gemm.linear", linear.make_rounded_linear, rounded, rounding, solution=ROUNDED_SOLUTION)


def _register_mixtures() -> None:
    routing: dict[str, TraitBound] = {
        "experts": Range(1, moe.MAX_EXPERTS),
        "top_k": Range(1),
        "scoring": one_of(*SCORINGS),
        "corrected": one_of(False, True),
        "grouped": one_of(False, True),
    }
    _register("moe.route", moe.make_route, frozenset({ROUTE_SIGNATURE}), routing, by_row=True)
    mixture: dict[str, TraitBound] = {
        "hidden": Range(1),
        "intermediate": Range(1),
        "activation": one_of(*GATED_ACTIVATIONS),
        "biased": one_of(False, True),
    }
    taken = frozenset(starmap(experts_signature, product(WEIGHT_FORMATS.values(), repeat=2)))
    _register("moe.experts", moe.make_experts, taken, mixture)
    blocked = [WEIGHT_FORMATS[name] for name in QUANTISED]
    rounded = frozenset(
        {experts_signature(BFLOAT16, BFLOAT16), *starmap(experts_signature, product(blocked, repeat=2))}
    )
    rounding: dict[str, TraitBound] = {**mixture, "activations": one_of("bfloat16")}
    _register("moe.experts", moe.make_rounded_experts, rounded, rounding, solution=ROUNDED_SOLUTION)


def _register_recurrent() -> None:
    widths: dict[str, TraitBound] = {"width": Range(2, recurrent.MAX_WIDTH), "biased": one_of(False, True)}
    _register("recurrent.causal_conv", recurrent.causal_conv, frozenset({CONV_SIGNATURE}), widths, by_row=True)
    rule: dict[str, TraitBound] = {
        "key_dim": Range(1, recurrent.MAX_KEY_DIM),
        "value_dim": Range(1),
        "v_per_k": Range(1),
        "decay": one_of(*DECAYS),
    }
    taken = frozenset({DELTA_SIGNATURE})
    _register("recurrent.gated_delta", recurrent.gated_delta, taken, rule, by_row=True)
    chunks = gated_delta_chunks.gated_delta
    _register("recurrent.gated_delta", chunks, taken, rule, solution=CHUNKED_SOLUTION, band=Band.PERFORMANT)


def _register_sampling() -> None:
    for mode in ("sample", "apply_penalties", "apply_token_mask", "logprobs", "has_nan"):
        _register(f"sampling.{mode}", getattr(sampling, mode), frozenset({SAMPLING_SIGNATURE}), by_row=True)
    for mode in ("verify", "verify_proposals"):
        _register(f"sampling.{mode}", getattr(verify, mode), frozenset({SAMPLING_SIGNATURE}), by_row=True)


def register() -> None:
    """Registers every kernel of this package."""
    _register_attention()
    _register_rows()
    _register_recurrent()
    _register_sampling()
    _register_products()
    _register_mixtures()
    register_weights(_register)
    register_entries(_register)
    register_fp4()
