"""The loads of a pair of blocks, and what both share with its other warps (blackwell_pair.py)."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from tokenspeed_mla.addressing import HALF_LATENT, PAIR_KEYS, PAIR_ROWS, WIDTH, page_of
from tokenspeed_mla.kernels.operands import COLUMNS

BLOCKS = 2
BLOCK_ROWS = PAIR_ROWS // BLOCKS
BLOCK_KEYS = PAIR_KEYS // BLOCKS
QUERIES, KEYS, KEYS_FREE, VALUES, SUMMED, WEIGHED, SCORED = range(7)
"""Barriers; SCORED is the first of two. SUMMED says, too, that the values and the weights may be written anew."""

NORMAL = 0x1000000000000000
"""The cache policy of a load that wants nothing special; those of pairs name one."""


@cute.jit
def load_queries(
    atom: cute.CopyAtom,
    q: cute.Tensor,
    s_q: cute.Tensor,
    barriers: cute.Pointer,
    block: Int32,
    rank: Int32,
) -> None:
    """The block's rows of its group, by one thread of the loading warp."""
    source = cute.group_modes(cute.local_tile(q, (BLOCK_ROWS, COLUMNS), (block, None)), 0, 2)
    target = cute.group_modes(cute.local_tile(s_q, (BLOCK_ROWS, COLUMNS), (0, None)), 0, 2)
    target, source = cpasync.tma_partition(atom, 0, cute.make_layout(1), target, source)
    if rank == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barriers + QUERIES, PAIR_ROWS * WIDTH * 2)
    for column in cutlass.range_constexpr(WIDTH // COLUMNS):
        cute.copy(
            atom,
            source[None, column],
            target[None, column],
            tma_bar_ptr=barriers + QUERIES,
            cache_policy=Int64(NORMAL),
        )


@cute.jit
def load_keys(
    atom: cute.CopyAtom,
    entries: cute.Tensor,
    s_keys: cute.Tensor,
    table: cute.Tensor,
    barriers: cute.Pointer,
    first: Int32,
    stop: Int32,
    steps: Int32,
    rank: Int32,
    page_size: int,
) -> None:
    """The block's half of all steps' keys. Those from ``stop`` on come from the null page."""
    box_keys = min(page_size, BLOCK_KEYS)
    shape = (box_keys, COLUMNS)
    source = cute.group_modes(cute.local_tile(entries, shape, (None, None, None)), 0, 2)
    target = cute.group_modes(cute.local_tile(s_keys, shape, (None, None)), 0, 2)
    target, source = cpasync.tma_partition(atom, 0, cute.make_layout(1), target, source)
    for step in cutlass.range(steps, unroll=1):
        cute.arch.mbarrier_wait(barriers + KEYS_FREE, (step + 1) % 2)
        if rank == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barriers + KEYS, PAIR_KEYS * WIDTH * 2)
        for part in cutlass.range_constexpr(BLOCK_KEYS // box_keys):
            position = first + step * PAIR_KEYS + rank * BLOCK_KEYS + part * box_keys
            page, box = find_box(table, position, stop, page_size)
            for column in cutlass.range_constexpr(WIDTH // COLUMNS):
                cute.copy(
                    atom,
                    source[None, box, column, page],
                    target[None, part, column],
                    tma_bar_ptr=barriers + KEYS,
                    cache_policy=Int64(NORMAL),
                )


@cute.jit
def load_values(
    atom: cute.CopyAtom,
    entries: cute.Tensor,
    s_values: cute.Tensor,
    table: cute.Tensor,
    barriers: cute.Pointer,
    first: Int32,
    stop: Int32,
    steps: Int32,
    rank: Int32,
    page_size: int,
) -> None:
    """The block's columns of all steps' latents: its half of each half."""
    box_keys = min(page_size, BLOCK_KEYS)
    shape = (box_keys, COLUMNS)
    source = cute.group_modes(cute.local_tile(entries, shape, (None, None, None)), 0, 2)
    target = cute.group_modes(cute.local_tile(s_values, shape, (None, None)), 0, 2)
    target, source = cpasync.tma_partition(atom, 0, cute.make_layout(1), target, source)
    for step in cutlass.range(steps, unroll=1):
        cute.arch.mbarrier_wait(barriers + SUMMED, (step + 1) % 2)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barriers + VALUES, PAIR_KEYS * HALF_LATENT * 2)
        for part in cutlass.range_constexpr(PAIR_KEYS // box_keys):
            page, box = find_box(table, first + step * PAIR_KEYS + part * box_keys, stop, page_size)
            for place in cutlass.range_constexpr(HALF_LATENT // COLUMNS):
                column = place // 2 * 4 + rank * 2 + place % 2
                cute.copy(
                    atom, source[None, box, column, page], target[None, part, place], tma_bar_ptr=barriers + VALUES
                )


@cute.jit
def find_box(table: cute.Tensor, position: Int32, stop: Int32, page_size: int) -> tuple[Int32, Int32]:
    """The page of a position and the box in it; from ``stop`` on the null page."""
    index, box = page_of(position, page_size, min(page_size, BLOCK_KEYS))
    page = Int32(0)
    if position < stop:
        page = table[index]
    return page, box
