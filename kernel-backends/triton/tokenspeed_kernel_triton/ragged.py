"""attention.ragged on the device; contract in tokenspeed_kernel.ops.ragged."""

import torch

from tokenspeed_kernel_triton.configs import float32_products, ragged_tile
from tokenspeed_kernel_triton.device import architecture_of
from tokenspeed_kernel_triton.loading import Launch

MAX_DIM = 256
"""Elements of a head of q and k, or of v, that a block holds."""

_LEAST = 16  # rows and columns of a matrix instruction


def _block(size: int) -> int:
    return max(_LEAST, 1 << max(0, size - 1).bit_length())


def _blocks(dim: int) -> tuple[int, int]:
    """The two operands that hold ``dim`` elements; the second counts where the first does not hold them all."""
    whole = max(_LEAST, 1 << (dim.bit_length() - 1))
    return whole, _block(max(0, dim - whole))


def ragged_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    key_start: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    causal: bool,
    rounded: bool,
) -> Launch:
    """The launch of ragged attention."""
    (tokens, heads, dim), kv_heads, value_dim = q.shape, k.shape[1], v.shape[2]
    rows = query_start.shape[0] - 1
    architecture = architecture_of(q.device)
    tile = ragged_tile(architecture, max(dim, value_dim), rounded)
    first, rest = _blocks(dim)
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    arguments = (
        q, k, v, query_start, key_start, out, out if lse is None else lse, *strides, float(scale), rows
    )  # fmt: skip
    constants = {
        "PER_KV": heads // kv_heads,
        "DIM": dim,
        "BLOCK_DIM": first,
        "BLOCK_REST": rest,
        "VALUE": value_dim,
        "BLOCK_VALUE": _block(value_dim),
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys,
        "CAUSAL": causal,
        "WRITE_LSE": lse is not None,
        "ROUNDED": rounded,
        "PRECISION": float32_products("ragged", architecture),
    }
    grid = (tokens // tile.rows + rows, heads)
    return Launch("ragged", "ragged", grid, arguments, constants, tile.warps, tile.stages)


def ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    key_start: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    causal: bool,
) -> None:
    """attention.ragged, with products of float32."""
    if out.numel() and query_start.shape[0] > 1:
        ragged_of(q, k, v, query_start, key_start, scale, out, lse, causal, rounded=False).run()


def rounded_ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    key_start: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    causal: bool,
) -> None:
    """attention.ragged, with what is multiplied rounded to bfloat16."""
    if out.numel() and query_start.shape[0] > 1:
        ragged_of(q, k, v, query_start, key_start, scale, out, lse, causal, rounded=True).run()
