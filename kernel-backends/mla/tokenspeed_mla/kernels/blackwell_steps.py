"""The steps of the Blackwell kernels that single warps do (blackwell.py, blackwell_pair.py, blackwell_prefill.py).

A thread of the softmax has one row: of a decode's 64 one half of the scores' keys and of the sums' columns, of a
prefill's 128 all of them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.utils.blackwell_helpers import make_trivial_tiled_mma

from tokenspeed_mla.kernels.operands import COLUMNS, WORDS

SOFTMAX_WARPS = 4
SOFTMAX_THREADS = 32 * SOFTMAX_WARPS
PRODUCT_WARP = SOFTMAX_WARPS
LOADING_WARP = PRODUCT_WARP + 1

TENSOR_COLUMNS = 512
"""Of tensor memory, a power of two: 256 of sums, two times 64 of scores."""

SCORE_COLUMNS = 64
"""Of one buffer of scores."""

CHUNK = 32
"""Sums that a thread has in its registers at once."""

MOST_REGISTERS = 255
"""Of a thread: a processor has enough of them for all of a block's."""

MASKED = 32
"""Scores that are masked by one loop."""

LOG2_E = 1.4426950408889634

GROWTH = 8.0
"""By how many powers of two a weight may exceed 1 before the sums are scaled. They are divided by the sum of the
weights in the end, so what they are relative to is free; 2 ** 8 is far from what 16 bits hold."""

LANE = 1 << 16
"""Of tensor memory: an address is a lane and a column."""


@dsl_user_op
def order_before(*, loc: object = None, ip: object = None) -> None:
    """What this thread did with tensor memory comes before its next arrival."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def order_after(*, loc: object = None, ip: object = None) -> None:
    """What this thread does with tensor memory comes after its last wait."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC, loc=loc, ip=ip)


def product_of(
    element: type[cutlass.Numeric], major: OperandMajorMode, blocks: tcgen05.CtaGroup, shape: tuple[int, int]
) -> cute.TiledMma:
    """A product of so many rows by columns, 16 deep, sums in float32; ``major`` of its right side."""
    return make_trivial_tiled_mma(element, element, OperandMajorMode.K, major, Float32, blocks, shape)


def operand(tensor: cute.Tensor, rows: int) -> cute.Tensor:
    """A block's part of a product's operand, [rows, depth], by instructions: ((rows, 16), times, depths)."""
    return cute.group_modes(cute.flat_divide(tensor, (rows, 16)), 0, 2)


@cute.jit
def multiply(product: cute.TiledMma, sums: cute.Tensor, left: cute.Tensor, right: cute.Tensor, adds: Boolean) -> None:
    """Asks for left times right, 16 deep at a time, added to the sums if ``adds`` and in their place otherwise."""
    order_after()
    product.set(tcgen05.Field.ACCUMULATE, adds)
    for depth in cutlass.range_constexpr(cute.size(left, mode=[2])):
        cute.gemm(product, sums, left[None, None, depth], right[None, None, depth], sums)
        product.set(tcgen05.Field.ACCUMULATE, True)


@cute.jit
def fetch(scores: cute.Tensor, operation: object, seen: Int32, thread: Int32) -> tuple[cute.Tensor, Float32]:
    """This thread's scores, by one load ``operation`` of tensor memory, -inf from its key ``seen`` on; the largest."""
    load = tcgen05.make_tmem_copy(cute.make_copy_atom(operation, Float32), scores).get_slice(thread)
    found = cute.make_rmem_tensor(load.partition_D(scores).shape, Float32)
    order_after()
    cute.copy(load, load.partition_S(scores), found)
    cute.arch.fence_view_async_tmem_load()
    order_before()
    # Two loops, as the compiler warns of long ones.
    for part in cutlass.range_constexpr(cute.size(found) // MASKED):
        for place in cutlass.range_constexpr(MASKED):
            key = part * MASKED + place
            if key >= seen:
                found[key] = -Float32.inf
    return found, found.load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)


