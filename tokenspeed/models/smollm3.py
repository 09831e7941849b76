"""SmolLM3: the llama shape, of which some layers rotate nothing (arXiv:2501.18795)."""

from tokenspeed.layers.cache_groups import key_value_groups
from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.key_value_decoder import KeyValueDecoder, key_value_decoder_weights
from tokenspeed.layers.weights import Ranks, WeightSpec
from tokenspeed.recipes.model_config import ModelConfig


def cache_groups(config: ModelConfig, *, granularity: int) -> tuple[CacheGroupSpec, ...]:
    """A full_history group over the layers that see every token, a sliding_window group over the others."""
    return key_value_groups(config, granularity=granularity)


def weights(config: ModelConfig, *, rank: int, world: int) -> tuple[WeightSpec, ...]:
    """Names, whole shapes and shards, in the order of the forward."""
    return key_value_decoder_weights(config, Ranks(rank=rank, world=world))


class Model(KeyValueDecoder):
    """The decoder; ``config.unturned_layers`` says which layers rotate nothing."""
