"""Gemma 3 (arXiv:2503.19786): norms before and behind both blocks; most layers have windows, with a rotary embedding of
their own."""

from tokenspeed.layers.cache_groups import key_value_groups
from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.key_value_decoder import KeyValueDecoder, key_value_decoder_weights
from tokenspeed.layers.parts import ModelParts
from tokenspeed.layers.sandwich import SandwichLayer, SandwichNames
from tokenspeed.layers.weights import Ranks, WeightSpec
from tokenspeed.recipes.model_config import ModelConfig

NORMS = SandwichNames(
    behind_mixer="post_attention_layernorm",
    before_feed_forward="pre_feedforward_layernorm",
    behind_feed_forward="post_feedforward_layernorm",
)


def cache_groups(config: ModelConfig, *, granularity: int) -> tuple[CacheGroupSpec, ...]:
    """A full_history group over the layers that see every token, a sliding_window group over the others."""
    return key_value_groups(config, granularity=granularity)


def weights(config: ModelConfig, *, rank: int, world: int) -> tuple[WeightSpec, ...]:
    """Names, whole shapes and shards, in the order of the forward."""
    return key_value_decoder_weights(config, Ranks(rank=rank, world=world), norms=NORMS)


class Model(KeyValueDecoder):
    """The decoder between its norms; scaled embeddings, gelu and the offsets of norms are in ``config``."""

    def make_layer(self, parts: ModelParts, index: int) -> SandwichLayer:
        mixer, feed_forward = self.make_mixer(parts, index), self.make_feed_forward(parts, index)
        return SandwichLayer(parts, f"model.layers.{index}", mixer, feed_forward, NORMS)
