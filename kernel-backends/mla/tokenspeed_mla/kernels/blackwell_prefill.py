"""Latent attention's prefill on Blackwell: keys and values of every head out of their latents, tcgen05, causal or not.

A block takes 256 queries of one head and one row of the batch, two tiles of 128, and walks over the row's keys 64 at a
time. It is 12 warps. Warp 9 loads: the queries once, then keys and values of every step, each into one of two stages,
by TMA. Warp 8 issues the products. Warps 0 to 3 and 4 to 7 are the softmax of one tile each, a thread a row; the last
two do nothing, as registers are shared out by fours. In a step, for each tile,

1. the scores of 64 keys (m128n64k16, 12 times for 192 elements) lie in tensor memory;
2. the softmax reads them, masks, and writes the weights, rounded, into shared memory;
3. the scores of the next step are asked for, then weights times values (m128n128k16, 4 times).

So the tensor core has one tile's products while the other tile is at its softmax. Both tiles take the steps of the
later one, whose queries see more: the first has its last two masked away under a mask.

Rows lie one behind the other, so a step's last keys may be another row's, or hold NaN where nobody wrote: their weights
are 0, and their values are zeroed in the stage. Dependent launch: as hopper_prefill.py.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.cute.nvgpu.tcgen05 import SmemLayoutAtomKind, make_smem_layout_atom
from cutlass.memory import SmemAllocator

from tokenspeed_mla.addressing import DOUBLE_KEYS, DOUBLE_QUERIES, EXPANDED, VALUE, visible_keys
from tokenspeed_mla.kernels.blackwell_steps import (
    LANE,
    LOG2_E,
    SCORE_COLUMNS,
    SOFTMAX_THREADS,
    SOFTMAX_WARPS,
    TENSOR_COLUMNS,
    clear,
    correct,
    fetch,
    finish,
    multiply,
    operand,
    product_of,
    weigh,
)
from tokenspeed_mla.kernels.operands import prefill_extent, words_of
from tokenspeed_mla.kernels.prefill_launch import PrefillLaunch

STAGES = 2
TILES = 2
TILE_QUERIES = DOUBLE_QUERIES // TILES
PRODUCT_WARP = TILES * SOFTMAX_WARPS
LOADING_WARP = PRODUCT_WARP + 1
THREADS = TILES * SOFTMAX_THREADS + 128
SOFTMAX_REGISTERS = 208
OTHER_REGISTERS = 96
"""Of a thread: 2 * 128 of those and 128 of these are less than a processor's 65536."""

QUERIES, KEYS, KEYS_FREE, VALUES, VALUES_FREE, SCORED, WEIGHED, SUMMED = (0, *range(1, 15, 2))
"""Barriers: of the queries one; of keys and values one for each stage; the others one for each tile. SUMMED says, too,
that the weights may be written anew."""

BARRIERS = SUMMED + TILES
SHARED_BYTES = (
    2 * EXPANDED * (DOUBLE_QUERIES + STAGES * DOUBLE_KEYS)
    + 2 * VALUE * STAGES * DOUBLE_KEYS
    + 2 * DOUBLE_QUERIES * DOUBLE_KEYS
    + 8 * BARRIERS
    + 4
)
"""Of a block: queries, stages of keys and of values, weights, barriers, where the tensor memory begins."""

TAIL = 1
"""The named barrier of both softmaxes, for a row's last keys; 0 is that of the whole block."""


