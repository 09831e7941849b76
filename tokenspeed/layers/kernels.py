"""Binds every operation once, at build, and remembers what was bound. Nothing is selected while serving."""

import torch

from tokenspeed.layers.attention_kernels import AttentionKernels
from tokenspeed.layers.kernel_choice import Kernel
from tokenspeed_kernel import ops
from tokenspeed_kernel.ops.activation import GatedActivation
from tokenspeed_kernel.ops.moe import Routing
from tokenspeed_kernel.quantized import QuantizedTensor


class KernelBinder(AttentionKernels):
    """One engine's choice of kernels: those of attention, and all others. See KernelChoice."""

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
