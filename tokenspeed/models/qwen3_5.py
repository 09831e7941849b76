"""The dense text model of the Qwen3.5 to 3.8 line: Qwen3-Next's layers, with projections of their own; no pictures
yet."""

from functools import partial

from tokenspeed.layers.attention import attention_weights
from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.experts import ExpertNames
from tokenspeed.layers.gated_delta import gated_delta_weights
from tokenspeed.layers.hybrid_decoder import hybrid_weights
from tokenspeed.layers.weights import Ranks, WeightSpec
from tokenspeed.models import qwen3_next
from tokenspeed.recipes.model_config import ModelConfig


def cache_groups(config: ModelConfig, *, granularity: int) -> tuple[CacheGroupSpec, ...]:
    """A full_history group over the layers that attend, a group of states over the others."""
    return qwen3_next.cache_groups(config, granularity=granularity)


def weights(config: ModelConfig, *, rank: int, world: int) -> tuple[WeightSpec, ...]:
    """Names, whole shapes and shards, in the order of the forward."""
    return hybrid_weights(
        config,
        Ranks(rank=rank, world=world),
        attending=attention_weights,
        linear=("linear_attn", partial(gated_delta_weights, by_key_heads=False)),
        names=ExpertNames(shared="shared_expert"),
    )


class Model(qwen3_next.Model):
    """The same decoder; the layers see by their weights which projections they have."""
