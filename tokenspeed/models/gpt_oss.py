"""gpt-oss (arXiv:2508.10925): sinks in every layer, windows in every other one, a mixture of experts with biases."""

from tokenspeed.layers.cache_groups import key_value_groups
from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.experts import ExpertNames
from tokenspeed.layers.key_value_decoder import KeyValueDecoder, key_value_decoder_weights
from tokenspeed.layers.weights import Ranks, WeightSpec
from tokenspeed.recipes.model_config import ModelConfig

NAMES = ExpertNames(router="router", stacked="columns", alternating=True)


def cache_groups(config: ModelConfig, *, granularity: int) -> tuple[CacheGroupSpec, ...]:
    """A full_history group over the layers that see every token, a sliding_window group over the others."""
    return key_value_groups(config, granularity=granularity)


def weights(config: ModelConfig, *, rank: int, world: int) -> tuple[WeightSpec, ...]:
    """Names, whole shapes and shards, in the order of the forward."""
    return key_value_decoder_weights(config, Ranks(rank=rank, world=world), NAMES)


class Model(KeyValueDecoder):
    """The decoder; ``config.sinks`` and ``config.experts`` are set."""

    names = NAMES
