"""Binds every operation once, at build, and remembers what was bound. Nothing is selected while serving."""

import os
from collections.abc import Callable, Mapping

import torch

from tokenspeed.recipes.activation_type import auto_activations
from tokenspeed.recipes.model_config import CheckpointError
from tokenspeed.recipes.resolved import Activations
from tokenspeed_kernel import ops
from tokenspeed_kernel.binding import Bound, binding_captured, present_objective
from tokenspeed_kernel.fp4_rows import FP4_FORMATS
from tokenspeed_kernel.ops.activation import GatedActivation
from tokenspeed_kernel.ops.gemm import ACTIVATIONS_VARIABLE
from tokenspeed_kernel.ops.moe import Routing
from tokenspeed_kernel.page_sizes import kernel_page_size
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.registry import KernelSpec

Kernel = Callable[..., None]
Around = Callable[[KernelSpec, Kernel], Kernel]
"""What a kernel is called through, made of its spec and itself; see device/graphs/dispatch.py."""

OPERATIONS = (
    "gemm.linear",
    "embedding.lookup",
    "norm.rms",
    "norm.fused_add_rms",
    "activation.silu_and_mul",
    "activation.clamped_swiglu",
    "activation.gelu_tanh_and_mul",
    "activation.scale_rows",
    "activation.sigmoid_gate",
    "activation.add",
    "moe.route",
    "moe.experts",
    "gemm.head_linear",
    "norm.gated_rms",
    "recurrent.causal_conv",
    "recurrent.gated_delta",
    "attention.gqa_prologue",
    "attention.decode",
    "attention.extend",
    "attention.mla_prologue",
    "attention.mla_decode",
    "attention.mla_extend",
    "attention.mla_extend_expanded",
    "attention.index_prologue",
    "attention.index_select",
    "attention.mla_selected",
    "attention.write",
    "attention.compress",
    "attention.merge_partials",
    "rotary.apply",
    "attention.apply_sinks",
    "hyper.begin",
    "hyper.mix",
    "hyper.spread",
    "hyper.collapse",
    "activation.clamped_silu",
    "moe.table_route",
    "sampling.sample",
    "sampling.apply_penalties",
    "sampling.apply_token_mask",
    "sampling.logprobs",
    "sampling.has_nan",
)
"""What an engine binds; the keys that a configuration's ``kernels`` may name."""


