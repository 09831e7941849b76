"""The table of rotary embeddings, with the scalings that checkpoints ask for."""

import math

import torch

from tokenspeed.recipes.model_config import RopeConfig


def rotary_table(
    rope: RopeConfig, *, head_dim: int, num_positions: int, factors: torch.Tensor | None = None
) -> torch.Tensor:
    """float32 [num_positions, R]: cosines in the first half of the columns, sines in the second; R is the share of
    ``head_dim`` that is rotated.

    ``factors`` float32 [R / 2] divide the frequencies (llama 3.1 files in GGUF carry them as a tensor).
    Raises ValueError for an unknown kind. Angles are products in float32, as the reference implementations have them.
    """
    width = int(head_dim * rope.share)
    exponents = torch.arange(0, width, 2, dtype=torch.int64).to(torch.float32) / width
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        frequencies = frequencies / rope.parameters["factor"]
    elif rope.kind == "llama3":
        frequencies = _llama3(frequencies, rope.parameters)
    elif rope.kind == "yarn":
        frequencies = _yarn(frequencies, width, rope)
    elif rope.kind != "default":
        raise ValueError(f"rotary scaling {rope.kind!r} is unknown; it is default, linear, llama3 or yarn")
    if factors is not None:
        frequencies = frequencies / factors
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=1) * _magnitude(rope)


def score_factor(rope: RopeConfig) -> float:
    """What the scores of latent attention are multiplied by besides (DeepSeek's mscale_all_dim, twice)."""
    share = rope.parameters.get("mscale_all_dim", 0.0)
    return _stretch(rope.parameters["factor"], share) ** 2 if rope.kind == "yarn" and share else 1.0


def _stretch(factor: float, share: float) -> float:
    """YaRN's (arXiv:2309.00071) factor of the temperature, of which a model may take a ``share``."""
    return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0


def _magnitude(rope: RopeConfig) -> float:
    """What cosines and sines are multiplied by."""
    if rope.kind != "yarn":
        return 1.0
    parameters = rope.parameters
    if parameters["attention_factor"]:
        return parameters["attention_factor"]
    factor, first, second = (parameters[name] for name in ("factor", "mscale", "mscale_all_dim"))
    return _stretch(factor, first) / _stretch(factor, second) if first and second else _stretch(factor, 1.0)


def _yarn(frequencies: torch.Tensor, width: int, rope: RopeConfig) -> torch.Tensor:
    """Divides low frequencies by ``factor``, keeps high ones, and blends linearly over the pairs between two bounds:
    those that turn beta_slow and beta_fast times within the original context."""
    parameters = rope.parameters
    original = parameters["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        return width * math.log(original / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(parameters["beta_fast"]), pair_that_turns(parameters["beta_slow"])
    if parameters["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # no division by zero, as the reference implementations have it
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / parameters["factor"] * ramp + frequencies * (1 - ramp)


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
