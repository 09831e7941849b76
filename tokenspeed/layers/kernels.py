"""Binds every operation once, at build, and remembers what was bound. Nothing is selected while serving."""

import os
from collections.abc import Callable, Mapping

import torch

from tokenspeed.recipes.resolved import Activations
from tokenspeed_kernel import ops
from tokenspeed_kernel.binding import Bound
from tokenspeed_kernel.ops.gemm import ACTIVATIONS_VARIABLE
from tokenspeed_kernel.page_sizes import kernel_page_size
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.registry import KernelSpec

Kernel = Callable[..., None]

OPERATIONS = (
    "gemm.linear",
    "embedding.lookup",
    "norm.rms",
    "norm.fused_add_rms",
    "activation.silu_and_mul",
    "attention.gqa_prologue",
    "attention.decode",
    "attention.extend",
    "sampling.sample",
    "sampling.apply_penalties",
    "sampling.logprobs",
    "sampling.has_nan",
)
"""What an engine binds; the keys that a configuration's ``kernels`` may name."""


class KernelBinder:
    """One engine's choice of kernels.

    ``activations``: what products may round their inputs to; "auto" is bfloat16 for weights, and caches, in bfloat16
    (what such a model computes in where it was trained), else float32. TOKENSPEED_KERNEL_ACTIVATIONS goes before it.

    Attributes:
        chosen: operation to the kernel bound to it; several, joined by " + ", where weights of several formats differ.
    """

    def __init__(self, overrides: Mapping[str, str], *, activations: Activations = "auto") -> None:
        unknown = sorted(set(overrides) - set(OPERATIONS))
        if unknown:
            raise ValueError(f"kernels: {', '.join(unknown)} is no operation; operations are {', '.join(OPERATIONS)}")
        self._overrides = dict(overrides)
        self._activations = activations
        self.chosen: dict[str, str] = {}
        self._specs: list[KernelSpec] = []

    @property
    def of_the_forward(self) -> tuple[KernelSpec, ...]:
        """Every kernel bound so far but those that sample."""
        return tuple(spec for spec in self._specs if spec.family != "sampling")

    def _keep(self, bound: Bound) -> Kernel:
        operation, name = bound.spec.operation, bound.spec.name
        self._specs.append(bound.spec)
        names = self.chosen.get(operation, "").split(" + ") if operation in self.chosen else []
        if name not in names:
            self.chosen[operation] = " + ".join([*names, name])
        kernel: Kernel = bound.fn
        return kernel

    def linear(self, weight: QuantizedTensor, bias: torch.Tensor | None) -> Kernel:
        """``fn(x float32 [T, K], out float32 [T, N])``."""
        override = self._overrides.get("gemm.linear")
        return self._keep(ops.bind_linear(weight, bias, activations=self._rounding(weight.format), override=override))

    def _rounding(self, stored: str) -> str | None:
        """What may be rounded to meet what is ``stored`` so; None leaves it to the environment."""
        if os.environ.get(ACTIVATIONS_VARIABLE):
            return None
        if self._activations == "auto":
            return "bfloat16" if stored == "bfloat16" else "float32"
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

    def gqa_prologue(self, *, head_dim: int, q_per_kv: int, qk_norm: bool, kv_dtype: torch.dtype) -> Kernel:
        """``fn(q, k, v, positions, cos_sin, q_norm, k_norm, eps, k_cache, v_cache, slots)``."""
        override = self._overrides.get("attention.gqa_prologue")
        return self._keep(
            ops.bind_gqa_prologue(
                head_dim=head_dim, q_per_kv=q_per_kv, qk_norm=qk_norm, kv_dtype=kv_dtype, override=override
            )
        )

    def attention_read(
        self, mode: str, *, head_dim: int, q_per_kv: int, page: int, windowed: bool, kv_dtype: torch.dtype
    ) -> Kernel:
        """The kernel of attention ``mode`` ("decode" or "extend") for blocks of ``page`` tokens.

        ``windowed``: whether calls give a window above 0. Raises ValueError where the kernel's own page size does not
        divide a block.
        """
        bind = ops.bind_attention_decode if mode == "decode" else ops.bind_attention_extend
        rounding = self._rounding(str(kv_dtype).removeprefix("torch."))
        bound = bind(
            head_dim=head_dim,
            q_per_kv=q_per_kv,
            kernel_page_size=page,
            windowed=windowed,
            kv_dtype=kv_dtype,
            activations="float32" if rounding in ("int8", "int16") else rounding,
            override=self._overrides.get(f"attention.{mode}"),
        )
        sizes = kernel_page_size(bound.spec.name)
        if all(page % size for size in sizes):
            raise ValueError(
                f"blocks of {page} tokens: {bound.spec.name} reads pages of {', '.join(map(str, sizes))} tokens; "
                "set kv.granularity to a multiple"
            )
        return self._keep(bound)

    def sample(self) -> Kernel:
        """``fn(logits, temperature, top_k, top_p, min_p, seed, choice, position, out)``."""
        return self._keep(ops.bind_sample(override=self._overrides.get("sampling.sample")))

    def apply_penalties(self) -> Kernel:
        """``fn(logits, counts, prompt_mask, rows, presence, frequency, repetition)``."""
        return self._keep(ops.bind_apply_penalties(override=self._overrides.get("sampling.apply_penalties")))

    def logprobs(self) -> Kernel:
        """``fn(logits, ids, k, out_logprob, top_ids, top_logprobs)``."""
        return self._keep(ops.bind_logprobs(override=self._overrides.get("sampling.logprobs")))

    def has_nan(self) -> Kernel:
        """``fn(logits, out bool [S])``."""
        return self._keep(ops.bind_has_nan(override=self._overrides.get("sampling.has_nan")))
