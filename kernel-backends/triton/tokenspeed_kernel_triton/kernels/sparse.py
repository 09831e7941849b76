"""The indexer of sparse attention: scores of what is cached, the best of them; and latent attention over those.

See tokenspeed_kernel.ops.sparse. A query's scores are made by the same tiles whatever else is in the call, and what is
chosen hangs on them alone.
"""

import triton
import triton.language as tl

from tokenspeed_kernel_triton.kernels.entries import row_of
from tokenspeed_kernel_triton.kernels.float8 import loaded_as
from tokenspeed_kernel_triton.kernels.paged_attention import LOG2E, logarithm, mean, weighed
from tokenspeed_kernel_triton.kernels.sampling import _ordered

_NAN = tl.constexpr(0x7FFFFFFF)
"""The order of a NaN: above that of every number."""


@triton.jit
def _seen(query_start, seq_lens, rows, query, stride):
    """The row of a query, and how many entries it sees; none where it belongs to no row."""
    row = row_of(query_start, rows, query)
    first, stop = tl.load(query_start + row), tl.load(query_start + row + 1)
    seen = tl.maximum(tl.load(seq_lens + row) - (stop - 1 - query), 0) // stride
    return row, tl.where((query >= first) & (query < stop), seen, 0)


@triton.jit(
    do_not_specialize=["first_query", "queries", "rows", "stride", "table_stride", "scores_stride"],
    do_not_specialize_on_alignment=["weights", "page_table", "query_start", "seq_lens"],
)
def index_scores(
    q, weights, cache, page_table, query_start, seq_lens, scores, first_query, queries, rows, stride,
    q_stride, block_stride, token_stride, table_stride, scores_stride,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PAGE: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """scores float32 [queries, entries]: of the entries that each of the queries from ``first_query`` on sees.

    Grid: (tiles of BLOCK_N entries, tiles of QUERIES queries). A tile's keys are loaded anew only where the row is
    another's.
    """
    entry = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims, head = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_HEADS)
    dims_here, head_here = dims < DIM, head < HEADS
    held = -1
    k_tile = tl.zeros([BLOCK_N, BLOCK_DIM], tl.float32)
    for index in range(QUERIES):
        place = tl.program_id(1) * QUERIES + index
        seen = 0
        row = 0
        query = first_query + place
        if place < queries:
            row, seen = _seen(query_start, seq_lens, rows, query, stride)
        if tl.program_id(0) * BLOCK_N < seen:
            if row != held:
                # the last query of a row sees the most: what it sees, the others' tiles may hold
                most = tl.load(seq_lens + row) // stride
                readable = entry < most
                table = page_table + row.to(tl.int64) * table_stride
                block = tl.load(table + entry // PAGE, mask=readable, other=0).to(tl.int64)
                offsets = block * block_stride + (entry % PAGE).to(tl.int64) * token_stride
                k_mask = readable[:, None] & dims_here[None, :]
                k_at = cache + offsets[:, None] + dims[None, :]
                k_tile = loaded_as(tl.load(k_at, mask=k_mask, other=0.0), tl.float32)
                held = row
            q_at = q + query.to(tl.int64) * q_stride + head[:, None] * DIM + dims[None, :]
            q_tile = tl.load(q_at, mask=head_here[:, None] & dims_here[None, :], other=0.0)
            weight = tl.load(weights + query.to(tl.int64) * HEADS + head, mask=head_here, other=0.0)
            dots = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            # a NaN stays one
            dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
            score = tl.sum(tl.where(head_here[:, None], dots * weight[:, None], 0.0), 0)
            tl.store(scores + place.to(tl.int64) * scores_stride + entry, score, mask=entry < seen)


@triton.jit
def _order_at(row, place, width):
    """How an entry's score compares, as an int32; a NaN above every number, what is beyond the row below."""
    score = tl.load(row + place, mask=place < width, other=float("-inf"))
    return tl.where(score != score, _NAN, _ordered(score))


@triton.jit
def _at_least(row, width, least, BLOCK: tl.constexpr):
    """How many of a row's scores have an order of at least ``least``."""
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        total += ((place < width) & (_order_at(row, place, width).to(tl.int64) >= least)).to(tl.int32)
    return tl.sum(total, 0)


@triton.jit(
    do_not_specialize=["first_query", "rows", "stride", "scores_stride", "count"],
    do_not_specialize_on_alignment=["query_start", "seq_lens", "selected"],
)
def index_best(
    scores, query_start, seq_lens, selected, first_query, rows, stride, scores_stride, count, BLOCK: tl.constexpr
):  # fmt: skip
    """The ``count`` best entries of each query, ascending, then -1. Grid: (queries,).

    The order of the worst that is chosen is found by bisection over the 32 bits; of those that equal it, the lowest are
    taken.
    """
    place = tl.program_id(0)
    query = first_query + place
    if (query < tl.load(query_start)) | (query >= tl.load(query_start + rows)):
        return
    _row, seen = _seen(query_start, seq_lens, rows, query, stride)
    row = scores + place.to(tl.int64) * scores_stride
    low, high = tl.cast(-(1 << 31), tl.int64), tl.cast(1 << 31, tl.int64)
    if seen > count:
        # at least ``count`` reach low, fewer reach high
        while high - low > 1:
            middle = (low + high) >> 1
            if _at_least(row, seen, middle, BLOCK) >= count:
                low = middle
            else:
                high = middle
    equals = count - _at_least(row, seen, low + 1, BLOCK)  # of the order low, that many are taken
    target = selected + query.to(tl.int64) * count
    taken, met = 0, 0
    for start in range(0, seen, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        order = _order_at(row, entry, seen).to(tl.int64)
        equal = ((entry < seen) & (order == low)).to(tl.int32)
        rank = met + tl.cumsum(equal, 0)
        chosen = (entry < seen) & ((order > low) | ((equal != 0) & (rank <= equals)))
        before = tl.cumsum(chosen.to(tl.int32), 0)
        tl.store(target + taken + before - 1, entry, mask=chosen)
        taken += tl.sum(chosen.to(tl.int32), 0)
        met += tl.sum(equal, 0)
    for start in range(taken, count, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        tl.store(target + slot, -1 + tl.zeros([BLOCK], tl.int32), mask=slot < count)


@triton.jit(
    do_not_specialize=["rows", "count", "table_stride", "out_split_stride", "lse_split_stride"],
    do_not_specialize_on_alignment=["page_table", "query_start", "selected", "lse"],
)
def attend_selected(
    q, q_rope, cache, page_table, query_start, selected, out, lse,
    q_token_stride, q_head_stride, rope_token_stride, rope_head_stride, block_stride, token_stride,
    table_stride, out_split_stride, lse_split_stride, scale, rows, count,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK_ROPE: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WRITE_LSE: tl.constexpr, ROUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As paged_attention.attend with LATENT, over each query's own ``count`` entries, -1 for none.

    Grid: (queries, tiles of BLOCK_M heads, S): split s takes its share of the places in ``selected``.
    """
    OPERAND: tl.constexpr = tl.bfloat16 if ROUNDED else tl.float32
    query = tl.program_id(0)
    if (query < tl.load(query_start)) | (query >= tl.load(query_start + rows)):
        return
    row = row_of(query_start, rows, query)
    split = tl.program_id(2)
    share = (count + tl.num_programs(2) - 1) // tl.num_programs(2)
    begin, stop = split * share, tl.minimum(split * share + share, count)
    head = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    here = head < HEADS
    dims = tl.arange(0, BLOCK_DIM)
    dims_here = dims < DIM
    token = query.to(tl.int64)
    q_at = q + token * q_token_stride + head.to(tl.int64)[:, None] * q_head_stride + dims[None, :]
    q_mask = here[:, None] & dims_here[None, :]
    q_tile = loaded_as(tl.load(q_at, mask=q_mask, other=0.0), tl.float32).to(OPERAND)
    if ROPE:
        rope_dims = tl.arange(0, BLOCK_ROPE)
        rope_here = rope_dims < ROPE
        rope_at = q_rope + token * rope_token_stride + head.to(tl.int64)[:, None] * rope_head_stride
        rope_mask = here[:, None] & rope_here[None, :]
        rope_tile = tl.load(rope_at + rope_dims[None, :], mask=rope_mask, other=0.0)
        rope_tile = loaded_as(rope_tile, tl.float32).to(OPERAND)
    table = page_table + row.to(tl.int64) * table_stride
    own = selected + token * count
    high = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
    for at in range(begin, stop, BLOCK_N):
        place = at + tl.arange(0, BLOCK_N)
        entry = tl.load(own + place, mask=place < stop, other=-1)
        readable = entry >= 0
        entry = tl.maximum(entry, 0)
        block = tl.load(table + entry // PAGE, mask=readable, other=0).to(tl.int64)
        offsets = block * block_stride + (entry % PAGE).to(tl.int64) * token_stride
        k_mask = readable[:, None] & dims_here[None, :]
        k_tile = loaded_as(tl.load(cache + offsets[:, None] + dims[None, :], mask=k_mask, other=0.0), OPERAND)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if ROPE:
            rope_keys = cache + offsets[:, None] + DIM + rope_dims[None, :]
            rope_k_mask = readable[:, None] & rope_here[None, :]
            rope_k = loaded_as(tl.load(rope_keys, mask=rope_k_mask, other=0.0), OPERAND)
            scores = tl.dot(rope_tile, tl.trans(rope_k), scores, input_precision=PRECISION)
        scores = tl.where(readable[None, :], scores * (scale * LOG2E), float("-inf"))
        weights, decay, total, high = weighed(scores, total, high)
        sums = tl.dot(weights.to(OPERAND), k_tile, sums * decay[:, None], input_precision=PRECISION)
    target = token * HEADS + head
    out_at = out + split.to(tl.int64) * out_split_stride + target[:, None] * DIM + dims[None, :]
    tl.store(out_at, mean(sums, total).to(out.dtype.element_ty), mask=q_mask)
    if WRITE_LSE:
        lse_at = lse + split.to(tl.int64) * lse_split_stride + target
        tl.store(lse_at, logarithm(total, high), mask=here)
