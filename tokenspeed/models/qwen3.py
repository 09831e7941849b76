"""Qwen3 dense: the llama shape with an RMS norm over each head of q and k before the rotary embedding.

A configuration may give some of the layers a sliding window.
"""

from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.dense_decoder import DenseDecoder
from tokenspeed.layers.dense_weights import dense_decoder_cache_groups, dense_decoder_weights
from tokenspeed.layers.weights import WeightSpec
from tokenspeed.recipes.model_config import ModelConfig


def cache_groups(config: ModelConfig, *, granularity: int) -> tuple[CacheGroupSpec, ...]:
    """A full_history group over the layers that see every token, a sliding_window group over the others."""
    return dense_decoder_cache_groups(config, granularity=granularity)


def weights(config: ModelConfig, *, rank: int, world: int) -> tuple[WeightSpec, ...]:
    """Names, whole shapes and shards, in the order of the forward."""
    return dense_decoder_weights(config, rank=rank, world=world)


class Model(DenseDecoder):
    """The dense decoder; ``config.qk_norm`` is set, so that weights and prologue have the head norms."""
