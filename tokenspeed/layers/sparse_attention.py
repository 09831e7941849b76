"""DeepSeek Sparse Attention (DeepSeek-V3.2-Exp, 2025): latent attention over the tokens that an indexer chose.

The indexer has small heads, of which each token caches one key. What it chose for the tokens of a step stays in the
workspace, so that layers without an indexer (GLM 5, arXiv:2603.12201) read what the last layer before them left there.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.batch import ForwardBatch, LayerCache
from tokenspeed.layers.latent_attention import (
    LatentAttention,
    latent_attention_spec,
    latent_attention_weights,
    latent_of,
)
from tokenspeed.layers.parts import ModelParts
from tokenspeed.layers.weights import Ranks, WeightSpec, paired_rotary_rows
from tokenspeed.recipes.model_config import IndexConfig, ModelConfig

INDEX_EPS = 1e-6
"""Of the layer norm of the indexer's keys: part of the architecture, no checkpoint says it."""


def index_of(config: ModelConfig) -> IndexConfig:
    """The indexer's dimensions; ValueError where the model has none."""
    if config.index is None:
        raise ValueError(f"{config.architecture}: the configuration has no indexer")
    return config.index


def sparse_attention_weights(config: ModelConfig, layer: int, place: str, ranks: Ranks) -> list[WeightSpec]:
    """Those of latent attention at ``place``, and of the layer's indexer, which is whole on every rank."""
    index, specs = index_of(config), latent_attention_weights(config, place, ranks)
    if layer not in index.layers:
        return specs
    latent, width, place = latent_of(config), index.width, f"{place}.indexer"
    order = {"row_order": paired_rotary_rows(width, latent.rotary)} if index.paired else {}
    return [
        *specs,
        ranks.whole(f"{place}.wq_b.weight", index.heads * width, latent.query_rank, **order),
        ranks.whole(f"{place}.wk.weight", width, config.hidden_size, **order),
        ranks.whole(f"{place}.k_norm.weight", width, **order),
        ranks.whole(f"{place}.k_norm.bias", width, **order),
        ranks.whole(f"{place}.weights_proj.weight", index.heads, config.hidden_size),
    ]


def sparse_attention_specs(config: ModelConfig) -> tuple[AttentionSpec, ...]:
    """One for each group of sparse_latent_groups."""
    spec = replace(latent_attention_spec(config), backend="sparse_mla", index_heads=index_of(config).heads)
    return (spec,) * (1 if len(index_of(config).layers) == config.num_layers else 2)


class Indexer:
    """Chooses the tokens to attend to: five kernel calls a step."""

    def __init__(self, parts: ModelParts, place: str) -> None:
        config, workspace, kernels = parts.config, parts.workspace, parts.kernels
        index, rotary = index_of(config), latent_of(config).rotary
        self._query = parts.linear(f"{place}.wq_b", "replicated")
        self._key = parts.linear(f"{place}.wk", "replicated")
        # Which tokens are read must not hang on the rounding of what weighs the heads.
        self._weigh = kernels.linear(parts.matrix(f"{place}.weights_proj.weight"), None, exact=True)
        self._norm_weight, self._norm_bias = (parts.vector(f"{place}.k_norm.{part}") for part in ("weight", "bias"))
        self._cos_sin = parts.rotary(config.rope, rotary)
        self._prologue = kernels.index_prologue(index_dim=index.width, rotary_dim=rotary, kv_dtype=parts.kv_dtype)
        self._q = workspace.rows("index_q", index.heads, index.width)
        self._flat_q = workspace.rows("index_q", index.heads * index.width)
        self._k = workspace.rows("index_key", index.width)
        self._weights = workspace.rows("index_weights", index.heads)

    def bind_cache(self, cache: LayerCache) -> None:
        """Gives the layer its part of the arena: the indexer's keys."""
        self._group, self._place = cache.group, cache.place
        self._cache = cache.fields["index_key"]

    def forward(
        self, batch: ForwardBatch, x: torch.Tensor, compressed_query: torch.Tensor, selected: torch.Tensor
    ) -> None:
        """Writes ``selected`` int32 [T, k] of ``x`` float32 [T, H] and its compressed query, and the tokens' keys to
        the cache."""
        tokens = x.shape[0]
        q, key, weights = self._q(tokens), self._k(tokens), self._weights(tokens)
        self._query(compressed_query, self._flat_q(tokens))
        self._key(x, key)
        self._weigh(x, weights)
        self._prologue(
            q, key, batch.positions, self._cos_sin, self._norm_weight, self._norm_bias, INDEX_EPS, self._cache,
            batch.slots[self._group],
        )  # fmt: skip
        batch.attention[self._group].select(self._place, q, weights, selected)


class SparseLatentAttention(LatentAttention):
    """Latent attention over the tokens that the indexer of this layer, or of one before, chose."""

    def __init__(self, parts: ModelParts, layer: int, place: str) -> None:
        super().__init__(parts, place, may_expand=False)
        index = index_of(parts.config)
        self._indexer = Indexer(parts, f"{place}.indexer") if layer in index.layers else None
        self._selected = parts.workspace.integers("selected", index.chosen)

    def bind_cache(self, caches: Sequence[LayerCache]) -> None:
        """Gives the layer its parts of the arena: the latents, and the indexer's keys beside them or in a group of
        their own."""
        super().bind_cache([cache for cache in caches if "latent" in cache.fields])
        if self._indexer is not None:
            (keys,) = (cache for cache in caches if "index_key" in cache.fields)
            self._indexer.bind_cache(keys)

    def _attend(self, batch: ForwardBatch, x: torch.Tensor, q: torch.Tensor, heads: torch.Tensor) -> None:
        tokens, plain = x.shape[0], self._plain
        q_latent, attended, selected = self._q_latent(tokens), self._attended(tokens), self._selected(tokens)
        self._to_latent(q[..., :plain], q_latent)
        if self._indexer is not None:
            self._indexer.forward(batch, x, self._compressed_query(tokens), selected)
        batch.attention[self._group].attend_selected(self._place, q_latent, q[..., plain:], selected, attended, None)
        self._to_value(attended, heads)
