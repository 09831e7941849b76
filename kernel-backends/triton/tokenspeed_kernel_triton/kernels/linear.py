"""Products with weights: dense, or quantised in groups that share a scale.

A program makes a tile of outputs. Quantised elements are widened without their scale, which is exact; a group's
products are summed in float32 and scaled then. So a step of the loop is a group, or two: 128 elements of float8, 32 or
64 of the others. Few tokens are a read of the weight, which more blocks share where the inputs are split: each split
writes its part, and the parts are added in their order.
"""

import triton
import triton.language as tl

from tokenspeed_kernel_triton.kernels.float8 import loaded_as, widened


@triton.jit
def _e2m1(nibble):
    """0, 0.5, 1, 1.5, 2, 3, 4, 6 and the same below 0."""
    exponent, half = (nibble >> 1) & 3, (nibble & 1).to(tl.float32) * 0.5
    size = tl.where(exponent == 0, half, (1.0 + half) * tl.exp2((exponent - 1).to(tl.float32)))
    return tl.where(nibble >= 8, -size, size)


@triton.jit
def _of_quant(quant, KIND: tl.constexpr, ZERO: tl.constexpr):
    """What a quant stands for, without its scale."""
    if KIND == "e2m1":
        value = _e2m1(quant.to(tl.int32))
    else:
        value = quant.to(tl.float32) - ZERO
    return value


