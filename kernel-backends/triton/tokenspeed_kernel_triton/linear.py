"""gemm.linear on the device; contract in tokenspeed_kernel.ops.gemm.

Quantised weights are taken apart when they are bound: elements in one plane, scales in another, so that a tile reads
both in whole lines. What an element stands for stays exact.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenspeed_kernel.quantized import QuantizedTensor, WeightError
from tokenspeed_kernel_triton.configs import linear_tile
from tokenspeed_kernel_triton.device import architecture_of
from tokenspeed_kernel_triton.loading import Launch

DENSE = ("float32", "bfloat16", "float16")
QUANTISED = ("fp8_blocks", "gguf_q8_0", "gguf_q4_0", "gguf_q4_1", "gguf_mxfp4")
"""The quantised formats that are taken; the others need a kernel of their own."""


@dataclass(frozen=True)
class Planes:
    """A weight as the kernel takes it.

    Attributes:
        kind: of elements, as the kernel names it.
        group: elements under one scale; 0 for dense weights.
        elements: [N, K], or [N, K / 2] bytes of two.
        scales, minima: float32 [N, K / group], None where the kind has none.
    """

    kind: str
    group: int
    shape: tuple[int, int]
    elements: torch.Tensor
    scales: torch.Tensor | None = None
    minima: torch.Tensor | None = None


def _halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte ``at`` of each block [N, groups, bytes], as float32 [N, groups]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """2^(e - 127) of e8m0 bytes; NaN for 255."""
    wide = exponents.to(torch.float64)
    return torch.where(exponents == 255, torch.nan, torch.exp2(wide - 127.0)).float()


def take_apart(weight: QuantizedTensor) -> Planes:
    """The planes of a weight: a view of a dense one, else a copy. Raises WeightError for formats of other kernels."""
    if weight.format in DENSE:
        return Planes("dense", 0, weight.shape, weight.plane)
    if weight.format not in QUANTISED:
        raise WeightError(f"{weight.source}: {weight.format} is none of {', '.join((*DENSE, *QUANTISED))}")
    group = weight.block_elements
    rows, columns = weight.shape
    blocks = weight.plane.view(rows, columns // group, -1)
    if weight.format == "fp8_blocks":
        elements = blocks[..., 4:].contiguous().view(torch.float8_e4m3fn).view(rows, columns)
        return Planes(
            "eight", group, weight.shape, elements, blocks[..., :4].contiguous().view(torch.float32).squeeze(-1)
        )
    if weight.format == "gguf_q8_0":
        elements = blocks[..., 2:].contiguous().view(torch.int8).view(rows, columns)
        return Planes("eight", group, weight.shape, elements, _halves(blocks, 0))
    nibbles = blocks[..., -16:].contiguous().view(rows, columns // 2)
    if weight.format == "gguf_mxfp4":
        return Planes("e2m1", group, weight.shape, nibbles, _powers(blocks[..., 0]))
    if weight.format == "gguf_q4_1":
        return Planes("int4 above a minimum", group, weight.shape, nibbles, _halves(blocks, 0), _halves(blocks, 2))
    return Planes("int4", group, weight.shape, nibbles, _halves(blocks, 0))


def linear_of(x: torch.Tensor, planes: Planes, bias: torch.Tensor | None, out: torch.Tensor, rounded: bool) -> Launch:
    """The launch of out = x @ weight.T + bias."""
    outputs, inputs = planes.shape
    tokens = x.shape[0]
    tile = linear_tile(architecture_of(x.device), tokens, planes.kind, rounded)
    arguments = (
        x,
        planes.elements,
        x if planes.scales is None else planes.scales,
        x if planes.minima is None else planes.minima,
        x if bias is None else bias,
        out,
        tokens,
        outputs,
    )
    constants = {
        "INPUTS": inputs,
        "KIND": planes.kind,
        "GROUP": planes.group or tile.depth,
        "BIASED": bias is not None,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "ROUNDED": rounded,
        "PRECISION": tile.precision,
    }
    grid = (-(-outputs // tile.columns), -(-tokens // tile.rows))
    return Launch("linear", "linear", grid, arguments, constants, tile.warps, tile.stages)


def _make(
    weight: QuantizedTensor, bias: torch.Tensor | None, rounded: bool
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    planes = take_apart(weight)

    def linear(x: torch.Tensor, out: torch.Tensor) -> None:
        if out.numel():
            linear_of(x, planes, bias, out, rounded).run()

    return linear


def make_linear(weight: QuantizedTensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """gemm.linear with products of float32."""
    return _make(weight, bias, rounded=False)


def make_rounded_linear(
    weight: QuantizedTensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """gemm.linear with x rounded to bfloat16."""
    return _make(weight, bias, rounded=True)
