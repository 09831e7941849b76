"""Qwen3-Next: three layers of Gated DeltaNet to one of gated attention, experts behind each, one shared."""

from functools import partial

from tokenspeed.layers.attention import GroupedQueryAttention, attention_weights
from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.cache_groups import key_value_groups
from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.decoder import Mixer
from tokenspeed.layers.experts import ExpertNames
from tokenspeed.layers.gated_delta import GatedDeltaNet, gated_delta_weights
from tokenspeed.layers.hybrid_decoder import hybrid_weights, make_hybrid_mixer
from tokenspeed.layers.key_value_decoder import KeyValueDecoder, key_value_attention_specs
from tokenspeed.layers.parts import ModelParts
from tokenspeed.layers.recurrent import state_attention_spec, state_group
from tokenspeed.layers.weights import Ranks, WeightSpec
from tokenspeed.recipes.model_config import ModelConfig

_NAMES = ExpertNames(shared="shared_expert")


def cache_groups(config: ModelConfig, *, granularity: int) -> tuple[CacheGroupSpec, ...]:
    """A full_history group over the layers that attend, a group of states over the others."""
    return (*key_value_groups(config, granularity=granularity), state_group(config))


def weights(config: ModelConfig, *, rank: int, world: int) -> tuple[WeightSpec, ...]:
    """Names, whole shapes and shards, in the order of the forward."""
    return hybrid_weights(
        config,
        Ranks(rank=rank, world=world),
        attending=attention_weights,
        linear=("linear_attn", partial(gated_delta_weights, by_key_heads=True)),
        names=_NAMES,
    )


class Model(KeyValueDecoder):
    """Gated attention in some layers, Gated DeltaNet in the others."""

    names = _NAMES

    def make_mixer(self, parts: ModelParts, index: int) -> Mixer:
        return make_hybrid_mixer(parts, index, attending=GroupedQueryAttention, linear=("linear_attn", GatedDeltaNet))

    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return (*key_value_attention_specs(self.config), state_attention_spec())
