"""The steps of the Hopper decode that its arithmetic's threads do, and the sizes of everything (hopper.py); the prefill
has some of both alike (hopper_prefill.py).

A thread has two rows of its tile, 8 apart; of a tensor in its registers ``[(None, r, None), 0, 0]`` is what belongs to
row r. ``rows`` are the numbers of both in the tile, ``half`` is which half of the arithmetic the thread is in.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from tokenspeed_mla.addressing import TILE_KEYS, TILE_ROWS, WIDTH
from tokenspeed_mla.kernels.operands import COLUMNS, WORDS

STAGES = 2
HALVES = 2
MATH_WARPS = 8
MATH_THREADS = 32 * MATH_WARPS
LOADING_WARP = MATH_WARPS
THREADS = MATH_THREADS + 128
LOADING_REGISTERS = 24
MATH_REGISTERS = 240
"""Of a thread: 2 * 128 of these and 128 of the others are those that a block of 384 threads of 168 has."""

FEWER_MATH_REGISTERS = 200
"""The same where the other threads convert a cache of 8 bits, CONVERTING_REGISTERS each."""

HALF_KEYS = TILE_KEYS // HALVES

SHARED_BYTES = (
    2 * WIDTH * (TILE_ROWS + STAGES * TILE_KEYS)
    + 2 * TILE_ROWS * TILE_KEYS
    + 4 * TILE_ROWS * HALVES
    + 8 * (2 * STAGES + 1)
)
"""Of a block: queries, stages, weights, a number for each row and half, barriers."""

EXCHANGE = 1
"""The named barrier of the arithmetic's threads; 0 is that of the whole block."""

LOG2_E = 1.4426950408889634


@cute.jit
def multiply(product: cute.TiledMma, sums: cute.Tensor, left: cute.Tensor, right: cute.Tensor) -> None:
    """Adds left times right, 16 deep at a time, and waits."""
    warpgroup.fence()
    for depth in cutlass.range_constexpr(cute.size(left, mode=[2])):
        cute.gemm(product, sums, left[None, None, depth], right[None, None, depth], sums)
    warpgroup.commit_group()
    warpgroup.wait_group(0)


@cute.jit
def mask(scores: cute.Tensor, key_of: cute.Tensor, ends: cute.Tensor, before: Int32) -> None:
    """Scores of keys that a row does not see become -inf; ``before`` keys of the block come before these."""
    for r in cutlass.range_constexpr(2):
        row_scores, row_keys = scores[(None, r, None), 0, 0], key_of[(None, r, None), 0, 0]
        for i in cutlass.range_constexpr(cute.size(row_scores)):
            if before + row_keys[i][1] >= ends[r]:
                row_scores[i] = -Float32.inf


@cute.jit
def weigh(
    scores: cute.Tensor,
    weights: cute.Tensor,
    sums: cute.Tensor,
    most: cute.Tensor,
    total: cute.Tensor,
    s_row: cute.Tensor,
    rows: cute.Tensor,
    scale: Float32,
    half: Int32,
    thread: Int32,
) -> None:
    """Scores to weights, exp2((score - largest so far) * scale), with what was summed so far scaled alike."""
    largest = cute.make_rmem_tensor(2, Float32)
    for r in cutlass.range_constexpr(2):
        row_scores = scores[(None, r, None), 0, 0].load()
        largest[r] = row_scores.reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
        for offset in cutlass.range_constexpr(1, 3):
            largest[r] = cute.arch.fmax(largest[r], cute.arch.shuffle_sync_bfly(largest[r], offset))
        if thread % 4 == 0:
            s_row[rows[r], half] = largest[r]
    cute.arch.barrier(barrier_id=EXCHANGE, number_of_threads=MATH_THREADS)
    for r in cutlass.range_constexpr(2):
        row_scores, row_sums = scores[(None, r, None), 0, 0], sums[(None, r, None), 0, 0]
        new = cute.arch.fmax(most[r], cute.arch.fmax(largest[r], s_row[rows[r], 1 - half]))
        base = Float32(0.0) if new == -Float32.inf else new
        shrink = cute.math.exp2((most[r] - base) * scale, fastmath=True)
        most[r] = new
        row_weights = cute.math.exp2((row_scores.load() - base) * scale, fastmath=True)
        weights[(None, r, None), 0, 0].store(row_weights.to(weights.element_type))
        total[r] = row_weights.reduce(cute.ReductionOp.ADD, total[r] * shrink, 0)
        row_sums.store(row_sums.load() * shrink)


@cute.jit
def clear(
    words: cute.Tensor, stage: Int32, place: Int32 | int, columns: int, left: Int32, thread: Int32, threads: int
) -> None:
    """Zeroes what a stage has behind its first ``left`` keys, of every key the part number ``place`` of so many
    ``columns``; ``words`` are those of all stages (words_of). By so many ``threads``."""
    loads = columns // COLUMNS
    for word in cutlass.range(thread, (cute.size(words, mode=[1]) - left) * loads * WORDS, threads, unroll=1):
        key, within = left + word // (loads * WORDS), word % (loads * WORDS)
        words[within % WORDS, key, place * loads + within // WORDS, stage] = Int64(0)


@cute.jit
def finish(
    sums: cute.Tensor,
    most: cute.Tensor,
    total: cute.Tensor,
    s_row: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    rows: cute.Tensor,
    rows_left: Int32,
    scale: Float32,
    half: Int32,
    thread: Int32,
) -> None:
    """Divides by the sum of the weights and writes output and lse of the rows that there are."""
    for r in cutlass.range_constexpr(2):
        for offset in cutlass.range_constexpr(1, 3):
            total[r] += cute.arch.shuffle_sync_bfly(total[r], offset)
        if thread % 4 == 0:
            s_row[rows[r], half] = total[r]
    cute.arch.barrier(barrier_id=EXCHANGE, number_of_threads=MATH_THREADS)
    result = cute.make_rmem_tensor(sums.layout, out.element_type)
    for r in cutlass.range_constexpr(2):
        whole = total[r] + s_row[rows[r], 1 - half]
        seen = whole != 0.0  # a NaN goes through
        inverse = 1.0 / whole if seen else Float32(0.0)
        row_result = result[(None, r, None), 0, 0]
        row_result.store((sums[(None, r, None), 0, 0].load() * inverse).to(out.element_type))
        if rows[r] < rows_left:
            cute.autovec_copy(row_result, out[(None, r, None), 0, 0])
            if thread % 4 == 0 and half == 0:
                lse[rows[r]] = most[r] * scale + cute.math.log(whole) if seen else -Float32.inf
