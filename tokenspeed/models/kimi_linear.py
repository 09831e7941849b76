"""Kimi Linear (arXiv:2510.26692): layers of Kimi Delta Attention, every few of latent attention without positions,
experts as DeepSeek-V3 has them."""

from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.cache_groups import latent_group
from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.decoder import Mixer
from tokenspeed.layers.experts import ExpertNames
from tokenspeed.layers.hybrid_decoder import hybrid_weights, make_hybrid_mixer
from tokenspeed.layers.kda import KimiDeltaAttention, kda_weights
from tokenspeed.layers.key_value_decoder import KeyValueDecoder
from tokenspeed.layers.latent_attention import LatentAttention, latent_attention_spec, latent_attention_weights
from tokenspeed.layers.parts import ModelParts
from tokenspeed.layers.recurrent import state_attention_spec, state_group
from tokenspeed.layers.weights import Ranks, WeightSpec
from tokenspeed.recipes.model_config import ModelConfig

_NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


def cache_groups(config: ModelConfig, *, granularity: int) -> tuple[CacheGroupSpec, ...]:
    """A full_history group of latents over the layers that attend, a group of states over the others."""
    return (latent_group(config, config.attending_layers, granularity=granularity), state_group(config))


def weights(config: ModelConfig, *, rank: int, world: int) -> tuple[WeightSpec, ...]:
    """Names, whole shapes and shards, in the order of the forward."""
    return hybrid_weights(
        config,
        Ranks(rank=rank, world=world),
        attending=latent_attention_weights,
        linear=("self_attn", kda_weights),
        names=_NAMES,
    )


class Model(KeyValueDecoder):
    """Latent attention in some layers, Kimi Delta Attention in the others."""

    names = _NAMES

    def make_mixer(self, parts: ModelParts, index: int) -> Mixer:
        return make_hybrid_mixer(parts, index, attending=LatentAttention, linear=("self_attn", KimiDeltaAttention))

    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return (latent_attention_spec(self.config, self.layers), state_attention_spec())
