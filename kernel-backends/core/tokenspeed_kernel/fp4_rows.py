"""Rows of activations in four bits (e2m1), as instructions that multiply blocks of four bits take them.

The format of the rows follows the weight's (``FP4_FORMATS``). Everything here is exact but the roundings named: each is
of the exact quotient, to nearest, ties to even.

nvfp4
    A row has a float32 of its own, ``whole``: the least power of two that is not below its largest magnitude / 2688,
    so that scales reach up to 448. 16 elements share a scale, an e4m3: their largest magnitude / (6 * whole), rounded.
    An element is the e2m1 of x / (scale * whole), at most 6 in size; 0 where the scale is 0.

gguf_mxfp4
    32 elements share a scale, an e8m0: two to the power of floor(log2(m)) - 2, where m is their largest magnitude with
    its mantissa rounded up to the next power of two from 1.75 on (what Quark and AITER call "even": 7 lies in the
    middle of the largest e2m1, 6, and what would come next). An element is the e2m1 of x / scale, at most 6 in size.
    ``whole`` is 1.

Both: a row (nvfp4) or block (MXFP4) whose largest magnitude lies below 2^-100 is 0 throughout. A row (nvfp4) or block
(MXFP4) with a NaN or an infinity is NaN throughout, so that every result of its row is NaN.

OCP Microscaling Formats (MX) v1.0 has e2m1 and e8m0; the PTX ISA's kinds mxf4nvf4 and mxf4 multiply them.
"""

from dataclasses import dataclass

import torch

from tokenspeed_kernel.gguf_blocks import TWICE_E2M1, half_of_e8m0, split_last

FP4_GROUP: dict[str, int] = {"nvfp4": 16, "gguf_mxfp4": 32}
"""Format of a weight to the elements of an activation that share a scale."""

FP4_FORMATS = frozenset(FP4_GROUP)
"""The formats of weights whose products can take activations of four bits."""

LEAST = 2.0**-100
"""Rows and blocks whose largest magnitude lies below are taken for zeros."""

_LARGEST = 6.0
_THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Middles between e2m1 neighbours. Those after an even code belong to it, the others to the next: ties to even."""

_EXPONENT = 0x7F800000
_MANTISSA_OF_2688 = 0x280000  # 2688 = 6 * 448 = 1.3125 * 2^11
_MANTISSA_OF_1_75 = 0x600000


@dataclass(frozen=True)
class Fp4Rows:
    """Quantised rows.

    Attributes:
        format: of the weights they are for.
        codes: uint8 [T, K] below 16, each an e2m1.
        scales: uint8 [T, K / 16 or K / 32], each an e4m3 or an e8m0.
        whole: float32 [T].
    """

    format: str
    codes: torch.Tensor
    scales: torch.Tensor
    whole: torch.Tensor

    def values(self) -> torch.Tensor:
        """What they stand for, float32 [T, K], exact."""
        twice = torch.tensor(TWICE_E2M1, dtype=torch.float32)[self.codes.int()]
        if self.format == "nvfp4":
            scale = self.scales.view(torch.float8_e4m3fn).float() * (self.whole * 0.5).unsqueeze(1)
        else:
            scale = half_of_e8m0(self.scales)
        return (split_last(twice, scale.shape[1], -1) * scale.unsqueeze(-1)).flatten(1)


def quantise_rows(x: torch.Tensor, format_name: str) -> Fp4Rows:
    """x float32 [T, K] for a weight of ``format_name``, a key of FP4_GROUP. Raises ValueError where K does not divide
    into groups."""
    group = FP4_GROUP[format_name]
    if x.shape[1] % group:
        raise ValueError(
            f"rows of {x.shape[1]} elements do not divide into the groups of {group} that {format_name} has"
        )
    blocks = split_last(x, -1, group)
    return _nvfp4(blocks) if format_name == "nvfp4" else _mxfp4(blocks)


def _power_above(magnitude: torch.Tensor, mantissa: int) -> torch.Tensor:
    """The bits of the magnitudes' power of two, of the next one where their mantissa exceeds ``mantissa``; int32."""
    return (magnitude.view(torch.int32) + (0x7FFFFF - mantissa)) & _EXPONENT


def _nvfp4(blocks: torch.Tensor) -> Fp4Rows:
    largest = blocks.abs().amax(dim=(1, 2))
    sound = torch.isfinite(largest)
    here = sound & (largest >= LEAST)
    whole = (_power_above(torch.where(here, largest, 1.0), _MANTISSA_OF_2688) - (11 << 23)).view(torch.float32)
    scaled = torch.where(here, 1.0 / whole, 0.0)[:, None, None] * blocks.nan_to_num(0.0, 0.0, 0.0)
    scales = (scaled.abs().amax(dim=-1) / _LARGEST).to(torch.float8_e4m3fn)
    codes = _codes(scaled, scales.float().unsqueeze(-1))
    whole = torch.where(sound, torch.where(here, whole, 0.0), torch.nan)
    return Fp4Rows("nvfp4", codes, scales.view(torch.uint8), whole)


def _mxfp4(blocks: torch.Tensor) -> Fp4Rows:
    largest = blocks.abs().amax(dim=-1)
    sound = torch.isfinite(largest)
    here = sound & (largest >= LEAST)
    exponents = (_power_above(torch.where(here, largest, 1.0), _MANTISSA_OF_1_75 - 1) >> 23) - 2
    inverse = torch.where(here, ((254 - exponents) << 23).view(torch.float32), 0.0)
    scaled = blocks.nan_to_num(0.0, 0.0, 0.0) * inverse.unsqueeze(-1)
    codes = _codes(scaled, torch.ones(()))
    exponents = torch.where(here, exponents, torch.where(sound, 0, 255))
    return Fp4Rows("gguf_mxfp4", codes, exponents.to(torch.uint8), torch.ones(blocks.shape[0]))


def _codes(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The codes of x / scales, uint8 [T, K]; x [T, groups, group]. A threshold times a scale has few bits: exact."""
    size = x.abs()
    codes = torch.zeros_like(x, dtype=torch.uint8)
    for place, threshold in enumerate(_THRESHOLDS):
        middle = threshold * scales
        codes += (size > middle) if place % 2 == 0 else (size >= middle)
    codes = torch.where((x < 0.0) & (codes > 0), codes | 8, codes)
    return codes.masked_fill(scales == 0.0, 0).flatten(1)
