"""Random GGUF K blocks, put together from quants, scales and minimums whose values are known."""

from dataclasses import dataclass

import torch

from tokenspeed_kernel.gguf_blocks import split_last

GROUP_ELEMENTS = {"gguf_q2_k": 16, "gguf_q3_k": 16, "gguf_q4_k": 32, "gguf_q5_k": 32, "gguf_q6_k": 16}
"""Format to the elements that share a scale."""

_QUANT_BITS = {"gguf_q2_k": 2, "gguf_q3_k": 3, "gguf_q4_k": 4, "gguf_q5_k": 5, "gguf_q6_k": 6}
_ZERO = {"gguf_q3_k": 4, "gguf_q6_k": 32}
_SCALES = {
    "gguf_q2_k": (0, 16),
    "gguf_q3_k": (-32, 32),
    "gguf_q4_k": (0, 64),
    "gguf_q5_k": (0, 64),
    "gguf_q6_k": (-128, 128),
}


@dataclass(frozen=True)
class Blocks:
    """Random blocks.

    Attributes:
        plane: uint8 [N, blocks, block bytes].
        values, magnitude: float64 [N, blocks, 256]; see weights.RandomWeight.
    """

    plane: torch.Tensor
    values: torch.Tensor
    magnitude: torch.Tensor


def _pile(fields: torch.Tensor, width: int) -> torch.Tensor:
    """uint8 [..., n, run] to [..., run]: field i lies ``width`` * i bits up."""
    piled = torch.zeros_like(fields[..., 0, :])
    for index in range(fields.shape[-2]):
        piled |= fields[..., index, :] << (width * index)
    return piled


def _low_bits(format_name: str, quants: torch.Tensor) -> torch.Tensor:
    """The bytes of the low 2 or 4 bits of quants [..., 256]."""
    width = 2 if format_name in ("gguf_q2_k", "gguf_q3_k") else 4
    run = 64 if format_name == "gguf_q6_k" else 32
    low = quants & ((1 << width) - 1)
    return _pile(split_last(low, -1, 8 // width, run), width).flatten(-2)


def _six_bit_pairs(scales: torch.Tensor, minimums: torch.Tensor) -> torch.Tensor:
    """Scales and minimums [..., 8] below 64 to the 12 bytes of Q4_K and Q5_K."""
    return torch.cat(
        [
            scales[..., :4] | ((scales[..., 4:] >> 4) << 6),
            minimums[..., :4] | ((minimums[..., 4:] >> 4) << 6),
            (scales[..., 4:] & 15) | ((minimums[..., 4:] & 15) << 4),
        ],
        dim=-1,
    )


def _pack(
    format_name: str, quants: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor, units: torch.Tensor
) -> torch.Tensor:
    """quants uint8 [..., 256]; scales, minimums uint8 [..., groups] as stored; units float16 [..., 2]: d and dmin."""
    low = _low_bits(format_name, quants)
    bytes_of_units = units.view(torch.uint8)
    if format_name == "gguf_q2_k":
        parts = [scales | (minimums << 4), low, bytes_of_units]
    elif format_name == "gguf_q3_k":
        high = _pile(split_last(quants >> 2, 8, 32), 1)
        packed = [_pile(split_last(scales & 15, 2, 8), 4), _pile(split_last(scales >> 4, 4, 4), 2)]
        parts = [high, low, *packed, bytes_of_units[..., :2]]
    elif format_name == "gguf_q4_k":
        parts = [bytes_of_units, _six_bit_pairs(scales, minimums), low]
    elif format_name == "gguf_q5_k":
        high = _pile(split_last(quants >> 4, 8, 32), 1)
        parts = [bytes_of_units, _six_bit_pairs(scales, minimums), high, low]
    else:
        high = _pile(split_last(quants >> 4, 2, 4, 32), 2).flatten(-2)
        parts = [low, high, scales, bytes_of_units[..., :2]]
    return torch.cat(parts, dim=-1)


def random_blocks(format_name: str, rows: int, blocks: int, size: float, generator: torch.Generator) -> Blocks:
    """Blocks [rows, blocks] of about ``size`` per element; every value of quants, scales and minimums may occur."""
    groups = 256 // GROUP_ELEMENTS[format_name]
    lowest, end = _SCALES[format_name]
    levels = 1 << _QUANT_BITS[format_name]
    has_minimum = format_name not in _ZERO

    def integers(low: int, high: int, count: int) -> torch.Tensor:
        return torch.randint(low, high, (rows, blocks, count), generator=generator)

    quants, scales = integers(0, levels, 256), integers(lowest, end, groups)
    minimums = integers(0, end, groups) if has_minimum else torch.zeros_like(scales)
    unit = (torch.rand(rows, blocks, 1, generator=generator) + 0.5) * size / (levels * end)
    units = torch.cat([unit, unit * (levels // 2)], dim=-1).half()
    stored = scales + 32 if format_name == "gguf_q3_k" else scales & 255
    plane = _pack(format_name, quants.to(torch.uint8), stored.to(torch.uint8), minimums.to(torch.uint8), units)
    exact = units.double()
    scale = (exact[..., :1] * scales.double()).unsqueeze(-1)
    grouped = split_last(quants.double(), groups, -1)
    offset = scale * _ZERO.get(format_name, 0) + (exact[..., 1:] * minimums.double()).unsqueeze(-1)
    return Blocks(plane, (grouped * scale - offset).flatten(-2), (grouped * scale.abs() + offset.abs()).flatten(-2))
