"""Makes one output of the partial ones, by their log-sum-exp: a warp for each row, on any GPU.

The order of the sum is that of the splits, so the bits do not depend on how the device schedules. A split without keys
is not read.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from tokenspeed_mla.addressing import LATENT, ceil_div

WARPS = 4
LANES = 32
VECTOR = 4
"""Elements that a lane reads at once: 16 bytes."""

LOG2_E = 1.4426950408889634


class MergePartials:
    """One compiled variant: the type of the output; ``dependent``: whether it may be launched while what it waits for
    still runs, which GPUs from sm_90 on can."""

    def __init__(self, output: type[cutlass.Numeric], dependent: bool) -> None:
        self.output = output
        self.dependent = dependent

    @cute.jit
    def __call__(
        self,
        partials: cute.Pointer,
        partial_lse: cute.Pointer,
        out: cute.Pointer,
        lse: cute.Pointer,
        groups: Int32,
        rows: Int32,
        splits: Int32,
        group_stride: Int64,
        split_stride: Int64,
        lse_group_stride: Int64,
        lse_split_stride: Int64,
        stream: cuda.CUstream,
    ) -> None:
        """Launches the kernel. Partials are float32 [splits][groups][rows][512] with these strides, in elements, their
        lse the same without the last axis; out and lse lie [groups][rows] without gaps."""
        lanes = (VECTOR, LANES, LATENT // (VECTOR * LANES))
        lane_strides = (1, VECTOR, VECTOR * LANES)
        part_stride = (cute.assume(split_stride, LATENT), cute.assume(group_stride, LATENT), LATENT)
        parts = cute.make_tensor(
            partials, cute.make_layout((*lanes, splits, groups, rows), stride=(*lane_strides, *part_stride))
        )
        part_lse = cute.make_tensor(
            partial_lse,
            cute.make_layout((splits, groups, rows), stride=(lse_split_stride, lse_group_stride, 1)),
        )
        out_stride = (*lane_strides, cute.assume(Int64(rows) * LATENT, LATENT), LATENT)
        outputs = cute.make_tensor(out, cute.make_layout((*lanes, groups, rows), stride=out_stride))
        sums = cute.make_tensor(lse, cute.make_layout((groups, rows), stride=(Int64(rows), 1)))
        kernel = self._kernel(parts, part_lse, outputs, sums, rows, splits)
        grid, block = (ceil_div(rows, WARPS), groups, 1), (WARPS * LANES, 1, 1)
        kernel.launch(grid=grid, block=block, stream=stream, use_pdl=self.dependent)

    @cute.kernel
    def _kernel(
        self,
        parts: cute.Tensor,
        part_lse: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        rows: Int32,
        splits: Int32,
    ) -> None:
        block, group, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % LANES
        row = block * WARPS + thread // LANES
        if cutlass.const_expr(self.dependent):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        if row < rows:
            most = -Float32.inf
            for split in cutlass.range(lane, splits, LANES, unroll=1):
                most = cute.arch.fmax(most, part_lse[split, group, row])
            for step in cutlass.range_constexpr(5):
                most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, 1 << step))
            sums = cute.make_rmem_tensor((VECTOR, LATENT // (VECTOR * LANES)), Float32)
            sums.fill(0.0)
            total = Float32(0.0)
            for split in cutlass.range(splits, unroll=1):
                found = part_lse[split, group, row]
                if found != -Float32.inf:
                    weight = cute.math.exp2((found - most) * LOG2_E, fastmath=True)
                    total += weight
                    part = cute.make_rmem_tensor(sums.layout, Float32)
                    cute.autovec_copy(parts[None, lane, None, split, group, row], part)
                    sums.store(sums.load() + part.load() * weight)
            seen = total != 0.0  # a NaN goes through
            inverse = 1.0 / total if seen else Float32(0.0)
            result = cute.make_rmem_tensor(sums.layout, self.output)
            result.store((sums.load() * inverse).to(self.output))
            cute.autovec_copy(result, out[None, lane, None, group, row])
            if lane == 0:
                lse[group, row] = most + cute.math.log(total) if seen else -Float32.inf