class BlackwellPrefill(PrefillLaunch):
    """One compiled variant (PrefillLaunch)."""

    queries = DOUBLE_QUERIES
    keys = DOUBLE_KEYS
    threads = THREADS
    stages = STAGES

    def _swizzle(self) -> cute.ComposedLayout:
        return make_smem_layout_atom(SmemLayoutAtomKind.K_SW128, self.element)

    def _beside(self) -> tuple[cute.ComposedLayout]:
        """The layout of the weights."""
        return (cute.tile_to_shape(self._swizzle(), (DOUBLE_QUERIES, DOUBLE_KEYS), order=(0, 1)),)

    def _scores(self) -> cute.TiledMma:
        """The product of queries and keys. Made anew for each use: whether it adds is a state of it."""
        return product_of(self.element, OperandMajorMode.K, tcgen05.CtaGroup.ONE, (TILE_QUERIES, DOUBLE_KEYS))

    def _values(self) -> cute.TiledMma:
        """That of weights and values."""
        return product_of(self.element, OperandMajorMode.MN, tcgen05.CtaGroup.ONE, (TILE_QUERIES, VALUE))

    @cute.kernel
    def _kernel(
        self,
        q_atom: cute.CopyAtom,
        q_tma: cute.Tensor,
        k_atom: cute.CopyAtom,
        k_tma: cute.Tensor,
        v_atom: cute.CopyAtom,
        v_tma: cute.Tensor,
        starts: cute.Tensor,
        key_starts: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
        weight_layout: cute.ComposedLayout,
        rows: Int32,
        scale: Float32,
    ) -> None:
        flat_tile, head, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        smem = SmemAllocator()
        s_q = smem.allocate_tensor(self.element, q_layout.outer, 1024, swizzle=q_layout.inner)
        s_k = smem.allocate_tensor(self.element, k_layout.outer, 1024, swizzle=k_layout.inner)
        s_v = smem.allocate_tensor(self.element, v_layout.outer, 1024, swizzle=v_layout.inner)
        s_weights = smem.allocate_tensor(self.element, weight_layout.outer, 1024, swizzle=weight_layout.inner)
        barriers = smem.allocate_array(Int64, BARRIERS)
        holder = smem.allocate_array(Int32, 1)
        if thread == 0:
            for barrier in cutlass.range_constexpr(BARRIERS):
                weighed = WEIGHED <= barrier < SUMMED
                cute.arch.mbarrier_init(barriers + barrier, SOFTMAX_WARPS if weighed else 1)
        cute.arch.mbarrier_init_fence()
        if warp == PRODUCT_WARP:
            cute.arch.alloc_tmem(TENSOR_COLUMNS, holder)
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.sync_threads()
        tensor = cute.arch.retrieve_tmem_ptr(Float32, 16, holder)
        # From here on what the kernel before this one wrote is there.
        cute.arch.griddepcontrol_wait()

        tile, first, q_len, first_key, key_len, steps = prefill_extent(
            starts, key_starts, rows, flat_tile, DOUBLE_QUERIES, DOUBLE_KEYS, self.causal
        )
        if warp >= PRODUCT_WARP:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if warp == LOADING_WARP and steps > 0:
                queries = cute.domain_offset((first + tile * DOUBLE_QUERIES, 0), q_tma[None, None, head])
                keys = cute.domain_offset((first_key, 0), k_tma[None, None, head])
                values = cute.domain_offset((first_key, 0), v_tma[None, None, head])
                self._load(q_atom, queries, s_q, barriers + QUERIES, Int32(0))
                for step in cutlass.range(steps, unroll=1):
                    stage, phase = step % STAGES, (step // STAGES + 1) % 2
                    cute.arch.mbarrier_wait(barriers + KEYS_FREE + stage, phase)
                    self._load(k_atom, keys, s_k[None, None, stage], barriers + KEYS + stage, step)
                    cute.arch.mbarrier_wait(barriers + VALUES_FREE + stage, phase)
                    self._load(v_atom, values, s_v[None, None, stage], barriers + VALUES + stage, step)
            if warp == PRODUCT_WARP and steps > 0:
                self._multiply(s_q, s_k, s_v, s_weights, barriers, tensor, steps)
        else:
            cute.arch.setmaxregister_increase(SOFTMAX_REGISTERS)
            group = warp // SOFTMAX_WARPS
            place = tile * DOUBLE_QUERIES + group * TILE_QUERIES
            lane = thread % SOFTMAX_THREADS
            end = key_len
            if cutlass.const_expr(self.causal):
                end = cutlass.min(key_len, visible_keys(key_len, q_len, place + lane))
            self._attend(
                s_v,
                cute.local_tile(s_weights, (1, DOUBLE_KEYS), (group * TILE_QUERIES + lane, 0)),
                barriers,
                tensor,
                cute.local_tile(
                    cute.domain_offset((first + place, 0), out[None, None, head]), (TILE_QUERIES, VALUE), (0, 0)
                ),
                cute.domain_offset((first + place,), lse[None, head]),
                end,
                q_len - place,
                key_len,
                steps,
                scale,
                group,
                lane,
            )
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.sync_threads()
        if warp == PRODUCT_WARP:
            cute.arch.dealloc_tmem(tensor, TENSOR_COLUMNS)

    @cute.jit
    def _multiply(
        self,
        s_q: cute.Tensor,
        s_k: cute.Tensor,
        s_v: cute.Tensor,
        s_weights: cute.Tensor,
        barriers: cute.Pointer,
        tensor: cute.Pointer,
        steps: Int32,
    ) -> None:
        """Asks for the products of all steps: of a tile the scores of a step before the values of the one before."""
        scores_mma, values_mma = self._scores(), self._values()
        turned = cute.make_tensor(s_v.iterator, cute.select(s_v.layout, [1, 0, 2]))
        k_operand = scores_mma.make_fragment_B(operand(s_k, DOUBLE_KEYS))
        v_operand = values_mma.make_fragment_B(operand(turned, VALUE))
        scores_layout = scores_mma.make_fragment_C(scores_mma.partition_shape_C((TILE_QUERIES, DOUBLE_KEYS))).layout
        sums_layout = values_mma.make_fragment_C(values_mma.partition_shape_C((TILE_QUERIES, VALUE))).layout

        cute.arch.mbarrier_wait(barriers + QUERIES, 0)
        for step in cutlass.range(steps + 1, unroll=1):
            stage, phase = step % STAGES, step // STAGES % 2
            if step < steps:
                cute.arch.mbarrier_wait(barriers + KEYS + stage, phase)
            if step > 0:
                cute.arch.mbarrier_wait(barriers + VALUES + (step - 1) % STAGES, (step - 1) // STAGES % 2)
            for tile in cutlass.range_constexpr(TILES):
                if step > 0:
                    # Its softmax has read the scores, so that the next ones may take their place.
                    cute.arch.mbarrier_wait(barriers + WEIGHED + tile, (step - 1) % 2)
                if step < steps:
                    q_tile = cute.local_tile(s_q, (TILE_QUERIES, EXPANDED), (tile, 0))
                    scores = cute.make_tensor(tensor + TILES * VALUE + tile * SCORE_COLUMNS, scores_layout)
                    q_operand = scores_mma.make_fragment_A(operand(q_tile, TILE_QUERIES))
                    k_stage = k_operand[None, None, None, stage]
                    multiply(self._scores(), scores, q_operand, k_stage, cutlass.Boolean(False))
                    with cute.arch.elect_one():
                        tcgen05.commit(barriers + SCORED + tile)
                if step > 0:
                    w_tile = cute.local_tile(s_weights, (TILE_QUERIES, DOUBLE_KEYS), (tile, 0))
                    sums = cute.make_tensor(tensor + tile * VALUE, sums_layout)
                    w_operand = values_mma.make_fragment_A(operand(w_tile, TILE_QUERIES))
                    v_stage = v_operand[None, None, None, (step - 1) % STAGES]
                    multiply(self._values(), sums, w_operand, v_stage, cutlass.Boolean(step > 1))
                    with cute.arch.elect_one():
                        tcgen05.commit(barriers + SUMMED + tile)
            # Only where a load waits for it: nothing is under way when the block ends.
            if step + STAGES < steps:
                with cute.arch.elect_one():
                    tcgen05.commit(barriers + KEYS_FREE + stage)
            if step > 0 and step - 1 + STAGES < steps:
                with cute.arch.elect_one():
                    tcgen05.commit(barriers + VALUES_FREE + (step - 1) % STAGES)

    @cute.jit
    def _attend(
        self,
        s_v: cute.Tensor,
        weights_to: cute.Tensor,
        barriers: cute.Pointer,
        tensor: cute.Pointer,
        out: cute.Tensor,
        lse: cute.Tensor,
        end: Int32,
        rows_left: Int32,
        keys: Int32,
        steps: Int32,
        scale: Float32,
        group: Int32,
        lane: Int32,
    ) -> None:
        """One thread's part of the softmax: row ``lane`` of tile ``group``, which sees the first ``end`` of ``keys``
        keys; ``out`` and ``lse`` begin at the tile's first query."""
        score_layout = cute.make_layout((TILE_QUERIES, DOUBLE_KEYS), stride=(LANE, 1))
        sums = cute.make_tensor(tensor + group * VALUE, cute.make_layout((TILE_QUERIES, VALUE), stride=(LANE, 1)))
        words = words_of(s_v, DOUBLE_KEYS, VALUE, STAGES)
        base, total = -Float32.inf, Float32(0.0)
        for step in cutlass.range(steps, unroll=1):
            stage = step % STAGES
            cute.arch.mbarrier_wait(barriers + SCORED + group, step % 2)
            scores, most = fetch(
                cute.make_tensor(tensor + TILES * VALUE + group * SCORE_COLUMNS, score_layout),
                tcgen05.Ld32x32bOp(tcgen05.Repetition(DOUBLE_KEYS)),
                end - step * DOUBLE_KEYS,
                lane,
            )
            weights, base, total, shrink = weigh(scores, most, base, total, scale * LOG2_E)
            if step > 0:
                # The product before has read the weights and written the sums.
                cute.arch.mbarrier_wait(barriers + SUMMED + group, (step - 1) % 2)
                if cute.arch.vote_any_sync(shrink != 1.0):
                    correct(sums, shrink, lane)
            rounded = cute.make_rmem_tensor(weights_to.layout.shape, self.element)
            rounded.store(weights.to(self.element))
            cute.autovec_copy(rounded, weights_to)
            if (step + 1) * DOUBLE_KEYS > keys:
                cute.arch.mbarrier_wait(barriers + VALUES + stage, step // STAGES % 2)
                place = group * SOFTMAX_THREADS + lane
                clear(words[None, None, None, stage], VALUE, keys - step * DOUBLE_KEYS, place, TILES * SOFTMAX_THREADS)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=TAIL, number_of_threads=TILES * SOFTMAX_THREADS)
            # What was written above is read by the tensor core, which goes another way to shared memory.
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barriers + WEIGHED + group)
        if steps > 0:
            cute.arch.mbarrier_wait(barriers + SUMMED + group, (steps - 1) % 2)
        finish(sums, base, total, out, lse, lane, rows_left, steps, scale, lane, Int32(0))
