"""Decoders with grouped-query attention in every layer, and a dense MLP or a mixture of experts behind it."""

from tokenspeed.layers.attention import GroupedQueryAttention, attention_weights
from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.decoder import Decoder, DecoderLayer, FeedForward, decoder_weights, norm_weights
from tokenspeed.layers.experts import ExpertNames, Mixture, experts_weights
from tokenspeed.layers.mlp import GatedMlp, mlp_weights
from tokenspeed.layers.parts import ModelParts
from tokenspeed.layers.weights import Ranks, WeightSpec
from tokenspeed.recipes.model_config import ModelConfig


def key_value_decoder_weights(
    config: ModelConfig, ranks: Ranks, names: ExpertNames | None = None
) -> tuple[WeightSpec, ...]:
    """Every weight of the model, in the order of the forward."""
    specs: list[WeightSpec] = []
    for index in range(config.num_layers):
        place = f"model.layers.{index}"
        before, between = norm_weights(config, place, ranks)
        specs += [before, *attention_weights(config, f"{place}.self_attn", ranks), between]
        specs += feed_forward_weights(config, index, f"{place}.mlp", ranks, names)
    return decoder_weights(config, ranks, specs)


def feed_forward_weights(
    config: ModelConfig, index: int, place: str, ranks: Ranks, names: ExpertNames | None = None
) -> list[WeightSpec]:
    """Those of layer ``index``'s mixture where it has one, else of its dense MLP."""
    experts = config.experts
    if experts is not None and index in experts.layers:
        return experts_weights(experts, place, config.hidden_size, ranks, names)
    return mlp_weights(place, config.hidden_size, config.intermediate_size, ranks, biases=config.mlp_bias)


def make_feed_forward(parts: ModelParts, index: int, place: str, names: ExpertNames | None = None) -> FeedForward:
    """The mixture of layer ``index`` where it has one, else its dense MLP."""
    config, experts = parts.config, parts.config.experts
    if experts is not None and index in experts.layers:
        return Mixture(parts, experts, place, names=names)
    return GatedMlp(parts, place, config.intermediate_size)


def key_value_attention_specs(config: ModelConfig) -> tuple[AttentionSpec, ...]:
    """One for each group of key_value_groups."""
    spec = AttentionSpec(backend="paged_gqa", num_heads=config.num_heads, scale=config.head_dim**-0.5)
    some_see_all = len(config.sliding_layers) < config.num_layers
    return (spec,) * (int(some_see_all) + int(bool(config.sliding_layers)))


class KeyValueDecoder(Decoder):
    """The decoder as it is; architectures that differ override what they do otherwise."""

    def make_layer(self, parts: ModelParts, index: int) -> DecoderLayer:
        place = f"model.layers.{index}"
        mixer = GroupedQueryAttention(parts, f"{place}.self_attn")
        return DecoderLayer(parts, place, mixer, make_feed_forward(parts, index, f"{place}.mlp"))

    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return key_value_attention_specs(self.config)
