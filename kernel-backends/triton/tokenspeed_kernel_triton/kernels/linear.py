"""Products with weights: dense, or quantised in groups that share a scale.

A program makes a tile of outputs. Quantised elements are widened without their scale, which is exact; a group's
products are summed in float32 and scaled then. So a step of the loop is a group: 128 elements of float8, 32 of the
others.
"""

import triton
import triton.language as tl


@triton.jit
def _e2m1(nibble):
    """0, 0.5, 1, 1.5, 2, 3, 4, 6 and the same below 0."""
    exponent, half = (nibble >> 1) & 3, (nibble & 1).to(tl.float32) * 0.5
    size = tl.where(exponent == 0, half, (1.0 + half) * tl.exp2((exponent - 1).to(tl.float32)))
    return tl.where(nibble >= 8, -size, size)


@triton.jit
def _of_nibble(nibble, KIND: tl.constexpr):
    """What a nibble stands for, without its scale."""
    if KIND == "e2m1":
        return _e2m1(nibble.to(tl.int32))
    if KIND == "int4":
        return nibble.to(tl.float32) - 8.0
    return nibble.to(tl.float32)


@triton.jit
def products(
    x_row, row_here, weight, weight_row, output_here, scales, minima,
    INPUTS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of INPUTS float32 at ``x_row`` [BLOCK_M, 1] times the rows ``weight_row`` [BLOCK_N] of a weight.

    KIND "dense": weight [rows, INPUTS], GROUP elements a step. "eight": the same of float8 or int8, with scales [rows,
    INPUTS / GROUP]. "int4", "int4 above a minimum" and "e2m1": bytes [rows, INPUTS / 2], of which the low nibbles of a
    group's 16 are its first elements, the high ones its last. ROUNDED: operands are bfloat16, else float32.
    """
    OPERAND: tl.constexpr = tl.bfloat16 if ROUNDED else tl.float32
    PACKED: tl.constexpr = KIND != "dense" and KIND != "eight"
    HALF: tl.constexpr = GROUP // 2
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, INPUTS, GROUP):
        if PACKED:
            place = start + tl.arange(0, HALF)
            x_mask = row_here[:, None] & (place < INPUTS)[None, :]
            low_x = tl.load(x_row + place[None, :], mask=x_mask, other=0.0).to(OPERAND)
            high_x = tl.load(x_row + HALF + place[None, :], mask=x_mask, other=0.0).to(OPERAND)
            byte_at = weight + weight_row[:, None] * (INPUTS // 2) + start // 2 + tl.arange(0, HALF)[None, :]
            byte = tl.load(byte_at, mask=output_here[:, None], other=0)
            low = _of_nibble(byte & 15, KIND).to(OPERAND)
            high = _of_nibble(byte >> 4, KIND).to(OPERAND)
            part = tl.dot(low_x, tl.trans(low), input_precision=PRECISION)
            part = tl.dot(high_x, tl.trans(high), part, input_precision=PRECISION)
        else:
            place = start + tl.arange(0, GROUP)
            x_mask = row_here[:, None] & (place < INPUTS)[None, :]
            x_tile = tl.load(x_row + place[None, :], mask=x_mask, other=0.0).to(OPERAND)
            w_at = weight + weight_row[:, None] * INPUTS + place[None, :]
            w_tile = tl.load(w_at, mask=output_here[:, None] & (place < INPUTS)[None, :], other=0.0).to(OPERAND)
            if KIND == "dense":
                sums = tl.dot(x_tile, tl.trans(w_tile), sums, input_precision=PRECISION)
            else:
                part = tl.dot(x_tile, tl.trans(w_tile), input_precision=PRECISION)
        if KIND != "dense":
            scale_at = weight_row * (INPUTS // GROUP) + start // GROUP
            sums += part * tl.load(scales + scale_at, mask=output_here, other=0.0)[None, :]
            if KIND == "int4 above a minimum":
                inputs = tl.sum(low_x.to(tl.float32), 1) + tl.sum(high_x.to(tl.float32), 1)
                sums += inputs[:, None] * tl.load(minima + scale_at, mask=output_here, other=0.0)[None, :]
    return sums


@triton.jit(do_not_specialize=["tokens", "outputs"])
def linear(
    x, weight, scales, minima, bias, out, tokens, outputs,
    INPUTS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, BIASED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [tokens, outputs] = x [tokens, INPUTS] @ weight.T + bias. Grid: (tiles of outputs, tiles of tokens)."""
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token_here, output_here = token < tokens, output < outputs
    x_row = x + token.to(tl.int64)[:, None] * INPUTS
    sums = products(
        x_row, token_here, weight, output.to(tl.int64), output_here, scales, minima,
        INPUTS, KIND, GROUP, BLOCK_M, BLOCK_N, ROUNDED, PRECISION,
    )  # fmt: skip
    if BIASED:
        sums += tl.load(bias + output, mask=output_here, other=0.0)[None, :]
    out_at = out + token.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(out_at, sums, mask=token_here[:, None] & output_here[None, :])