class KernelBinder:
    """One engine's choice of kernels.

    ``activations``: what products may round their inputs to; "auto" follows weight or cache, and ``device`` (see
    auto_activations). "fp4" counts for weights whose elements have four bits; the others are served as by "auto".
    TOKENSPEED_KERNEL_ACTIVATIONS goes before it. ``captured``: a device's graphs will hold the calls of decodes.
    ``around``: put around each kernel, where someone has to know of its calls.

    Attributes:
        chosen: operation to the kernel bound to it; several, joined by " + ", where weights of several formats differ.
    """

    def __init__(
        self,
        overrides: Mapping[str, str],
        *,
        activations: Activations = "auto",
        device: str = "cpu",
        captured: bool = False,
        around: Around | None = None,
    ) -> None:
        unknown = sorted(set(overrides) - set(OPERATIONS))
        if unknown:
            raise ValueError(f"kernels: {', '.join(unknown)} is no operation; operations are {', '.join(OPERATIONS)}")
        self._overrides = dict(overrides)
        self._activations = activations
        self._device = device
        self._captured = captured
        self._around = around
        self.chosen: dict[str, str] = {}
        self._specs: list[KernelSpec] = []

    @property
    def of_the_forward(self) -> tuple[KernelSpec, ...]:
        """Every kernel bound so far but those that sample."""
        return tuple(spec for spec in self._specs if spec.family != "sampling")

    def refuse_unused_activations(self, where: str) -> None:
        """Raises CheckpointError where activations of four bits were asked for and no weight of ``where`` takes them.

        Call it once everything is bound.
        """
        if self._asked == "fp4" and not any(_takes_fp4(spec) for spec in self._specs):
            raise CheckpointError(
                f"{where}: activations are fp4, but no weight in it is stored as {' or '.join(sorted(FP4_FORMATS))}; "
                "take an NVFP4 or MXFP4 checkpoint of the model, or set activations to auto"
            )

    @property
    def _asked(self) -> str:
        return os.environ.get(ACTIVATIONS_VARIABLE) or self._activations

    def _keep(self, bound: Bound) -> Kernel:
        operation, name = bound.spec.operation, bound.spec.name
        self._specs.append(bound.spec)
        names = self.chosen.get(operation, "").split(" + ") if operation in self.chosen else []
        if name not in names:
            self.chosen[operation] = " + ".join([*names, name])
        kernel: Kernel = bound.fn
        return kernel if self._around is None else self._around(bound.spec, kernel)

    def linear(self, weight: QuantizedTensor, bias: torch.Tensor | None, *, exact: bool = False) -> Kernel:
        """``fn(x float32 [T, K], out float32 [T, N])``; where ``exact``, x is never rounded."""
        override = self._overrides.get("gemm.linear")
        rounding = "float32" if exact else self._rounding(weight.format)
        return self._keep(ops.bind_linear(weight, bias, activations=rounding, override=override))

    def head_linear(self, weight: QuantizedTensor, heads: int, *, skipped: int = 0) -> Kernel:
        """``fn(x float32 [T, heads, K], out float32 [T, heads, N])``; the first ``skipped`` rows of a head are left
        out."""
        override = self._overrides.get("gemm.head_linear")
        return self._keep(ops.bind_head_linear(weight, heads, skipped=skipped, override=override))

    def route(self, routing: Routing, correction: torch.Tensor | None) -> Kernel:
        """``fn(logits, ids, weights)``."""
        return self._keep(ops.bind_route(routing, correction, override=self._overrides.get("moe.route")))

    def experts(
        self,
        gate_up: QuantizedTensor,
        down: QuantizedTensor,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        activation: GatedActivation,
    ) -> Kernel:
        """``fn(x, ids, weights, out)``."""
        return self._keep(
            ops.bind_experts(
                gate_up,
                down,
                gate_up_bias,
                down_bias,
                activation,
                activations=self._rounding(gate_up.format, down.format),
                override=self._overrides.get("moe.experts"),
            )
        )

    def _rounding(self, *stored: str) -> str | None:
        """What may be rounded to meet what is ``stored`` so; None leaves it to the environment."""
        if self._asked == "fp4":
            if stored[0] in FP4_FORMATS and len(set(stored)) == 1:
                return "fp4"
        elif os.environ.get(ACTIVATIONS_VARIABLE):
            return None
        if self._asked in ("auto", "fp4"):
            return auto_activations(stored[0], self._device)
        return self._activations

    def embedding(self, weight: QuantizedTensor) -> Kernel:
        """``fn(ids int32 [T], out float32 [T, H])``."""
        return self._keep(ops.bind_embedding(weight, override=self._overrides.get("embedding.lookup")))

    def rms_norm(self) -> Kernel:
        """``fn(x, weight, eps, out)``."""
        return self._keep(ops.bind_rms_norm(override=self._overrides.get("norm.rms")))

    def fused_add_rms_norm(self) -> Kernel:
        """``fn(x, residual in/out, weight, eps, out)``."""
        return self._keep(ops.bind_fused_add_rms_norm(override=self._overrides.get("norm.fused_add_rms")))

    def silu_and_mul(self) -> Kernel:
        """``fn(gate, up, out)``."""
        return self._keep(ops.bind_silu_and_mul(override=self._overrides.get("activation.silu_and_mul")))

    def clamped_swiglu(self) -> Kernel:
        """``fn(gate, up, alpha, limit, out)``."""
        return self._keep(ops.bind_clamped_swiglu(override=self._overrides.get("activation.clamped_swiglu")))

    def gelu_tanh_and_mul(self) -> Kernel:
        """``fn(gate, up, out)``."""
        return self._keep(ops.bind_gelu_tanh_and_mul(override=self._overrides.get("activation.gelu_tanh_and_mul")))

    def scale_rows(self) -> Kernel:
        """``fn(x, factors, places or None, out)``."""
        return self._keep(ops.bind_scale_rows(override=self._overrides.get("activation.scale_rows")))

    def sigmoid_gate(self) -> Kernel:
        """``fn(x, gate, out)``."""
        return self._keep(ops.bind_sigmoid_gate(override=self._overrides.get("activation.sigmoid_gate")))

    def add(self) -> Kernel:
        """``fn(x, out in/out)``."""
        return self._keep(ops.bind_add(override=self._overrides.get("activation.add")))

    def gated_rms_norm(self, *, gate: str) -> Kernel:
        """``fn(x, gate, weight, eps, silu, out)``; ``gate``: its function, "silu" or "sigmoid"."""
        return self._keep(ops.bind_gated_rms_norm(gate=gate, override=self._overrides.get("norm.gated_rms")))

    def causal_conv(self, *, width: int, biased: bool) -> Kernel:
        """``fn(x, weight, bias, state, starts, sources, targets, out)``."""
        override = self._overrides.get("recurrent.causal_conv")
        return self._keep(ops.bind_causal_conv(width=width, biased=biased, override=override))

    def gated_delta(self, *, key_dim: int, value_dim: int, v_per_k: int, decay: str) -> Kernel:
        """``fn(q, k, v, decay, beta, rate, bias, eps, state, starts, sources, targets, out)``; ``decay``: of what there
        is one, "head" or "channel"."""
        return self._keep(
            ops.bind_gated_delta(
                key_dim=key_dim,
                value_dim=value_dim,
                v_per_k=v_per_k,
                decay=decay,
                override=self._overrides.get("recurrent.gated_delta"),
            )
        )

    def gqa_prologue(
        self, *, head_dim: int, q_per_kv: int, qk_norm: bool, partial_rotary: bool, kv_dtype: torch.dtype
    ) -> Kernel:
        """``fn(q, k, v, positions, cos_sin, q_norm, k_norm, eps, k_cache, v_cache, slots)``."""
        return self._keep(
            ops.bind_gqa_prologue(
                head_dim=head_dim,
                q_per_kv=q_per_kv,
                qk_norm=qk_norm,
                partial_rotary=partial_rotary,
                kv_dtype=kv_dtype,
                override=self._overrides.get("attention.gqa_prologue"),
            )
        )

    def mla_prologue(self, *, latent_dim: int, rotary_dim: int, plain_dim: int, kv_dtype: torch.dtype) -> Kernel:
        """``fn(q, compressed, positions, cos_sin, latent_norm, eps, latent_cache, slots)``."""
        return self._keep(
            ops.bind_mla_prologue(
                latent_dim=latent_dim,
                rotary_dim=rotary_dim,
                plain_dim=plain_dim,
                kv_dtype=kv_dtype,
                override=self._overrides.get("attention.mla_prologue"),
            )
        )

    def mla_read(self, mode: str, *, latent_dim: int, rotary_dim: int, page: int, kv_dtype: torch.dtype) -> Kernel:
        """The kernel of ``mode`` ("mla_decode" or "mla_extend") for blocks of ``page`` tokens; raises as attention_read
        does."""
        with binding_captured(self._captured and mode == "mla_decode"):
            bound = ops.bind_mla_read(
                mode,
                latent_dim=latent_dim,
                rotary_dim=rotary_dim,
                kernel_page_size=page,
                kv_dtype=kv_dtype,
                activations=self._attention_rounding(kv_dtype),
                override=self._overrides.get(f"attention.{mode}"),
            )
        return self._keep(_reads(bound, page))

    def mla_extend_expanded(
        self,
        weight: QuantizedTensor,
        heads: int,
        *,
        rotary_dim: int,
        plain_dim: int,
        page: int,
        kv_dtype: torch.dtype,
    ) -> Kernel | None:
        """``fn(q, latent_cache, page_table, query_start, seq_lens, scale, out)`` of an up-projection [heads * (plain +
        value), latent], for blocks of ``page`` tokens; raises as attention_read does.

        None where the reference alone can run and nobody asked for it; and under the objective determinism, where the
        bits of a token must not hang on its chunk, as they do where long chunks are expanded and short ones not.
        """
        if present_objective() == "determinism":
            return None
        bound = ops.bind_mla_extend_expanded(
            weight,
            heads,
            rotary_dim=rotary_dim,
            plain_dim=plain_dim,
            kernel_page_size=page,
            kv_dtype=kv_dtype,
            activations=self._attention_rounding(kv_dtype),
            override=self._overrides.get("attention.mla_extend_expanded"),
            reference=False,
        )
        return None if bound is None else self._keep(_reads(bound, page))

    def write_entries(self, *, entry_dim: int, kv_dtype: torch.dtype) -> Kernel:
        """``fn(x, cache, slots)``."""
        override = self._overrides.get("attention.write")
        return self._keep(ops.bind_write(entry_dim=entry_dim, kv_dtype=kv_dtype, override=override))

    def compress(self, *, entry_dim: int, overlapping: bool, page: int, kv_dtype: torch.dtype) -> Kernel:
        """``fn(values_cache, gates_cache, page_table, query_start, seq_lens, bias, norm, eps, cos_sin, entry_cache,
        entry_slots, overlapping)`` for blocks of ``page`` tokens; raises as attention_read does."""
        bound = ops.bind_compress(
            entry_dim=entry_dim,
            overlapping=overlapping,
            kernel_page_size=page,
            kv_dtype=kv_dtype,
            override=self._overrides.get("attention.compress"),
        )
        return self._keep(_reads(bound, page))

    def merge_partials(self, *, head_dim: int) -> Kernel:
        """``fn(partials, partial_lse, out, lse)``."""
        override = self._overrides.get("attention.merge_partials")
        return self._keep(ops.bind_merge_partials(head_dim=head_dim, override=override))

    def apply_sinks(self, *, head_dim: int) -> Kernel:
        """``fn(x in/out, lse, sinks)``."""
        override = self._overrides.get("attention.apply_sinks")
        return self._keep(ops.bind_apply_sinks(head_dim=head_dim, override=override))

    def rotary(self, *, head_dim: int, interleaved: bool) -> Kernel:
        """``fn(x, positions [1, T], None, cos_sin, interleaved)``."""
        override = self._overrides.get("rotary.apply")
        return self._keep(ops.bind_rotary(head_dim=head_dim, interleaved=interleaved, override=override))

    def hyper(self, mode: str, *, streams: int) -> Kernel:
        """The kernel of ``mode``, "begin", "mix", "spread" or "collapse"; see tokenspeed_kernel.ops.hyper."""
        return self._keep(ops.bind_hyper(mode, streams=streams, override=self._overrides.get(f"hyper.{mode}")))

    def clamped_silu(self) -> Kernel:
        """``fn(gate, up, limit, out)``."""
        return self._keep(ops.bind_clamped_silu(override=self._overrides.get("activation.clamped_silu")))

    def table_route(self) -> Kernel:
        """``fn(logits, tokens, table, scale, ids, weights)``."""
        return self._keep(ops.bind_table_route(override=self._overrides.get("moe.table_route")))

    def index_prologue(self, *, index_dim: int, rotary_dim: int, kv_dtype: torch.dtype) -> Kernel:
        """``fn(q, key, positions, cos_sin, norm_weight, norm_bias, eps, index_cache, slots)``."""
        override = self._overrides.get("attention.index_prologue")
        return self._keep(
            ops.bind_index_prologue(index_dim=index_dim, rotary_dim=rotary_dim, kv_dtype=kv_dtype, override=override)
        )

    def index_select(self, *, index_dim: int, index_heads: int, page: int, kv_dtype: torch.dtype) -> Kernel:
        """``fn(q, weights, index_cache, page_table, query_start, seq_lens, stride, selected)`` for blocks of ``page``
        entries; raises as attention_read does."""
        bound = ops.bind_index_select(
            index_dim=index_dim,
            index_heads=index_heads,
            kernel_page_size=page,
            kv_dtype=kv_dtype,
            override=self._overrides.get("attention.index_select"),
        )
        return self._keep(_reads(bound, page))

    def mla_selected(self, *, latent_dim: int, rotary_dim: int, page: int, kv_dtype: torch.dtype) -> Kernel:
        """``fn(q_latent, q_rope, latent_cache, page_table, query_start, selected, scale, out, lse)`` for blocks of
        ``page`` entries; raises as attention_read does."""
        bound = ops.bind_mla_selected(
            latent_dim=latent_dim,
            rotary_dim=rotary_dim,
            kernel_page_size=page,
            kv_dtype=kv_dtype,
            activations=self._attention_rounding(kv_dtype),
            override=self._overrides.get("attention.mla_selected"),
        )
        return self._keep(_reads(bound, page))

    def attention_read(
        self,
        mode: str,
        *,
        head_dim: int,
        q_per_kv: int,
        page: int,
        windowed: bool,
        sinks: bool,
        soft_cap: bool,
        kv_dtype: torch.dtype,
    ) -> Kernel:
        """The kernel of attention ``mode`` ("decode" or "extend") for blocks of ``page`` tokens.

        ``windowed``: whether calls give a window above 0; ``sinks`` and ``soft_cap``: whether they give these. Raises
        ValueError where the kernel's own page size does not divide a block.
        """
        bind = ops.bind_attention_decode if mode == "decode" else ops.bind_attention_extend
        with binding_captured(self._captured and mode == "decode"):
            bound = bind(
                head_dim=head_dim,
                q_per_kv=q_per_kv,
                kernel_page_size=page,
                windowed=windowed,
                sinks=sinks,
                soft_cap=soft_cap,
                kv_dtype=kv_dtype,
                activations=self._attention_rounding(kv_dtype),
                override=self._overrides.get(f"attention.{mode}"),
            )
        return self._keep(_reads(bound, page))

    def _attention_rounding(self, kv_dtype: torch.dtype) -> str | None:
        """As _rounding, of what attention knows. Over 8 bits it may round as over bfloat16: queries and weights keep
        more than the cache has."""
        rounding = self._rounding("bfloat16" if kv_dtype.itemsize == 1 else str(kv_dtype).removeprefix("torch."))
        return "float32" if rounding in ("int8", "int16") else rounding

    def sample(self) -> Kernel:
        """``fn(logits, temperature, top_k, top_p, min_p, seed, choice, position, out)``."""
        return self._keep(ops.bind_sample(override=self._overrides.get("sampling.sample")))

    def apply_penalties(self) -> Kernel:
        """``fn(logits, counts, prompt_mask, rows, presence, frequency, repetition)``."""
        return self._keep(ops.bind_apply_penalties(override=self._overrides.get("sampling.apply_penalties")))

    def apply_token_mask(self) -> Kernel:
        """``fn(logits, mask int32 [R, ceil(V / 32)], rows)``."""
        return self._keep(ops.bind_apply_token_mask(override=self._overrides.get("sampling.apply_token_mask")))

    def logprobs(self) -> Kernel:
        """``fn(logits, ids, k, out_logprob, top_ids, top_logprobs)``."""
        return self._keep(ops.bind_logprobs(override=self._overrides.get("sampling.logprobs")))

    def has_nan(self) -> Kernel:
        """``fn(logits, out bool [S])``."""
        return self._keep(ops.bind_has_nan(override=self._overrides.get("sampling.has_nan")))


def _takes_fp4(spec: KernelSpec) -> bool:
    bound = spec.traits.get("activations")
    return bound is not None and bound.admits("fp4")


def _reads(bound: Bound, page: int) -> Bound:
    """The kernel, if it reads blocks of ``page`` tokens; ValueError where its own page size does not divide them."""
    sizes = kernel_page_size(bound.spec.name)
    if all(page % size for size in sizes):
        raise ValueError(
            f"blocks of {page} tokens: {bound.spec.name} reads pages of {', '.join(map(str, sizes))} tokens; "
            "set kv.granularity to a multiple"
        )
    return bound
