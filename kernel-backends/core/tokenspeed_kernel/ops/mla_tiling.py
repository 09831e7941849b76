"""How latent decode is cut into tiles and splits: pure functions that every backend shares.

A tensor-core tile has 128 rows (M). One token of a model with 64 heads fills half of it, so consecutive query tokens of
a request (of which a verify step has several) are folded into the head axis.
"""

import torch

from tokenspeed_kernel.ops.split_plan import best_split_count

TILE_ROWS = 128


def fold_sq_factor(heads: int, q_len: int, tile_rows: int = TILE_ROWS) -> int:
    """How many query tokens share a tile: the largest divisor F of ``q_len`` with heads * F <= tile_rows, at least 1.

    64 heads and 4 queries give 2: 128 rows, 2 query groups. Raises ValueError where an argument is below 1.
    """
    if min(heads, q_len, tile_rows) < 1:
        raise ValueError(f"heads {heads}, q_len {q_len} and tile_rows {tile_rows} must be at least 1")
    return max(f for f in range(1, q_len + 1) if q_len % f == 0 and (f == 1 or heads * f <= tile_rows))


def fold_queries(q: torch.Tensor, q_len: int, factor: int) -> torch.Tensor:
    """q [B * q_len, H, D] as [B, q_len / factor, factor * H, D]: a view of the same storage.

    Row f * H + h of a group is head h of its token f. Raises ValueError where the factor does not divide q_len or q_len
    the rows, and RuntimeError where the strides of q do not allow a view.
    """
    rows, heads, width = q.shape
    if factor < 1 or q_len < 1 or q_len % factor or rows % q_len:
        raise ValueError(f"{rows} rows of {q_len} queries cannot be folded by {factor}; it must divide q_len")
    return q.view(rows // q_len, q_len // factor, factor * heads, width)


def tile_rows_padded(heads: int, q_len: int, tile_rows: int = TILE_ROWS) -> int:
    """Rows of all query groups of a request, each padded to whole tiles."""
    factor = fold_sq_factor(heads, q_len, tile_rows)
    return q_len // factor * -(-heads * factor // tile_rows) * tile_rows


def split_count(batch: int, heads: int, q_len: int, pages: int, processors: int, tile_rows: int = TILE_ROWS) -> int:
    """Into how many splits the keys are cut so that every processor has work: split_plan.best_split_count for the query
    tiles of ``batch`` rows, the longest of ``pages`` pages; 1 where there is no row."""
    tiles = batch * tile_rows_padded(heads, q_len, tile_rows) // tile_rows
    return best_split_count(tiles, pages, processors)


def partial_workspace_bytes(
    batch: int, heads: int, q_len: int, splits: int, latent_dim: int = 512, tile_rows: int = TILE_ROWS
) -> int:
    """Bytes of the float32 partial outputs and their lse: batch * padded rows * splits * (latent_dim + 1) * 4; 0 where
    splits is 1, for then the output is written at once."""
    if splits == 1:
        return 0
    return batch * tile_rows_padded(heads, q_len, tile_rows) * splits * (latent_dim + 1) * 4
