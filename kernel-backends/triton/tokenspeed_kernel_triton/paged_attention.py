"""attention.decode, extend, mla_decode, mla_decode_partial, mla_extend and merge_partials on the device.

Contracts in tokenspeed_kernel.ops.attention, .mla and .merge. The device's code for all of them is one kernel and one
that merges splits. Beyond the contracts, queries may be bfloat16, float16 or float8 of scale 1, outputs bfloat16 or
float16: the kernel widens what it loads. Nothing here waits for the device.
"""

from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed_kernel.ops.mla_tiling import fold_sq_factor
from tokenspeed_kernel.ops.split_plan import MAX_SPLITS, best_split_count
from tokenspeed_kernel_triton.configs import AttentionTile, attention_tile, float32_products, row_blocks
from tokenspeed_kernel_triton.device import architecture_of, loadable, processors_of
from tokenspeed_kernel_triton.loading import Launch


@dataclass(frozen=True)
class Reads:
    """One call's cache, page table and rules. Latent attention has no ``v_cache``: its values lie in its keys.

    Attributes:
        query_start: int32 [B + 1] where rows have queries of their own number, None where all have as many.
        rounded: whether operands of products are rounded to bfloat16; else they are float32.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor | None
    page_table: torch.Tensor
    query_start: torch.Tensor | None
    seq_lens: torch.Tensor
    scale: float
    window: int = 0
    sinks: torch.Tensor | None = None
    soft_cap: float = 0.0
    rounded: bool = False
    kind: str = "decode"

    @property
    def page(self) -> int:
        return self.k_cache.shape[2]

    @property
    def architecture(self) -> str:
        return architecture_of(self.k_cache.device)


@dataclass(frozen=True)
class Cut:
    """How a call is cut: tokens and rows of a query tile, the number of tiles of a KV head, the tile."""

    tokens: int
    rows: int
    tiles: int
    tile: AttentionTile


def _power_of_two(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def cut_queries(queries: int, batch: int, heads: int, folded: bool, tile: AttentionTile) -> Cut:
    """Query tiles of ``queries`` tokens in ``batch`` rows, ``heads`` query heads a KV head.

    folded: every row has as many tokens, and those of a tile divide them (fold_sq_factor); else a tile has as many as
    fit, and a row's last may be short.
    """
    if folded:
        width = queries // batch
        tokens = fold_sq_factor(heads, width, tile.rows)
        groups = batch * (width // tokens)
    else:
        tokens = max(1, tile.rows // heads)
        groups = queries // tokens + batch
    rows = row_blocks(tokens * heads, tile.rows)
    return Cut(tokens, rows, groups * (-(-tokens * heads // rows)), tile)


def cut_of(q: torch.Tensor, reads: Reads) -> Cut:
    """The tiles of a call's queries on its device."""
    per_kv = q.shape[1] // reads.k_cache.shape[1]
    tile = attention_tile(reads.kind, reads.architecture, q.shape[2], reads.rounded, reads.k_cache.itemsize == 1)
    return cut_queries(q.shape[0], reads.seq_lens.shape[0], per_kv, reads.query_start is None, tile)


def attend(
    q: torch.Tensor,
    q_rope: torch.Tensor | None,
    reads: Reads,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    splits: int | None = None,
) -> None:
    """Writes out [T, Hq, D] and lse [T, Hq]: over ``splits`` splits, where None as many as keep the device busy."""
    if q.shape[0] == 0 or reads.seq_lens.shape[0] == 0:
        return
    q, q_rope = _queries(q, q_rope, reads)
    cut = cut_of(q, reads)
    if splits is None:
        blocks = cut.tiles * reads.k_cache.shape[1]
        splits = best_split_count(blocks, _longest(q, reads), processors_of(q.device))
    if splits == 1:
        whole_lse = None if lse is None else lse.unsqueeze(0)
        launch_of(q, q_rope, reads, cut, out.unsqueeze(0), whole_lse, reads.sinks).run()
        return
    partials, partial_lse = split_workspace(q.shape[0], q.shape[1], splits, q.shape[2], q.device)
    launch_of(q, q_rope, reads, cut, partials, partial_lse, None).run()
    merge_of(partials, partial_lse, reads.sinks, out, lse).run()


