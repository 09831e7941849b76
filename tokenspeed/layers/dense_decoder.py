"""A decoder of equal dense layers: the forward over all of them, and logits for the rows that need them."""

from collections.abc import Sequence

import torch

from tokenspeed.layers.batch import ForwardBatch, LayerCache
from tokenspeed.layers.decoder_layer import DecoderLayer, LayerBuffers
from tokenspeed.layers.kernels import KernelBinder
from tokenspeed.layers.linear import Linear, StackedOutputs
from tokenspeed.layers.rotary import rotary_table
from tokenspeed.layers.shard import Shard
from tokenspeed.layers.weights import LoadedWeights
from tokenspeed.recipes.model_config import ModelConfig


class DenseDecoder:
    """Embedding, layers, final norm and output head over buffers that are allocated once.

    ``max_tokens`` bounds the tokens of a forward, ``max_logit_rows`` the rows of one ``logits`` call, ``max_positions``
    the length of a sequence. Buffers are float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: LoadedWeights,
        kernels: KernelBinder,
        *,
        kv_dtype: torch.dtype,
        max_tokens: int,
        max_logit_rows: int,
        max_positions: int,
    ) -> None:
        embedding = weights.matrices["model.embed_tokens.weight"]
        head = embedding if config.tie_word_embeddings else weights.matrices["lm_head.weight"]
        cos_sin = rotary_table(
            config.rope, head_dim=config.head_dim, num_positions=max_positions, factors=weights.rotary_factors
        )
        self._config = config
        self._embed = kernels.embedding(embedding)
        self.layers = [
            DecoderLayer(index, config, weights, kernels, cos_sin=cos_sin, kv_dtype=kv_dtype)
            for index in range(config.num_layers)
        ]
        self._norm = vector = weights.vectors["model.norm.weight"]
        self._add_rms_norm = kernels.fused_add_rms_norm()
        self._head = Linear(kernels, head, None, Shard(kind="rows", rank=0, world=1)).forward
        hidden, keys = config.hidden_size, config.num_kv_heads
        self._qkv_shapes = ((config.num_heads, config.head_dim), (keys, config.head_dim), (keys, config.head_dim))
        self._qkv_width = (config.num_heads + 2 * keys) * config.head_dim
        self._residual, self._hidden, self._normed = (torch.zeros(max_tokens, hidden) for _ in range(3))
        self._qkv = torch.zeros(max_tokens * self._qkv_width)
        self._heads = torch.zeros(max_tokens, config.num_heads, config.head_dim)
        self._gate_up = torch.zeros(max_tokens * 2 * config.intermediate_size)
        self._activated = torch.zeros(max_tokens, config.intermediate_size)
        self._gathered = torch.zeros(max_logit_rows, hidden)
        self._logits = torch.zeros(max_logit_rows, config.vocab_size)
        self._views: dict[int, LayerBuffers] = {}
        self._kept_views = max_logit_rows
        self.workspace_bytes = cos_sin.nbytes + vector.nbytes + sum(
            buffer.nbytes
            for buffer in (
                self._residual, self._hidden, self._normed, self._qkv, self._heads, self._gate_up, self._activated,
                self._gathered, self._logits,
            )
        )  # fmt: skip

    def bind_cache(self, caches: Sequence[LayerCache]) -> None:
        """Gives each layer its key and value cache; ``caches`` in the order of the layers."""
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.bind_cache(cache)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Runs all layers and the last norm; returns float32 [T, H], a view that the next forward overwrites."""
        work = self._buffers(batch.input_ids.shape[0])
        self._embed(batch.input_ids, work.residual)
        for layer in self.layers:
            layer.forward(batch, work)
        self._add_rms_norm(work.hidden, work.residual, self._norm, self._config.rms_norm_eps, work.normed)
        return work.normed

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Logits float32 [S, V] of the tokens ``rows`` (int64 [S]) of ``hidden``; overwritten by the next call."""
        count = rows.shape[0]
        gathered, logits = self._gathered[:count], self._logits[:count]
        torch.index_select(hidden, 0, rows, out=gathered)
        self._head(gathered, logits)
        return logits

    def _buffers(self, tokens: int) -> LayerBuffers:
        """Views for ``tokens`` tokens; those of decode sizes are made once and keep their addresses."""
        views = self._views.get(tokens)
        if views is None:
            inner = (self._config.intermediate_size,)
            heads = self._heads[:tokens]
            views = LayerBuffers(
                residual=self._residual[:tokens],
                hidden=self._hidden[:tokens],
                normed=self._normed[:tokens],
                qkv=StackedOutputs.of(self._qkv, tokens, self._qkv_shapes),
                heads=heads,
                heads_flat=heads.flatten(1),
                gate_up=StackedOutputs.of(self._gate_up, tokens, (inner, inner)),
                activated=self._activated[:tokens],
            )
            if tokens <= self._kept_views:
                self._views[tokens] = views
        return views
