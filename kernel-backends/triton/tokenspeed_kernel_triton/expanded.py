"""attention.ragged and mla_extend_expanded on the device; contracts in tokenspeed_kernel.ops.

Keys and values are expanded for some positions of every row at a time, as many as fit EXPANDED_BYTES, and attended to
before the next. How many times follows the width of the page table, for nothing here waits for the device: a row that
is shorter leaves blocks that end at once.
"""

from collections.abc import Callable
from typing import Any

import torch

from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel_triton.configs import AttentionTile, attention_tile, float32_products, row_blocks
from tokenspeed_kernel_triton.device import architecture_of, loadable
from tokenspeed_kernel_triton.linear import tile_of
from tokenspeed_kernel_triton.loading import Launch, power_of_two
from tokenspeed_kernel_triton.planes import Planes, take_apart

EXPANDED_BYTES = 256 << 20
"""Of the keys and values that are held at a time."""

_LARGEST_TILE = 64
"""Keys: what is held is a multiple, so that tiles begin at the same positions."""


def _parts(width: int) -> tuple[int, int]:
    """A head's elements as the largest power of two that fits, from 16 on, and the rest."""
    main = max(16, 1 << (width.bit_length() - 1))
    return min(main, width), max(0, width - main)


def _rows_launch(
    tensors: tuple[torch.Tensor, ...],
    strides: tuple[int, ...],
    numbers: tuple[Any, ...],
    tile: AttentionTile,
    constants: dict[str, Any],
    sizes: tuple[int, int, int],
    rounded: bool,
) -> Launch:
    """The launch of attend_rows; ``sizes``: of a head's two parts and its value."""
    q, architecture, per_kv = tensors[0], architecture_of(tensors[0].device), constants["PER_KV"]
    tokens = max(1, tile.rows // per_kv)
    main, rest, value = sizes
    whole = {
        "QUERY_HEADS": q.shape[1],
        "TOKENS": tokens,
        "MAIN": main,
        "BLOCK_MAIN": power_of_two(main, 16),
        "REST": rest,
        "BLOCK_REST": power_of_two(rest, 16) if rest else 16,
        "VALUE": value,
        "BLOCK_VALUE": power_of_two(value, 16),
        "BLOCK_M": row_blocks(tokens * per_kv, max(tile.rows, power_of_two(per_kv, 16))),
        "BLOCK_N": tile.keys,
        "ROUNDED": rounded,
        "PRECISION": float32_products("extend", architecture),
        **constants,
    }
    rows = tensors[5].shape[0] - 1
    grid = (q.shape[0] // tokens + rows, q.shape[1] // per_kv)
    return Launch("expanded", "attend_rows", grid, (*tensors, *strides, *numbers), whole, tile.warps, tile.stages)


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
) -> Launch:
    """The launch of attention over rows of keys and values."""
    width, value = q.shape[2], v.shape[2]
    tile = attention_tile("extend", architecture_of(q.device), max(width, value), rounded=False)
    known = out if lse is None else lse
    tensors = (q, k, v, k, key_start, query_start, key_start, out, known, out, out)
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], 0, 0, 0)
    numbers = (float(scale), query_start.shape[0] - 1, 0, 0, 1, 1)
    constants = {
        "PER_KV": q.shape[1] // k.shape[1],
        "LATENT": 0,
        "PAGE": 1,
        "EXPANDED": False,
        "CAUSAL": causal,
        "WRITE_LSE": lse is not None,
    }
    return _rows_launch(tensors, strides, numbers, tile, constants, (*_parts(width), value), rounded=False)


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
    """attention.ragged."""
    if q.shape[0] and query_start.shape[0] > 1:
        ragged_of(q, k, v, query_start, key_start, scale, out, lse, causal).run()


