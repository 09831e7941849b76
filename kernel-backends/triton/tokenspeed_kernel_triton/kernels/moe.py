"""Mixtures of experts: the choice of experts, the products of each expert's tokens, and their sum."""

import triton
import triton.language as tl

from tokenspeed_kernel_triton.kernels.elementwise import softplus
from tokenspeed_kernel_triton.kernels.linear import products

_NONE = tl.constexpr(1 << 30)


@triton.jit
def _scores(logits, here, SCORING: tl.constexpr):
    if SCORING == "softmax":
        most = tl.max(tl.where(here, logits, float("-inf")), 0)
        weight = tl.where(here, tl.exp(logits - most), 0.0)
        return weight / tl.sum(weight, 0)
    small = tl.exp(-tl.abs(logits))
    if SCORING == "sigmoid":
        return tl.where(logits >= 0.0, 1.0, small) / (1.0 + small)
    return tl.sqrt(softplus(logits))


@triton.jit
def _best(values, open_, place):
    """The largest of the open values, and the lowest place that has it."""
    most = tl.max(tl.where(open_, values, float("-inf")), 0)
    return most, tl.min(tl.where(open_ & (values == most), place, _NONE), 0)


@triton.jit
def route(
    logits, correction, ids, weights, scale,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, SCORING: tl.constexpr,
    CORRECTED: tl.constexpr, GROUPS: tl.constexpr, BLOCK_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    RENORMALISE: tl.constexpr,
):  # fmt: skip
    """Chooses TOP_K experts of a row; see tokenspeed_kernel.ops.moe. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    here = place < EXPERTS
    logit = tl.load(logits + row * EXPERTS + place, mask=here, other=0.0)
    score = _scores(logit, here, SCORING)
    choice = logit
    if CORRECTED:
        choice = score + tl.load(correction + place, mask=here, other=0.0)
    choice = tl.where(choice != choice, float("-inf"), choice)
    open_ = here
    if GROUPS > 1:
        group_of = place // (EXPERTS // GROUPS)
        group = tl.arange(0, BLOCK_GROUPS)
        value_of = tl.full([BLOCK_GROUPS], float("-inf"), tl.float32)
        for index in tl.static_range(GROUPS):
            members = here & (group_of == index)
            value, first = _best(choice, members, place)
            if CORRECTED:
                second, _ = _best(choice, members & (place != first), place)
                value += second
            value_of = tl.where(group == index, value, value_of)
        left = group < GROUPS
        open_ = place < 0
        for _ in tl.static_range(TOP_GROUPS):
            _value, chosen_group = _best(value_of, left, group)
            left = left & (group != chosen_group)
            open_ = open_ | (here & (group_of == chosen_group))
    slot = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    found = tl.zeros([BLOCK_K], tl.float32)
    for index in tl.static_range(TOP_K):
        _value, expert = _best(choice, open_, place)
        open_ = open_ & (place != expert)
        chosen = tl.where(slot == index, expert, chosen)
        found = tl.where(slot == index, tl.sum(tl.where(place == expert, score, 0.0), 0), found)
    if RENORMALISE:
        found = found / (tl.sum(found, 0) + 1e-20)
    at = row * TOP_K + slot
    tl.store(ids + at, chosen, mask=slot < TOP_K)
    tl.store(weights + at, found * scale, mask=slot < TOP_K)


@triton.jit(do_not_specialize=["outputs", "top_k"], do_not_specialize_on_alignment=["order", "starts"])
def grouped(
    x, elements, high, scales, minima, units, minimum_units, bias, factors, order, starts, out, outputs, top_k,
    EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr,
    INPUTS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, ZERO: tl.constexpr,
    HIGH_BITS: tl.constexpr, HIGH_WIDTH: tl.constexpr, MINIMUM: tl.constexpr, UNIT: tl.constexpr,
    BIASED: tl.constexpr, GATHERED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out [pairs, outputs]: each pair's row of x by its expert's rows of the weight [EXPERTS * outputs, INPUTS].

    ``order`` lists the pairs (token * top_k + slot) by expert; expert e has those from starts[e] to starts[e + 1].
    Grid: (tiles of outputs, tiles of pairs, as many as there may be). GATHERED: x has a row a token, and out a row a
    place in the order. Else x has a row a place, and out a row a pair, times the pair's factor.
    """
    tile = tl.program_id(1)
    each = tl.arange(0, BLOCK_EXPERTS)
    known = each < EXPERTS
    firsts = tl.load(starts + each, mask=known, other=0)
    stops = tl.load(starts + each + 1, mask=known, other=0)
    tiles = (stops - firsts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((known & (ends <= tile)).to(tl.int32), 0)
    if expert >= EXPERTS:
        return
    own = each == expert
    stop = tl.sum(tl.where(own, stops, 0), 0)
    begin = tl.sum(tl.where(own, firsts + (tile - ends + tiles) * BLOCK_M, 0), 0)
    place = begin + tl.arange(0, BLOCK_M)
    here = place < stop
    pair = tl.load(order + place, mask=here, other=0)
    row = (pair // top_k if GATHERED else place).to(tl.int64)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    output_here = output < outputs
    weight_row = expert.to(tl.int64) * outputs + output
    STEPS: tl.constexpr = (INPUTS + STEP - 1) // STEP
    sums = products(
        x + row[:, None] * INPUTS, here, elements, weight_row, output_here, high, scales, minima, units, minimum_units,
        0, STEPS,
        INPUTS, KIND, GROUP, STEP, ZERO, HIGH_BITS, HIGH_WIDTH, MINIMUM, UNIT, BLOCK_M, BLOCK_N, ROUNDED, PRECISION,
    )  # fmt: skip
    if BIASED:
        sums += tl.load(bias + weight_row, mask=output_here, other=0.0)[None, :]
    if not GATHERED:
        sums *= tl.load(factors + pair, mask=here, other=0.0)[:, None]
    target = (place if GATHERED else pair).to(tl.int64)
    tl.store(out + target[:, None] * outputs + output[None, :], sums, mask=here[:, None] & output_here[None, :])


@triton.jit(do_not_specialize=["width"])
def combine(parts, ids, out, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """out [tokens, width]: the sum of a token's parts [tokens, TOP_K, width] that have an expert, in their order.

    Grid: (tokens, stretches of BLOCK).
    """
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = place < width
    sums = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        present = tl.load(ids + pair) >= 0
        sums += tl.load(parts + pair * width + place, mask=here & present, other=0.0)
    tl.store(out + token * width + place, sums, mask=here)


@triton.jit(do_not_specialize_on_alignment=["tokens", "table", "ids", "weights"])
def table_route(
    logits, tokens, table, scale, ids, weights, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """The experts that the table has for a row's token, and their weights. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, BLOCK_K)
    here = slot < TOP_K
    expert = tl.load(table + tl.load(tokens + row).to(tl.int64) * TOP_K + slot, mask=here, other=0)
    score = _scores(tl.load(logits + row * EXPERTS + expert, mask=here, other=0.0), here, "sqrtsoftplus")
    score = tl.where(here, score, 0.0)
    tl.store(ids + row * TOP_K + slot, expert, mask=here)
    tl.store(weights + row * TOP_K + slot, score / (tl.sum(score, 0) + 1e-20) * scale, mask=here)
