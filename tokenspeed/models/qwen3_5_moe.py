"""The text model of the Qwen3.5 to 3.8 line with experts in every layer, one of them shared; no pictures yet."""

from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.weights import WeightSpec
from tokenspeed.models import qwen3_5
from tokenspeed.recipes.model_config import ModelConfig


def cache_groups(config: ModelConfig, *, granularity: int) -> tuple[CacheGroupSpec, ...]:
    """A full_history group over the layers that attend, a group of states over the others."""
    return qwen3_5.cache_groups(config, granularity=granularity)


def weights(config: ModelConfig, *, rank: int, world: int) -> tuple[WeightSpec, ...]:
    """Names, whole shapes and shards, in the order of the forward."""
    return qwen3_5.weights(config, rank=rank, world=world)


class Model(qwen3_5.Model):
    """The same decoder; ``config.experts`` is set."""
