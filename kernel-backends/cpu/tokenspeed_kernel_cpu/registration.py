"""Registers the kernels: the entry point of the group ``tokenspeed_kernel.plugins``."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenspeed_kernel.ops.activation import ACTIVATION_SIGNATURE, GATED_ACTIVATIONS
from tokenspeed_kernel.ops.causal_conv import CONV_SIGNATURE
from tokenspeed_kernel.ops.embedding import lookup_signature
from tokenspeed_kernel.ops.gated_delta import DECAYS, DELTA_SIGNATURE
from tokenspeed_kernel.ops.gated_norm import GATES
from tokenspeed_kernel.ops.gemm import linear_signature
from tokenspeed_kernel.ops.kv_cache import ATTENTION_SIGNATURES, KV_FORMATS
from tokenspeed_kernel.ops.merge import MERGE_SIGNATURE
from tokenspeed_kernel.ops.mla_expanded import expanded_signature
from tokenspeed_kernel.ops.moe import ROUTE_SIGNATURE, SCORINGS, experts_signature
from tokenspeed_kernel.ops.norm import NORM_SIGNATURE
from tokenspeed_kernel.ops.rotary import ROTARY_SIGNATURE
from tokenspeed_kernel.ops.sampling import SAMPLING_SIGNATURE
from tokenspeed_kernel.page_sizes import PAGE_SIZE_TRAIT
from tokenspeed_kernel.recording import register_recorder
from tokenspeed_kernel.records import load_records
from tokenspeed_kernel.registry import Band, CapabilityRequirement, KernelFunction, KernelSpec, register_kernel
from tokenspeed_kernel.signature import BFLOAT16, FLOAT8_E4M3, FLOAT32, WEIGHT_FORMATS, FormatSignature
from tokenspeed_kernel.traits import MultipleOf, Range, TraitBound, one_of
from tokenspeed_kernel_cpu import (
    _native,
    amx,
    attention,
    compressed,
    elementwise,
    expanded,
    gating,
    head_linear,
    int8_linear,
    latent,
    linear,
    moe,
    recording,
    recurrent,
    sampling,
    sparse,
    streams,
)
from tokenspeed_kernel_cpu.instruction_sets import follow_platform
from tokenspeed_kernel_cpu.threads import take_places

SOLUTION = "cpu_native"
ROUNDED_SOLUTION = "cpu_native_bf16"
"""Products and attention whose activations are rounded to bfloat16: chosen only where the caller allows it."""

TILED_SOLUTION = "cpu_native_amx"
"""The same products by AMX's tiles: registered only where TOKENSPEED_CPU_AMX=1, and without a record, for they have not
run on hardware."""

RECORDER = "cpu"
"""Notes the calls of all kernels of a forward; sampling ends a step, and its buffers are its caller's."""

INT8_SOLUTION = "cpu_native_int8"
INT16_SOLUTION = "cpu_native_int16"
"""Products with activations in 8 and in 15 bits: chosen only where the caller allows it."""

RECORDS = Path(__file__).parent / "verified.json"
"""What scripts/verify_cpu_kernels.py found, by kernel version and instruction set."""

WEIGHTS = (
    "float32",
    "bfloat16",
    "float16",
    "gguf_q4_0",
    "gguf_q4_1",
    "gguf_q5_0",
    "gguf_q5_1",
    "gguf_q8_0",
    "gguf_mxfp4",
    "nvfp4",
    "fp8_blocks",
    "gguf_q2_k",
    "gguf_q3_k",
    "gguf_q4_k",
    "gguf_q5_k",
    "gguf_q6_k",
)
"""The weight formats that the native module reads."""

