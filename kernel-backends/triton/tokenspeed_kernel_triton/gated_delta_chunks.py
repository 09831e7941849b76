"""recurrent.gated_delta over chunks of a row's tokens, on matrix instructions; contract in tokenspeed_kernel.ops.

What a row gives depends on no other row; but sums are rounded as the chunks lie, so that its bits depend on how its
tokens are cut into calls. Rows of a few tokens, as in a decode, go token by token.
"""

from collections.abc import Iterator

import torch

from tokenspeed_kernel_triton.configs import delta_tile
from tokenspeed_kernel_triton.device import architecture_of
from tokenspeed_kernel_triton.loading import Launch
from tokenspeed_kernel_triton.recurrent import gated_delta_of

SHORT = 8
"""Rows of up to this many tokens go token by token: a chunk of them would be padding."""

_BLOCK = 16
_LEAST = 16  # rows and columns of a matrix instruction


def _block(size: int) -> int:
    return max(_LEAST, 1 << max(0, size - 1).bit_length())


def room_between_chunks(tokens: int, rows: int, chunk: int) -> tuple[int, int]:
    """How many states lie between chunks, and the tokens that have one together; 0 where each row has its own.

    Of two rows with more than one chunk the first tokens are at least chunk + 1 apart.
    """
    states = tokens // (chunk + 1) + 1
    return (rows, 0) if rows <= states else (states, chunk + 1)


def chunk_launches(
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
    shortest: int,
) -> Iterator[Launch]:
    """The three launches for the rows of at least ``shortest`` tokens, to be run in this order.

    Workspace: float32 of T * Hv * (2 * chunk + Dk + Dv), and Hv * Dk * Dv for the state between chunks of each row that
    has more than one. Lengths are the device's secret: room is for every row or, where that is less, for as many as T
    tokens allow.
    """
    (tokens, heads, value_dim), (_, key_heads, key_dim), rows = v.shape, k.shape, sources.shape[0]
    tile = delta_tile(architecture_of(q.device))
    updates, seen = (torch.empty(tokens, heads, tile.chunk, device=q.device) for _ in range(2))
    from_state = torch.empty(tokens, heads, key_dim, device=q.device)
    from_values = torch.empty(tokens, heads, value_dim, device=q.device)
    states, tokens_apart = room_between_chunks(tokens, rows, tile.chunk)
    scratch = torch.empty(states, heads, key_dim, value_dim, device=q.device)
    values = min(tile.values, _block(value_dim))
    constants = {
        "HEADS": heads,
        "PER_KEY": heads // key_heads,
        "KEY": key_dim,
        "CHANNEL": decay.dim() == 3,
        "BLOCK_K": _block(key_dim),
        "CHUNK": tile.chunk,
        "PRECISION": tile.precision,
    }
    of_values = {**constants, "VALUE": value_dim}
    q_stride, k_stride, v_stride, decay_stride, beta_stride = (x.stride(0) for x in (q, k, v, decay, beta))
    inputs = (decay, beta, rate, bias, starts)
    module = "gated_delta_chunks"
    arguments: tuple[object, ...] = (
        q, k, *inputs, updates, seen, q_stride, k_stride, decay_stride, beta_stride, float(eps), rows, shortest
    )  # fmt: skip
    yield Launch(module, "pairs", (tokens // _BLOCK + rows, heads), arguments, constants, tile.warps)
    arguments = (
        k, v, *inputs, updates, from_state, from_values, k_stride, v_stride, decay_stride, beta_stride, float(eps),
        rows, shortest,
    )  # fmt: skip
    yield Launch(module, "solve", (tokens // tile.chunk + rows, heads), arguments, of_values, tile.warps)
    arguments = (
        q, k, decay, rate, bias, state, starts, sources, targets, seen, from_state, from_values, scratch, out,
        q_stride, k_stride, decay_stride, state.stride(0), state.stride(1), float(eps), shortest,
        tokens_apart,
    )  # fmt: skip
    grid = (rows, heads, -(-value_dim // values))
    yield Launch(module, "walk", grid, arguments, {**of_values, "BLOCK_V": values}, tile.walk_warps)


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
    """recurrent.gated_delta, chunk by chunk."""
    if not q.shape[0] or not sources.shape[0]:
        return
    call = (q, k, v, decay, beta, rate, bias, eps, state, starts, sources, targets, out)
    gated_delta_of(*call, SHORT).run()
    if q.shape[0] > SHORT:
        for launch in chunk_launches(*call, SHORT + 1):
            launch.run()
