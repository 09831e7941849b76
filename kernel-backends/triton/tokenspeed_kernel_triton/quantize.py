"""quantize.rows and quantize.restore on the device; contracts in tokenspeed_kernel.ops.quantize."""

import torch

from tokenspeed_kernel_triton.device import loadable
from tokenspeed_kernel_triton.loading import Launch

STRETCH = 1024
"""Elements that one block takes, or takes at a time."""

MAX_SIZE = 128
"""Elements under one scale that a block holds in one row of its tile."""


def rows_of(x: torch.Tensor, block: int, out: torch.Tensor, scales: torch.Tensor) -> Launch:
    """The launch that quantises x [T, K], ``block`` elements under a scale."""
    tokens, width = x.shape
    floats = out.dtype is torch.float8_e4m3fn
    arguments = (x, loadable(out), scales, width, x.stride(0))
    if block <= MAX_SIZE and block & (block - 1) == 0:
        blocks = STRETCH // block
        constants = {"SIZE": block, "BLOCKS": blocks, "EIGHT_BIT_FLOAT": floats}
        grid = (tokens, -(-scales.shape[1] // blocks))
        return Launch("quantize", "rows", grid, (*arguments, scales.shape[1]), constants)
    constants = {"BLOCK": STRETCH, "EIGHT_BIT_FLOAT": floats}
    return Launch("quantize", "long_rows", (tokens, scales.shape[1]), (*arguments, block), constants)


def rows(x: torch.Tensor, block: int, out: torch.Tensor, scales: torch.Tensor) -> None:
    """quantize.rows."""
    if x.numel():
        rows_of(x, block, out, scales).run()


def restore_of(q: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], out: torch.Tensor) -> Launch:
    """The launch of out = q * scale."""
    tokens, width = q.shape
    arguments = (loadable(q), scales, out, width, scales.shape[1], *block)
    return Launch("quantize", "restore", (tokens, -(-width // STRETCH)), arguments, {"BLOCK": STRETCH})


def restore(q: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], out: torch.Tensor) -> None:
    """quantize.restore."""
    if q.numel():
        restore_of(q, scales, block, out).run()
