"""Random blocks of floats of four and eight bits, put together from elements and scales whose values are known."""

import torch

from tokenspeed_kernel.gguf_blocks import split_last

FLOAT_BLOCKS = ("gguf_mxfp4", "nvfp4", "fp8_blocks")

_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def random_float_blocks(
    format_name: str, rows: int, blocks: int, size: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks uint8 [rows, blocks, bytes] of about ``size`` an element and their exact values, float64 [rows, blocks,
    n]; of a format in FLOAT_BLOCKS. Scales lie some powers of two apart."""
    if format_name == "fp8_blocks":
        return _eight_bits(rows, blocks, size, generator)
    count = 32 if format_name == "gguf_mxfp4" else 64
    magnitudes = torch.randint(0, 8, (rows, blocks, count), generator=generator)
    negative = torch.randint(0, 2, (rows, blocks, count), generator=generator)
    elements = _MAGNITUDES[magnitudes] * (1.0 - 2.0 * negative)
    halves = split_last((magnitudes + 8 * negative).to(torch.uint8), -1, 2, 16)
    packed = (halves[..., 0, :] | (halves[..., 1, :] << 4)).flatten(-2)
    if format_name == "gguf_mxfp4":
        exponents = torch.randint(-2, 2, (rows, blocks, 1), generator=generator)
        exponents += int(torch.tensor(size / 3.0).log2().floor())
        plane = torch.cat([(exponents + 127).to(torch.uint8), packed], dim=-1)
        return plane, elements * torch.exp2(exponents.double())
    # Positive e4m3 from 2^-4 to 15 * 2^3; the float32 beside them has few bits, so that products with it are exact.
    scales = torch.randint(24, 88, (rows, blocks, 4), generator=generator, dtype=torch.uint8)
    whole = torch.full((rows, blocks, 1), float(torch.tensor(size / 16.0).bfloat16()))
    plane = torch.cat([whole.view(torch.uint8), scales, packed], dim=-1)
    wide = scales.view(torch.float8_e4m3fn).double() * whole.double()
    return plane, (split_last(elements, 4, -1) * wide.unsqueeze(-1)).flatten(-2)


def _eight_bits(rows: int, blocks: int, size: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Every e4m3 that is a number; scales of few bits, so that products with them are exact."""
    elements = torch.randint(0, 0x7F, (rows, blocks, 128), generator=generator, dtype=torch.uint8)
    elements |= torch.randint(0, 2, elements.shape, generator=generator, dtype=torch.uint8) << 7
    scales = (torch.rand(rows, blocks, 1, generator=generator) + 0.5) * (size / 64.0)
    scales = scales.bfloat16().float()
    plane = torch.cat([scales.view(torch.uint8), elements], dim=-1)
    return plane, elements.view(torch.float8_e4m3fn).double() * scales.double()
