"""Decoders of which some layers attend and the others keep a state."""

from collections.abc import Callable

from tokenspeed.layers.decoder import Mixer, decoder_weights, norm_weights
from tokenspeed.layers.experts import ExpertNames
from tokenspeed.layers.key_value_decoder import feed_forward_place, feed_forward_weights
from tokenspeed.layers.parts import ModelParts
from tokenspeed.layers.recurrent import linear_of
from tokenspeed.layers.weights import Ranks, WeightSpec
from tokenspeed.recipes.model_config import ModelConfig

MixerWeights = Callable[[ModelConfig, str, Ranks], list[WeightSpec]]
"""The weights of a layer's mixer at its place."""


def hybrid_weights(
    config: ModelConfig,
    ranks: Ranks,
    *,
    attending: MixerWeights,
    linear: tuple[str, MixerWeights],
    names: ExpertNames | None = None,
) -> tuple[WeightSpec, ...]:
    """Every weight of the model, in the order of the forward. ``linear``: what a layer calls its mixer with a state,
    and that one's weights."""
    name, weights = linear
    specs: list[WeightSpec] = []
    for index in range(config.num_layers):
        place = f"model.layers.{index}"
        before, between = norm_weights(config, place, ranks)
        keeps_state = index in linear_of(config).layers
        mixer = (
            weights(config, f"{place}.{name}", ranks) if keeps_state else attending(config, f"{place}.self_attn", ranks)
        )
        specs += [before, *mixer, between]
        specs += feed_forward_weights(config, index, feed_forward_place(config, index, names), ranks, names)
    return decoder_weights(config, ranks, specs)


def make_hybrid_mixer(
    parts: ModelParts,
    index: int,
    *,
    attending: Callable[[ModelParts, str], Mixer],
    linear: tuple[str, Callable[[ModelParts, str], Mixer]],
) -> Mixer:
    """The mixer of layer ``index``; the arguments as those of hybrid_weights."""
    name, make = linear
    place = f"model.layers.{index}"
    return (
        make(parts, f"{place}.{name}")
        if index in linear_of(parts.config).layers
        else attending(parts, f"{place}.self_attn")
    )
