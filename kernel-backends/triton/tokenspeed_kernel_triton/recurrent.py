"""recurrent.causal_conv and recurrent.gated_delta on the device, token by token; contracts in tokenspeed_kernel.ops.

What a row's tokens do to a state follows from the tokens alone, so its bits depend neither on other rows nor on how it
is cut into calls. gated_delta_chunks.py takes a row's tokens in chunks, on matrix instructions.
"""

import torch

from tokenspeed_kernel_triton.configs import delta_tile
from tokenspeed_kernel_triton.device import architecture_of
from tokenspeed_kernel_triton.loading import Launch

CHANNELS = 128
"""That a block of the convolution takes."""

TOKENS = 16
"""That a block of the convolution takes where rows are longer than a few tokens."""

MAX_WIDTH = 64
"""Inputs that an output of the convolution may depend on."""

MAX_KEY_DIM = 256
"""Elements of a key: a block holds whole columns of a state."""


def _block(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def causal_conv_of(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    starts: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    out: torch.Tensor,
) -> Launch:
    """The launch of a convolution."""
    tokens, channels = x.shape
    rows, width = sources.shape[0], weight.shape[0]
    held = _block(width - 1)
    stretch = held if tokens <= rows else max(held, TOKENS)
    strides = (x.stride(0), state.stride(0), state.stride(1))
    arguments = (
        x, weight, weight if bias is None else bias, state, starts, sources, targets, out, *strides, rows, channels
    )  # fmt: skip
    constants = {
        "WIDTH": width,
        "BIASED": bias is not None,
        "BLOCK_W": held,
        "BLOCK_T": stretch,
        "BLOCK_C": CHANNELS,
    }
    grid = (tokens // stretch + rows, -(-channels // CHANNELS))
    return Launch("recurrent", "causal_conv", grid, arguments, constants)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    starts: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """recurrent.causal_conv."""
    if out.numel() and sources.shape[0]:
        causal_conv_of(x, weight, bias, state, starts, sources, targets, out).run()


def gated_delta_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    rate: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    state: torch.Tensor,
    starts: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    out: torch.Tensor,
    longest: int,
) -> Launch:
    """The launch of the rule for the rows of up to ``longest`` tokens."""
    (_, heads, value_dim), (_, key_heads, key_dim) = v.shape, k.shape
    tile = delta_tile(architecture_of(q.device))
    strides = (*(x.stride(0) for x in (q, k, v, decay, beta)), state.stride(0), state.stride(1))
    arguments = (
        q, k, v, decay, beta, rate, bias, state, starts, sources, targets, out, *strides, float(eps), 1, longest
    )  # fmt: skip
    values = min(tile.step_values, _block(value_dim))
    constants = {
        "HEADS": heads,
        "PER_KEY": heads // key_heads,
        "KEY": key_dim,
        "VALUE": value_dim,
        "CHANNEL": decay.dim() == 3,
        "BLOCK_K": _block(key_dim),
        "BLOCK_V": values,
    }
    grid = (sources.shape[0], heads, -(-value_dim // values))
    return Launch("recurrent", "gated_delta", grid, arguments, constants, tile.step_warps)


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    rate: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    state: torch.Tensor,
    starts: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """recurrent.gated_delta, token by token."""
    tokens = q.shape[0]
    if tokens and sources.shape[0]:
        gated_delta_of(
            q, k, v, decay, beta, rate, bias, eps, state, starts, sources, targets, out, tokens
        ).run()  # fmt: skip
