"""ERNIE 4.5's text models with experts: rotary pairs side by side; behind the first layers experts, and shared ones."""

from tokenspeed.layers.cache_groups import key_value_groups
from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.experts import ExpertNames
from tokenspeed.layers.key_value_decoder import KeyValueDecoder, key_value_decoder_weights
from tokenspeed.layers.weights import Ranks, WeightSpec
from tokenspeed.recipes.model_config import ModelConfig

NAMES = ExpertNames(correction="moe_statics.e_score_correction_bias", correction_row=True)


def cache_groups(config: ModelConfig, *, granularity: int) -> tuple[CacheGroupSpec, ...]:
    """One full_history group over all layers: keys and values of every token."""
    return key_value_groups(config, granularity=granularity)


def weights(config: ModelConfig, *, rank: int, world: int) -> tuple[WeightSpec, ...]:
    """Names, whole shapes and shards, in the order of the forward."""
    return key_value_decoder_weights(config, Ranks(rank=rank, world=world), NAMES)


class Model(KeyValueDecoder):
    """The decoder; ``config.rope.paired`` and ``config.experts`` are set."""

    names = NAMES
