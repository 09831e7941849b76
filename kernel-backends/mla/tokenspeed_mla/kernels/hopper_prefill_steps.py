"""The steps of the Hopper prefill that its arithmetic's threads do, and the sizes of everything (hopper_prefill.py).

A thread has two rows of its group's 64, 8 apart; of a tensor in its registers ``[(None, r, None), 0, 0]`` is what
belongs to row r.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from tokenspeed_mla.addressing import EXPANDED, PREFILL_KEYS, PREFILL_QUERIES, VALUE

STAGES = 2
GROUP_QUERIES = PREFILL_QUERIES // 2
"""Of 4 warps: M of a wgmma."""

SHARED_BYTES = (
    2 * EXPANDED * (PREFILL_QUERIES + STAGES * PREFILL_KEYS) + 2 * VALUE * STAGES * PREFILL_KEYS + 8 * (4 * STAGES + 1)
)
"""Of a block: queries, stages of keys and of values, barriers."""

TAIL = 1
"""The named barrier of the arithmetic's threads, for a row's last keys; 0 is that of the whole block."""


@cute.jit
def weigh(scores: cute.Tensor, sums: cute.Tensor, most: cute.Tensor, total: cute.Tensor, scale: Float32) -> None:
    """Scores to weights in their place, exp2((score - largest so far) * scale), and what was summed so far scaled
    alike."""
    for r in cutlass.range_constexpr(2):
        row_scores, row_sums = scores[(None, r, None), 0, 0], sums[(None, r, None), 0, 0]
        new = row_scores.load().reduce(cute.ReductionOp.MAX, most[r], 0)
        for offset in cutlass.range_constexpr(1, 3):
            new = cute.arch.fmax(new, cute.arch.shuffle_sync_bfly(new, offset))
        base = Float32(0.0) if new == -Float32.inf else new
        shrink = cute.math.exp2((most[r] - base) * scale, fastmath=True)
        most[r] = new
        row_weights = cute.math.exp2((row_scores.load() - base) * scale, fastmath=True)
        row_scores.store(row_weights)
        total[r] = row_weights.reduce(cute.ReductionOp.ADD, total[r] * shrink, 0)
        row_sums.store(row_sums.load() * shrink)


@cute.jit
def finish(
    sums: cute.Tensor,
    most: cute.Tensor,
    total: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    lane_row: Int32,
    rows_left: Int32,
    scale: Float32,
    thread: Int32,
) -> None:
    """Divides by the sum of the weights and writes output and lse of the rows that there are."""
    result = cute.make_rmem_tensor(sums.layout, out.element_type)
    for r in cutlass.range_constexpr(2):
        whole = total[r]
        for offset in cutlass.range_constexpr(1, 3):
            whole += cute.arch.shuffle_sync_bfly(whole, offset)
        seen = whole != 0.0  # a NaN goes through
        inverse = 1.0 / whole if seen else Float32(0.0)
        row_result, row = result[(None, r, None), 0, 0], lane_row + 8 * r
        row_result.store((sums[(None, r, None), 0, 0].load() * inverse).to(out.element_type))
        if row < rows_left:
            cute.autovec_copy(row_result, out[(None, r, None), 0, 0])
            if thread % 4 == 0:
                lse[row] = most[r] * scale + cute.math.log(whole) if seen else -Float32.inf
