"""Activations to 8 bits under float32 scales, and back."""

import triton
import triton.language as tl

from tokenspeed_kernel_triton.kernels.float8 import bits_of_e4m3, widened


@triton.jit
def _quantised(value, scale, KIND: tl.constexpr, EIGHT_BIT_FLOAT: tl.constexpr):
    """value / scale as int8 or e4m3, to nearest, never beyond the largest; 0 where the scale is 0. KIND: of elements;
    uint8 takes the bits of an e4m3."""
    LARGEST: tl.constexpr = 448.0 if EIGHT_BIT_FLOAT else 127.0
    quotient = value / tl.where(scale == 0.0, 1.0, scale)
    quotient = tl.minimum(tl.maximum(quotient, -LARGEST), LARGEST)
    if EIGHT_BIT_FLOAT and tl.uint8 == KIND:
        result = bits_of_e4m3(quotient)
    elif EIGHT_BIT_FLOAT:
        result = quotient.to(tl.float8e4nv)
    else:
        # adding and taking away 1.5 * 2^23 rounds to the nearest integer
        result = ((quotient + 12582912.0) - 12582912.0).to(tl.int8)
    return result


@triton.jit(do_not_specialize=["width", "blocks"])
def rows(
    x, out, scales, width, x_stride, blocks,
    SIZE: tl.constexpr, BLOCKS: tl.constexpr, EIGHT_BIT_FLOAT: tl.constexpr,
):  # fmt: skip
    """BLOCKS blocks of SIZE elements of a row of x [T, width], each under its own scale. Grid: (T, stretches)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    place = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    here = place < width
    value = tl.load(x + row * x_stride + place, mask=here, other=0.0)
    scale = tl.max(tl.abs(value), 1) / (448.0 if EIGHT_BIT_FLOAT else 127.0)
    tl.store(
        out + row * width + place, _quantised(value, scale[:, None], out.dtype.element_ty, EIGHT_BIT_FLOAT), mask=here
    )
    tl.store(scales + row * blocks + block, scale, mask=block < blocks)


@triton.jit(do_not_specialize=["width", "size"])
def long_rows(x, out, scales, width, x_stride, size, BLOCK: tl.constexpr, EIGHT_BIT_FLOAT: tl.constexpr):
    """One block of ``size`` elements, of any size, BLOCK at a time. Grid: (T, blocks of a row)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = block * size
    stop = tl.minimum(begin + size, width)
    largest = 0.0
    for start in range(begin, stop, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * x_stride + place, mask=place < stop, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(value), 0))
    scale = largest / (448.0 if EIGHT_BIT_FLOAT else 127.0)
    for start in range(begin, stop, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * x_stride + place, mask=place < stop, other=0.0)
        tl.store(
            out + row * width + place,
            _quantised(value, scale, out.dtype.element_ty, EIGHT_BIT_FLOAT),
            mask=place < stop,
        )
    tl.store(scales + row * tl.num_programs(1) + block, scale)


@triton.jit(do_not_specialize=["width", "scale_stride", "rows_of_scale", "columns_of_scale"])
def restore(q, scales, out, width, scale_stride, rows_of_scale, columns_of_scale, BLOCK: tl.constexpr):
    """out = q * scale. Grid: (T, stretches of BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = place < width
    scale_at = scales + row // rows_of_scale * scale_stride + place // columns_of_scale
    scale = tl.load(scale_at, mask=here, other=0.0)
    value = widened(tl.load(q + row * width + place, mask=here, other=0.0))
    tl.store(out + row * width + place, value * scale, mask=here)
