"""Products of weights and activations of four bits (e2m1) by the matrix instructions that take both with their scales.

A tile's first axis are outputs, its second tokens: tcgen05.mma wants 128 rows, and few tokens may be a narrow second
axis. Scales stay beside the elements as they were quantised; the instruction multiplies them in.
"""

import triton
import triton.language as tl

from tokenspeed_kernel_triton.kernels.elementwise import gate_and_multiply
from tokenspeed_kernel_triton.kernels.paged_attention import ragged_row

_LEAST = tl.constexpr(2.0**-100)
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _power_above(magnitude, MANTISSA: tl.constexpr):
    """The bits of a magnitude's power of two, of the next one where its mantissa exceeds MANTISSA."""
    return (magnitude.to(tl.int32, bitcast=True) + (0x7FFFFF - MANTISSA)) & 0x7F800000


@triton.jit
def _codes(x, scale):
    """The e2m1 of x / scale, to nearest, ties to even; 0 where the scale is 0. A threshold times a scale is exact."""
    size = tl.abs(x)
    code = (size > 0.25 * scale).to(tl.int32) + (size >= 0.75 * scale).to(tl.int32)
    code += (size > 1.25 * scale).to(tl.int32) + (size >= 1.75 * scale).to(tl.int32)
    code += (size > 2.5 * scale).to(tl.int32) + (size >= 3.5 * scale).to(tl.int32)
    code += (size > 5.0 * scale).to(tl.int32)
    code = tl.where((x < 0.0) & (code > 0), code | 8, code)
    return tl.where(scale == 0.0, 0, code)


@triton.jit
def _magnitude(x):
    """|x|, infinite where x is a NaN, so that a maximum shows it."""
    return tl.where(x == x, tl.abs(x), _INFINITY)


@triton.jit
def _taken(x, up, row, x_stride, up_stride, place, WIDTH: tl.constexpr, alpha, limit, KIND: tl.constexpr):
    """What is quantised: x, or with a KIND activation(x) * up; 0 beyond the row."""
    here = place < WIDTH
    value = tl.load(x + row * x_stride + place, mask=here, other=0.0)
    if KIND != "none":
        gated = gate_and_multiply(
            value, tl.load(up + row * up_stride + place, mask=here, other=0.0), alpha, limit, KIND
        )
        value = tl.where(here, gated, 0.0)
    return value