@cute.jit
def weigh(
    scores: cute.Tensor, most: Float32, base: Float32, total: Float32, scale: Float32
) -> tuple[cute.TensorSSA, Float32, Float32, Float32]:
    """Scores to weights, 2 ** ((score - base) * scale); ``most`` is the row's largest score of this step.

    Returns them, the base and the sum of this thread's weights so far, and what the sums are to be scaled by."""
    shrink = Float32(1.0)
    if (most - base) * scale > GROWTH:
        shrink = cute.math.exp2((base - most) * scale, fastmath=True)
        base = most
    origin = Float32(0.0) if base == -Float32.inf else base
    weights = cute.math.exp2((scores.load() - origin) * scale, fastmath=True)
    total = weights.reduce(cute.ReductionOp.ADD, total * shrink, 0)
    return weights, base, total, shrink


@cute.jit
def correct(sums: cute.Tensor, shrink: Float32, thread: Int32) -> None:
    """Scales this thread's sums."""
    load = tcgen05.make_tmem_copy(
        cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(CHUNK)), Float32), sums
    ).get_slice(thread)
    store = tcgen05.make_tmem_copy(
        cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(CHUNK)), Float32), sums
    ).get_slice(thread)
    source, target = load.partition_S(sums), store.partition_D(sums)
    order_after()
    for chunk in cutlass.range_constexpr(cute.size(source, mode=[2])):
        found = cute.make_rmem_tensor(CHUNK, Float32)
        part = cute.make_tensor(found.iterator, load.partition_D(sums)[None, None, chunk].shape)
        cute.copy(load, source[None, None, chunk], part)
        cute.arch.fence_view_async_tmem_load()
        found.store(found.load() * shrink)
        cute.copy(store, part, target[None, None, chunk])
    cute.arch.fence_view_async_tmem_store()
    order_before()


@cute.jit
def clear(words: cute.Tensor, columns: int, left: Int32, thread: Int32, threads: int) -> None:
    """Zeroes the first ``columns`` behind the first ``left`` keys of a stage's ``words`` [16, keys, loads], by so many
    ``threads``."""
    keys, loads = cute.size(words, mode=[1]), columns // COLUMNS
    for place in cutlass.range(thread, (keys - left) * loads * WORDS, threads, unroll=1):
        key, within = left + place // (loads * WORDS), place % (loads * WORDS)
        words[within % WORDS, key, within // WORDS] = Int64(0)


@cute.jit
def finish(
    sums: cute.Tensor,
    base: Float32,
    whole: Float32,
    out: cute.Tensor,
    lse: cute.Tensor,
    row: Int32,
    rows_left: Int32,
    steps: Int32,
    scale: Float32,
    thread: Int32,
    half: Int32,
) -> None:
    """Divides by ``whole``, the sum of the row's weights, and writes output and lse of the rows that there are."""
    load = tcgen05.make_tmem_copy(
        cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(CHUNK)), Float32), sums
    ).get_slice(thread)
    source, target = load.partition_S(sums), load.partition_D(out)
    seen = whole != 0.0  # a NaN goes through
    inverse = 1.0 / whole if seen else Float32(0.0)
    order_after()
    for chunk in cutlass.range_constexpr(cute.size(source, mode=[2])):
        found = cute.make_rmem_tensor(target[None, None, chunk].shape, Float32)
        found.fill(0.0)
        if steps > 0:
            cute.copy(load, source[None, None, chunk], found)
            cute.arch.fence_view_async_tmem_load()
        result = cute.make_rmem_tensor(found.shape, out.element_type)
        result.store((found.load() * inverse).to(out.element_type))
        if row < rows_left:
            cute.autovec_copy(result, target[None, None, chunk])
    if row < rows_left and half == 0:
        lse[row] = base * scale + cute.math.log(whole) if seen else -Float32.inf
    order_before()
