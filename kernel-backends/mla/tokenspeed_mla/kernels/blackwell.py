"""Latent decode on Blackwell: tcgen05 on tiles of 64 rows, sums in tensor memory, TMA loads, partial outputs with lse.

A block is 6 warps. Warp 5 loads: its queries once, then the keys of every step into one of two stages, each page by
TMA. Warp 4 issues the products, which run by themselves and report to mbarriers. Warps 0 to 3 are the softmax, and
correct what was summed. In a step

1. the scores of 64 keys with all rows become one of two buffers of tensor memory (m64n64k16, 36 times);
2. the softmax reads them, masks, and writes the weights, rounded, into shared memory;
3. where a row's largest score grew much, it scales what was summed so far;
4. weights times latents are added to the sums, two halves of 256 columns (m64n256k16, 4 times each).

The scores of the next step are asked for before the values of this one, so that the tensor core works while the
softmax does. The latents are the values as they lie in the stage, read with the other major mode: they are loaded once,
for both products, so keys and values have one loading warp.

A tile of 64 rows takes 16 of each 32 lanes of tensor memory: row 16 w + l of the tile is lane 32 w + l. The second half
of the sums lies in the other 16 lanes of the same columns, so thread l of a warp has row l % 16 and half l / 16 of
everything.

Over a cache of 8 bits a block is 9 warps: 4 to 7 load and convert (entry_bytes.py), 8 issues the products.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.cute.nvgpu.tcgen05 import SmemLayoutAtomKind, make_smem_layout_atom
from cutlass.memory import SmemAllocator

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
    product_of,
    weigh,
)
from tokenspeed_mla.kernels.decode_launch import OneBlockLaunch
from tokenspeed_mla.kernels.entry_bytes import ARRIVALS, CONVERTING_WARPS, convert_keys
from tokenspeed_mla.kernels.operands import words_of

STAGES = 2
THREADS = 32 * (LOADING_WARP + 1)
MORE_THREADS = 32 * (SOFTMAX_WARPS + CONVERTING_WARPS + 1)
"""Of a block that converts a cache of 8 bits."""

HALF_KEYS = TILE_KEYS // 2
SHARED_BYTES = 2 * WIDTH * (TILE_ROWS + STAGES * TILE_KEYS) + 2 * TILE_ROWS * TILE_KEYS + 8 * (3 * STAGES + 2) + 4
"""Of a block: queries, stages, weights, barriers, where the tensor memory begins."""


class BlackwellDecode(OneBlockLaunch):
    """One compiled variant (DecodeLaunch)."""

    stages = STAGES
    score_keys = TILE_KEYS

    def __init__(
        self,
        element: type[cutlass.Numeric],
        output: type[cutlass.Numeric],
        cached: type[cutlass.Numeric],
        page_size: int,
    ) -> None:
        super().__init__(element, output, cached, page_size)
        self.threads = MORE_THREADS if self.converts else THREADS
        self.product_warp = SOFTMAX_WARPS + CONVERTING_WARPS if self.converts else PRODUCT_WARP
        self.loading_warp = SOFTMAX_WARPS if self.converts else LOADING_WARP

    def _swizzle(self) -> cute.ComposedLayout:
        return make_smem_layout_atom(SmemLayoutAtomKind.K_SW128, self.element)

    def _product(self, major: OperandMajorMode, columns: int) -> cute.TiledMma:
        return product_of(self.element, major, tcgen05.CtaGroup.ONE, (TILE_ROWS, columns))

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
        # Full, one for each stage; freed, one for each stage; scored, one for each buffer; weighed; the queries'.
        barriers = smem.allocate_array(Int64, 3 * STAGES + 2)
        holder = smem.allocate_array(Int32, 1)

        if thread == 0:
            for barrier in cutlass.range_constexpr(3 * STAGES + 2):
                arrivals = SOFTMAX_WARPS if barrier == 3 * STAGES else 1
                if cutlass.const_expr(self.converts and barrier < STAGES):
                    arrivals = ARRIVALS
                cute.arch.mbarrier_init(barriers + barrier, arrivals)
        cute.arch.mbarrier_init_fence()
        if warp == self.product_warp:
            cute.arch.alloc_tmem(TENSOR_COLUMNS, holder)
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.sync_threads()
        tensor = cute.arch.retrieve_tmem_ptr(Float32, 16, holder)
        # From here on what the kernel before this one wrote is there.
        cute.arch.griddepcontrol_wait()

        seq_len = lengths[request]
        first, share = split_keys(seq_len, self.page_size, split, splits)
        stop = cutlass.min(first + share, visible_keys(seq_len, q_len, first_token + fold - 1))
        steps = ceil_div(cutlass.max(stop - first, 0), TILE_KEYS)

        if self._loads(warp):
            if steps > 0:
                q_operands = (q_atom, q_tma[None, None, request_group], s_q, barriers + 3 * STAGES + 1, tile)
                if cutlass.const_expr(self.converts):
                    if warp == self.loading_warp:
                        self._load_queries(*q_operands)
                    table, number = tables[request, None], thread - 32 * self.loading_warp
                    free, page_size = barriers + STAGES, self.page_size
                    convert_keys(
                        kv_tma, table, s_kv, barriers, free, first, stop, steps, page_size, number, in_place=True
                    )
                else:
                    self._load_queries(*q_operands)
                    self._load_keys(kv_atom, kv_tma, tables, s_kv, barriers, request, first, stop, steps)
        elif warp == self.product_warp:
            self._multiply(s_q, s_kv, s_weights, barriers, scores_mma, values_mma, tensor, steps)
        else:
            # A request of a negative length is nobody's: nothing is written for it.
            rows_left = fold * heads - tile * TILE_ROWS if seq_len >= 0 else Int32(0)
            row = 16 * warp + thread % 16
            token = first_token + (tile * TILE_ROWS + row) // heads
            end = cutlass.min(stop, visible_keys(seq_len, q_len, token)) - first
            self._attend(
                s_kv,
                s_weights,
                barriers,
                tensor,
                cute.local_tile(out[None, None, request_group, split], (TILE_ROWS, LATENT), (tile, 0)),
                cute.local_tile(lse[None, request_group, split], (TILE_ROWS,), (tile,)),
                row,
                end,
                rows_left,
                stop - first,
                steps,
                scale,
                thread,
            )
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.sync_threads()
        if warp == self.product_warp:
            cute.arch.dealloc_tmem(tensor, TENSOR_COLUMNS)

    def _loads(self, warp: Int32) -> Boolean:
        """Whether a warp loads keys: the loading one, or where they are converted all of its warpgroup."""
        if self.converts:
            return warp // CONVERTING_WARPS == self.loading_warp // CONVERTING_WARPS
        return warp == self.loading_warp

    @cute.jit
    def _multiply(
        self,
        s_q: cute.Tensor,
        s_kv: cute.Tensor,
        s_weights: cute.Tensor,
        barriers: cute.Pointer,
        scores_mma: cute.TiledMma,
        values_mma: cute.TiledMma,
        tensor: cute.Pointer,
        steps: Int32,
    ) -> None:
        """Asks for the products of all steps: the scores of a step before the values of the one before it."""
        uniform_scores, uniform_values = scores_mma.get_slice(0), values_mma.get_slice(0)
        # The cache entries once more as values: their first 512 elements, columns first.
        s_values = cute.make_tensor(
            s_kv.iterator, cute.select(cute.composition(s_kv.layout, (TILE_KEYS, LATENT, STAGES)), [1, 0, 2])
        )
        q_operand = scores_mma.make_fragment_A(uniform_scores.partition_A(s_q))
        k_operand = scores_mma.make_fragment_B(uniform_scores.partition_B(s_kv))
        weight_operand = values_mma.make_fragment_A(uniform_values.partition_A(s_weights))
        value_operand = values_mma.make_fragment_B(uniform_values.partition_B(s_values))
        scores = scores_mma.make_fragment_C(scores_mma.partition_shape_C((TILE_ROWS, TILE_KEYS)))
        sums = values_mma.make_fragment_C(values_mma.partition_shape_C((TILE_ROWS, LATENT)))
        sums = cute.make_tensor(tensor, sums.layout)

        if steps > 0:
            cute.arch.mbarrier_wait(barriers + 3 * STAGES + 1, 0)
        for step in cutlass.range(steps + 1, unroll=1):
            stage, phase = step % STAGES, step // STAGES % 2
            if step < steps:
                cute.arch.mbarrier_wait(barriers + stage, phase)
                score = cute.make_tensor(tensor + HALF_LATENT + stage * SCORE_COLUMNS, scores.layout)
                multiply(scores_mma, score, q_operand, k_operand[None, None, None, stage], Boolean(False))
                with cute.arch.elect_one():
                    tcgen05.commit(barriers + 2 * STAGES + stage)
            if step > 0:
                before = (step - 1) % STAGES
                cute.arch.mbarrier_wait(barriers + 3 * STAGES, (step - 1) % 2)
                multiply(values_mma, sums, weight_operand, value_operand[None, None, None, before], Boolean(step > 1))
                with cute.arch.elect_one():
                    tcgen05.commit(barriers + STAGES + before)

    @cute.jit
    def _attend(
        self,
        s_kv: cute.Tensor,
        s_weights: cute.Tensor,
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
        """One thread's part of the softmax: row ``row`` of the tile, which sees the first ``end`` of the block's
        ``keys`` keys; ``out`` are the tile's rows."""
        half = thread // 16 % 2
        weights_to = cute.local_tile(s_weights, (1, HALF_KEYS), (row, half))
        # Rows and columns of tensor memory; the second product's are in the other 16 of each 32 lanes.
        lanes = (LANE, 32 * LANE)
        score_layout = cute.make_layout(((16, 4), TILE_KEYS), stride=(lanes, 1))
        sum_layout = cute.make_layout(((16, 4), (HALF_LATENT, 2)), stride=(lanes, (1, 16 * LANE)))
        sums = cute.make_tensor(tensor, sum_layout)
        words = words_of(s_kv, TILE_KEYS, WIDTH, STAGES)
        base, total = -Float32.inf, Float32(0.0)
        for step in cutlass.range(steps, unroll=1):
            stage, phase = step % STAGES, step // STAGES % 2
            cute.arch.mbarrier_wait(barriers + 2 * STAGES + stage, phase)
            scores, most = fetch(
                cute.make_tensor(tensor + HALF_LATENT + stage * SCORE_COLUMNS, score_layout),
                tcgen05.Ld16x32bx2Op(tcgen05.Repetition(HALF_KEYS)),
                end - step * TILE_KEYS - half * HALF_KEYS,
                thread,
            )
            most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, 16))
            weights, base, total, shrink = weigh(scores, most, base, total, scale * LOG2_E)
            if step > 0:
                # The product before has read the weights and written the sums.
                cute.arch.mbarrier_wait(barriers + STAGES + (step - 1) % STAGES, (step - 1) // STAGES % 2)
                if cute.arch.vote_any_sync(shrink != 1.0):
                    correct(sums, shrink, thread)
            rounded = cute.make_rmem_tensor(weights_to.layout.shape, self.element)
            rounded.store(weights.to(self.element))
            cute.autovec_copy(rounded, weights_to)
            if cutlass.const_expr(not self.converts) and (step + 1) * TILE_KEYS > keys:
                clear(words[None, None, None, stage], LATENT, keys - step * TILE_KEYS, thread, SOFTMAX_THREADS)
            # What was written above is read by the tensor core, which goes another way to shared memory.
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barriers + 3 * STAGES)
        if steps > 0:
            cute.arch.mbarrier_wait(barriers + STAGES + (steps - 1) % STAGES, (steps - 1) // STAGES % 2)
        whole = total + cute.arch.shuffle_sync_bfly(total, 16)
        finish(sums, base, whole, out, lse, row, rows_left, steps, scale, thread, half)
