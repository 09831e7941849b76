"""Gemma 2 (arXiv:2408.00118): Gemma 3's decoder with soft caps, no norms over heads, windows in every other layer."""

from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.weights import WeightSpec
from tokenspeed.models import gemma3
from tokenspeed.recipes.model_config import ModelConfig


def cache_groups(config: ModelConfig, *, granularity: int) -> tuple[CacheGroupSpec, ...]:
    """A full_history group over the layers that see every token, a sliding_window group over the others."""
    return gemma3.cache_groups(config, granularity=granularity)


def weights(config: ModelConfig, *, rank: int, world: int) -> tuple[WeightSpec, ...]:
    """Names, whole shapes and shards, in the order of the forward."""
    return gemma3.weights(config, rank=rank, world=world)


class Model(gemma3.Model):
    """The same decoder; ``config.soft_cap`` and ``config.logit_soft_cap`` are set."""