@triton.jit
def _quants(
    elements, high, weight_row, output_here, step,
    INPUTS: tl.constexpr, HALF: tl.constexpr, HIGH_BITS: tl.constexpr, HIGH_WIDTH: tl.constexpr,
):  # fmt: skip
    """The quants [BLOCK_N, HALF] of a step's two halves."""
    place = tl.arange(0, HALF)
    here = output_here[:, None]
    byte_at = elements + weight_row[:, None] * (INPUTS // 2) + step * HALF + place[None, :]
    byte = tl.load(byte_at, mask=here, other=0)
    first, second = byte & 15, byte >> 4
    if HIGH_BITS:
        STEPS: tl.constexpr = 4 // HIGH_BITS  # whose high bits share a byte
        ABOVE: tl.constexpr = (1 << HIGH_BITS) - 1
        high_at = high + weight_row[:, None] * HIGH_WIDTH + step // STEPS * HALF + place[None, :]
        bits = tl.load(high_at, mask=here, other=0).to(tl.int32) >> (step % STEPS * (2 * HIGH_BITS))
        first = first.to(tl.int32) | ((bits & ABOVE) << 4)
        second = second.to(tl.int32) | (((bits >> HIGH_BITS) & ABOVE) << 4)
    return first, second


@triton.jit
def _scale(
    scales, units, weight_row, output_here, group,
    INPUTS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_N]: the scales, or minima, of a group of inputs."""
    found = tl.load(scales + weight_row * (INPUTS // GROUP) + group, mask=output_here, other=0.0).to(tl.float32)
    if UNIT:
        unit_at = units + weight_row * (INPUTS // UNIT) + group * GROUP // UNIT
        found *= tl.load(unit_at, mask=output_here, other=0.0).to(tl.float32)
    return found


@triton.jit
def _with_group(
    sums, part, inputs, scales, minima, units, minimum_units, weight_row, output_here, group,
    INPUTS: tl.constexpr, GROUP: tl.constexpr, MINIMUM: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """sums and a group's part [BLOCK_M, BLOCK_N] under its scale; ``inputs`` [BLOCK_M] is the sum of the group's."""
    sums += part * _scale(scales, units, weight_row, output_here, group, INPUTS, GROUP, UNIT)[None, :]
    if MINIMUM:
        least = _scale(minima, minimum_units, weight_row, output_here, group, INPUTS, GROUP, UNIT)
        sums += inputs[:, None] * least[None, :]
    return sums


@triton.jit
def _powers(exponents):
    """2^(e - 127) of e8m0 bytes; NaN for 255."""
    wide = exponents.to(tl.int32)
    bits = tl.where(wide == 0, 0x00400000, wide << 23)
    return tl.where(wide == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _with_float4(
    sums, x_row, row_here, elements, scales, weight_row, output_here, start,
    INPUTS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, ROUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """sums and the products of STEP inputs. An e2m1 times a power of two, or times an e4m3, is a bfloat16, so scales go
    with the elements: "mxfp4" by the device's own scaled product or conversion where ROUNDED."""
    place = start // 2 + tl.arange(0, STEP // 2)
    inside = (place < INPUTS // 2)[None, :]
    w_mask, x_mask = output_here[:, None] & inside, row_here[:, None] & inside
    byte = tl.load(elements + weight_row[:, None] * (INPUTS // 2) + place[None, :], mask=w_mask, other=0)
    scale_row = scales + weight_row[:, None] * (INPUTS // GROUP)
    if KIND == "mxfp4" and ROUNDED:
        input_ = start + tl.arange(0, STEP)
        x_mask = row_here[:, None] & (input_ < INPUTS)[None, :]
        x_tile = loaded_as(tl.load(x_row + input_[None, :], mask=x_mask, other=0.0), tl.bfloat16)
        group = start // GROUP + tl.arange(0, STEP // GROUP)
        scale_mask = output_here[:, None] & (group < INPUTS // GROUP)[None, :]
        scale = tl.load(scale_row + group[None, :], mask=scale_mask, other=127)
        sums = tl.dot_scaled(x_tile, None, "bf16", tl.trans(byte), scale, "e2m1", sums)
    else:
        OPERAND: tl.constexpr = tl.bfloat16 if ROUNDED else tl.float32
        even = loaded_as(tl.load(x_row + 2 * place[None, :], mask=x_mask, other=0.0), OPERAND)
        odd = loaded_as(tl.load(x_row + 2 * place[None, :] + 1, mask=x_mask, other=0.0), OPERAND)
        scale = tl.load(scale_row + (place // (GROUP // 2))[None, :], mask=w_mask, other=0.0)
        if KIND == "mxfp4":
            scale = _powers(scale)
        else:
            scale = widened(scale)
        low, high = _e2m1((byte & 15).to(tl.int32)) * scale, _e2m1((byte >> 4).to(tl.int32)) * scale
        sums = tl.dot(even, tl.trans(low.to(OPERAND)), sums, input_precision=PRECISION)
        sums = tl.dot(odd, tl.trans(high.to(OPERAND)), sums, input_precision=PRECISION)
    return sums


@triton.jit
def products(
    x_row, row_here, elements, weight_row, output_here, high, scales, minima, units, minimum_units, begin, stop,
    INPUTS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, ZERO: tl.constexpr,
    HIGH_BITS: tl.constexpr, HIGH_WIDTH: tl.constexpr, MINIMUM: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of INPUTS elements at ``x_row`` [BLOCK_M, 1], uint8 being e4m3, times the rows ``weight_row`` [BLOCK_N]
    of a weight, over the inputs from step ``begin`` to step ``stop`` of STEP each. The planes are those of
    planes.Planes. ROUNDED: operands are bfloat16, else float32."""
    OPERAND: tl.constexpr = tl.bfloat16 if ROUNDED else tl.float32
    HALF: tl.constexpr = STEP // 2
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(begin, stop):
        start = step * STEP
        if KIND == "dense" or KIND == "eight":
            place = start + tl.arange(0, STEP)
            inside = (place < INPUTS)[None, :]
            x_mask = row_here[:, None] & inside
            x_tile = loaded_as(tl.load(x_row + place[None, :], mask=x_mask, other=0.0), OPERAND)
            w_at = elements + weight_row[:, None] * INPUTS + place[None, :]
            w_tile = widened(tl.load(w_at, mask=output_here[:, None] & inside, other=0.0)).to(OPERAND)
            if KIND == "dense":
                sums = tl.dot(x_tile, tl.trans(w_tile), sums, input_precision=PRECISION)
            else:
                part = tl.dot(x_tile, tl.trans(w_tile), input_precision=PRECISION)
                scale = _scale(scales, units, weight_row, output_here, step, INPUTS, GROUP, UNIT)
                sums += part * scale[None, :]
        elif KIND == "mxfp4" or KIND == "nvfp4":
            sums = _with_float4(
                sums, x_row, row_here, elements, scales, weight_row, output_here, start,
                INPUTS, KIND, GROUP, STEP, ROUNDED, PRECISION,
            )  # fmt: skip
        else:
            place = start + tl.arange(0, HALF)
            first_x = loaded_as(tl.load(x_row + place[None, :], mask=row_here[:, None], other=0.0), OPERAND)
            second_x = tl.load(x_row + HALF + place[None, :], mask=row_here[:, None], other=0.0)
            second_x = loaded_as(second_x, OPERAND)
            first, second = _quants(
                elements, high, weight_row, output_here, step, INPUTS, HALF, HIGH_BITS, HIGH_WIDTH
            )  # fmt: skip
            first = tl.trans(_of_quant(first, KIND, ZERO).to(OPERAND))
            second = tl.trans(_of_quant(second, KIND, ZERO).to(OPERAND))
            first_sum, second_sum = tl.sum(first_x.to(tl.float32), 1), tl.sum(second_x.to(tl.float32), 1)
            part = tl.dot(first_x, first, input_precision=PRECISION)
            if GROUP == STEP:
                part = tl.dot(second_x, second, part, input_precision=PRECISION)
                sums = _with_group(
                    sums, part, first_sum + second_sum, scales, minima, units, minimum_units, weight_row, output_here,
                    step, INPUTS, GROUP, MINIMUM, UNIT,
                )  # fmt: skip
            else:
                sums = _with_group(
                    sums, part, first_sum, scales, minima, units, minimum_units, weight_row, output_here,
                    2 * step, INPUTS, GROUP, MINIMUM, UNIT,
                )  # fmt: skip
                part = tl.dot(second_x, second, input_precision=PRECISION)
                sums = _with_group(
                    sums, part, second_sum, scales, minima, units, minimum_units, weight_row, output_here,
                    2 * step + 1, INPUTS, GROUP, MINIMUM, UNIT,
                )  # fmt: skip
    if KIND == "nvfp4":
        sums *= tl.load(units + weight_row, mask=output_here, other=0.0)[None, :]
    return sums


@triton.jit(do_not_specialize=["tokens", "outputs", "split_stride"])
def linear(
    x, elements, high, scales, minima, units, minimum_units, bias, out, tokens, outputs, split_stride,
    INPUTS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, ZERO: tl.constexpr,
    HIGH_BITS: tl.constexpr, HIGH_WIDTH: tl.constexpr, MINIMUM: tl.constexpr, UNIT: tl.constexpr,
    BIASED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out [S, tokens, outputs]: the parts of x [tokens, INPUTS] @ weight.T + bias that S splits of the inputs make.

    Grid: (tiles of outputs, tiles of tokens, S). BIASED only where there is one split.
    """
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    STEPS: tl.constexpr = (INPUTS + STEP - 1) // STEP
    share = (STEPS + tl.num_programs(2) - 1) // tl.num_programs(2)
    token_here, output_here = token < tokens, output < outputs
    x_row = x + token.to(tl.int64)[:, None] * INPUTS
    sums = products(
        x_row, token_here, elements, output.to(tl.int64), output_here, high, scales, minima, units, minimum_units,
        split * share, tl.minimum(split * share + share, STEPS),
        INPUTS, KIND, GROUP, STEP, ZERO, HIGH_BITS, HIGH_WIDTH, MINIMUM, UNIT, BLOCK_M, BLOCK_N, ROUNDED, PRECISION,
    )  # fmt: skip
    if BIASED:
        sums += tl.load(bias + output, mask=output_here, other=0.0)[None, :]
    out_at = out + split * split_stride + token.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(out_at, sums, mask=token_here[:, None] & output_here[None, :])


@triton.jit(do_not_specialize=["size", "outputs", "splits"])
def add_splits(
    parts, bias, out, size, outputs, splits, BIASED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out [tokens, outputs], ``size`` elements: the sum of parts [splits, tokens, outputs], in their order, + bias."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = place < size
    sums = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        sums += tl.load(parts + tl.cast(split, tl.int64) * size + place, mask=here, other=0.0)
    if BIASED:
        sums += tl.load(bias + place % outputs, mask=here, other=0.0)
    tl.store(out + place, sums, mask=here)


@triton.jit(do_not_specialize=["tokens"])
def head_linear(
    x, elements, high, scales, minima, units, minimum_units, out, tokens,
    x_token_stride, x_head_stride, out_token_stride, out_head_stride,
    OUTPUTS: tl.constexpr, SKIPPED: tl.constexpr,
    INPUTS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, ZERO: tl.constexpr,
    HIGH_BITS: tl.constexpr, HIGH_WIDTH: tl.constexpr, MINIMUM: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [tokens, heads, OUTPUTS] = each head's x by its own rows of the weight [heads * (SKIPPED + OUTPUTS), INPUTS],
    the first SKIPPED of a head left out. Grid: (tiles of outputs, tiles of tokens, heads)."""
    token = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(2).to(tl.int64)
    STEPS: tl.constexpr = (INPUTS + STEP - 1) // STEP
    token_here, output_here = token < tokens, output < OUTPUTS
    weight_row = head * (SKIPPED + OUTPUTS) + SKIPPED + output
    x_row = x + token[:, None] * x_token_stride + head * x_head_stride
    sums = products(
        x_row, token_here, elements, weight_row, output_here, high, scales, minima, units, minimum_units, 0, STEPS,
        INPUTS, KIND, GROUP, STEP, ZERO, HIGH_BITS, HIGH_WIDTH, MINIMUM, UNIT, BLOCK_M, BLOCK_N, ROUNDED, PRECISION,
    )  # fmt: skip
    out_at = out + token[:, None] * out_token_stride + head * out_head_stride + output[None, :]
    tl.store(out_at, sums, mask=token_here[:, None] & output_here[None, :])
