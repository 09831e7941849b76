"""The attention of DeepSeek-V4 (2026): over a window, and over entries that stand for several tokens each.

All heads share one entry, which is key and value at once: latent attention without a part of its own for rotation. Its
last elements are rotated, so those of the output are turned back by the token's own angles. A score for each head that
has no value, its sink, takes part in the softmax. Layers that compress read their window and their entries apart and
merge both.
"""

from collections.abc import Sequence

import torch

from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.batch import Compressor, ForwardBatch, LayerCache
from tokenspeed.layers.parts import ModelParts
from tokenspeed.layers.weights import Ranks, WeightSpec
from tokenspeed.recipes.model_config import CompressionConfig, ModelConfig
from tokenspeed_kernel.ops.kv_cache import row_dtype


def compression_of(config: ModelConfig) -> CompressionConfig:
    """How the model compresses; ValueError where it does not."""
    if config.compression is None:
        raise ValueError(f"{config.architecture}: the configuration compresses nothing")
    return config.compression


def compressed_attention_specs(config: ModelConfig) -> tuple[AttentionSpec, ...]:
    """One for each group of compressed_groups."""
    compression, width = compression_of(config), config.head_dim
    heads, scale = config.num_heads, width**-0.5

    def reading(index_heads: int = 0) -> AttentionSpec:
        return AttentionSpec(
            backend="sparse_mla",
            num_heads=heads,
            latent_dim=width,
            index_heads=index_heads,
            visible=index_heads == 0,
            scale=scale,
        )

    inputs = AttentionSpec(backend="compressor")
    specs = [reading()]
    if compression.sparse_layers:
        assert config.index is not None, "layers that choose have an indexer"
        specs += [reading(config.index.heads), inputs]
    if compression.heavy_layers:
        specs += [reading(), inputs]
    return tuple(specs)


