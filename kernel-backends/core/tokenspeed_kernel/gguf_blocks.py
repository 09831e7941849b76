"""Blocks, GGUF's and two of our own, taken apart by hand: consecutive elements of a row share one block. Little-endian
throughout.

Blocks of 32 elements; byte j of the nibbles holds element j in its low half and element j + 16 in its high half,
and a quant of five bits has its highest apart, that of element j at bit j % 8 of byte j / 8:

| format | bytes | layout | element |
|---|---|---|---|
| gguf_q4_0 | 18 | float16 d; 16 bytes of nibbles | d * (nibble - 8) |
| gguf_q4_1 | 20 | float16 d; float16 m; 16 bytes of nibbles | d * nibble + m |
| gguf_q5_0 | 22 | float16 d; high bits [4]; 16 bytes of nibbles | d * (quant - 16) |
| gguf_q5_1 | 24 | float16 d; float16 m; high bits [4]; 16 bytes of nibbles | d * quant + m |
| gguf_q8_0 | 34 | float16 d; 32 int8 | d * int8 |
| gguf_mxfp4 | 17 | e8m0 e; 16 bytes of nibbles | 2^(e - 127) * e2m1; NaN where e is 255 |

Blocks of 256 elements (the K formats) hold groups of 16 or 32 elements, each with a small integer scale s and, where
the format has one, a minimum m, both in units of the block's d and dmin:

| format | bytes | layout | groups of | element |
|---|---|---|---|---|
| gguf_q2_k | 84 | s and m, 4 bits each, [16]; quants [64]; d; dmin | 16 | d * s * quant - dmin * m |
| gguf_q3_k | 110 | high bits [32]; quants [64]; s, 6 bits each, [12]; d | 16 | d * (s - 32) * (quant - 4) |
| gguf_q4_k | 144 | d; dmin; s and m, 6 bits each, [12]; quants [128] | 32 | d * s * quant - dmin * m |
| gguf_q5_k | 176 | d; dmin; s and m, 6 bits each, [12]; high bits [32]; quants [128] | 32 | d * s * quant - dmin * m |
| gguf_q6_k | 210 | quants [128]; high bits [64]; int8 s [16]; d | 16 | d * s * (quant - 32) |

Quants and high bits of 2 bits: byte l of each 32 holds, from the lowest bits on, elements l, l + 32, l + 64 and l + 96
of 128. Quants of 4 bits: byte l of each 32 holds two of 64 elements, l and l + 32; in Q6_K, byte l of each 64 holds two
of 128, l and l + 64. High bits of 1 bit: byte l holds those of the elements l, l + 32, and so on to l + 224.

NVFP4 has a float32 scale for a whole matrix besides those of its groups. ``nvfp4``, blocks of 64 elements, holds it in
each, so that rows can be taken apart and put together: 40 bytes, float32 g; 4 e4m3 s, one for 16 elements; nibbles
[32], of which byte j of each 16 holds the elements j and j + 16 of 32. An element is g * s * e2m1, in float32: half of
g, times s, rounded, times twice the e2m1, an integer.

``fp8_blocks``, 128 elements in 132 bytes, is float32 d and 128 e4m3: an element is d * e4m3, in float32. No e4m3 is a
NaN; a block that had one has a NaN for d.

A nibble that is an e2m1 stands for 0, 0.5, 1, 1.5, 2, 3, 4, 6, and from 8 on for the same below 0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch

BLOCK_ELEMENTS: dict[str, int] = {
    "gguf_q4_0": 32,
    "gguf_q4_1": 32,
    "gguf_q5_0": 32,
    "gguf_q5_1": 32,
    "gguf_q8_0": 32,
    "gguf_mxfp4": 32,
    "nvfp4": 64,
    "fp8_blocks": 128,
    "gguf_q2_k": 256,
    "gguf_q3_k": 256,
    "gguf_q4_k": 256,
    "gguf_q5_k": 256,
    "gguf_q6_k": 256,
}
"""Format to the elements of a block."""

BLOCK_BYTES: dict[str, int] = {
    "gguf_q4_0": 18,
    "gguf_q4_1": 20,
    "gguf_q5_0": 22,
    "gguf_q5_1": 24,
    "gguf_q8_0": 34,
    "gguf_mxfp4": 17,
    "nvfp4": 40,
    "fp8_blocks": 132,
    "gguf_q2_k": 84,
    "gguf_q3_k": 110,
    "gguf_q4_k": 144,
    "gguf_q5_k": 176,
    "gguf_q6_k": 210,
}
"""Format to the bytes of a block."""


TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the value of each nibble that is an e2m1."""


