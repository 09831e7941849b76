"""One layer of a dense decoder: attention and gated MLP, each behind an RMS norm, over a residual stream."""

from dataclasses import dataclass

import torch

from tokenspeed.layers.batch import ForwardBatch, LayerCache
from tokenspeed.layers.kernels import KernelBinder
from tokenspeed.layers.linear import Linear, StackedLinear, StackedOutputs
from tokenspeed.layers.shard import Shard
from tokenspeed.layers.weights import LoadedWeights
from tokenspeed.recipes.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerBuffers:
    """Views of the forward's buffers for T tokens; all layers use the same. float32.

    Attributes:
        residual: [T, H] the residual stream.
        hidden: [T, H] what the last block gave and is still to be added to the residual.
        normed: [T, H] a block's input.
        qkv: q [T, heads, D], k and v [T, kv heads, D].
        heads: [T, heads, D] the result of attention; ``heads_flat`` [T, heads * D] is the same memory.
        gate_up: gate and up [T, I].
        activated: [T, I].
    """

    residual: torch.Tensor
    hidden: torch.Tensor
    normed: torch.Tensor
    qkv: StackedOutputs
    heads: torch.Tensor
    heads_flat: torch.Tensor
    gate_up: StackedOutputs
    activated: torch.Tensor


class DecoderLayer:
    """Nine kernel calls a step; everything is bound in the constructor and by ``bind_cache``."""

    def __init__(
        self,
        index: int,
        config: ModelConfig,
        weights: LoadedWeights,
        kernels: KernelBinder,
        *,
        cos_sin: torch.Tensor,
        kv_dtype: torch.dtype,
    ) -> None:
        prefix = f"model.layers.{index}"
        matrices, vectors = weights.matrices, weights.vectors
        rows, columns = (Shard(kind=kind, rank=0, world=1) for kind in ("rows", "columns"))
        self._index = index
        self._eps = config.rms_norm_eps
        self._cos_sin = cos_sin
        self._input_norm = vectors[f"{prefix}.input_layernorm.weight"]
        self._mlp_norm = vectors[f"{prefix}.post_attention_layernorm.weight"]
        self._q_norm = vectors.get(f"{prefix}.self_attn.q_norm.weight")
        self._k_norm = vectors.get(f"{prefix}.self_attn.k_norm.weight")

        def stacked(block: str, names: tuple[str, ...]) -> StackedLinear:
            places = [f"{prefix}.{block}.{name}_proj" for name in names]
            parts = [matrices[f"{place}.weight"] for place in places]
            return StackedLinear(kernels, parts, [vectors.get(f"{place}.bias") for place in places], rows)

        def single(block: str, name: str) -> Linear:
            place = f"{prefix}.{block}.{name}_proj"
            return Linear(kernels, matrices[f"{place}.weight"], vectors.get(f"{place}.bias"), columns)

        self._qkv = stacked("self_attn", ("q", "k", "v")).forward
        self._o = single("self_attn", "o").forward
        self._gate_up = stacked("mlp", ("gate", "up")).forward
        self._down = single("mlp", "down").forward
        self._rms_norm = kernels.rms_norm()
        self._add_rms_norm = kernels.fused_add_rms_norm()
        self._silu_and_mul = kernels.silu_and_mul()
        self._prologue = kernels.gqa_prologue(
            head_dim=config.head_dim,
            q_per_kv=config.num_heads // config.num_kv_heads,
            qk_norm=config.qk_norm,
            kv_dtype=kv_dtype,
        )

    def bind_cache(self, cache: LayerCache) -> None:
        """Gives the layer its part of the arena."""
        self._k_cache = cache.k
        self._v_cache = cache.v
        self._group = cache.group

    def forward(self, batch: ForwardBatch, work: LayerBuffers) -> None:
        """Adds ``hidden`` of the block before to the residual (nothing before the first layer) and leaves its own."""
        normed, hidden, residual, eps = work.normed, work.hidden, work.residual, self._eps
        if self._index == 0:
            self._rms_norm(residual, self._input_norm, eps, normed)
        else:
            self._add_rms_norm(hidden, residual, self._input_norm, eps, normed)
        q, k, v = self._qkv(normed, work.qkv)
        self._prologue(
            q, k, v, batch.positions, self._cos_sin, self._q_norm, self._k_norm, eps,
            self._k_cache, self._v_cache, batch.slots[self._group],
        )  # fmt: skip
        batch.attention.attend(self._index, q, work.heads)
        self._o(work.heads_flat, hidden)
        self._add_rms_norm(hidden, residual, self._mlp_norm, eps, normed)
        gate, up = self._gate_up(normed, work.gate_up)
        self._silu_and_mul(gate, up, work.activated)
        self._down(work.activated, hidden)
