"""Latent attention's prefill on Hopper: keys and values of every head out of their latents, wgmma, TMA, causal or not.

A block takes 128 queries of one head and one row of the batch, and walks over the row's keys 128 at a time. It is 12
warps. Warp 8 loads: the queries once, then keys and values of every step, each into one of two stages, by TMA. Warps 0
to 3 and 4 to 7 have 64 queries each and need nothing of each other: while one waits for its scores, the other is at its
softmax. In a step

1. the scores of 128 keys (m64n128k16, 12 times for 192 elements);
2. the softmax, in registers;
3. weights times values (m64n128k16, 8 times), the weights out of the registers that the scores were in.

Rows lie one behind the other, so a step's last keys may be another row's, or hold NaN where nobody wrote: their weights
are 0, and their values are zeroed in the stage.

The kernel is launched while the one before it in the stream still runs, waits for it before it reads anything, and lets
the next one come as soon as it has nothing left to load (programmatic dependent launch).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.nvgpu.warpgroup import Field, OperandSource, SmemLayoutAtomKind, make_smem_layout_atom
from cutlass.memory import SmemAllocator
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from tokenspeed_mla.addressing import EXPANDED, PREFILL_KEYS, PREFILL_QUERIES, VALUE, visible_keys
from tokenspeed_mla.kernels.hopper_prefill_steps import GROUP_QUERIES, STAGES, TAIL, finish, weigh
from tokenspeed_mla.kernels.hopper_steps import (
    LOADING_REGISTERS,
    LOADING_WARP,
    LOG2_E,
    MATH_REGISTERS,
    MATH_THREADS,
    MATH_WARPS,
    THREADS,
    clear,
    mask,
    multiply,
)
from tokenspeed_mla.kernels.operands import prefill_extent, words_of
from tokenspeed_mla.kernels.prefill_launch import PrefillLaunch


class HopperPrefill(PrefillLaunch):
    """One compiled variant (PrefillLaunch)."""

    queries = PREFILL_QUERIES
    keys = PREFILL_KEYS
    threads = THREADS
    stages = STAGES

    def _swizzle(self) -> cute.ComposedLayout:
        return make_smem_layout_atom(SmemLayoutAtomKind.K_SW128, self.element)

    def _beside(self) -> tuple[cute.TiledMma, ...]:
        """The products of queries and keys, and of weights and values."""
        return (
            self._product(OperandMajorMode.K, PREFILL_KEYS, OperandSource.SMEM),
            self._product(OperandMajorMode.MN, VALUE, OperandSource.RMEM),
        )

    def _product(self, major: OperandMajorMode, columns: int, source: OperandSource) -> cute.TiledMma:
        """64 rows by ``columns``, 16 deep, sums in float32."""
        product = make_trivial_tiled_mma(
            self.element,
            self.element,
            OperandMajorMode.K,
            major,
            Float32,
            (1, 1, 1),
            (GROUP_QUERIES, columns),
            source,
        )
        product.set(Field.ACCUMULATE, True)
        return product

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
        scores_mma: cute.TiledMma,
        values_mma: cute.TiledMma,
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
        # Keys full, keys free, values full, values free, one each for a stage; then that of the queries.
        barriers = smem.allocate_array(Int64, 4 * STAGES + 1)
        if thread == 0:
            for barrier in cutlass.range_constexpr(4 * STAGES + 1):
                free = barrier // STAGES % 2 == 1
                cute.arch.mbarrier_init(barriers + barrier, MATH_WARPS if free else 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # From here on what the kernel before this one wrote is there.
        cute.arch.griddepcontrol_wait()

        tile, first, q_len, first_key, key_len, steps = prefill_extent(
            starts, key_starts, rows, flat_tile, PREFILL_QUERIES, PREFILL_KEYS, self.causal
        )
        if warp >= MATH_WARPS:
            cute.arch.setmaxregister_decrease(LOADING_REGISTERS)
            if warp == LOADING_WARP and steps > 0:
                queries = cute.domain_offset((first + tile * PREFILL_QUERIES, 0), q_tma[None, None, head])
                self._load(q_atom, queries, s_q, barriers + 4 * STAGES, Int32(0))
                keys = cute.domain_offset((first_key, 0), k_tma[None, None, head])
                values = cute.domain_offset((first_key, 0), v_tma[None, None, head])
                stage, phase = Int32(0), Int32(1)
                for step in cutlass.range(steps, unroll=1):
                    cute.arch.mbarrier_wait(barriers + STAGES + stage, phase)
                    self._load(k_atom, keys, s_k[None, None, stage], barriers + stage, step)
                    cute.arch.mbarrier_wait(barriers + 3 * STAGES + stage, phase)
                    self._load(v_atom, values, s_v[None, None, stage], barriers + 2 * STAGES + stage, step)
                    stage += 1
                    if stage == STAGES:
                        stage = Int32(0)
                        phase ^= 1
            cute.arch.griddepcontrol_launch_dependents()
        else:
            cute.arch.setmaxregister_increase(MATH_REGISTERS)
            group = warp // 4
            place = tile * PREFILL_QUERIES + group * GROUP_QUERIES
            lane_row = 16 * (warp % 4) + (thread % 32) // 4
            ends = cute.make_rmem_tensor(2, Int32)
            for r in cutlass.range_constexpr(2):
                ends[r] = key_len
                if cutlass.const_expr(self.causal):
                    ends[r] = cutlass.min(key_len, visible_keys(key_len, q_len, place + lane_row + 8 * r))
            self._attend(
                cute.local_tile(s_q, (GROUP_QUERIES, EXPANDED), (group, 0)),
                s_k,
                s_v,
                barriers,
                scores_mma,
                values_mma,
                cute.local_tile(
                    cute.domain_offset((first + place, 0), out[None, None, head]), (GROUP_QUERIES, VALUE), (0, 0)
                ),
                cute.domain_offset((first + place,), lse[None, head]),
                lane_row,
                ends,
                q_len - place,
                key_len,
                steps,
                scale,
                thread,
            )

    @cute.jit
    def _attend(
        self,
        s_q: cute.Tensor,
        s_k: cute.Tensor,
        s_v: cute.Tensor,
        barriers: cute.Pointer,
        scores_mma: cute.TiledMma,
        values_mma: cute.TiledMma,
        out: cute.Tensor,
        lse: cute.Tensor,
        lane_row: Int32,
        ends: cute.Tensor,
        rows_left: Int32,
        keys: Int32,
        steps: Int32,
        scale: Float32,
        thread: Int32,
    ) -> None:
        """One thread's part of the arithmetic: rows ``lane_row`` and that + 8 of its group's, of which row i sees the
        first ``ends[i]`` of ``keys`` keys; ``out`` and ``lse`` begin at the group's first query."""
        lane = thread % 128
        scores_of, values_of = scores_mma.get_slice(lane), values_mma.get_slice(lane)
        uniform_scores, uniform_values = scores_mma.get_slice(0), values_mma.get_slice(0)
        s_turned = cute.make_tensor(s_v.iterator, cute.select(s_v.layout, [1, 0, 2]))
        q_operand = scores_mma.make_fragment_A(uniform_scores.partition_A(s_q))
        k_operand = scores_mma.make_fragment_B(uniform_scores.partition_B(s_k))
        value_operand = values_mma.make_fragment_B(uniform_values.partition_B(s_turned))
        scores = cute.make_rmem_tensor(scores_of.partition_shape_C((GROUP_QUERIES, PREFILL_KEYS)), Float32)
        sums = cute.make_rmem_tensor(values_of.partition_shape_C((GROUP_QUERIES, VALUE)), Float32)
        # Where a thread has its scores is where it has the weights that the second product takes from registers.
        weights = cute.make_rmem_tensor(values_of.partition_shape_A((GROUP_QUERIES, PREFILL_KEYS)), self.element)
        key_of = scores_of.partition_C(cute.make_identity_tensor((GROUP_QUERIES, PREFILL_KEYS)))
        words = words_of(s_v, PREFILL_KEYS, VALUE, STAGES)
        most, total = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        sums.fill(0.0)
        most.fill(-Float32.inf)
        total.fill(0.0)

        if steps > 0:
            cute.arch.mbarrier_wait(barriers + 4 * STAGES, 0)
        stage, phase = Int32(0), Int32(0)
        for step in cutlass.range(steps, unroll=1):
            cute.arch.mbarrier_wait(barriers + stage, phase)
            scores.fill(0.0)
            multiply(scores_mma, scores, q_operand, k_operand[None, None, None, stage])
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barriers + STAGES + stage)
            if step * PREFILL_KEYS + PREFILL_KEYS > ends[0]:  # the smaller of both ends
                mask(scores, key_of, ends, step * PREFILL_KEYS)
            weigh(scores, sums, most, total, scale * LOG2_E)
            weights.store(cute.make_tensor(scores.iterator, weights.layout).load().to(self.element))
            cute.arch.mbarrier_wait(barriers + 2 * STAGES + stage, phase)
            if (step + 1) * PREFILL_KEYS > keys:
                clear(words, stage, 0, VALUE, keys - step * PREFILL_KEYS, thread, MATH_THREADS)
                # What was written is read by wgmma, which goes another way to shared memory.
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=TAIL, number_of_threads=MATH_THREADS)
            multiply(values_mma, sums, weights, value_operand[None, None, None, stage])
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barriers + 3 * STAGES + stage)
            stage += 1
            if stage == STAGES:
                stage = Int32(0)
                phase ^= 1
        cute.arch.griddepcontrol_launch_dependents()
        finish(sums, most, total, values_of.partition_C(out), lse, lane_row, rows_left, scale, thread)