def split_last(tensor: torch.Tensor, *sizes: int) -> torch.Tensor:
    """The last dimension split into several; one of the sizes may be -1, also where there are no elements at all."""
    known = math.prod(size for size in sizes if size != -1)
    return tensor.reshape(*tensor.shape[:-1], *(tensor.shape[-1] // known if size == -1 else size for size in sizes))


def _halves(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte ``start`` of each block, as float32 [..., 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The 32 nibbles that begin at byte ``start`` of each block, as float32 [..., 32]."""
    packed = blocks[..., start : start + 16]
    return torch.cat([packed & 15, packed >> 4], dim=-1).float()


def _fields(packed: torch.Tensor, width: int, run: int) -> torch.Tensor:
    """The fields of ``width`` bits in uint8 [..., n], lowest first within each run of ``run`` bytes: uint8
    [..., n * 8 / width]."""
    runs = split_last(packed, -1, 1, run)
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device).view(-1, 1)
    return ((runs >> shifts) & ((1 << width) - 1)).flatten(-3)


def _grouped(quants: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
    """quant * scale - offset for quants [..., 256], scales and offsets [..., groups], all float32."""
    groups = split_last(quants, scales.shape[-1], -1) * scales.unsqueeze(-1)
    return (groups if offsets is None else groups - offsets.unsqueeze(-1)).flatten(-2)


def _six_bit_pairs(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 8 scales and the 8 minimums in the 12 bytes of Q4_K and Q5_K, as uint8 [..., 8]."""
    first, second, third = split_last(packed, 3, 4).unbind(-2)
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], dim=-1)
    minimums = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], dim=-1)
    return scales, minimums


@dataclass(frozen=True)
class KBlocks:
    """Blocks of a K format taken apart: an element is unit * scale * (quant - zero) - minimum_unit * minimum.

    Attributes:
        quants: uint8 [..., 256].
        scales: uint8 or int8 [..., groups].
        unit: float32 [..., 1].
        zero: the quant that stands for 0.
        minimums: uint8 [..., groups], None where the format has none.
        minimum_unit: float32 [..., 1], None likewise.
    """

    quants: torch.Tensor
    scales: torch.Tensor
    unit: torch.Tensor
    zero: int = 0
    minimums: torch.Tensor | None = None
    minimum_unit: torch.Tensor | None = None


def _q2_k(parts: torch.Tensor) -> KBlocks:
    quants, packed = _fields(parts[..., 16:80], 2, 32), parts[..., :16]
    return KBlocks(quants, packed & 15, _halves(parts, 80), 0, packed >> 4, _halves(parts, 82))


def _q3_k(parts: torch.Tensor) -> KBlocks:
    quants = _fields(parts[..., 32:96], 2, 32) | (_fields(parts[..., :32], 1, 32) << 2)
    scales = _fields(parts[..., 96:104], 4, 8) | (_fields(parts[..., 104:108], 2, 4) << 4)
    return KBlocks(quants, scales.to(torch.int8) - 32, _halves(parts, 108), 4)


def _q4_k(parts: torch.Tensor) -> KBlocks:
    scales, minimums = _six_bit_pairs(parts[..., 4:16])
    return KBlocks(_fields(parts[..., 16:], 4, 32), scales, _halves(parts, 0), 0, minimums, _halves(parts, 2))


def _q5_k(parts: torch.Tensor) -> KBlocks:
    scales, minimums = _six_bit_pairs(parts[..., 4:16])
    quants = _fields(parts[..., 48:], 4, 32) | (_fields(parts[..., 16:48], 1, 32) << 4)
    return KBlocks(quants, scales, _halves(parts, 0), 0, minimums, _halves(parts, 2))


def _q6_k(parts: torch.Tensor) -> KBlocks:
    quants = _fields(parts[..., :128], 4, 64) | (_fields(parts[..., 128:192], 2, 32) << 4)
    scales = parts[..., 192:208].contiguous().view(torch.int8)
    return KBlocks(quants, scales, _halves(parts, 208), 32)


