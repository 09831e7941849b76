"""Decoder layers with a norm before and another behind each block (GLM 4, Gemma 3)."""

from dataclasses import dataclass

import torch

from tokenspeed.layers.batch import ForwardBatch
from tokenspeed.layers.decoder import DecoderLayer, FeedForward, Mixer
from tokenspeed.layers.parts import ModelParts
from tokenspeed.layers.weights import Ranks, WeightSpec
from tokenspeed.recipes.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class SandwichNames:
    """What a family's checkpoints call the norms around the mixer and around what stands behind it."""

    before_mixer: str = "input_layernorm"
    behind_mixer: str
    before_feed_forward: str
    behind_feed_forward: str


def sandwich_norm_weights(
    config: ModelConfig, place: str, ranks: Ranks, names: SandwichNames
) -> tuple[list[WeightSpec], list[WeightSpec]]:
    """The norms around the mixer, and those around the rest, of the layer at ``place``."""

    def norms(*each: str) -> list[WeightSpec]:
        return [ranks.whole(f"{place}.{name}.weight", config.hidden_size, offset=config.norm_offset) for name in each]

    return norms(names.before_mixer, names.behind_mixer), norms(names.before_feed_forward, names.behind_feed_forward)


class SandwichLayer(DecoderLayer):
    """Two blocks, each between two RMS norms, over the residual stream."""

    def __init__(
        self, parts: ModelParts, place: str, mixer: Mixer, feed_forward: FeedForward, names: SandwichNames
    ) -> None:
        super().__init__(parts, place, mixer, feed_forward, norms=(names.before_mixer, names.before_feed_forward))
        self._behind_mixer = parts.vector(f"{place}.{names.behind_mixer}.weight")
        self._behind_feed_forward = parts.vector(f"{place}.{names.behind_feed_forward}.weight")

    def forward(
        self, batch: ForwardBatch, residual: torch.Tensor, hidden: torch.Tensor, normed: torch.Tensor, *, first: bool
    ) -> None:
        """As DecoderLayer's: ``hidden`` is what the last norm leaves."""
        if first:
            self._rms_norm(residual, self._input_norm, self._eps, normed)
        else:
            self._add_rms_norm(hidden, residual, self._input_norm, self._eps, normed)
        self.mixer.forward(batch, normed, hidden)
        self._rms_norm(hidden, self._behind_mixer, self._eps, hidden)
        self._add_rms_norm(hidden, residual, self._middle_norm, self._eps, normed)
        self._feed_forward.forward(normed, hidden)
        self._rms_norm(hidden, self._behind_feed_forward, self._eps, hidden)
