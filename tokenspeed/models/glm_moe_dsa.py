"""GLM 5: a DeepSeek-V3.2 with other dimensions, some of whose layers share the choice of an indexer before them."""

from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.weights import WeightSpec
from tokenspeed.models import deepseek_v32
from tokenspeed.recipes.model_config import ModelConfig


def cache_groups(config: ModelConfig, *, granularity: int) -> tuple[CacheGroupSpec, ...]:
    """As in DeepSeek-V3.2; where layers share a choice, the indexer's keys are a full_history group of their own."""
    return deepseek_v32.cache_groups(config, granularity=granularity)


def weights(config: ModelConfig, *, rank: int, world: int) -> tuple[WeightSpec, ...]:
    """Names, whole shapes and shards, in the order of the forward."""
    return deepseek_v32.weights(config, rank=rank, world=world)


class Model(deepseek_v32.Model):
    """Sparse latent attention in every layer; a dense MLP in the first ones, experts in the others."""
