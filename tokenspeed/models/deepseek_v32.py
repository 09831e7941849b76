"""DeepSeek-V3.2 (2025): a DeepSeek-V3 whose attention reads the tokens that an indexer chooses."""

from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.cache_groups import sparse_latent_groups
from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.decoder import Decoder, DecoderLayer, decoder_weights, norm_weights
from tokenspeed.layers.key_value_decoder import feed_forward_weights, make_feed_forward
from tokenspeed.layers.parts import ModelParts
from tokenspeed.layers.sparse_attention import (
    SparseLatentAttention,
    sparse_attention_specs,
    sparse_attention_weights,
)
from tokenspeed.layers.weights import Ranks, WeightSpec
from tokenspeed.recipes.model_config import ModelConfig


def cache_groups(config: ModelConfig, *, granularity: int) -> tuple[CacheGroupSpec, ...]:
    """One full_history group over all layers: the latent, the rotated key and the indexer's key of every token."""
    return sparse_latent_groups(config, granularity=granularity)


def weights(config: ModelConfig, *, rank: int, world: int) -> tuple[WeightSpec, ...]:
    """Names, whole shapes and shards, in the order of the forward."""
    ranks = Ranks(rank=rank, world=world)
    specs: list[WeightSpec] = []
    for index in range(config.num_layers):
        place = f"model.layers.{index}"
        before, between = norm_weights(config, place, ranks)
        specs += [before, *sparse_attention_weights(config, index, f"{place}.self_attn", ranks), between]
        specs += feed_forward_weights(config, index, f"{place}.mlp", ranks)
    return decoder_weights(config, ranks, specs)


class Model(Decoder):
    """Sparse latent attention in every layer; a dense MLP in the first ones, experts in the others."""

    def make_layer(self, parts: ModelParts, index: int) -> DecoderLayer:
        place = f"model.layers.{index}"
        mixer = SparseLatentAttention(parts, index, f"{place}.self_attn")
        return DecoderLayer(parts, place, mixer, make_feed_forward(parts, index, f"{place}.mlp"))

    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return sparse_attention_specs(self.config)
