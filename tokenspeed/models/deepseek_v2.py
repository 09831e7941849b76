"""DeepSeek-V2 and V2-Lite (arXiv:2405.04434): DeepSeek-V3's decoder with experts by softmax."""

from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.weights import WeightSpec
from tokenspeed.models import deepseek_v3
from tokenspeed.recipes.model_config import ModelConfig


def cache_groups(config: ModelConfig, *, granularity: int) -> tuple[CacheGroupSpec, ...]:
    """One full_history group over all layers: the latent and the rotated key of every token."""
    return deepseek_v3.cache_groups(config, granularity=granularity)


def weights(config: ModelConfig, *, rank: int, world: int) -> tuple[WeightSpec, ...]:
    """Names, whole shapes and shards, in the order of the forward."""
    return deepseek_v3.weights(config, rank=rank, world=world)


class Model(deepseek_v3.Model):
    """The same decoder; ``config.experts`` says how experts are chosen."""
