"""The host code of the decodes: operands made of addresses, loads, layouts, and the launch; and the loads of a block
alone."""

from abc import ABC, abstractmethod
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync

from tokenspeed_mla.addressing import HALF_LATENT, TILE_KEYS, TILE_ROWS, WIDTH, ceil_div, page_of
from tokenspeed_mla.kernels.operands import (
    COLUMNS,
    cache_entries,
    group_outputs,
    group_queries,
    group_sums,
    tiled_load,
)


class DecodeLaunch(ABC):
    """One compiled variant: element type of queries and products, type of the output, element type of the cache, tokens
    of a page. The cache's is the queries', or has 8 bits and becomes theirs on its way into shared memory.

    Attributes:
        converts: whether it has 8 bits.
        block_keys: keys of one step that lie in one block, whole.
        box_keys: keys of one load.
    """

    block_keys: int

    def __init__(
        self,
        element: type[cutlass.Numeric],
        output: type[cutlass.Numeric],
        cached: type[cutlass.Numeric],
        page_size: int,
    ) -> None:
        self.element = element
        self.output = output
        self.page_size = page_size
        self.converts = cached.width == 8
        self.box_keys = min(page_size, self.block_keys)

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        cache: cute.Pointer,
        page_table: cute.Pointer,
        seq_lens: cute.Pointer,
        out: cute.Pointer,
        lse: cute.Pointer,
        batch: Int32,
        groups: Int32,
        fold: Int32,
        heads: Int32,
        splits: Int32,
        pages: Int32,
        block_stride: Int64,
        token_stride: Int64,
        table_stride: Int64,
        out_group_stride: Int64,
        out_split_stride: Int64,
        lse_group_stride: Int64,
        lse_split_stride: Int64,
        scale: Float32,
        stream: cuda.CUstream,
    ) -> None:
        """Launches the kernel; decode.py says what each argument is. Strides are in elements."""
        rows, all_groups = fold * heads, batch * groups
        queries = group_queries(q, rows, all_groups)
        entries = cache_entries(cache, self.page_size, pages, block_stride, token_stride)
        tables = cute.make_tensor(page_table, cute.make_layout((batch, pages), stride=(table_stride, 1)))
        lengths = cute.make_tensor(seq_lens, cute.make_layout(batch))
        outputs = group_outputs(out, rows, all_groups, splits, out_group_stride, out_split_stride)
        sums = group_sums(lse, rows, all_groups, splits, lse_group_stride, lse_split_stride)
        memory, numbers = (tables, lengths, outputs, sums), (groups, fold, heads, splits, scale)
        self._launch(queries, entries, memory, numbers, rows, (all_groups, splits), stream)

    @abstractmethod
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
        """Launches the kernel for tiles of a group's ``rows``, the grid's last two axes being ``others``. ``queries``
        and ``entries`` are loaded by TMA; ``memory`` and ``numbers`` the kernel takes as they are."""


class OneBlockLaunch(DecodeLaunch):
    """A decode whose blocks are alone, with TILE_ROWS rows and stages of TILE_KEYS keys each.

    Attributes:
        threads: of a block.
        stages: of keys.
        score_keys: of one product of scores.
    """

    block_keys = TILE_KEYS
    threads: int
    stages: int
    score_keys: int

    @abstractmethod
    def _swizzle(self) -> cute.ComposedLayout:
        """The swizzle of 128 bytes as the architecture's products want it."""

    @abstractmethod
    def _product(self, major: OperandMajorMode, columns: int) -> cute.TiledMma:
        """A product of TILE_ROWS rows by ``columns``, 16 deep, sums in float32; ``major`` of its right side."""

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
        swizzled, load = self._swizzle(), cpasync.CopyBulkTensorTileG2SOp()
        load_keys = (None, entries) if self.converts else tiled_load(load, entries, swizzled, self.box_keys)
        kernel = self._kernel(
            *tiled_load(load, queries, swizzled, TILE_ROWS),
            *load_keys,
            *memory,
            cute.tile_to_shape(swizzled, (TILE_ROWS, WIDTH), order=(0, 1)),
            cute.tile_to_shape(swizzled, (TILE_KEYS, WIDTH, self.stages), order=(0, 1, 2)),
            cute.tile_to_shape(swizzled, (TILE_ROWS, TILE_KEYS), order=(0, 1)),
            self._product(OperandMajorMode.K, self.score_keys),
            self._product(OperandMajorMode.MN, HALF_LATENT),
            *numbers,
        )
        grid = (ceil_div(rows, TILE_ROWS), *others)
        kernel.launch(grid=grid, block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True)

    @abstractmethod
    def _kernel(self, *arguments: Any) -> Any:
        """The kernel, with the arguments that _launch gives it."""

    @cute.jit
    def _load_queries(
        self, atom: cute.CopyAtom, q: cute.Tensor, s_q: cute.Tensor, barrier: cute.Pointer, tile: Int32
    ) -> None:
        """The block's rows of its group, by one thread of the loading warp."""
        source = cute.group_modes(cute.local_tile(q, (TILE_ROWS, COLUMNS), (tile, None)), 0, 2)
        target = cute.group_modes(cute.local_tile(s_q, (TILE_ROWS, COLUMNS), (0, None)), 0, 2)
        target, source = cpasync.tma_partition(atom, 0, cute.make_layout(1), target, source)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, TILE_ROWS * WIDTH * self.element.width // 8)
        for column in cutlass.range_constexpr(WIDTH // COLUMNS):
            cute.copy(atom, source[None, column], target[None, column], tma_bar_ptr=barrier)

    @cute.jit
    def _load_keys(
        self,
        atom: cute.CopyAtom,
        entries: cute.Tensor,
        tables: cute.Tensor,
        s_kv: cute.Tensor,
        barriers: cute.Pointer,
        request: Int32,
        first: Int32,
        stop: Int32,
        steps: Int32,
    ) -> None:
        """All steps' keys, each into a stage that is free; of ``barriers`` the first are those of the full stages, the
        next those of the free ones. Keys from ``stop`` on come from the null page."""
        shape = (self.box_keys, COLUMNS)
        source = cute.group_modes(cute.local_tile(entries, shape, (None, None, None)), 0, 2)
        target = cute.group_modes(cute.local_tile(s_kv, shape, (None, None, None)), 0, 2)
        target, source = cpasync.tma_partition(atom, 0, cute.make_layout(1), target, source)
        stage, phase = Int32(0), Int32(1)
        for step in cutlass.range(steps, unroll=1):
            cute.arch.mbarrier_wait(barriers + self.stages + stage, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barriers + stage, TILE_KEYS * WIDTH * self.element.width // 8)
            for part in cutlass.range_constexpr(TILE_KEYS // self.box_keys):
                position = first + step * TILE_KEYS + part * self.box_keys
                index, box = page_of(position, self.page_size, self.box_keys)
                page = Int32(0)
                if position < stop:
                    page = tables[request, index]
                for column in cutlass.range_constexpr(WIDTH // COLUMNS):
                    cute.copy(
                        atom,
                        source[None, box, column, page],
                        target[None, part, column, stage],
                        tma_bar_ptr=barriers + stage,
                    )
            stage += 1
            if stage == self.stages:
                stage = Int32(0)
                phase ^= 1