_LINEAR = frozenset(linear_signature(WEIGHT_FORMATS[name]) for name in WEIGHTS)
_LOOKUP = frozenset(lookup_signature(WEIGHT_FORMATS[name]) for name in WEIGHTS)
_ROUNDED_LINEAR = frozenset({linear_signature(BFLOAT16)})
_INT8_LINEAR = frozenset(linear_signature(WEIGHT_FORMATS[name]) for name in int8_linear.FORMATS)
_COARSE = (BFLOAT16, FLOAT8_E4M3)
_ROUNDED_ATTENTION = frozenset(FormatSignature.of(input=FLOAT32, kv=kv) for kv in _COARSE)
_EXPANDED = frozenset(expanded_signature(kv, WEIGHT_FORMATS[name]) for kv in KV_FORMATS for name in WEIGHTS)
_ROUNDED_EXPANDED = frozenset(expanded_signature(kv, WEIGHT_FORMATS[name]) for kv in _COARSE for name in WEIGHTS)
_NORM = frozenset({NORM_SIGNATURE})
_ACTIVATION = frozenset({ACTIVATION_SIGNATURE})
_SAMPLING = frozenset({SAMPLING_SIGNATURE})

_EXPERTS = frozenset(
    experts_signature(WEIGHT_FORMATS[gate_up], WEIGHT_FORMATS[down]) for gate_up in WEIGHTS for down in WEIGHTS
)
_ROUTING: dict[str, TraitBound] = {
    "experts": Range(1),
    "top_k": Range(1),
    "scoring": one_of(*SCORINGS),
    "corrected": one_of(False, True),
    "grouped": one_of(False, True),
}
_MIXTURE: dict[str, TraitBound] = {
    "hidden": Range(1),
    "intermediate": Range(1),
    "activation": one_of(*GATED_ACTIVATIONS),
    "biased": one_of(False, True),
}
_SIZES: dict[str, TraitBound] = {"n": Range(0), "k": Range(1)}
_HEADS: dict[str, TraitBound] = {
    "head_dim": MultipleOf(2, _native.MAX_HEAD_DIM),
    "q_per_kv": Range(1, _native.MAX_Q_PER_KV),
}
_PROLOGUE: dict[str, TraitBound] = {**_HEADS, "qk_norm": one_of(False, True), "partial_rotary": one_of(False, True)}
_READ: dict[str, TraitBound] = {
    **_HEADS,
    PAGE_SIZE_TRAIT: MultipleOf(1),
    "causal": one_of(True),
    "windowed": one_of(False, True),
    "sinks": one_of(False, True),
    "soft_cap": one_of(False, True),
}

_LATENT: dict[str, TraitBound] = {
    "latent_dim": Range(1, _native.MAX_LATENT_DIM),
    "rotary_dim": MultipleOf(2, _native.MAX_ROTARY_DIM),
}
_DELTA: dict[str, TraitBound] = {
    "key_dim": Range(1),
    "value_dim": Range(1),
    "v_per_k": Range(1),
    "decay": one_of(*DECAYS),
}
_LATENT_READ: dict[str, TraitBound] = {**_LATENT, PAGE_SIZE_TRAIT: MultipleOf(1)}
_EXPANDED_READ: dict[str, TraitBound] = {**_LATENT_READ, "plain_dim": Range(1), "value_dim": Range(1)}
_COMPRESSION: dict[str, TraitBound] = {
    "entry_dim": Range(2),
    "overlapping": one_of(False, True),
    PAGE_SIZE_TRAIT: MultipleOf(1),
}
_ROTATION: dict[str, TraitBound] = {"head_dim": Range(2), "interleaved": one_of(False, True), "axes": Range(1)}
_INDEX_WIDTH: dict[str, TraitBound] = {"index_dim": Range(2, _native.MAX_INDEX_DIM)}
_INDEX: dict[str, TraitBound] = {**_INDEX_WIDTH, "index_heads": Range(1), PAGE_SIZE_TRAIT: MultipleOf(1)}
_SELECTED: dict[str, TraitBound] = {
    "latent_dim": Range(1, _native.MAX_LATENT_DIM),
    "rotary_dim": Range(0, _native.MAX_ROTARY_DIM),
    PAGE_SIZE_TRAIT: MultipleOf(1),
}