def expand_of(
    planes: Planes,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    first_key: int,
    held: torch.Tensor,
    rounded: bool,
) -> Launch:
    """The launch that expands held [B, positions, outputs] from position ``first_key`` on."""
    rows, positions, outputs = held.shape
    tile = tile_of(held.device, positions, planes, rounded)
    strides = (latent_cache.stride(0), latent_cache.stride(2), page_table.stride(0))
    cache = loadable(latent_cache)
    tensors = (cache, *planes.arguments(cache), page_table, seq_lens, held)
    constants = {
        "PAGE": latent_cache.shape[2],
        **planes.constants(tile.depth),
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "ROUNDED": rounded,
        "PRECISION": tile.precision,
    }
    grid = (-(-outputs // tile.columns), -(-positions // tile.rows), rows)
    arguments = (*tensors, *strides, first_key, positions, outputs)
    return Launch("expanded", "expand", grid, arguments, constants, tile.warps, tile.stages)


def attend_held_of(
    q: torch.Tensor,
    held: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    state: torch.Tensor,
    first_key: int,
    last: bool,
    rounded: bool,
) -> Launch:
    """The launch of attention over held [B, positions, Hq * (P + V)]; ``state`` float32 [2, T, Hq]."""
    heads, width, value = q.shape[1], q.shape[2], out.shape[2]
    positions, one = held.shape[1], held.shape[2] // heads
    plain = one - value
    tile = attention_tile("extend", architecture_of(q.device), max(plain, value), rounded)
    keys = (held, held[..., plain:], loadable(latent_cache))
    tensors = (q, *keys, page_table, query_start, seq_lens, out, out, *state)
    held_strides = (heads * one, one)
    cache_strides = (latent_cache.stride(0), latent_cache.stride(2), page_table.stride(0))
    strides = (*q.stride()[:2], *held_strides, *held_strides, *cache_strides)
    numbers = (float(scale), query_start.shape[0] - 1, first_key, positions, int(first_key == 0), int(last))
    rotary = width - plain
    constants = {
        "PER_KV": 1,
        "LATENT": latent_cache.shape[3] - rotary,
        "PAGE": latent_cache.shape[2],
        "EXPANDED": True,
        "CAUSAL": True,
        "WRITE_LSE": False,
    }
    return _rows_launch(tensors, strides, numbers, tile, constants, (plain, rotary, value), rounded)


def held_positions(rows: int, longest: int, bytes_of_position: int) -> int:
    """How many positions of each row are expanded at a time, of rows up to ``longest``."""
    fit = EXPANDED_BYTES // (rows * bytes_of_position) // _LARGEST_TILE * _LARGEST_TILE
    return max(_LARGEST_TILE, min(fit, -(-longest // _LARGEST_TILE) * _LARGEST_TILE))


def _make(weight: QuantizedTensor, heads: int, rounded: bool) -> Callable[..., None]:
    planes, outputs = take_apart(weight), weight.shape[0]

    def mla_extend_expanded(
        q: torch.Tensor,
        latent_cache: torch.Tensor,
        page_table: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        rows, longest = seq_lens.shape[0], page_table.shape[1] * latent_cache.shape[2]
        if not q.shape[0] or not rows:
            return
        dtype = torch.bfloat16 if rounded else torch.float32
        positions = held_positions(rows, longest, outputs * dtype.itemsize)
        held = torch.empty(rows, positions, outputs, dtype=dtype, device=q.device)
        state = torch.empty(2, q.shape[0], heads, dtype=torch.float32, device=q.device)
        for first_key in range(0, max(1, longest), positions):
            expand_of(planes, latent_cache, page_table, seq_lens, first_key, held, rounded).run()
            read = (latent_cache, page_table, query_start, seq_lens, scale, out, state, first_key)
            attend_held_of(q, held, *read, first_key + positions >= longest, rounded).run()

    return mla_extend_expanded


def make_mla_extend_expanded(weight: QuantizedTensor, heads: int) -> Callable[..., None]:
    """attention.mla_extend_expanded with products of float32."""
    return _make(weight, heads, rounded=False)


def make_rounded_mla_extend_expanded(weight: QuantizedTensor, heads: int) -> Callable[..., None]:
    """attention.mla_extend_expanded with queries, keys, values and weights rounded to bfloat16."""
    return _make(weight, heads, rounded=True)
