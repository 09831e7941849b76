"""The steps of the Blackwell decode that single warps do, and the sizes of everything (blackwell.py).

Thread t of the softmax has row 16 (t / 32) + t % 16 of its tile and half t / 16 % 2 of the scores' keys and of the
sums' columns, so the two threads of a row are 16 lanes apart in one warp.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import dsl_user_op

from tokenspeed_mla.addressing import LATENT, TILE_KEYS, TILE_ROWS, WIDTH

STAGES = 2
SOFTMAX_WARPS = 4
SOFTMAX_THREADS = 32 * SOFTMAX_WARPS
PRODUCT_WARP = SOFTMAX_WARPS
LOADING_WARP = PRODUCT_WARP + 1
THREADS = 32 * (LOADING_WARP + 1)

COLUMNS = 64
"""Of one TMA load: 128 bytes, the width of the swizzle."""

HALF_KEYS = TILE_KEYS // 2
HALF_LATENT = LATENT // 2
WORDS = 2 * COLUMNS // 8
"""Of 8 bytes, in a row of one load."""

TENSOR_COLUMNS = 512
"""Of tensor memory, a power of two: 256 of sums, two times 64 of scores."""

CHUNK = 64
"""Sums that a thread has in its registers at once."""

SHARED_BYTES = 2 * WIDTH * (TILE_ROWS + STAGES * TILE_KEYS) + 2 * TILE_ROWS * TILE_KEYS + 8 * (3 * STAGES + 2) + 4
"""Of a block: queries, stages, weights, barriers, where the tensor memory begins."""

MOST_REGISTERS = 255
"""Of a thread: a processor has enough of them for all of a block's."""

LOG2_E = 1.4426950408889634

GROWTH = 8.0
"""By how many powers of two a weight may exceed 1 before the sums are scaled. They are divided by the sum of the
weights in the end, so what they are relative to is free; 2 ** 8 is far from what 16 bits hold."""

_LANE = 1 << 16
"""Of tensor memory: an address is a lane and a column."""


@dsl_user_op
def order_before(*, loc: object = None, ip: object = None) -> None:
    """What this thread did with tensor memory comes before its next arrival."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def order_after(*, loc: object = None, ip: object = None) -> None:
    """What this thread does with tensor memory comes after its last wait."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC, loc=loc, ip=ip)


def score_tensor(address: cute.Pointer) -> cute.Tensor:
    """Scores [64, 64] where a product of 64 rows leaves them: in the first 16 of each 32 lanes."""
    return cute.make_tensor(address, cute.make_layout(((16, 4), TILE_KEYS), stride=((_LANE, 32 * _LANE), 1)))


def sum_tensor(address: cute.Pointer) -> cute.Tensor:
    """Sums [64, 512] of two products, the second in the other 16 of each 32 lanes."""
    return cute.make_tensor(
        address,
        cute.make_layout(((16, 4), (HALF_LATENT, 2)), stride=((_LANE, 32 * _LANE), (1, 16 * _LANE))),
    )


@cute.jit
def multiply(product: cute.TiledMma, sums: cute.Tensor, left: cute.Tensor, right: cute.Tensor, adds: Boolean) -> None:
    """Asks for left times right, 16 deep at a time, added to the sums if ``adds`` and in their place otherwise."""
    order_after()
    product.set(tcgen05.Field.ACCUMULATE, adds)
    for depth in cutlass.range_constexpr(cute.size(left, mode=[2])):
        cute.gemm(product, sums, left[None, None, depth], right[None, None, depth], sums)
        product.set(tcgen05.Field.ACCUMULATE, True)


@cute.jit
def weigh(
    scores: cute.Tensor, base: Float32, total: Float32, seen: Int32, scale: Float32, thread: Int32
) -> tuple[cute.TensorSSA, Float32, Float32, Float32]:
    """Scores to weights, 2 ** ((score - base) * scale) of the first ``seen`` keys of this half.

    Returns them, the base and the sum of this thread's weights so far, and what the sums are to be scaled by."""
    load = tcgen05.make_tmem_copy(
        cute.make_copy_atom(tcgen05.Ld16x32bx2Op(tcgen05.Repetition(HALF_KEYS)), Float32), scores
    ).get_slice(thread)
    source = load.partition_S(scores)
    found = cute.make_rmem_tensor(load.partition_D(scores).shape, Float32)
    order_after()
    cute.copy(load, source, found)
    cute.arch.fence_view_async_tmem_load()
    order_before()
    for key in cutlass.range_constexpr(HALF_KEYS):
        if key >= seen:
            found[key] = -Float32.inf
    most = found.load().reduce(cute.ReductionOp.MAX, base, 0)
    most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, 16))
    shrink = Float32(1.0)
    if (most - base) * scale > GROWTH:
        shrink = cute.math.exp2((base - most) * scale, fastmath=True)
        base = most
    origin = Float32(0.0) if base == -Float32.inf else base
    weights = cute.math.exp2((found.load() - origin) * scale, fastmath=True)
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
def clear(s_kv: cute.Tensor, left: Int32, stage: Int32, thread: Int32) -> None:
    """Zeroes the latents of a stage behind its first ``left`` keys. A key's 128 bytes of one load are whole whatever
    the swizzle does to their order."""
    words = cute.make_tensor(
        cute.recast_ptr(s_kv.iterator, cute.make_swizzle(0, 4, 3), dtype=Int64),
        cute.make_layout(
            (WORDS, TILE_KEYS, WIDTH // COLUMNS, STAGES),
            stride=(1, WORDS, WORDS * TILE_KEYS, WORDS * TILE_KEYS * (WIDTH // COLUMNS)),
        ),
    )
    blocks = LATENT // COLUMNS
    for place in cutlass.range(thread, (TILE_KEYS - left) * blocks * WORDS, SOFTMAX_THREADS, unroll=1):
        key, within = left + place // (blocks * WORDS), place % (blocks * WORDS)
        words[within % WORDS, key, within // WORDS, stage] = Int64(0)


@cute.jit
def finish(
    sums: cute.Tensor,
    base: Float32,
    total: Float32,
    out: cute.Tensor,
    lse: cute.Tensor,
    row: Int32,
    rows_left: Int32,
    steps: Int32,
    scale: Float32,
    thread: Int32,
) -> None:
    """Divides by the sum of the weights and writes output and lse of the rows that there are."""
    load = tcgen05.make_tmem_copy(
        cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(CHUNK)), Float32), sums
    ).get_slice(thread)
    source, target = load.partition_S(sums), load.partition_D(out)
    whole = total + cute.arch.shuffle_sync_bfly(total, 16)
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
    if row < rows_left and thread % 32 < 16:
        lse[row] = base * scale + cute.math.log(whole) if seen else -Float32.inf
    order_before()
