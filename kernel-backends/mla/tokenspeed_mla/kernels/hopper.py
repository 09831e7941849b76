"""Latent decode on Hopper: wgmma on tiles of 64 rows, TMA loads, partial outputs with their log-sum-exp.

A block is 12 warps. Warp 8 loads: its queries once, then the keys of every step into one of two stages, each page by
TMA. Warps 0 to 3 and 4 to 7 are the two halves of the arithmetic. In a step

1. half h takes the scores of keys 32 h … 32 h + 31 with all rows (m64n32k16, 36 times);
2. both halves exchange the largest score of each row, so that they scale alike;
3. half h writes the weights of its keys, rounded, into shared memory, and both wait for each other;
4. half h adds weights times latents for columns 256 h … 256 h + 255 (m64n256k16, 4 times).

The latents are the values as they lie in the stage, read with the other major mode: nothing is transposed. Keys that no
row of the block sees may hold anything, NaN too, so their latents are zeroed before step 4; weight 0 would not do.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.nvgpu.warpgroup import Field, SmemLayoutAtomKind, make_smem_layout_atom
from cutlass.memory import SmemAllocator
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from tokenspeed_mla.addressing import (
    HALF_LATENT,
    LATENT,
    TILE_KEYS,
    TILE_ROWS,
    WIDTH,
    ceil_div,
    split_keys,
    visible_keys,
)
from tokenspeed_mla.kernels.decode_launch import OneBlockLaunch
from tokenspeed_mla.kernels.entry_bytes import ARRIVALS, CONVERTING_REGISTERS, convert_keys
from tokenspeed_mla.kernels.hopper_steps import (
    EXCHANGE,
    FEWER_MATH_REGISTERS,
    HALF_KEYS,
    HALVES,
    LOADING_REGISTERS,
    LOADING_WARP,
    LOG2_E,
    MATH_REGISTERS,
    MATH_THREADS,
    MATH_WARPS,
    STAGES,
    THREADS,
    clear,
    finish,
    mask,
    multiply,
    weigh,
)
from tokenspeed_mla.kernels.operands import words_of


class HopperDecode(OneBlockLaunch):
    """One compiled variant (DecodeLaunch)."""

    threads = THREADS
    stages = STAGES
    score_keys = HALF_KEYS

    def _swizzle(self) -> cute.ComposedLayout:
        return make_smem_layout_atom(SmemLayoutAtomKind.K_SW128, self.element)

    def _product(self, major: OperandMajorMode, columns: int) -> cute.TiledMma:
        product = make_trivial_tiled_mma(
            self.element, self.element, OperandMajorMode.K, major, Float32, (1, 1, 1), (TILE_ROWS, columns)
        )
        product.set(Field.ACCUMULATE, True)
        return product

    @cute.kernel
    def _kernel(
        self,
        q_atom: cute.CopyAtom,
        q_tma: cute.Tensor,
        kv_atom: cute.CopyAtom | None,
        kv_tma: cute.Tensor,
        tables: cute.Tensor,
        lengths: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        q_layout: cute.ComposedLayout,
        kv_layout: cute.ComposedLayout,
        weight_layout: cute.ComposedLayout,
        scores_mma: cute.TiledMma,
        values_mma: cute.TiledMma,
        groups: Int32,
        fold: Int32,
        heads: Int32,
        splits: Int32,
        scale: Float32,
    ) -> None:
        tile, request_group, split = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        request = request_group // groups
        first_token = (request_group % groups) * fold
        q_len = groups * fold

        smem = SmemAllocator()
        s_q = smem.allocate_tensor(self.element, q_layout.outer, 1024, swizzle=q_layout.inner)
        s_kv = smem.allocate_tensor(self.element, kv_layout.outer, 1024, swizzle=kv_layout.inner)
        s_weights = smem.allocate_tensor(self.element, weight_layout.outer, 1024, swizzle=weight_layout.inner)
        s_row = smem.allocate_tensor(Float32, cute.make_layout((TILE_ROWS, HALVES)), 16)
        # Full, one for each stage, then empty, one for each stage, then that of the queries.
        barriers = smem.allocate_array(Int64, 2 * STAGES + 1)

        if thread == 0:
            cute.arch.mbarrier_init(barriers + 2 * STAGES, 1)
            for stage in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(barriers + stage, ARRIVALS if self.converts else 1)
                cute.arch.mbarrier_init(barriers + STAGES + stage, MATH_WARPS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # From here on what the kernel before this one wrote is there.
        cute.arch.griddepcontrol_wait()

        seq_len = lengths[request]
        first, share = split_keys(seq_len, self.page_size, split, splits)
        stop = cutlass.min(first + share, visible_keys(seq_len, q_len, first_token + fold - 1))
        steps = ceil_div(cutlass.max(stop - first, 0), TILE_KEYS)

        if warp >= MATH_WARPS:
            cute.arch.setmaxregister_decrease(CONVERTING_REGISTERS if self.converts else LOADING_REGISTERS)
            if warp == LOADING_WARP and steps > 0:
                self._load_queries(q_atom, q_tma[None, None, request_group], s_q, barriers + 2 * STAGES, tile)
                if cutlass.const_expr(not self.converts):
                    self._load_keys(kv_atom, kv_tma, tables, s_kv, barriers, request, first, stop, steps)
            if cutlass.const_expr(self.converts):
                convert_keys(
                    kv_tma,
                    tables[request, None],
                    s_kv,
                    barriers,
                    barriers + STAGES,
                    first,
                    stop,
                    steps,
                    self.page_size,
                    thread - MATH_THREADS,
                    in_place=False,
                )
            cute.arch.griddepcontrol_launch_dependents()
        else:
            cute.arch.setmaxregister_increase(FEWER_MATH_REGISTERS if self.converts else MATH_REGISTERS)
            # A request of a negative length is nobody's: nothing is written for it.
            rows_left = fold * heads - tile * TILE_ROWS if seq_len >= 0 else Int32(0)
            lane_row = 16 * (warp % 4) + (thread % 32) // 4
            rows = cute.make_rmem_tensor(2, Int32)
            ends = cute.make_rmem_tensor(2, Int32)
            for r in cutlass.range_constexpr(2):
                rows[r] = lane_row + 8 * r
                token = first_token + (tile * TILE_ROWS + rows[r]) // heads
                ends[r] = cutlass.min(stop, visible_keys(seq_len, q_len, token)) - first
            self._attend(
                s_q,
                s_kv,
                s_weights,
                s_row,
                barriers,
                scores_mma,
                values_mma,
                cute.local_tile(out[None, None, request_group, split], (TILE_ROWS, HALF_LATENT), (tile, warp // 4)),
                cute.local_tile(lse[None, request_group, split], (TILE_ROWS,), (tile,)),
                rows,
                ends,
                rows_left,
                stop - first,
                steps,
                scale,
                thread % MATH_THREADS,
                warp // 4,
            )

    @cute.jit
    def _attend(
        self,
        s_q: cute.Tensor,
        s_kv: cute.Tensor,
        s_weights: cute.Tensor,
        s_row: cute.Tensor,
        barriers: cute.Pointer,
        scores_mma: cute.TiledMma,
        values_mma: cute.TiledMma,
        out: cute.Tensor,
        lse: cute.Tensor,
        rows: cute.Tensor,
        ends: cute.Tensor,
        rows_left: Int32,
        keys: Int32,
        steps: Int32,
        scale: Float32,
        thread: Int32,
        half: Int32,
    ) -> None:
        """One thread's part of the arithmetic: rows ``rows`` of the tile, of which row i sees the first ``ends[i]`` of
        the block's ``keys`` keys; ``out`` are the tile's rows and this half's columns."""
        lane = thread % 128
        scores_of, values_of = scores_mma.get_slice(lane), values_mma.get_slice(lane)
        uniform_scores, uniform_values = scores_mma.get_slice(0), values_mma.get_slice(0)
        # The cache entries once more as values: their first 512 elements, columns first.
        s_values = cute.make_tensor(
            s_kv.iterator, cute.select(cute.composition(s_kv.layout, (TILE_KEYS, LATENT, STAGES)), [1, 0, 2])
        )
        q_operand = scores_mma.make_fragment_A(uniform_scores.partition_A(s_q))
        k_operand = scores_mma.make_fragment_B(
            uniform_scores.partition_B(cute.local_tile(s_kv, (HALF_KEYS, WIDTH), (half, 0, None)))
        )
        weight_operand = values_mma.make_fragment_A(uniform_values.partition_A(s_weights))
        value_operand = values_mma.make_fragment_B(
            uniform_values.partition_B(cute.local_tile(s_values, (HALF_LATENT, TILE_KEYS), (half, 0, None)))
        )
        scores = cute.make_rmem_tensor(scores_of.partition_shape_C((TILE_ROWS, HALF_KEYS)), Float32)
        weights = cute.make_rmem_tensor(scores.layout, self.element)
        sums = cute.make_rmem_tensor(values_of.partition_shape_C((TILE_ROWS, HALF_LATENT)), Float32)
        key_of = scores_of.partition_C(cute.make_identity_tensor((TILE_ROWS, HALF_KEYS)))
        weights_to = scores_of.partition_C(cute.local_tile(s_weights, (TILE_ROWS, HALF_KEYS), (0, half)))
        words = words_of(s_kv, TILE_KEYS, WIDTH, STAGES)
        most, total = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        sums.fill(0.0)
        most.fill(-Float32.inf)
        total.fill(0.0)

        if steps > 0:
            cute.arch.mbarrier_wait(barriers + 2 * STAGES, 0)
        stage, phase = Int32(0), Int32(0)
        for step in cutlass.range(steps, unroll=1):
            cute.arch.mbarrier_wait(barriers + stage, phase)
            scores.fill(0.0)
            multiply(scores_mma, scores, q_operand, k_operand[None, None, None, stage])
            before = step * TILE_KEYS + half * HALF_KEYS
            mask(scores, key_of, ends, before)
            weigh(scores, weights, sums, most, total, s_row, rows, scale * LOG2_E, half, thread)
            cute.autovec_copy(weights, weights_to)
            if cutlass.const_expr(not self.converts) and (step + 1) * TILE_KEYS > keys:
                clear(words, stage, half, HALF_LATENT, keys - step * TILE_KEYS, lane, MATH_THREADS // HALVES)
            # What was written above is read by wgmma, which goes another way to shared memory.
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=EXCHANGE, number_of_threads=MATH_THREADS)
            multiply(values_mma, sums, weight_operand, value_operand[None, None, None, stage])
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barriers + STAGES + stage)
            stage += 1
            if stage == STAGES:
                stage = Int32(0)
                phase ^= 1
        cute.arch.griddepcontrol_launch_dependents()
        finish(sums, most, total, s_row, values_of.partition_C(out), lse, rows, rows_left, scale, half, thread)
