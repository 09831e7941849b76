"""Random weights in every format, with their values in float64 and the size of what a kernel may add up for
them."""

from dataclasses import dataclass

import torch

from tokenspeed_kernel.gguf_blocks import BLOCK_BYTES, BLOCK_ELEMENTS, split_last
from tokenspeed_kernel.numerics.float_blocks import FLOAT_BLOCKS, random_float_blocks
from tokenspeed_kernel.numerics.k_quants import GROUP_ELEMENTS, random_blocks
from tokenspeed_kernel.quantized import DENSE_DTYPES, QuantizedTensor


@dataclass(frozen=True)
class RandomWeight:
    """A weight and what is known about it.

    Attributes:
        weight: as kernels take it.
        values: float64 [N, K], its exact values.
        magnitude: float64 [N, K], at least the absolute size of every term that a kernel adds up for the element (a
            kernel may keep scale * nibble and offset apart, which are larger than their sum).
    """

    weight: QuantizedTensor
    values: torch.Tensor
    magnitude: torch.Tensor


def random_weight(format_name: str, rows: int, columns: int, generator: torch.Generator) -> RandomWeight:
    """A weight of about unit row norm. ``columns`` is a multiple of a block's elements for blocked formats."""
    source = f"random {format_name} [{rows}, {columns}]"
    if format_name in DENSE_DTYPES:
        dense = (torch.randn(rows, columns, generator=generator) / columns**0.5).to(DENSE_DTYPES[format_name])
        weight = QuantizedTensor(format_name, (rows, columns), {"data": dense}, source)
        return RandomWeight(weight, dense.double(), dense.double().abs())
    elements = BLOCK_ELEMENTS[format_name]
    blocks = columns // elements
    if format_name in GROUP_ELEMENTS:
        made = random_blocks(format_name, rows, blocks, 1.0 / columns**0.5, generator)
        weight = QuantizedTensor(format_name, (rows, columns), {"blocks": made.plane.reshape(rows, -1)}, source)
        return RandomWeight(weight, made.values.reshape(rows, columns), made.magnitude.reshape(rows, columns))
    if format_name in FLOAT_BLOCKS:
        plane, values = random_float_blocks(format_name, rows, blocks, 1.0 / columns**0.5, generator)
        weight = QuantizedTensor(format_name, (rows, columns), {"blocks": plane.reshape(rows, -1)}, source)
        return RandomWeight(weight, values.reshape(rows, columns), values.abs().reshape(rows, columns))
    scale = (torch.rand(rows, blocks, 1, generator=generator) + 0.5) / (4.0 * columns**0.5)
    if format_name == "gguf_q8_0":
        scale = (scale / 16.0).half()
        quants = torch.randint(-128, 128, (rows, blocks, elements), generator=generator, dtype=torch.int8)
        parts = [scale.view(torch.uint8), quants.view(torch.uint8)]
        values = scale.double() * quants.double()
        magnitude = values.abs()
    else:
        scale = scale.half()
        levels = 32 if format_name.startswith("gguf_q5") else 16
        quants = torch.randint(0, levels, (rows, blocks, elements), generator=generator, dtype=torch.uint8)
        parts = [scale.view(torch.uint8)]
        offset = scale.double() * -(levels // 2)
        if format_name.endswith("_1"):
            factor = torch.empty_like(scale).uniform_(0.375, 0.5625, generator=generator)
            minimum = (scale * -(factor * levels)).half()
            parts.append(minimum.view(torch.uint8))
            offset = minimum.double()
        if levels == 32:
            bits = split_last(quants >> 4, 4, 8) << torch.arange(8, dtype=torch.uint8)
            parts.append(bits.sum(dim=-1).to(torch.uint8))
        parts.append((quants[..., :16] & 15) | ((quants[..., 16:] & 15) << 4))
        values = scale.double() * quants.double() + offset
        magnitude = scale.double() * quants.double() + offset.abs()
    plane = torch.cat(parts, dim=-1).reshape(rows, blocks * BLOCK_BYTES[format_name])
    weight = QuantizedTensor(format_name, (rows, columns), {"blocks": plane}, source)
    return RandomWeight(weight, values.reshape(rows, columns), magnitude.reshape(rows, columns))