def compressed_attention_weights(config: ModelConfig, layer: int, place: str, ranks: Ranks) -> list[WeightSpec]:
    """Those of the layer's attention at ``place``; ranks share the heads, what all heads share is on all of them."""
    compression, hidden, width = compression_of(config), config.hidden_size, config.head_dim
    heads, query = config.num_heads, compression.query_rank
    groups, rank = compression.output_groups, compression.output_rank
    specs = [
        ranks.rows(f"{place}.attn_sink", heads),
        ranks.whole(f"{place}.wq_a.weight", query, hidden),
        ranks.whole(f"{place}.q_norm.weight", query),
        ranks.rows(f"{place}.wq_b.weight", heads * width, query),
        ranks.whole(f"{place}.wkv.weight", width, hidden),
        ranks.whole(f"{place}.norm.weight", width),
        ranks.rows(f"{place}.wo_a.weight", groups * rank, heads // groups * width),
        ranks.columns(f"{place}.wo_b.weight", hidden, groups * rank),
    ]
    if layer in compression.heavy_layers:
        specs += _compressor_weights(f"{place}.compressor", hidden, compression.heavy_rate, width, width, ranks)
    if layer in compression.sparse_layers:
        assert config.index is not None, "layers that choose have an indexer"
        index, rate = config.index, compression.sparse_rate
        specs += _compressor_weights(f"{place}.compressor", hidden, rate, width, 2 * width, ranks)
        place = f"{place}.indexer"
        specs += _compressor_weights(f"{place}.compressor", hidden, rate, index.width, 2 * index.width, ranks)
        specs += [
            ranks.whole(f"{place}.wq_b.weight", index.heads * index.width, query),
            ranks.whole(f"{place}.weights_proj.weight", index.heads, hidden),
        ]
    return specs


def _compressor_weights(place: str, hidden: int, rate: int, width: int, columns: int, ranks: Ranks) -> list[WeightSpec]:
    return [
        ranks.whole(f"{place}.wkv.weight", columns, hidden),
        ranks.whole(f"{place}.wgate.weight", columns, hidden),
        ranks.whole(f"{place}.ape", rate, columns, is_float=True),
        ranks.whole(f"{place}.norm.weight", width),
    ]


class EntryMaker:
    """What tokens leave of ``x`` becomes entries: two products, two writes and the making."""

    def __init__(self, parts: ModelParts, place: str, cos_sin: torch.Tensor, *, page: str, overlapping: bool) -> None:
        workspace, kernels = parts.workspace, parts.kernels
        bias, norm = parts.vector(f"{place}.ape"), parts.vector(f"{place}.norm.weight")
        self._stride, columns = bias.shape
        self._parts, self._entry_dim = parts, norm.shape[0]
        self._bias, self._norm, self._cos_sin, self._overlapping = bias, norm, cos_sin, overlapping
        self._names = f"{page}values", f"{page}gates"
        self._projections = [parts.linear(f"{place}.{name}", "replicated") for name in ("wkv", "wgate")]
        self._write = kernels.write_entries(entry_dim=columns, kv_dtype=row_dtype(parts.kv_dtype))
        self._rows = workspace.rows("compressor_row", columns)

    def bind_cache(self, inputs: LayerCache, entries: LayerCache, field: str) -> None:
        """Gives it its part of the arena: what tokens leave, and the entries' ``field``."""
        self._inputs, self._entries = inputs.group, entries.group
        self._caches = [inputs.fields[name] for name in self._names]
        self._entry_cache = entries.fields[field]
        kernel = self._parts.kernels.compress(
            entry_dim=self._entry_dim,
            overlapping=self._overlapping,
            page=self._caches[0].shape[2],
            kv_dtype=self._entry_cache.dtype,
        )
        self._compressor = Compressor(
            kernel, self._bias, self._norm, self._parts.config.rms_norm_eps, self._cos_sin, self._overlapping
        )

    def forward(self, batch: ForwardBatch, x: torch.Tensor) -> None:
        """Writes what the tokens of ``x`` float32 [T, H] leave, and the entries that they complete."""
        row = self._rows(x.shape[0])
        for project, cache in zip(self._projections, self._caches, strict=True):
            project(x, row)
            self._write(row, cache, batch.slots[self._inputs])
        values, gates = self._caches
        batch.attention[self._inputs].compress(
            values, gates, self._compressor, self._entry_cache, batch.slots[self._entries]
        )


class EntryIndexer:
    """Chooses among the entries of a layer; its keys are entries too, made as those are."""

    def __init__(self, parts: ModelParts, place: str, cos_sin: torch.Tensor) -> None:
        index, workspace, kernels = parts.config.index, parts.workspace, parts.kernels
        assert index is not None, "layers that choose have an indexer"
        self._keys = EntryMaker(parts, f"{place}.compressor", cos_sin, page="index_", overlapping=True)
        self._query = parts.linear(f"{place}.wq_b", "replicated")
        # Which entries are read must not hang on the rounding of what weighs the heads.
        self._weigh = kernels.linear(parts.matrix(f"{place}.weights_proj.weight"), None, exact=True)
        self._cos_sin = cos_sin
        self._rotate = kernels.rotary(head_dim=cos_sin.shape[1], interleaved=True)
        self._plain = index.width - cos_sin.shape[1]
        self._q = workspace.rows("index_q", index.heads, index.width)
        self._flat_q = workspace.rows("index_q", index.heads * index.width)
        self._weights = workspace.rows("index_weights", index.heads)
        self._selected = workspace.integers("selected", index.chosen)

    def bind_cache(self, inputs: LayerCache, entries: LayerCache) -> None:
        """Gives it its part of the arena."""
        self._keys.bind_cache(inputs, entries, "index_key")
        self._group, self._place = entries.group, entries.place

    def forward(self, batch: ForwardBatch, x: torch.Tensor, compressed_query: torch.Tensor) -> torch.Tensor:
        """The entries chosen for the tokens of ``x``, int32 [T, k]; their keys are written before."""
        tokens = x.shape[0]
        self._keys.forward(batch, x)
        q, weights, selected = self._q(tokens), self._weights(tokens), self._selected(tokens)
        self._query(compressed_query, self._flat_q(tokens))
        self._weigh(x, weights)
        self._rotate(q[..., self._plain :], batch.positions.unsqueeze(0), None, self._cos_sin, True)
        batch.attention[self._group].select(self._place, q, weights, selected)
        return selected


class CompressedAttention:
    """One layer, of any of the three kinds."""

    def __init__(self, parts: ModelParts, layer: int, place: str) -> None:
        config, workspace, kernels = parts.config, parts.workspace, parts.kernels
        compression, heads, width = compression_of(config), config.num_heads, config.head_dim
        groups, rank = compression.output_groups, compression.output_rank
        compresses = layer in (*compression.sparse_layers, *compression.heavy_layers)
        self._eps, self._heads = config.rms_norm_eps, heads
        rope = compression.rope if compresses else config.rope
        self._cos_sin, self._turning_back = parts.rotary(rope, width), parts.rotary(rope, width, back=True)
        self._plain = width - self._cos_sin.shape[1]
        self._compress_query = parts.linear(f"{place}.wq_a", "replicated")
        self._query = parts.linear(f"{place}.wq_b", "rows")
        self._entry = parts.linear(f"{place}.wkv", "replicated")
        self._query_norm, self._entry_norm = (parts.vector(f"{place}.{name}.weight") for name in ("q_norm", "norm"))
        self._sinks = parts.vector(f"{place}.attn_sink")
        self._ones = torch.ones(width, device=self._sinks.device)
        self._rms_norm, self._apply_sinks = kernels.rms_norm(), kernels.apply_sinks(head_dim=width)
        self._rotate = kernels.rotary(head_dim=self._cos_sin.shape[1], interleaved=True)
        self._write = kernels.write_entries(entry_dim=width, kv_dtype=parts.kv_dtype)
        self._output_groups = kernels.head_linear(parts.matrix(f"{place}.wo_a.weight"), groups)
        self._output = parts.linear(f"{place}.wo_b", "columns")
        self._maker: EntryMaker | None = None
        self._indexer: EntryIndexer | None = None
        if compresses:
            overlapping = layer in compression.sparse_layers
            self._maker = EntryMaker(parts, f"{place}.compressor", self._cos_sin, page="", overlapping=overlapping)
            self._merge = kernels.merge_partials(head_dim=width)
            if overlapping:
                self._indexer = EntryIndexer(parts, f"{place}.indexer", self._cos_sin)
        self._compressed_query = workspace.rows("compressed_query", compression.query_rank)
        self._q = workspace.rows("q", heads * width)
        self._row = workspace.rows("entry", width)
        self._partials = workspace.rows("partials", 2 * heads * width)
        self._lse = workspace.rows("lse", 2 * heads)
        self._attended = workspace.rows("attended", heads * width)
        self._total = workspace.rows("lse_total", heads)
        self._grouped = workspace.rows("grouped", groups, rank)
        self._flat_grouped = workspace.rows("grouped", groups * rank)

    def bind_cache(self, caches: Sequence[LayerCache]) -> None:
        """Gives the layer its parts of the arena: the window, and, where it compresses, entries and their inputs."""
        window, *others = caches
        self._group, self._place, self._cache = window.group, window.place, window.fields["latent"]
        if self._maker is not None:
            entries, inputs = others
            self._entries, self._entries_place = entries.group, entries.place
            self._maker.bind_cache(inputs, entries, "latent")
            if self._indexer is not None:
                self._indexer.bind_cache(inputs, entries)

    def forward(self, batch: ForwardBatch, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes ``out`` float32 [T, H] of ``x`` float32 [T, H], and what the tokens leave to the caches."""
        tokens, positions = x.shape[0], batch.positions.unsqueeze(0)
        shape = (tokens, self._heads, -1)
        compressed_query, q = self._compressed_query(tokens), self._q(tokens)
        self._compress_query(x, compressed_query)
        self._rms_norm(compressed_query, self._query_norm, self._eps, compressed_query)
        self._query(compressed_query, q)
        each = q.view(tokens * self._heads, -1)
        self._rms_norm(each, self._ones, self._eps, each)
        heads = q.view(shape)
        self._rotate(heads[..., self._plain :], positions, None, self._cos_sin, True)
        entry = self._row(tokens)
        self._entry(x, entry)
        self._rms_norm(entry, self._entry_norm, self._eps, entry)
        self._rotate(entry.unsqueeze(1)[..., self._plain :], positions, None, self._cos_sin, True)
        self._write(entry, self._cache, batch.slots[self._group])
        attended, lse = self._attended(tokens), self._total(tokens)
        batch.apart(self._attend, x, compressed_query, heads, (attended, lse))
        self._apply_sinks(attended.view(shape), lse, self._sinks)
        self._rotate(attended.view(shape)[..., self._plain :], positions, None, self._turning_back, True)
        grouped = self._grouped(tokens)
        self._output_groups(attended.view(tokens, grouped.shape[1], -1), grouped)
        self._output(self._flat_grouped(tokens), out)

    def _attend(
        self,
        batch: ForwardBatch,
        x: torch.Tensor,
        compressed_query: torch.Tensor,
        q: torch.Tensor,
        written: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Writes ``written``, float32 [T, heads * width] and its lse [T, heads], of the window and the entries."""
        tokens, (attended, total) = x.shape[0], written
        nothing, window = q[..., :0], batch.attention[self._group]
        if self._maker is None:
            window.attend_selected(self._place, q, nothing, window.visible, attended.view(q.shape), total)
            return
        partials = self._partials(tokens).view(2, *q.shape)
        lse = self._lse(tokens).view(2, tokens, self._heads)
        window.attend_selected(self._place, q, nothing, window.visible, partials[0], lse[0])
        self._maker.forward(batch, x)
        entries = batch.attention[self._entries]
        chosen = entries.visible if self._indexer is None else self._indexer.forward(batch, x, compressed_query)
        entries.attend_selected(self._entries_place, q, nothing, chosen, partials[1], lse[1])
        self._merge(partials, lse, attended.view(q.shape), total)
