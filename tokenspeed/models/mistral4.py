"""Mistral Small 4: DeepSeek-V3's decoder with experts by softmax that lie in one tensor, and queries that grow."""

from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.experts import ExpertNames
from tokenspeed.layers.weights import WeightSpec
from tokenspeed.models import deepseek_v3
from tokenspeed.recipes.model_config import ModelConfig

NAMES = ExpertNames(stacked="rows")


def cache_groups(config: ModelConfig, *, granularity: int) -> tuple[CacheGroupSpec, ...]:
    """One full_history group over all layers: the latent and the rotated key of every token."""
    return deepseek_v3.cache_groups(config, granularity=granularity)


def weights(config: ModelConfig, *, rank: int, world: int) -> tuple[WeightSpec, ...]:
    """Names, whole shapes and shards, in the order of the forward."""
    return deepseek_v3.weights(config, rank=rank, world=world, names=NAMES)


class Model(deepseek_v3.Model):
    """The same decoder; ``config.latent.growth`` is set."""

    names = NAMES
