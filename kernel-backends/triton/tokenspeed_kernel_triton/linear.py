"""gemm.linear and gemm.head_linear on the device; contracts in tokenspeed_kernel.ops.gemm."""

from collections.abc import Callable

import torch

from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel_triton.configs import LinearTile, input_splits, linear_tile
from tokenspeed_kernel_triton.device import architecture_of, processors_of
from tokenspeed_kernel_triton.loading import Launch
from tokenspeed_kernel_triton.planes import Planes, take_apart

STRETCH = 1024
"""Outputs that one block adds the parts of."""


def tile_of(device: torch.device, tokens: int, planes: Planes, rounded: bool) -> LinearTile:
    """The tile of a product of ``tokens`` rows with a weight."""
    return linear_tile(architecture_of(device), tokens, planes.burden, rounded)


def linear_of(x: torch.Tensor, planes: Planes, bias: torch.Tensor | None, out: torch.Tensor, rounded: bool) -> Launch:
    """The launch of out [S, T, N], the parts of x @ weight.T + bias; ``bias`` only where S is 1."""
    outputs, tokens = planes.shape[0], x.shape[0]
    tile = tile_of(x.device, tokens, planes, rounded)
    # a stride of what has one part must not make another kernel of it
    strides = tokens, outputs, out.stride(0) if out.shape[0] > 1 else 0
    constants = {
        **planes.constants(tile.depth),
        "BIASED": bias is not None,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "ROUNDED": rounded,
        "PRECISION": tile.precision,
    }
    grid = (-(-outputs // tile.columns), -(-tokens // tile.rows), out.shape[0])
    arguments = (x, *planes.arguments(x), x if bias is None else bias, out, *strides)
    return Launch("linear", "linear", grid, arguments, constants, tile.warps, tile.stages)


def add_splits_of(parts: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> Launch:
    """The launch that adds the parts [S, T, N] of out [T, N], and the bias."""
    arguments = (parts, parts if bias is None else bias, out, out.numel(), out.shape[1], parts.shape[0])
    constants = {"BIASED": bias is not None, "BLOCK": STRETCH}
    return Launch("linear", "add_splits", (-(-out.numel() // STRETCH),), arguments, constants)


def splits_of(x: torch.Tensor, planes: Planes, rounded: bool) -> int:
    """How many parts the inputs of x [T, K] are cut into."""
    outputs, inputs = planes.shape
    tile = tile_of(x.device, x.shape[0], planes, rounded)
    return input_splits(-(-outputs // tile.columns), x.shape[0], inputs, processors_of(x.device))


def multiply(
    x: torch.Tensor,
    planes: Planes,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    rounded: bool,
    splits: int | None = None,
) -> None:
    """out [T, N] = x @ weight.T + bias, over ``splits`` parts of the inputs; None: as many as keep the device busy."""
    if not out.numel():
        return
    splits = splits or splits_of(x, planes, rounded)
    if splits == 1:
        linear_of(x, planes, bias, out.unsqueeze(0), rounded).run()
        return
    parts = torch.empty(splits, *out.shape, dtype=torch.float32, device=x.device)
    linear_of(x, planes, None, parts, rounded).run()
    add_splits_of(parts, bias, out).run()


def _make(
    weight: QuantizedTensor, bias: torch.Tensor | None, rounded: bool
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    planes = take_apart(weight)

    def linear(x: torch.Tensor, out: torch.Tensor) -> None:
        multiply(x, planes, bias, out, rounded)

    return linear


def make_linear(weight: QuantizedTensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """gemm.linear with products of float32."""
    return _make(weight, bias, rounded=False)


def make_rounded_linear(
    weight: QuantizedTensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """gemm.linear with x rounded to bfloat16."""
    return _make(weight, bias, rounded=True)


def head_linear_of(x: torch.Tensor, planes: Planes, skipped: int, out: torch.Tensor) -> Launch:
    """The launch of out [T, heads, N] from x [T, heads, K], each head with its own rows of the weight."""
    tokens, heads, outputs = out.shape
    tile = tile_of(x.device, tokens, planes, rounded=False)
    constants = {
        "OUTPUTS": outputs,
        "SKIPPED": skipped,
        **planes.constants(tile.depth),
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "ROUNDED": False,
        "PRECISION": tile.precision,
    }
    grid = (-(-outputs // tile.columns), -(-tokens // tile.rows), heads)
    arguments = (x, *planes.arguments(x), out, tokens, *x.stride()[:2], *out.stride()[:2])
    return Launch("linear", "head_linear", grid, arguments, constants, tile.warps, tile.stages)


def make_head_linear(
    weight: QuantizedTensor,
    heads: int,  # noqa: ARG001 (x and out have it too)
    skipped: int,
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """gemm.head_linear."""
    planes = take_apart(weight)

    def head_linear(x: torch.Tensor, out: torch.Tensor) -> None:
        if out.numel():
            head_linear_of(x, planes, skipped, out).run()

    return head_linear