_K_BLOCKS: dict[str, Callable[[torch.Tensor], KBlocks]] = {
    "gguf_q2_k": _q2_k,
    "gguf_q3_k": _q3_k,
    "gguf_q4_k": _q4_k,
    "gguf_q5_k": _q5_k,
    "gguf_q6_k": _q6_k,
}


def take_k_blocks(format_name: str, blocks: torch.Tensor) -> KBlocks:
    """The parts of uint8 [..., block bytes] of a K format; raises KeyError for another format."""
    return _K_BLOCKS[format_name](blocks)


def _of_k_blocks(format_name: str, blocks: torch.Tensor) -> torch.Tensor:
    """float32 [..., 256]."""
    found = take_k_blocks(format_name, blocks)
    scales, quants = found.unit * found.scales.float(), found.quants.float() - float(found.zero)
    if found.minimums is None or found.minimum_unit is None:
        return _grouped(quants, scales)
    return _grouped(quants, scales, found.minimum_unit * found.minimums.float())


def five_bit_quants(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The 32 quants of 5 bits whose high bits begin at byte ``start`` of each block, as uint8 [..., 32]."""
    bits = blocks[..., start : start + 4, None] >> torch.arange(8, dtype=torch.uint8, device=blocks.device)
    packed = blocks[..., start + 4 : start + 20]
    return torch.cat([packed & 15, packed >> 4], dim=-1) | ((bits & 1).flatten(-2) << 4)


def half_of_e8m0(exponents: torch.Tensor) -> torch.Tensor:
    """2^(e - 128) of uint8 e as float32, NaN where e is 255: half of what an e8m0 stands for."""
    wide = exponents.to(torch.int32)
    bits = torch.where(wide < 2, 0x00200000 << wide.clamp(max=1), (wide - 1) << 23)
    return bits.masked_fill(wide == 255, 0x7FC00000).view(torch.float32)


@cache
def _twice_e2m1(device: torch.device) -> torch.Tensor:
    return torch.tensor(TWICE_E2M1, dtype=torch.float32).to(device)


def _mxfp4(parts: torch.Tensor) -> torch.Tensor:
    quants = _twice_e2m1(parts.device)[_fields(parts[..., 1:], 4, 16).int()]
    return half_of_e8m0(parts[..., :1]) * quants


def _nvfp4(parts: torch.Tensor) -> torch.Tensor:
    quants = _twice_e2m1(parts.device)[_fields(parts[..., 8:], 4, 16).int()]
    whole = parts[..., :4].contiguous().view(torch.float32)
    scales = parts[..., 4:8].contiguous().view(torch.float8_e4m3fn).float()
    return _grouped(quants, scales * (whole * 0.5))


def _fp8(parts: torch.Tensor) -> torch.Tensor:
    scale = parts[..., :4].contiguous().view(torch.float32)
    return parts[..., 4:].contiguous().view(torch.float8_e4m3fn).float() * scale


_DEQUANTIZE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gguf_q4_0": lambda parts: _halves(parts, 0) * (_nibbles(parts, 2) - 8.0),
    "gguf_q4_1": lambda parts: _halves(parts, 0) * _nibbles(parts, 4) + _halves(parts, 2),
    "gguf_q5_0": lambda parts: _halves(parts, 0) * (five_bit_quants(parts, 2).float() - 16.0),
    "gguf_q5_1": lambda parts: _halves(parts, 0) * five_bit_quants(parts, 4).float() + _halves(parts, 2),
    "gguf_q8_0": lambda parts: _halves(parts, 0) * parts[..., 2:].contiguous().view(torch.int8).float(),
    "gguf_mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
    "fp8_blocks": _fp8,
    **{name: partial(_of_k_blocks, name) for name in _K_BLOCKS},
}


def dequantize_blocks(format_name: str, blocks: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K / block elements * block bytes] of a blocked format to float32 [N, K]."""
    rows, size = blocks.shape[0], BLOCK_BYTES[format_name]
    count = blocks.shape[1] // size
    values = _DEQUANTIZE[format_name](blocks.reshape(rows, count, size))
    return values.reshape(rows, count * BLOCK_ELEMENTS[format_name])