@triton.jit(do_not_specialize=["stretches"])
def quantise(
    x, up, codes, scales, whole, x_stride, up_stride, stretches, alpha, limit,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows x float32 [T, WIDTH], with a KIND (kernels/elementwise.py) activation(x) * up, as codes uint8 [T, WIDTH /
    2], two in a byte, the first below; scales uint8 [T, WIDTH / GROUP]; with GROUP 16 whole float32 [T]. Rounding:
    tokenspeed_kernel.fp4_rows. Grid: (T, programs a row), each of which takes ``stretches`` of BLOCK elements.
    """
    row = tl.program_id(0).to(tl.int64)
    if GROUP == 16:
        most = tl.zeros([BLOCK], tl.float32)
        for start in range(0, WIDTH, BLOCK):
            place = start + tl.arange(0, BLOCK)
            value = _taken(x, up, row, x_stride, up_stride, place, WIDTH, alpha, limit, KIND)
            most = tl.maximum(most, _magnitude(value))
        largest = tl.max(most, 0)
        sound = largest < _INFINITY
        here = sound & (largest >= _LEAST)
        bits = _power_above(tl.where(here, largest, 1.0), 0x280000) - (11 << 23)
        of_row = bits.to(tl.float32, bitcast=True)
        row_inverse = tl.where(here, ((254 << 23) - bits).to(tl.float32, bitcast=True), 0.0)
        if tl.program_id(1) == 0:
            tl.store(whole + row, tl.where(sound, tl.where(here, of_row, 0.0), float("nan")))
    first = tl.program_id(1) * stretches
    group = tl.arange(0, BLOCK // GROUP)
    for stretch in range(first, first + stretches):
        at = (stretch * (BLOCK // GROUP) + group)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        value = _taken(x, up, row, x_stride, up_stride, at, WIDTH, alpha, limit, KIND)
        if GROUP == 16:
            value = tl.where(_magnitude(value) < _INFINITY, value, 0.0) * row_inverse
            # a quotient rounded once: only then is its rounding to eight bits that of the exact one
            scale = tl.div_rn(tl.max(tl.abs(value), 1), 6.0).to(tl.float8e4nv)
            byte = scale.to(tl.uint8, bitcast=True)
            code = _codes(value, scale.to(tl.float32)[:, None])
        else:
            largest = tl.max(_magnitude(value), 1)
            sound = largest < _INFINITY
            here = sound & (largest >= _LEAST)
            exponent = (_power_above(tl.where(here, largest, 1.0), 0x5FFFFF) >> 23) - 2
            inverse = tl.where(here, ((254 - exponent) << 23).to(tl.float32, bitcast=True), 0.0)
            value = tl.where(sound[:, None], value, 0.0) * inverse[:, None]
            byte = tl.where(here, exponent, tl.where(sound, 0, 255)).to(tl.uint8)
            code = _codes(value, 1.0)
        low, high = tl.split(tl.reshape(code, [BLOCK // GROUP, GROUP // 2, 2]))
        pair = (stretch * (BLOCK // GROUP) + group)[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        tl.store(codes + row * (WIDTH // 2) + pair, (low | (high << 4)).to(tl.uint8), mask=pair < WIDTH // 2)
        of_group = stretch * (BLOCK // GROUP) + group
        tl.store(scales + row * (WIDTH // GROUP) + of_group, byte, mask=of_group < WIDTH // GROUP)


@triton.jit
def _tile(codes, scales, row, here, start, INPUTS: tl.constexpr, GROUP: tl.constexpr, DEPTH: tl.constexpr):
    """DEPTH inputs of rows from ``start`` on: two codes a byte, and their scales."""
    byte = start // 2 + tl.arange(0, DEPTH // 2)
    at = start // GROUP + tl.arange(0, DEPTH // GROUP)
    code_mask, scale_mask = here[:, None], here[:, None]
    if INPUTS % DEPTH != 0:
        code_mask, scale_mask = code_mask & (byte < INPUTS // 2)[None, :], scale_mask & (at < INPUTS // GROUP)[None, :]
    code = tl.load(codes + row[:, None] * (INPUTS // 2) + byte[None, :], mask=code_mask, other=0)
    scale = tl.load(scales + row[:, None] * (INPUTS // GROUP) + at[None, :], mask=scale_mask, other=0)
    if GROUP == 16:
        scale = scale.to(tl.float8e4nv, bitcast=True)
    return code, scale


@triton.jit
def products(
    weight, weight_scales, weight_row, output_here, x, x_scales, x_row, token_here, first, stop,
    INPUTS: tl.constexpr, GROUP: tl.constexpr, DEPTH: tl.constexpr, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """[OUTPUTS, TOKENS] float32: the rows ``weight_row`` of a weight times the rows ``x_row`` of x, over the steps
    of DEPTH inputs from ``first`` up to ``stop``."""
    sums = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    for step in range(first, stop):
        start = step * DEPTH
        w_code, w_scale = _tile(weight, weight_scales, weight_row, output_here, start, INPUTS, GROUP, DEPTH)
        x_code, x_scale = _tile(x, x_scales, x_row, token_here, start, INPUTS, GROUP, DEPTH)
        sums = tl.dot_scaled(w_code, w_scale, "e2m1", tl.trans(x_code), x_scale, "e2m1", sums)
    return sums


@triton.jit(do_not_specialize=["tokens", "outputs", "share"])
def linear(
    x, x_scales, x_whole, weight, weight_scales, weight_whole, bias, out, tokens, outputs, share,
    INPUTS: tl.constexpr, GROUP: tl.constexpr, BIASED: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out float32 [tokens, outputs] = x @ weight.T + bias, both quantised. Grid: (tiles of outputs, of tokens, splits).

    SPLIT: out is [splits, tokens, outputs], split s of it over ``share`` steps of DEPTH inputs from s * share on.
    """
    token = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    token_here, output_here = token < tokens, output < outputs
    STEPS: tl.constexpr = (INPUTS + DEPTH - 1) // DEPTH
    if SPLIT:
        first = tl.program_id(2) * share
        stop = tl.minimum(first + share, STEPS)
        out += tl.program_id(2).to(tl.int64) * tokens * outputs
    else:
        first = 0
        stop = STEPS
    sums = products(
        weight, weight_scales, output, output_here, x, x_scales, token, token_here, first, stop,
        INPUTS, GROUP, DEPTH, BLOCK_N, BLOCK_M,
    )  # fmt: skip
    if GROUP == 16:
        sums *= tl.load(weight_whole + output, mask=output_here, other=0.0)[:, None]
        sums *= tl.load(x_whole + token, mask=token_here, other=0.0)[None, :]
    if BIASED:
        sums += tl.load(bias + output, mask=output_here, other=0.0)[:, None]
    out_at = out + token[:, None] * outputs + output[None, :]
    tl.store(out_at, tl.trans(sums), mask=token_here[:, None] & output_here[None, :])


@triton.jit(do_not_specialize=["outputs", "elements", "splits"])
def add_splits(partials, bias, out, outputs, elements, splits, BIASED: tl.constexpr, BLOCK: tl.constexpr):
    """out [tokens, outputs], ``elements`` in all: the sum of partials [splits, tokens, outputs], in their order, and
    the bias. Grid: (stretches of BLOCK,)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = place < elements
    sums = tl.zeros([BLOCK], tl.float32)
    at = partials + place
    for _ in range(splits):
        sums += tl.load(at, mask=here, other=0.0)
        at += elements
    if BIASED:
        sums += tl.load(bias + place % outputs, mask=here, other=0.0)
    tl.store(out + place, sums, mask=here)


@triton.jit(do_not_specialize=["outputs", "top_k"], do_not_specialize_on_alignment=["order", "starts"])
def grouped(
    x, x_scales, x_whole, weight, weight_scales, weight_whole, bias, factors, order, starts, out, outputs, top_k,
    EXPERTS: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr, BIASED: tl.constexpr, GATHERED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """As kernels/moe.py: grouped, of quantised rows: each pair's row of x by its expert's rows of the weight."""
    tile = tl.program_id(1)
    expert = ragged_row(starts, EXPERTS, tile, BLOCK_M)
    first = tl.load(starts + expert)
    stop = tl.load(starts + expert + 1)
    begin = first + (tile - first // BLOCK_M - expert) * BLOCK_M
    # the tiles before the first expert's belong to pairs without an expert
    if (begin >= stop) | (begin < first):
        return
    place = begin + tl.arange(0, BLOCK_M)
    here = place < stop
    pair = tl.load(order + place, mask=here, other=0)
    row = (pair // top_k if GATHERED else place).to(tl.int64)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    output_here = output < outputs
    weight_row = expert.to(tl.int64) * outputs + output
    sums = products(
        weight, weight_scales, weight_row, output_here, x, x_scales, row, here, 0, (INPUTS + DEPTH - 1) // DEPTH,
        INPUTS, GROUP, DEPTH, BLOCK_N, BLOCK_M,
    )  # fmt: skip
    if GROUP == 16:
        sums *= tl.load(weight_whole + weight_row, mask=output_here, other=0.0)[:, None]
        sums *= tl.load(x_whole + row, mask=here, other=0.0)[None, :]
    if BIASED:
        sums += tl.load(bias + weight_row, mask=output_here, other=0.0)[:, None]
    if not GATHERED:
        sums *= tl.load(factors + pair, mask=here, other=0.0)[None, :]
    target = (place if GATHERED else pair).to(tl.int64)
    out_at = out + target[:, None] * outputs + output[None, :]
    tl.store(out_at, tl.trans(sums), mask=here[:, None] & output_here[None, :])