def _longest(q: torch.Tensor, reads: Reads) -> int:
    """The pages that a row may have to read: those of the table, or of a window and the queries."""
    pages = reads.page_table.shape[1]
    if reads.window:
        pages = min(pages, (reads.window + q.shape[0] // reads.seq_lens.shape[0]) // reads.page + 2)
    return pages


def _queries(q: torch.Tensor, q_rope: torch.Tensor | None, reads: Reads) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Queries as the kernel takes them: those of latent attention rounded beforehand, where they are to be."""
    if q_rope is None or not reads.rounded or q.dtype is not torch.float32:
        return q, q_rope
    return rounded_queries(q, q_rope)


def rounded_queries(q_latent: torch.Tensor, q_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both parts of the queries as bfloat16, views of one buffer [T, Hq, L + R].

    Every tile and every split reads them, as half the bytes; and a tile of 64 rows that has to narrow 512 float32 a row
    itself spills on sm_90.
    """
    width = q_latent.shape[2]
    whole = torch.empty(*q_latent.shape[:2], width + q_rope.shape[2], dtype=torch.bfloat16, device=q_latent.device)
    latent, rope = whole[..., :width], whole[..., width:]
    latent.copy_(q_latent)
    rope.copy_(q_rope)
    return latent, rope


def attend_splits(
    q: torch.Tensor, q_rope: torch.Tensor | None, reads: Reads, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Writes out [S, T, Hq, D] and lse [S, T, Hq] of S splits, without sinks and unmerged."""
    if q.shape[0] == 0 or reads.seq_lens.shape[0] == 0:
        return
    q, q_rope = _queries(q, q_rope, reads)
    launch_of(q, q_rope, reads, cut_of(q, reads), out, lse, None).run()


def split_workspace(
    queries: int, heads: int, splits: int, width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial outputs float32 [S, T, H, width] and their lse [S, T, H], in one allocation.

    It comes from the caching allocator, so a captured graph keeps its own and replays at the same addresses.
    """
    storage = torch.empty(splits * queries * heads * (width + 1), dtype=torch.float32, device=device)
    count = splits * queries * heads * width
    return storage[:count].view(splits, queries, heads, width), storage[count:].view(splits, queries, heads)


def workspace_bytes(queries: int, heads: int, splits: int, width: int) -> int:
    """Bytes that ``split_workspace`` takes; 0 for one split, whose output is written at once."""
    return 0 if splits == 1 else 4 * splits * queries * heads * (width + 1)


def launch_of(
    q: torch.Tensor,
    q_rope: torch.Tensor | None,
    reads: Reads,
    cut: Cut,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> Launch:
    """The kernel for out [S, T, Hq, D] and lse [S, T, Hq]; other tensors stand in for absent ones, and are not read."""
    batch, kv_heads = reads.seq_lens.shape[0], reads.k_cache.shape[1]
    rope, v_cache = q if q_rope is None else q_rope, reads.k_cache if reads.v_cache is None else reads.v_cache
    arguments = (
        *map(loadable, (q, rope, reads.k_cache, v_cache)),
        reads.page_table,
        reads.seq_lens if reads.query_start is None else reads.query_start,
        reads.seq_lens,
        reads.seq_lens if sinks is None else sinks,
        out,
        out if lse is None else lse,
        *q.stride()[:2],
        *rope.stride()[:2],
        *reads.k_cache.stride()[:3],
        *v_cache.stride()[:3],
        reads.page_table.stride(0),
        # what grows with the batch must not make another kernel of it
        out.stride(0) if out.shape[0] > 1 else 0,
        0 if lse is None else lse.stride(0),
        float(reads.scale),
        float(reads.soft_cap),
        batch,
        q.shape[0] // batch,
        reads.window,
    )
    constants = _constants(q, q_rope, reads, cut, lse is not None, sinks is not None)
    grid = (cut.tiles, kv_heads, out.shape[0])
    return Launch("paged_attention", "attend", grid, arguments, constants, cut.tile.warps, cut.tile.stages)


def _constants(
    q: torch.Tensor, q_rope: torch.Tensor | None, reads: Reads, cut: Cut, write_lse: bool, sunk: bool
) -> dict[str, Any]:
    """What the kernel is compiled for."""
    rope = 0 if q_rope is None else q_rope.shape[2]
    return {
        "QUERY_HEADS": q.shape[1],
        "PER_KV": q.shape[1] // reads.k_cache.shape[1],
        "TOKENS": cut.tokens,
        "DIM": q.shape[2],
        "BLOCK_DIM": _power_of_two(q.shape[2]),
        "ROPE": rope,
        "BLOCK_ROPE": _power_of_two(rope) if rope else 16,
        "PAGE": reads.page,
        "BLOCK_M": cut.rows,
        "BLOCK_N": cut.tile.keys,
        "RAGGED": reads.query_start is not None,
        "LATENT": q_rope is not None,
        "WINDOWED": reads.window > 0,
        "CAPPED": reads.soft_cap > 0.0,
        "SUNK": sunk,
        "WRITE_LSE": write_lse,
        "ROUNDED": reads.rounded,
        "PRECISION": float32_products(reads.kind, reads.architecture),
    }


def merge_of(
    partials: torch.Tensor,
    partial_lse: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    query_start: torch.Tensor | None = None,
) -> Launch:
    """The kernel that merges partials [S, T, H, D] with their lse, and a sink for each head where given, into out
    [T, H, D]; with ``query_start`` [B + 1] of its tokens only. Raises ValueError for more splits than MAX_SPLITS."""
    splits, queries, heads, width = partials.shape
    if splits > MAX_SPLITS:
        raise ValueError(f"{splits} splits cannot be merged at once; at most {MAX_SPLITS}")
    arguments = (
        partials,
        partial_lse,
        partial_lse if sinks is None else sinks,
        partial_lse if query_start is None else query_start,
        out,
        partial_lse if lse is None else lse,
        partials.stride(0),
        partial_lse.stride(0),
        splits,
        0 if query_start is None else query_start.shape[0] - 1,
    )
    constants = {
        "QUERY_HEADS": heads,
        "DIM": width,
        "BLOCK_DIM": _power_of_two(width),
        "BLOCK_SPLITS": max(2, 1 << (splits - 1).bit_length()),
        "SUNK": sinks is not None,
        "RAGGED": query_start is not None,
        "WRITE_LSE": lse is not None,
    }
    warps = max(1, min(4, width // 128))
    return Launch("paged_attention", "merge", (queries * heads,), arguments, constants, warps)
