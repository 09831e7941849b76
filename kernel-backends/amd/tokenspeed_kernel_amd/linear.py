"""gemm.linear over float8 in blocks by AITER, x rounded to bfloat16; contract in tokenspeed_kernel.ops.gemm.

The weight stays in 8 bits and is widened in the product, x is never quantised.
"""

from collections.abc import Callable

import torch

from tokenspeed_kernel.quantized import QuantizedTensor, WeightError
from tokenspeed_kernel.wrapped_library import library_module, note_variant
from tokenspeed_kernel_triton.planes import Planes, take_apart

FNUZ = frozenset({"gfx942"})
"""GPUs whose float8 is "fnuz": the exponents count from 8 and not from 7, and minus zero is NaN. From gfx950 on it is
OCP's, which checkpoints have."""

MINUS_ZERO = 0x80


def architecture_of(device: torch.device) -> str:
    """Such as "gfx950"."""
    return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]


def as_fnuz(elements: torch.Tensor, source: str) -> torch.Tensor:
    """float8_e4m3fn as float8_e4m3fnuz of half the value, bit by bit: all but minus zero, and NaN, which the other
    format has at no other place. Raises WeightError for a NaN."""
    bits = elements.view(torch.uint8)
    if bool(((bits & 0x7F) == 0x7F).any()):
        raise WeightError(f"{source}: a NaN among its elements, which this GPU's float8 cannot hold")
    return torch.where(bits == MINUS_ZERO, 0, bits).view(torch.float8_e4m3fnuz)


def in_squares(scales: torch.Tensor, group: int) -> torch.Tensor:
    """One scale for as many rows as columns, where they agree: [N / group, K / group]; else the scales as they are."""
    rows = scales.shape[0]
    if rows % group:
        return scales
    squares = scales.view(rows // group, group, scales.shape[1])
    return squares[:, 0].contiguous() if bool((squares == squares[:, :1]).all()) else scales


def prepared(planes: Planes, architecture: str, source: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements [N, K] and scales as the library takes them on ``architecture``."""
    assert planes.scales is not None
    scales = in_squares(planes.scales, planes.group)
    if architecture not in FNUZ:
        return planes.elements, scales
    return as_fnuz(planes.elements, source), scales * 2.0


def make_linear(weight: QuantizedTensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """gemm.linear."""
    shape = weight.shape
    elements, scales = prepared(take_apart(weight), architecture_of(weight.plane.device), weight.source)

    def linear(x: torch.Tensor, out: torch.Tensor) -> None:
        if out.numel() == 0:
            return
        note_variant("aiter float8 product", *shape)
        library_module("aiter.ops.triton.gemm_a16w8_blockscale").gemm_a16w8_blockscale(
            x.to(torch.bfloat16), elements, scales, dtype=torch.float32, y=out
        )
        if bias is not None:
            out += bias

    return linear
