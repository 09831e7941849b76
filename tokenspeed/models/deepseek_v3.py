"""DeepSeek-V3 (arXiv:2412.19437), R1, V3.1: latent attention, experts in groups, a shared one."""

from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.cache_groups import latent_group
from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.decoder import Decoder, DecoderLayer, decoder_weights, norm_weights
from tokenspeed.layers.experts import ExpertNames
from tokenspeed.layers.key_value_decoder import feed_forward_weights, make_feed_forward
from tokenspeed.layers.latent_attention import LatentAttention, latent_attention_spec, latent_attention_weights
from tokenspeed.layers.parts import ModelParts
from tokenspeed.layers.weights import Ranks, WeightSpec
from tokenspeed.recipes.model_config import ModelConfig


def cache_groups(config: ModelConfig, *, granularity: int) -> tuple[CacheGroupSpec, ...]:
    """One full_history group over all layers: the latent and the rotated key of every token."""
    return (latent_group(config, range(config.num_layers), granularity=granularity),)


def weights(config: ModelConfig, *, rank: int, world: int, names: ExpertNames | None = None) -> tuple[WeightSpec, ...]:
    """Names, whole shapes and shards, in the order of the forward."""
    ranks = Ranks(rank=rank, world=world)
    specs: list[WeightSpec] = []
    for index in range(config.num_layers):
        place = f"model.layers.{index}"
        before, between = norm_weights(config, place, ranks)
        specs += [before, *latent_attention_weights(config, f"{place}.self_attn", ranks), between]
        specs += feed_forward_weights(config, index, f"{place}.mlp", ranks, names)
    return decoder_weights(config, ranks, specs)


class Model(Decoder):
    """Latent attention in every layer; a dense MLP in the first ones, experts in the others.

    Attributes:
        names: what the checkpoints call the parts of a mixture, where that is not ExpertNames' own.
    """

    names: ExpertNames | None = None

    def make_layer(self, parts: ModelParts, index: int) -> DecoderLayer:
        place = f"model.layers.{index}"
        mixer = LatentAttention(parts, f"{place}.self_attn")
        return DecoderLayer(parts, place, mixer, make_feed_forward(parts, index, f"{place}.mlp", self.names))

    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return (latent_attention_spec(self.config, self.layers),)
