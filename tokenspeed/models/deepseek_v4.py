"""DeepSeek-V4 Pro and Flash (2026): attention over a window and compressed entries, residual streams, experts."""

import torch

from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.batch import ForwardBatch
from tokenspeed.layers.cache_groups import compressed_groups
from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.compressed_attention import (
    CompressedAttention,
    compressed_attention_specs,
    compressed_attention_weights,
)
from tokenspeed.layers.decoder import Decoder, DecoderLayer, decoder_weights
from tokenspeed.layers.experts import ExpertNames, Mixture, experts_of, experts_weights
from tokenspeed.layers.hyper_connections import (
    HyperLayer,
    StreamEnds,
    head_weights,
    stream_weights,
    streams_of,
)
from tokenspeed.layers.parts import ModelParts
from tokenspeed.layers.weights import Ranks, WeightSpec
from tokenspeed.recipes.model_config import ModelConfig

NAMES = ExpertNames(gate="w1", up="w3", down="w2", correction="gate.bias", shared_matrices=("w1", "w3", "w2"))


def cache_groups(config: ModelConfig, *, granularity: int) -> tuple[CacheGroupSpec, ...]:
    """A window over all layers; entries and their inputs of the layers that compress, by either rate."""
    return compressed_groups(config, granularity=granularity)


def weights(config: ModelConfig, *, rank: int, world: int) -> tuple[WeightSpec, ...]:
    """Names as the makers' checkpoints have them, whole shapes and shards, in the order of the forward."""
    ranks, experts = Ranks(rank=rank, world=world), experts_of(config)
    specs: list[WeightSpec] = []
    for index in range(config.num_layers):
        place = f"model.layers.{index}"
        specs += stream_weights(config, place, ranks)
        specs += [ranks.whole(f"{place}.{name}_norm.weight", config.hidden_size) for name in ("attn", "ffn")]
        specs += compressed_attention_weights(config, index, f"{place}.attn", ranks)
        looked_up = config.vocab_size if index in experts.table_layers else 0
        specs += experts_weights(experts, f"{place}.ffn", config.hidden_size, ranks, NAMES, looked_up=looked_up)
    return decoder_weights(config, ranks, [*specs, *head_weights(config, ranks)])


class Model(Decoder):
    """Compressed attention and experts in every layer, over several residual streams."""

    def make_layer(self, parts: ModelParts, index: int) -> DecoderLayer:
        if index == 0:
            self._streams = parts.workspace.rows("streams", streams_of(parts.config).count, parts.config.hidden_size)
            self._ends = StreamEnds(parts)
            self._rms_norm = parts.kernels.rms_norm()
        place = f"model.layers.{index}"
        mixer, experts = CompressedAttention(parts, index, f"{place}.attn"), experts_of(parts.config)
        looked_up = index in experts.table_layers
        return HyperLayer(
            parts, place, mixer, Mixture(parts, experts, f"{place}.ffn", names=NAMES, looked_up=looked_up)
        )

    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return compressed_attention_specs(self.config)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Runs all layers, makes one stream of all, and norms it; as Decoder.forward."""
        tokens = batch.input_ids.shape[0]
        residual, hidden, normed = self._residual(tokens), self._hidden(tokens), self._normed(tokens)
        streams = self._streams(tokens)
        self._embed(batch.input_ids, residual)
        self._ends.begin(residual, streams)
        for layer in self.layers:
            layer.forward(batch, streams, hidden, normed, first=False)
        self._ends.collapse(streams, hidden)
        self._rms_norm(hidden, self._norm, self._eps, normed)
        return normed