def _register(
    operation: str,
    kernel: KernelFunction,
    signatures: frozenset[FormatSignature],
    traits: Mapping[str, TraitBound] | None = None,
    version: str = "1",
    *,
    solution: str = SOLUTION,
    features: frozenset[str] = frozenset(),
    band: Band = Band.PERFORMANT,
    weight_preprocessor: Callable[[Any], Any] | None = None,
) -> None:
    family, mode = operation.split(".")
    spec = KernelSpec(
        name=f"cpu_{family}_{mode}" + solution.removeprefix(SOLUTION),
        family=family,
        mode=mode,
        solution=solution,
        capability=CapabilityRequirement(vendors=frozenset({"cpu"}), features=features),
        signatures=signatures,
        traits=traits or {},
        version=version,
        band=band,
        weight_preprocessor=weight_preprocessor,
        tags=frozenset({"deterministic", "row_invariant"}),
        recorder="" if family == "sampling" else RECORDER,
    )
    register_kernel(spec)(kernel)


def register() -> None:
    """Registers every kernel of this package with the records of its verification, and puts the platform's instruction
    set in force."""
    follow_platform()
    take_places()
    register_recorder(RECORDER, recording.record)
    _register("gemm.linear", linear.make_linear, _LINEAR, _SIZES, version="2")
    _register(
        "gemm.linear",
        linear.make_rounded_linear,
        _ROUNDED_LINEAR,
        {**_SIZES, "activations": one_of("bfloat16")},
        solution=ROUNDED_SOLUTION,
        features=frozenset({"avx512_bf16"}),
        band=Band.SPECIALISED,
    )
    for solution, make, activations in (
        (INT8_SOLUTION, int8_linear.make_int8_linear, "int8"),
        (INT16_SOLUTION, int8_linear.make_int16_linear, "int16"),
    ):
        _register(
            "gemm.linear",
            make,
            _INT8_LINEAR,
            {**_SIZES, "activations": one_of(activations)},
            solution=solution,
            band=Band.SPECIALISED,
            weight_preprocessor=int8_linear.pack,
        )
    if amx.asked_for():
        _register(
            "gemm.linear",
            linear.make_tiled_linear,
            _ROUNDED_LINEAR,
            {**_SIZES, "activations": one_of("bfloat16")},
            solution=TILED_SOLUTION,
            features=frozenset({"avx512_bf16"}),
            band=Band.SPECIALISED,
        )
    _register("embedding.lookup", linear.make_lookup, _LOOKUP, version="2")
    _register("norm.rms", elementwise.rms, _NORM)
    _register("norm.fused_add_rms", elementwise.fused_add_rms, _NORM)
    _register("activation.silu_and_mul", elementwise.silu_and_mul, _ACTIVATION)
    _register("attention.gqa_prologue", attention.gqa_prologue, ATTENTION_SIGNATURES, _PROLOGUE, version="3")
    _register("attention.decode", attention.decode, ATTENTION_SIGNATURES, _READ, version="4")
    _register("attention.extend", attention.extend, ATTENTION_SIGNATURES, _READ, version="4")
    _register(
        "attention.mla_prologue",
        latent.mla_prologue,
        ATTENTION_SIGNATURES,
        {**_LATENT, "plain_dim": Range(1)},
        version="2",
    )
    _register("attention.mla_decode", latent.mla_decode, ATTENTION_SIGNATURES, _LATENT_READ, version="2")
    _register(
        "attention.mla_decode_partial", latent.mla_decode_partial, ATTENTION_SIGNATURES, _LATENT_READ, version="2"
    )
    _register("attention.mla_extend", latent.mla_extend, ATTENTION_SIGNATURES, _LATENT_READ, version="2")
    _register(
        "attention.mla_extend_expanded", expanded.make_mla_extend_expanded, _EXPANDED, _EXPANDED_READ, version="2"
    )
    _register(
        "attention.mla_extend_expanded",
        expanded.make_rounded_mla_extend_expanded,
        _ROUNDED_EXPANDED,
        {**_EXPANDED_READ, "activations": one_of("bfloat16")},
        version="2",
        solution=ROUNDED_SOLUTION,
        features=frozenset({"avx512_bf16"}),
        band=Band.SPECIALISED,
    )
    _register(
        "attention.index_prologue",
        sparse.index_prologue,
        ATTENTION_SIGNATURES,
        {**_INDEX_WIDTH, "rotary_dim": MultipleOf(2, _native.MAX_INDEX_DIM)},
        version="2",
    )
    _register("attention.index_select", sparse.index_select, ATTENTION_SIGNATURES, _INDEX, version="2")
    _register("attention.mla_selected", sparse.mla_selected, ATTENTION_SIGNATURES, _SELECTED, version="2")
    for operation, kernel, traits, version in (
        ("attention.decode", attention.rounded_decode, _READ, "3"),
        ("attention.extend", attention.rounded_extend, _READ, "3"),
        ("attention.mla_decode", latent.rounded_mla_decode, _LATENT_READ, "2"),
        ("attention.mla_decode_partial", latent.rounded_mla_decode_partial, _LATENT_READ, "2"),
        ("attention.mla_extend", latent.rounded_mla_extend, _LATENT_READ, "2"),
    ):
        _register(
            operation,
            kernel,
            _ROUNDED_ATTENTION,
            {**traits, "activations": one_of("bfloat16")},
            version,
            solution=ROUNDED_SOLUTION,
            features=frozenset({"avx512_bf16"}),
            band=Band.SPECIALISED,
        )
    _register("attention.merge_partials", latent.merge_partials, frozenset({MERGE_SIGNATURE}), {"head_dim": Range(1)})
    _register("sampling.sample", sampling.sample, _SAMPLING)
    _register("sampling.apply_penalties", sampling.apply_penalties, _SAMPLING)
    _register("sampling.apply_token_mask", sampling.apply_token_mask, _SAMPLING)
    _register("sampling.logprobs", sampling.logprobs, _SAMPLING)
    _register("sampling.has_nan", sampling.has_nan, _SAMPLING)
    _register("gemm.head_linear", head_linear.make_head_linear, _LINEAR, _SIZES)
    _register("activation.clamped_swiglu", elementwise.clamped_swiglu, _ACTIVATION)
    _register("activation.gelu_tanh_and_mul", elementwise.gelu_tanh_and_mul, _ACTIVATION)
    _register("activation.scale_rows", elementwise.scale_rows, _ACTIVATION)
    _register("attention.write", compressed.write, ATTENTION_SIGNATURES, {"entry_dim": Range(1)}, version="2")
    _register("attention.compress", compressed.compress, ATTENTION_SIGNATURES, _COMPRESSION, version="2")
    _register("rotary.apply", compressed.rotary, frozenset({ROTARY_SIGNATURE}), _ROTATION)
    _register("attention.apply_sinks", compressed.apply_sinks, _ACTIVATION, {"head_dim": Range(1)})
    for mode in ("begin", "mix", "spread", "collapse"):
        _register(f"hyper.{mode}", getattr(streams, mode), _ACTIVATION, {"streams": Range(1)})
    _register("activation.clamped_silu", elementwise.clamped_silu, _ACTIVATION)
    _register("moe.table_route", moe.table_route, frozenset({ROUTE_SIGNATURE}))
    _register("moe.route", moe.make_route, frozenset({ROUTE_SIGNATURE}), _ROUTING)
    _register("moe.experts", moe.make_experts, _EXPERTS, _MIXTURE)
    _register(
        "moe.experts",
        moe.make_rounded_experts,
        frozenset({experts_signature(BFLOAT16, BFLOAT16)}),
        {**_MIXTURE, "activations": one_of("bfloat16")},
        solution=ROUNDED_SOLUTION,
        features=frozenset({"avx512_bf16"}),
        band=Band.SPECIALISED,
    )
    _register("activation.sigmoid_gate", gating.sigmoid_gate, _ACTIVATION)
    _register("activation.add", gating.add, _ACTIVATION)
    _register("norm.gated_rms", recurrent.gated_rms, _NORM, {"gate": one_of(*GATES)})
    conv_traits: dict[str, TraitBound] = {"width": Range(2), "biased": one_of(False, True)}
    _register("recurrent.causal_conv", recurrent.causal_conv, frozenset({CONV_SIGNATURE}), conv_traits)
    _register("recurrent.gated_delta", recurrent.gated_delta, frozenset({DELTA_SIGNATURE}), _DELTA)
    load_records(RECORDS)
