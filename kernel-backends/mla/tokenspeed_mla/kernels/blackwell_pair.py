"""Latent decode on Blackwell by pairs of blocks: tcgen05 on tiles of 128 rows, for whoever has rows to fill them.

A pair of blocks, a cluster, multiplies as one. Each has 64 of the rows; of a product's other side each has one half in
its shared memory, so what a product reads is loaded once for the pair: of the keys of a step, block r has keys 64 r …
64 r + 63 whole; of the latents as values it has all 128 keys, columns 128 r … 128 r + 127 of each half of the latent.
Those are different parts of the cache, so a step loads keys and values apart, the values out of the level-2 cache.

A block is 7 warps. Warp 5 loads the queries once and the keys of every step, warp 6 the values, each with a stage of
its own: the next keys come while the softmax is at these, the next values while the scores are made. Warps 0 to 3 are
the softmax of the block's rows. Warp 4 of the first block issues the products of both. In a step

1. the scores of 128 keys (m128n128k16, 36 times) become one of two buffers of both blocks' tensor memory;
2. each softmax reads its rows, masks, and writes the weights, rounded, into its block's shared memory;
3. where a row's largest score grew much, it scales what was summed so far;
4. weights times values are added to the sums, two halves of 256 columns (m128n256k16, 8 times each).

Barriers that a product reports to are arrived at in both blocks; those that it waits for are the first block's: the
loads of keys of both count there, and so do the warps of both softmaxes. Values report to their own block, whose
softmax waits for them, as it is the one to clear those that nobody sees.

A block's 64 rows are the first and the last 64 lanes of tensor memory, which have one half of the columns each: thread
t of a softmax has row t % 64 and half t / 64.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.nvgpu.tcgen05 import SmemLayoutAtomKind, make_smem_layout_atom
from cutlass.memory import SmemAllocator

from tokenspeed_mla.addressing import (
    HALF_LATENT,
    LATENT,
    PAIR_KEYS,
    PAIR_ROWS,
    WIDTH,
    ceil_div,
    split_keys,
    visible_keys,
)
from tokenspeed_mla.kernels.blackwell_pair_loads import (
    BLOCK_KEYS,
    BLOCK_ROWS,
    BLOCKS,
    KEYS,
    KEYS_FREE,
    QUERIES,
    SCORED,
    SUMMED,
    VALUES,
    WEIGHED,
    load_keys,
    load_queries,
    load_values,
)
from tokenspeed_mla.kernels.blackwell_steps import (
    LANE,
    LOADING_WARP,
    LOG2_E,
    PRODUCT_WARP,
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
from tokenspeed_mla.kernels.decode_launch import DecodeLaunch
from tokenspeed_mla.kernels.operands import tiled_load, words_of

VALUE_WARP = LOADING_WARP + 1
THREADS = 32 * (VALUE_WARP + 1)
SHARED_BYTES = (
    2 * WIDTH * (BLOCK_ROWS + BLOCK_KEYS)
    + 2 * HALF_LATENT * PAIR_KEYS
    + 2 * BLOCK_ROWS * PAIR_KEYS
    + 4 * BLOCK_ROWS * 2 * 2
    + 8 * 8
    + 4
)
"""Of a block: queries, keys, values, weights, two numbers for each row and half, barriers, where the tensor memory
begins."""

EXCHANGE = 1
"""The named barrier of the softmax; 0 is that of the whole block."""

BOTH = 0b11
"""Blocks, as a mask."""


class BlackwellPairDecode(DecodeLaunch):
    """One compiled variant (DecodeLaunch)."""

    block_keys = BLOCK_KEYS

    def _launch(
        self,
        queries: cute.Tensor,
        entries: cute.Tensor,
        memory: tuple[cute.Tensor, ...],
        numbers: tuple[Int32 | Float32, ...],
        rows: Int32,
        others: tuple[Int32, Int32],
        stream: cuda.CUstream,
    ) -> None:
        swizzled = make_smem_layout_atom(SmemLayoutAtomKind.K_SW128, self.element)
        alone = cpasync.CopyBulkTensorTileG2SOp()
        paired = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
        kernel = self._kernel(
            *tiled_load(paired, queries, swizzled, BLOCK_ROWS),
            *tiled_load(paired, entries, swizzled, self.box_keys),
            *tiled_load(alone, entries, swizzled, self.box_keys),
            *memory,
            cute.tile_to_shape(swizzled, (BLOCK_ROWS, WIDTH), order=(0, 1)),
            cute.tile_to_shape(swizzled, (BLOCK_KEYS, WIDTH), order=(0, 1)),
            cute.tile_to_shape(swizzled, (PAIR_KEYS, HALF_LATENT), order=(0, 1)),
            cute.tile_to_shape(swizzled, (BLOCK_ROWS, PAIR_KEYS), order=(0, 1)),
            product_of(self.element, OperandMajorMode.K, tcgen05.CtaGroup.TWO, (PAIR_ROWS, PAIR_KEYS)),
            product_of(self.element, OperandMajorMode.MN, tcgen05.CtaGroup.TWO, (PAIR_ROWS, HALF_LATENT)),
            *numbers,
        )
        kernel.launch(
            grid=(BLOCKS * ceil_div(rows, PAIR_ROWS), *others),
            block=(THREADS, 1, 1),
            cluster=(BLOCKS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def _kernel(
        self,
        q_atom: cute.CopyAtom,
        q_tma: cute.Tensor,
        key_atom: cute.CopyAtom,
        key_tma: cute.Tensor,
        value_atom: cute.CopyAtom,
        value_tma: cute.Tensor,
        tables: cute.Tensor,
        lengths: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        q_layout: cute.ComposedLayout,
        key_layout: cute.ComposedLayout,
        value_layout: cute.ComposedLayout,
        weight_layout: cute.ComposedLayout,
        scores_mma: cute.TiledMma,
        values_mma: cute.TiledMma,
        groups: Int32,
        fold: Int32,
        heads: Int32,
        splits: Int32,
        scale: Float32,
    ) -> None:
        block, request_group, split = cute.arch.block_idx()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        request = request_group // groups
        first_token = (request_group % groups) * fold
        q_len = groups * fold

        smem = SmemAllocator()
        s_q = smem.allocate_tensor(self.element, q_layout.outer, 1024, swizzle=q_layout.inner)
        s_keys = smem.allocate_tensor(self.element, key_layout.outer, 1024, swizzle=key_layout.inner)
        s_values = smem.allocate_tensor(self.element, value_layout.outer, 1024, swizzle=value_layout.inner)
        s_weights = smem.allocate_tensor(self.element, weight_layout.outer, 1024, swizzle=weight_layout.inner)
        s_row = smem.allocate_tensor(Float32, cute.make_layout((BLOCK_ROWS, 2, 2)), 16)
        barriers = smem.allocate_array(Int64, SCORED + 2)
        holder = smem.allocate_array(Int32, 1)
        if thread == 0:
            for barrier in cutlass.range_constexpr(SCORED + 2):
                cute.arch.mbarrier_init(barriers + barrier, BLOCKS * SOFTMAX_WARPS if barrier == WEIGHED else 1)
        cute.arch.mbarrier_init_fence()
        if warp == PRODUCT_WARP:
            cute.arch.alloc_tmem(TENSOR_COLUMNS, holder, is_two_cta=True)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
        cute.arch.sync_threads()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        tensor = cute.arch.retrieve_tmem_ptr(Float32, 16, holder)
        # From here on what the kernel before this one wrote is there.
        cute.arch.griddepcontrol_wait()

        seq_len = lengths[request]
        first, share = split_keys(seq_len, self.page_size, split, splits)
        stop = cutlass.min(first + share, visible_keys(seq_len, q_len, first_token + fold - 1))
        steps = ceil_div(cutlass.max(stop - first, 0), PAIR_KEYS)

        if warp == LOADING_WARP:
            if steps > 0:
                load_queries(q_atom, q_tma[None, None, request_group], s_q, barriers, block, rank)
                load_keys(
                    key_atom,
                    key_tma,
                    s_keys,
                    tables[request, None],
                    barriers,
                    first,
                    stop,
                    steps,
                    rank,
                    self.page_size,
                )
        elif warp == VALUE_WARP:
            load_values(
                value_atom,
                value_tma,
                s_values,
                tables[request, None],
                barriers,
                first,
                stop,
                steps,
                rank,
                self.page_size,
            )
        elif warp == PRODUCT_WARP:
            if rank == 0:
                self._multiply(s_q, s_keys, s_values, s_weights, barriers, scores_mma, values_mma, tensor, steps)
        else:
            # A request of a negative length is nobody's: nothing is written for it.
            rows_left = fold * heads - block * BLOCK_ROWS if seq_len >= 0 else Int32(0)
            row = thread % BLOCK_ROWS
            token = first_token + (block * BLOCK_ROWS + row) // heads
            end = cutlass.min(stop, visible_keys(seq_len, q_len, token)) - first
            self._attend(
                s_values,
                s_weights,
                s_row,
                barriers,
                tensor,
                cute.local_tile(out[None, None, request_group, split], (BLOCK_ROWS, LATENT), (block, 0)),
                cute.local_tile(lse[None, request_group, split], (BLOCK_ROWS,), (block,)),
                row,
                end,
                rows_left,
                stop - first,
                steps,
                scale,
                thread,
            )
        cute.arch.griddepcontrol_launch_dependents()
        # Neither block gives its memory back before the other has done with it.
        cute.arch.sync_threads()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if warp == PRODUCT_WARP:
            cute.arch.dealloc_tmem(tensor, TENSOR_COLUMNS, is_two_cta=True)

    @cute.jit
    def _multiply(
        self,
        s_q: cute.Tensor,
        s_keys: cute.Tensor,
        s_values: cute.Tensor,
        s_weights: cute.Tensor,
        barriers: cute.Pointer,
        scores_mma: cute.TiledMma,
        values_mma: cute.TiledMma,
        tensor: cute.Pointer,
        steps: Int32,
    ) -> None:
        """Asks for the products of all steps: the scores of a step before the values of the one before it."""
        turned = cute.make_tensor(s_values.iterator, cute.select(s_values.layout, [1, 0]))
        q_operand = scores_mma.make_fragment_A(operand(s_q, BLOCK_ROWS))
        k_operand = scores_mma.make_fragment_B(operand(s_keys, BLOCK_KEYS))
        weight_operand = values_mma.make_fragment_A(operand(s_weights, BLOCK_ROWS))
        value_operand = values_mma.make_fragment_B(operand(turned, HALF_LATENT // BLOCKS))
        scores = scores_mma.make_fragment_C(scores_mma.partition_shape_C((PAIR_ROWS, PAIR_KEYS)))
        sums = values_mma.make_fragment_C(values_mma.partition_shape_C((PAIR_ROWS, LATENT)))
        sums = cute.make_tensor(tensor, sums.layout)

        if steps > 0:
            cute.arch.mbarrier_wait(barriers + QUERIES, 0)
        for step in cutlass.range(steps + 1, unroll=1):
            if step < steps:
                cute.arch.mbarrier_wait(barriers + KEYS, step % 2)
                score = cute.make_tensor(tensor + HALF_LATENT + step % 2 * SCORE_COLUMNS, scores.layout)
                multiply(scores_mma, score, q_operand, k_operand, cutlass.Boolean(False))
                with cute.arch.elect_one():
                    tcgen05.commit(barriers + SCORED + step % 2, BOTH, tcgen05.CtaGroup.TWO)
                    tcgen05.commit(barriers + KEYS_FREE, BOTH, tcgen05.CtaGroup.TWO)
            if step > 0:
                cute.arch.mbarrier_wait(barriers + WEIGHED, (step - 1) % 2)
                multiply(values_mma, sums, weight_operand, value_operand, cutlass.Boolean(step > 1))
                with cute.arch.elect_one():
                    tcgen05.commit(barriers + SUMMED, BOTH, tcgen05.CtaGroup.TWO)

    @cute.jit
    def _attend(
        self,
        s_values: cute.Tensor,
        s_weights: cute.Tensor,
        s_row: cute.Tensor,
        barriers: cute.Pointer,
        tensor: cute.Pointer,
        out: cute.Tensor,
        lse: cute.Tensor,
        row: Int32,
        end: Int32,
        rows_left: Int32,
        keys: Int32,
        steps: Int32,
        scale: Float32,
        thread: Int32,
    ) -> None:
        """One thread's part of the softmax: row ``row`` of the block, which sees the first ``end`` of ``keys`` keys;
        ``out`` are the block's rows."""
        half = thread // BLOCK_ROWS
        weights_to = cute.local_tile(s_weights, (1, BLOCK_KEYS), (row, half))
        score_layout = cute.make_layout((BLOCK_ROWS, (BLOCK_KEYS, 2)), stride=(LANE, (1, BLOCK_ROWS * LANE)))
        columns = HALF_LATENT // 2
        sum_layout = cute.make_layout((BLOCK_ROWS, (columns, 2, 2)), stride=(LANE, (1, BLOCK_ROWS * LANE, columns)))
        sums = cute.make_tensor(tensor, sum_layout)
        words = words_of(s_values, PAIR_KEYS, HALF_LATENT, 1)
        base, total = -Float32.inf, Float32(0.0)
        for step in cutlass.range(steps, unroll=1):
            cute.arch.mbarrier_wait(barriers + SCORED + step % 2, step // 2 % 2)
            scores, most = fetch(
                cute.make_tensor(tensor + HALF_LATENT + step % 2 * SCORE_COLUMNS, score_layout),
                tcgen05.Ld32x32bOp(tcgen05.Repetition(BLOCK_KEYS)),
                end - step * PAIR_KEYS - half * BLOCK_KEYS,
                thread,
            )
            most = cute.arch.fmax(most, exchange(s_row[row, None, step % 2], most, half))
            weights, base, total, shrink = weigh(scores, most, base, total, scale * LOG2_E)
            if step > 0:
                # The product before has read the weights and written the sums.
                cute.arch.mbarrier_wait(barriers + SUMMED, (step - 1) % 2)
                if cute.arch.vote_any_sync(shrink != 1.0):
                    correct(sums, shrink, thread)
            rounded = cute.make_rmem_tensor(weights_to.layout.shape, self.element)
            rounded.store(weights.to(self.element))
            cute.autovec_copy(rounded, weights_to)
            cute.arch.mbarrier_wait(barriers + VALUES, step % 2)
            if (step + 1) * PAIR_KEYS > keys:
                clear(words[None, None, None, 0], HALF_LATENT, keys - step * PAIR_KEYS, thread, SOFTMAX_THREADS)
            # What was written above is read by the tensor core, which goes another way to shared memory.
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barriers + WEIGHED, 0, scope=nvvm.MemScopeKind.CLUSTER)
        if steps > 0:
            cute.arch.mbarrier_wait(barriers + SUMMED, (steps - 1) % 2)
        whole = total + exchange(s_row[row, None, steps % 2], total, half)
        finish(sums, base, whole, out, lse, row, rows_left, steps, scale, thread, half)


@cute.jit
def exchange(numbers: cute.Tensor, number: Float32, half: Int32) -> Float32:
    """The number of the thread that has the row's other half, through shared memory."""
    numbers[half] = number
    cute.arch.barrier(barrier_id=EXCHANGE, number_of_threads=SOFTMAX_THREADS)
    return numbers[1 - half]
