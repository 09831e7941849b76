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

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field, OperandSource, SmemLayoutAtomKind, make_smem_layout_atom
from cutlass.memory import SmemAllocator
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from tokenspeed_mla.addressing import (
    EXPANDED,
    PREFILL_KEYS,
    PREFILL_QUERIES,
    VALUE,
    visible_keys,
)
from tokenspeed_mla.kernels.hopper_prefill_steps import (
    COLUMNS,
    GROUP_QUERIES,
    LOADING_REGISTERS,
    LOADING_WARP,
    LOG2_E,
    MATH_REGISTERS,
    MATH_THREADS,
    MATH_WARPS,
    STAGES,
    TAIL,
    THREADS,
    clear,
    finish,
    mask,
    weigh,
)
from tokenspeed_mla.kernels.operands import head_rows, prefill_extent


class HopperPrefill:
    """One compiled variant: element type of queries, keys and values, type of the output, whether causal."""

    def __init__(self, element: type[cutlass.Numeric], output: type[cutlass.Numeric], causal: bool) -> None:
        self.element = element
        self.output = output
        self.causal = causal

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        query_start: cute.Pointer,
        key_start: cute.Pointer,
        out: cute.Pointer,
        lse: cute.Pointer,
        queries: Int32,
        keys: Int32,
        heads: Int32,
        rows: Int32,
        q_stride: Int64,
        q_head_stride: Int64,
        k_stride: Int64,
        k_head_stride: Int64,
        v_stride: Int64,
        v_head_stride: Int64,
        scale: Float32,
        stream: cuda.CUstream,
    ) -> None:
        """Launches the kernel; prefill.py says what each argument is. Strides are in elements."""
        query_stride = cute.assume(Int64(heads) * VALUE, VALUE)
        outputs = cute.make_tensor(out, cute.make_layout((queries, VALUE, heads), stride=(query_stride, 1, VALUE)))
        sums = cute.make_tensor(lse, cute.make_layout((queries, heads), stride=(Int64(heads), 1)))
        starts = cute.make_tensor(query_start, cute.make_layout(rows + 1))
        key_starts = cute.make_tensor(key_start, cute.make_layout(rows + 1))
        swizzled = make_smem_layout_atom(SmemLayoutAtomKind.K_SW128, self.element)
        loads = []
        for tensor, count in (
            (head_rows(q, queries, EXPANDED, heads, q_stride, q_head_stride), PREFILL_QUERIES),
            (head_rows(k, keys, EXPANDED, heads, k_stride, k_head_stride), PREFILL_KEYS),
            (head_rows(v, keys, VALUE, heads, v_stride, v_head_stride), PREFILL_KEYS),
        ):
            box = cute.tile_to_shape(swizzled, (count, COLUMNS), order=(0, 1))
            loads.append(cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, box, (count, COLUMNS)))
        kernel = self._kernel(
            *loads[0],
            *loads[1],
            *loads[2],
            starts,
            key_starts,
            outputs,
            sums,
            cute.tile_to_shape(swizzled, (PREFILL_QUERIES, EXPANDED), order=(0, 1)),
            cute.tile_to_shape(swizzled, (PREFILL_KEYS, EXPANDED, STAGES), order=(0, 1, 2)),
            cute.tile_to_shape(swizzled, (PREFILL_KEYS, VALUE, STAGES), order=(0, 1, 2)),
            self._product(OperandMajorMode.K, PREFILL_KEYS, OperandSource.SMEM),
            self._product(OperandMajorMode.MN, VALUE, OperandSource.RMEM),
            rows,
            scale,
        )
        # A row's last tile may be short, so there is at most one more for each row.
        grid = (queries // PREFILL_QUERIES + rows, heads, 1)
        kernel.launch(grid=grid, block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True)

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
                self._load(q_atom, queries, s_q, barriers + 4 * STAGES, Int32(0), None)
                keys = cute.domain_offset((first_key, 0), k_tma[None, None, head])
                values = cute.domain_offset((first_key, 0), v_tma[None, None, head])
                stage, phase = Int32(0), Int32(1)
                for step in cutlass.range(steps, unroll=1):
                    cute.arch.mbarrier_wait(barriers + STAGES + stage, phase)
                    self._load(k_atom, keys, s_k, barriers + stage, step, stage)
                    cute.arch.mbarrier_wait(barriers + 3 * STAGES + stage, phase)
                    self._load(v_atom, values, s_v, barriers + 2 * STAGES + stage, step, stage)
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
    def _load(
        self,
        atom: cute.CopyAtom,
        rows: cute.Tensor,
        target: cute.Tensor,
        barrier: cute.Pointer,
        step: Int32,
        stage: Int32 | None,
    ) -> None:
        """Tile ``step`` of the rows into shared memory, by one thread of the loading warp."""
        into = target if cutlass.const_expr(stage is None) else target[None, None, stage]
        count, width = cute.size(into, mode=[0]), cute.size(into, mode=[1])
        source = cute.group_modes(cute.local_tile(rows, (count, COLUMNS), (step, None)), 0, 2)
        tiles = cute.group_modes(cute.local_tile(into, (count, COLUMNS), (0, None)), 0, 2)
        tiles, source = cpasync.tma_partition(atom, 0, cute.make_layout(1), tiles, source)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, count * width * self.element.width // 8)
        for column in cutlass.range_constexpr(width // COLUMNS):
            cute.copy(atom, source[None, column], tiles[None, column], tma_bar_ptr=barrier)

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
            self._multiply(scores_mma, scores, q_operand, k_operand[None, None, None, stage])
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barriers + STAGES + stage)
            mask(scores, key_of, ends, step * PREFILL_KEYS)
            weigh(scores, sums, most, total, scale * LOG2_E)
            weights.store(cute.make_tensor(scores.iterator, weights.layout).load().to(self.element))
            cute.arch.mbarrier_wait(barriers + 2 * STAGES + stage, phase)
            if (step + 1) * PREFILL_KEYS > keys:
                clear(s_v, keys - step * PREFILL_KEYS, stage, thread)
                # What was written is read by wgmma, which goes another way to shared memory.
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=TAIL, number_of_threads=MATH_THREADS)
            self._multiply(values_mma, sums, weights, value_operand[None, None, None, stage])
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barriers + 3 * STAGES + stage)
            stage += 1
            if stage == STAGES:
                stage = Int32(0)
                phase ^= 1
        cute.arch.griddepcontrol_launch_dependents()
        finish(sums, most, total, values_of.partition_C(out), lse, lane_row, rows_left, scale, thread)

    @cute.jit
    def _multiply(self, product: cute.TiledMma, sums: cute.Tensor, left: cute.Tensor, right: cute.Tensor) -> None:
        """Adds left times right, 16 deep at a time, and waits."""
        warpgroup.fence()
        for depth in cutlass.range_constexpr(cute.size(left, mode=[2])):
            cute.gemm(product, sums, left[None, None, depth], right[None, None, depth], sums)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
