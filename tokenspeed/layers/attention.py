"""Grouped-query attention: projections, head norms, rotary, the write to the cache, attention, output."""

from collections.abc import Sequence

import torch

from tokenspeed.layers.batch import ForwardBatch, LayerCache
from tokenspeed.layers.parts import ModelParts
from tokenspeed.layers.weights import Ranks, WeightSpec
from tokenspeed.recipes.model_config import ModelConfig, RopeConfig


def attention_weights(config: ModelConfig, place: str, ranks: Ranks) -> list[WeightSpec]:
    """q, k, v with their biases and head norms, and o, at ``place`` ("model.layers.0.self_attn")."""
    hidden, dim = config.hidden_size, config.head_dim
    specs = []
    for name, heads, rotary in (
        ("q", config.num_heads, config.num_heads),
        ("k", config.num_kv_heads, config.num_kv_heads),
        ("v", config.num_kv_heads, 0),
    ):
        specs.append(ranks.rows(f"{place}.{name}_proj.weight", heads * dim, hidden, rotary_heads=rotary))
        if config.attention_bias:
            specs.append(ranks.rows(f"{place}.{name}_proj.bias", heads * dim, rotary_heads=rotary))
        if config.qk_norm and rotary:
            specs.append(ranks.whole(f"{place}.{name}_norm.weight", dim))
    specs.append(ranks.columns(f"{place}.o_proj.weight", hidden, config.num_heads * dim))
    if config.output_bias:
        specs.append(ranks.whole(f"{place}.o_proj.bias", hidden))
    return specs


class GroupedQueryAttention:
    """Four kernel calls a step. ``rope``: the model's own where None."""

    def __init__(self, parts: ModelParts, place: str, *, rope: RopeConfig | None = None) -> None:
        config, workspace = parts.config, parts.workspace
        heads, keys, dim = config.num_heads, config.num_kv_heads, config.head_dim
        rope = rope or config.rope
        self._eps = config.rms_norm_eps
        self._cos_sin = parts.rotary(rope, dim)
        self._q_norm = parts.maybe(f"{place}.q_norm.weight")
        self._k_norm = parts.maybe(f"{place}.k_norm.weight")
        self._project = parts.stacked([f"{place}.{name}_proj" for name in ("q", "k", "v")]).forward
        self._output = parts.linear(f"{place}.o_proj", "columns")
        self._prologue = parts.kernels.gqa_prologue(
            head_dim=dim,
            q_per_kv=heads // keys,
            qk_norm=self._q_norm is not None,
            partial_rotary=self._cos_sin.shape[1] < dim,
            kv_dtype=parts.kv_dtype,
        )
        self._qkv = workspace.stacked("qkv", ((heads, dim), (keys, dim), (keys, dim)))
        self._heads = workspace.rows("heads", heads, dim)
        self._flat_heads = workspace.rows("heads", heads * dim)

    def bind_cache(self, caches: Sequence[LayerCache]) -> None:
        """Gives the layer its part of the arena: k and v of one group."""
        (cache,) = caches
        self._group, self._place = cache.group, cache.place
        self._k_cache, self._v_cache = cache.fields["k"], cache.fields["v"]

    def forward(self, batch: ForwardBatch, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes ``out`` float32 [T, H] of ``x`` float32 [T, H], and the tokens' keys and values to the cache."""
        tokens = x.shape[0]
        q, k, v = self._project(x, self._qkv(tokens))
        self._prologue(
            q, k, v, batch.positions, self._cos_sin, self._q_norm, self._k_norm, self._eps,
            self._k_cache, self._v_cache, batch.slots[self._group],
        )  # fmt: skip
        batch.attention[self._group].attend(self._place, q, self._heads(tokens))
        self._output(self._flat_heads(tokens), out)
