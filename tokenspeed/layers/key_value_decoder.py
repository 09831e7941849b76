"""Decoders with grouped-query attention in every layer, and a dense MLP or a mixture of experts behind it."""

from collections.abc import Sequence
from typing import cast

import torch

from tokenspeed.layers.attention import GroupedQueryAttention, attention_weights
from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.decoder import Decoder, DecoderLayer, FeedForward, Mixer, decoder_weights, norm_weights
from tokenspeed.layers.experts import ExpertNames, Mixture, experts_weights
from tokenspeed.layers.mlp import GatedMlp, mlp_weights
from tokenspeed.layers.parts import ModelParts
from tokenspeed.layers.sandwich import SandwichNames, sandwich_norm_weights
from tokenspeed.layers.weights import Ranks, WeightSpec
from tokenspeed.recipes.model_config import ModelConfig


def key_value_decoder_weights(
    config: ModelConfig, ranks: Ranks, names: ExpertNames | None = None, *, norms: SandwichNames | None = None
) -> tuple[WeightSpec, ...]:
    """Every weight of the model, in the order of the forward. ``norms``: of layers with norms behind blocks too."""
    specs: list[WeightSpec] = []
    for index in range(config.num_layers):
        place = f"model.layers.{index}"
        if norms is None:
            first, second = ([spec] for spec in norm_weights(config, place, ranks))
        else:
            first, second = sandwich_norm_weights(config, place, ranks, norms)
        specs += [*first, *attention_weights(config, f"{place}.self_attn", ranks), *second]
        specs += feed_forward_weights(config, index, feed_forward_place(config, index, names), ranks, names)
    return decoder_weights(config, ranks, specs)


def feed_forward_place(config: ModelConfig, index: int, names: ExpertNames | None) -> str:
    """Where the checkpoint has what stands behind the attention of layer ``index``."""
    experts = config.experts
    mixture = names.block if names is not None and experts is not None and index in experts.layers else "mlp"
    return f"model.layers.{index}.{mixture}"


def feed_forward_weights(
    config: ModelConfig, index: int, place: str, ranks: Ranks, names: ExpertNames | None = None
) -> list[WeightSpec]:
    """Those of layer ``index``'s mixture where it has one, else of its dense MLP."""
    experts = config.experts
    if experts is not None and index in experts.layers:
        return experts_weights(experts, place, config.hidden_size, ranks, names)
    return mlp_weights(
        place, config.hidden_size, config.intermediate_size, ranks, biases=config.mlp_bias, joined=config.joined_gate_up
    )


def make_feed_forward(parts: ModelParts, index: int, place: str, names: ExpertNames | None = None) -> FeedForward:
    """The mixture of layer ``index`` where it has one, else its dense MLP."""
    config, experts = parts.config, parts.config.experts
    if experts is not None and index in experts.layers:
        return Mixture(parts, experts, place, names=names)
    return GatedMlp(parts, place, config.intermediate_size)


def key_value_attention_specs(
    config: ModelConfig, sinks: Sequence[torch.Tensor | None] = ()
) -> tuple[AttentionSpec, ...]:
    """One for each group of key_value_groups; ``sinks`` of each layer, empty where there are none."""

    def spec(layers: Sequence[int]) -> AttentionSpec:
        held = [sinks[layer] for layer in layers] if sinks else []
        return AttentionSpec(
            backend="paged_gqa",
            num_heads=config.num_heads,
            scale=config.attention_scale or config.head_dim**-0.5,
            soft_cap=config.soft_cap,
            sinks=tuple(sink for sink in held if sink is not None),
        )

    full = [layer for layer in config.attending_layers if layer not in config.sliding_layers]
    return tuple(spec(layers) for layers in (full, config.sliding_layers) if layers)


class KeyValueDecoder(Decoder):
    """The decoder as it is; architectures that differ override what they do otherwise."""

    names: ExpertNames | None = None
    """What the checkpoints call the parts of a mixture, where that is not ExpertNames' own."""

    def make_layer(self, parts: ModelParts, index: int) -> DecoderLayer:
        place = f"model.layers.{index}"
        return DecoderLayer(parts, place, self.make_mixer(parts, index), self.make_feed_forward(parts, index))

    def make_mixer(self, parts: ModelParts, index: int) -> Mixer:
        """The attention of layer ``index``."""
        return GroupedQueryAttention(parts, f"model.layers.{index}.self_attn", rope=parts.config.rope_of(index))

    def make_feed_forward(self, parts: ModelParts, index: int) -> FeedForward:
        """What stands behind it."""
        return make_feed_forward(parts, index, feed_forward_place(parts.config, index, self.names), self.names)

    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        mixers = [cast(GroupedQueryAttention, layer.mixer) for layer in self.layers]
        return key_value_attention_specs(self.config, [mixer.sinks for mixer in mixers])
