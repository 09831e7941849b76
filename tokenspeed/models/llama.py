"""Llama and what is built like it (SmolLM2, Llama 3): grouped-query attention, gated MLP, RMS norms, rotary."""

from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.dense_decoder import DenseDecoder
from tokenspeed.layers.dense_weights import dense_decoder_cache_groups, dense_decoder_weights
from tokenspeed.layers.weights import WeightSpec
from tokenspeed.recipes.model_config import ModelConfig


def cache_groups(config: ModelConfig, *, granularity: int) -> tuple[CacheGroupSpec, ...]:
    """One full_history group over all layers: keys and values of every token."""
    return dense_decoder_cache_groups(config, granularity=granularity)


def weights(config: ModelConfig, *, rank: int, world: int) -> tuple[WeightSpec, ...]:
    """Names, whole shapes and shards, in the order of the forward."""
    return dense_decoder_weights(config, rank=rank, world=world)


class Model(DenseDecoder):
    """The dense decoder as it is; forward(batch) and logits(hidden, rows) are inherited."""
