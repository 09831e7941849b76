"""The table of rotary embeddings, with the scalings that checkpoints ask for."""

import torch

from tokenspeed.recipes.model_config import RopeConfig
from tokenspeed_kernel.ops.rotary_tables import (
    LinearScaling,
    Llama3Scaling,
    RotaryScaling,
    YarnScaling,
    rotary_frequencies,
    rotary_magnitude,
    yarn_magnitude,
)


def rotary_table(
    rope: RopeConfig, *, head_dim: int, num_positions: int, factors: torch.Tensor | None = None
) -> torch.Tensor:
    """float32 [num_positions, R]: cosines in the first half of the columns, sines in the second; R is the share of
    ``head_dim`` that is rotated.

    ``factors`` float32 [R / 2] divide the frequencies (llama 3.1 files in GGUF carry them as a tensor).
    Raises ValueError for an unknown kind. Angles are products in float32, as the reference implementations have them.
    """
    if rope.kind == "none":
        half = rope.rotated(head_dim) // 2
        return torch.cat([torch.ones(1, half), torch.zeros(1, half)], dim=1)
    scaling = scaling_of(rope)
    frequencies = rotary_frequencies(rope.theta, rope.rotated(head_dim), scaling)
    if factors is not None:
        frequencies = frequencies / factors
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=1) * rotary_magnitude(scaling)


def scaling_of(rope: RopeConfig) -> RotaryScaling:
    """The scaling of ``rope`` as kernels' tables know it; ValueError for an unknown kind."""
    values = rope.parameters
    match rope.kind:
        case "default":
            return None
        case "dynamic":
            # It begins beyond the context that the model was made for, which no sequence here passes. What it does
            # there changes with the length of the sequence, and cached keys do not: a table for the longest length
            # would be wrong for all shorter ones, and one that grows for every key cached before.
            return None
        case "linear":
            return LinearScaling(values["factor"])
        case "llama3":
            return Llama3Scaling(
                factor=values["factor"],
                low_freq_factor=values["low_freq_factor"],
                high_freq_factor=values["high_freq_factor"],
                original_positions=int(values["original_max_position_embeddings"]),
            )
        case "yarn":
            return YarnScaling(
                factor=values["factor"],
                original_positions=int(values["original_max_position_embeddings"]),
                beta_fast=values["beta_fast"],
                beta_slow=values["beta_slow"],
                truncate=bool(values["truncate"]),
                attention_factor=values["attention_factor"] or None,
                mscale=values["mscale"],
                mscale_all_dim=values["mscale_all_dim"],
            )
    raise ValueError(f"rotary scaling {rope.kind!r} is unknown; it is default, dynamic, linear, llama3 or yarn")


def score_factor(rope: RopeConfig) -> float:
    """What the scores of latent attention are multiplied by besides: the square of DeepSeek's mscale_all_dim factor."""
    share = rope.parameters.get("mscale_all_dim", 0.0)
    return yarn_magnitude(rope.parameters["factor"], share) ** 2 if rope.kind == "yarn" and share else 1.0
