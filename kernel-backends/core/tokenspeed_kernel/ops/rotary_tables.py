"""Tables of rotary embeddings: the frequencies of the plain embedding and of its extensions, and mrope's axes.

A table is made once, when a model is built. ``rotary_table`` is the only thing that kernels see of a scaling.
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch


@dataclass(frozen=True)
class LinearScaling:
    """Positions are divided by ``factor``."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Low frequencies are divided by ``factor``, high ones kept, those between blended.

    The bounds are wavelengths: ``original_positions`` over ``low_freq_factor`` and over ``high_freq_factor``.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071): frequencies that turn less than ``beta_slow`` times over the original context are
    divided by ``factor``, those that turn more than ``beta_fast`` times kept, those between blended along a ramp.

    Attributes:
        original_positions: the context that the model was trained with.
        truncate: whether the ends of the ramp are rounded outward to whole pairs (gpt-oss: not).
        attention_factor: what cosines and sines are multiplied by; None: from the two below, or 0.1 ln(factor) + 1.
        mscale, mscale_all_dim: DeepSeek's: yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
            where both are above 0.
    """

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0


RotaryScaling: TypeAlias = LinearScaling | Llama3Scaling | YarnScaling | None


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """0.1 * mscale * ln(factor) + 1, or 1 where nothing is extended. DeepSeek multiplies the scale of its scores by the
    square of this for mscale_all_dim."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def rotary_magnitude(scaling: RotaryScaling) -> float:
    """What cosines and sines are multiplied by: YaRN's attention factor, 1 for the others."""
    if not isinstance(scaling, YarnScaling):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale > 0.0 and scaling.mscale_all_dim > 0.0:
        return yarn_magnitude(scaling.factor, scaling.mscale) / yarn_magnitude(scaling.factor, scaling.mscale_all_dim)
    return yarn_magnitude(scaling.factor)


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((scaling.original_positions / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(frequencies: torch.Tensor, theta: float, scaling: YarnScaling) -> torch.Tensor:
    width = 2 * frequencies.shape[0]

    def pair_that_turns(times: float) -> float:
        return width * math.log(scaling.original_positions / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by 0
    pair = torch.arange(frequencies.shape[0], dtype=torch.float32)
    kept = 1.0 - ((pair - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def rotary_frequencies(theta: float, rotary_dim: int, scaling: RotaryScaling = None) -> torch.Tensor:
    """float32 [rotary_dim / 2]: radians a position, for each pair. Raises ValueError where rotary_dim is not even or
    theta not above 1."""
    if rotary_dim < 2 or rotary_dim % 2 or theta <= 1.0:
        raise ValueError(f"rotary_dim {rotary_dim} must be even and above 0, theta {theta} above 1")
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).to(torch.float32) / rotary_dim
    frequencies = 1.0 / (theta**exponents)
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, Llama3Scaling):
        return _llama3(frequencies, scaling)
    if isinstance(scaling, YarnScaling):
        return _yarn(frequencies, theta, scaling)
    return frequencies


def rotary_table(theta: float, rotary_dim: int, num_positions: int, scaling: RotaryScaling = None) -> torch.Tensor:
    """float32 [num_positions, rotary_dim]: cosines in the first half of the columns, sines in the second, both times
    ``rotary_magnitude``. Angles are products in float32, as the implementations that models are trained with have them.
    """
    frequencies = rotary_frequencies(theta, rotary_dim, scaling)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=1) * rotary_magnitude(scaling)


def mrope_axes(sections: tuple[int, ...], interleaved: bool = False) -> torch.Tensor:
    """int32 [sum(sections)]: the axis of positions that each pair follows, for ``rotary.apply``.

    ``sections``: pairs of each axis. One run an axis (Qwen2-VL), or ``interleaved`` (Qwen3-VL): the axes take turns,
    pair i going to axis i mod A while that axis has pairs left by that count, and to axis 0 afterwards. Raises
    ValueError where a section is below 1, or where interleaving gives an axis another number of pairs than its section
    says.
    """
    if not sections or min(sections) < 1:
        raise ValueError(f"mrope sections {sections} must be positive")
    if not interleaved:
        return torch.repeat_interleave(torch.arange(len(sections)), torch.tensor(sections)).to(torch.int32)
    axes = torch.zeros(sum(sections), dtype=torch.int32)
    for axis, pairs in enumerate(sections[1:], 1):
        axes[axis : axis + pairs * len(sections) : len(sections)] = axis
    if torch.bincount(axes, minlength=len(sections)).tolist() != list(sections):
        raise ValueError(f"mrope sections {sections} cannot take turns; the first axis must have the most pairs")
    return axes
