"""The table of rotary embeddings, with the scalings that llama and qwen3 checkpoints use."""

import math

import torch

from tokenspeed.recipes.model_config import RopeConfig


def rotary_table(
    rope: RopeConfig, *, head_dim: int, num_positions: int, factors: torch.Tensor | None = None
) -> torch.Tensor:
    """float32 [num_positions, head_dim]: cosines in the first half of the columns, sines in the second.

    ``factors`` float32 [head_dim / 2] divide the frequencies (llama 3.1 files in GGUF carry them as a tensor).
    Raises ValueError for an unknown kind. Angles are products in float32, as the reference implementations have them.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        frequencies = frequencies / rope.parameters["factor"]
    elif rope.kind == "llama3":
        frequencies = _llama3(frequencies, rope.parameters)
    elif rope.kind != "default":
        raise ValueError(f"rotary scaling {rope.kind!r} is unknown; it is default, linear or llama3")
    if factors is not None:
        frequencies = frequencies / factors
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def _llama3(frequencies: torch.Tensor, parameters: dict[str, float]) -> torch.Tensor:
    """Divides low frequencies by ``factor``, keeps high ones, and blends between the two bounds.

    The bounds are wavelengths: original_max_position_embeddings over low_freq_factor and over high_freq_factor.
    """
    factor, low, high = (parameters[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = parameters["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, blended)
    return torch.where(wavelengths < original / high, frequencies, scaled)
