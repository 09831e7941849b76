"""The host code of the prefills: operands made of addresses, loads, layouts, and the launch; and their loads."""

from abc import ABC, abstractmethod
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from tokenspeed_mla.addressing import EXPANDED, VALUE
from tokenspeed_mla.kernels.operands import COLUMNS, head_rows, tiled_load


class PrefillLaunch(ABC):
    """One compiled variant: element type of queries, keys and values, type of the output, whether causal.

    Attributes:
        queries: of a block.
        keys: of one step.
        threads: of a block.
        stages: of keys, and of values.
    """

    queries: int
    keys: int
    threads: int
    stages: int

    def __init__(self, element: type[cutlass.Numeric], output: type[cutlass.Numeric], causal: bool) -> None:
        self.element = element
        self.output = output
        self.causal = causal

    @abstractmethod
    def _swizzle(self) -> cute.ComposedLayout:
        """The swizzle of 128 bytes as the architecture's products want it."""

    @abstractmethod
    def _beside(self) -> tuple[Any, ...]:
        """What the kernel takes beside operands and their layouts."""

    @abstractmethod
    def _kernel(self, *arguments: Any) -> Any:
        """The kernel, with the arguments that __call__ gives it."""

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
        swizzled, load = self._swizzle(), cpasync.CopyBulkTensorTileG2SOp()
        q_rows = head_rows(q, queries, EXPANDED, heads, q_stride, q_head_stride)
        k_rows = head_rows(k, keys, EXPANDED, heads, k_stride, k_head_stride)
        v_rows = head_rows(v, keys, VALUE, heads, v_stride, v_head_stride)
        kernel = self._kernel(
            *tiled_load(load, q_rows, swizzled, self.queries),
            *tiled_load(load, k_rows, swizzled, self.keys),
            *tiled_load(load, v_rows, swizzled, self.keys),
            cute.make_tensor(query_start, cute.make_layout(rows + 1)),
            cute.make_tensor(key_start, cute.make_layout(rows + 1)),
            cute.make_tensor(out, cute.make_layout((queries, VALUE, heads), stride=(query_stride, 1, VALUE))),
            cute.make_tensor(lse, cute.make_layout((queries, heads), stride=(Int64(heads), 1))),
            cute.tile_to_shape(swizzled, (self.queries, EXPANDED), order=(0, 1)),
            cute.tile_to_shape(swizzled, (self.keys, EXPANDED, self.stages), order=(0, 1, 2)),
            cute.tile_to_shape(swizzled, (self.keys, VALUE, self.stages), order=(0, 1, 2)),
            *self._beside(),
            rows,
            scale,
        )
        # A row's last tile may be short, so there is at most one more for each row.
        grid = (queries // self.queries + rows, heads, 1)
        kernel.launch(grid=grid, block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True)

    @cute.jit
    def _load(
        self, atom: cute.CopyAtom, rows: cute.Tensor, into: cute.Tensor, barrier: cute.Pointer, step: Int32
    ) -> None:
        """Tile ``step`` of the rows into shared memory, by one thread of the loading warp."""
        count, width = cute.size(into, mode=[0]), cute.size(into, mode=[1])
        source = cute.group_modes(cute.local_tile(rows, (count, COLUMNS), (step, None)), 0, 2)
        tiles = cute.group_modes(cute.local_tile(into, (count, COLUMNS), (0, None)), 0, 2)
        tiles, source = cpasync.tma_partition(atom, 0, cute.make_layout(1), tiles, source)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, count * width * self.element.width // 8)
        for column in cutlass.range_constexpr(width // COLUMNS):
            cute.copy(atom, source[None, column], tiles[None, column], tma_bar_ptr=barrier)
