"""Attention over a paged cache: grouped-query and latent, decode and extend, whole or split over the keys.

One program takes a tile of queries that read the same KV head, and one split of their row's pages. The rows of a tile
are pairs of a token and a query head, tokens outermost, so a group's heads and a verify step's tokens share every key
that is read. The softmax runs in base 2, keys ascending, in float32.
"""

import triton
import triton.language as tl

from tokenspeed_kernel_triton.kernels.float8 import loaded_as

LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def ragged_row(query_start, rows, tile, TOKENS: tl.constexpr):
    """The row that the tile belongs to: the last one b with query_start[b] // TOKENS + b <= tile.

    Row b owns the tiles from there to the next row's: at least as many as its queries fill.
    """
    low, high = 0, rows
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(query_start + middle) // TOKENS + middle
        if begins <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _soft_capped(scores, soft_cap):
    """soft_cap * tanh(scores / soft_cap); exp2 of a number below 0 cannot overflow."""
    small = tl.exp2(tl.abs(scores) * (-2.0 * LOG2E / soft_cap))
    magnitude = soft_cap * (1.0 - small) / (1.0 + small)
    return tl.where(scores < 0.0, -magnitude, magnitude)


@triton.jit
def weighed(scores, total, high):
    """The weights of another tile of scores, in base 2, and what it makes of the softmax so far: what sums decay by,
    the total of the weights and the largest score."""
    risen = tl.maximum(high, tl.max(scores, 1))
    base = tl.where(risen == float("-inf"), 0.0, risen)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(high - base)
    return weights, decay, total * decay + tl.sum(weights, 1), risen


@triton.jit
def logarithm(total, high):
    """The natural logarithm of the summed exponentials; -inf where nothing was seen."""
    return tl.where(total == 0.0, float("-inf"), (high + tl.log2(total)) * _LN2)


@triton.jit
def mean(sums, total):
    """The weighed sums over the total of the weights; 0 where nothing was seen."""
    blind = total == 0.0
    return tl.where(blind[:, None], 0.0, sums / tl.where(blind, 1.0, total)[:, None])


@triton.jit(
    do_not_specialize=["rows", "width", "window", "table_stride", "lse_split_stride"],
    do_not_specialize_on_alignment=["page_table", "query_start", "seq_lens", "sinks", "lse"],
)
def attend(
    q, q_rope, k_cache, v_cache, page_table, query_start, seq_lens, sinks, out, lse,
    q_token_stride, q_head_stride, rope_token_stride, rope_head_stride,
    k_block_stride, k_head_stride, k_token_stride,
    v_block_stride, v_head_stride, v_token_stride,
    table_stride, out_split_stride, lse_split_stride,
    scale, soft_cap, rows, width, window,
    QUERY_HEADS: tl.constexpr, PER_KV: tl.constexpr, TOKENS: tl.constexpr,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK_ROPE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    RAGGED: tl.constexpr, LATENT: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SUNK: tl.constexpr,
    WRITE_LSE: tl.constexpr, ROUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes out [S, T, QUERY_HEADS, DIM] and, with WRITE_LSE, lse [S, T, QUERY_HEADS] of the split program_id(2).

    Grid: (tiles, KV heads, S). A tile has TOKENS tokens of a row, PER_KV heads of each, in BLOCK_M rows of a matrix;
    where PER_KV exceeds BLOCK_M, TOKENS is 1 and a token's heads take several tiles. RAGGED: row b has the queries
    query_start[b] to query_start[b + 1]; else every row has ``width``. LATENT: values are the first DIM elements of a
    key, which has ROPE more. ROUNDED: operands of products are bfloat16, else float32, multiplied in PRECISION; sums
    are float32. With SUNK a head's sink takes part in the softmax: only where nothing is merged afterwards.
    """
    OPERAND: tl.constexpr = tl.bfloat16 if ROUNDED else tl.float32
    HEAD_TILES: tl.constexpr = (PER_KV + BLOCK_M - 1) // BLOCK_M
    place, kv_head = tl.program_id(0) // HEAD_TILES, tl.program_id(1)
    head_tile = tl.program_id(0) % HEAD_TILES
    split, splits = tl.program_id(2), tl.num_programs(2)
    if RAGGED:
        row = ragged_row(query_start, rows, place, TOKENS)
        row_start = tl.load(query_start + row)
        queries = tl.load(query_start + row + 1) - row_start
        first_token = (place - row_start // TOKENS - row) * TOKENS
    else:
        tiles = (width + TOKENS - 1) // TOKENS
        row = place // tiles
        row_start, queries = row * width, width
        first_token = (place % tiles) * TOKENS
    if first_token >= queries:
        return
    seq_len = tl.load(seq_lens + row)

    member = tl.arange(0, BLOCK_M)
    if HEAD_TILES == 1:
        token, group_head = first_token + member // PER_KV, member % PER_KV
        here = (member < TOKENS * PER_KV) & (token < queries)
    else:
        token, group_head = first_token + member * 0, head_tile * BLOCK_M + member
        here = group_head < PER_KV
    head = kv_head * PER_KV + group_head
    query = (row_start + token).to(tl.int64)
    position = seq_len - queries + token
    dims = tl.arange(0, BLOCK_DIM)
    dims_here = dims < DIM
    q_mask = here[:, None] & dims_here[None, :]
    q_at = q + query * q_token_stride + head.to(tl.int64) * q_head_stride
    q_tile = loaded_as(tl.load(q_at[:, None] + dims[None, :], mask=q_mask, other=0.0), tl.float32).to(OPERAND)
    if LATENT:
        rope_dims = tl.arange(0, BLOCK_ROPE)
        rope_here = rope_dims < ROPE
        rope_at = q_rope + query * rope_token_stride + head.to(tl.int64) * rope_head_stride
        rope_mask = here[:, None] & rope_here[None, :]
        rope_tile = tl.load(rope_at[:, None] + rope_dims[None, :], mask=rope_mask, other=0.0)
        rope_tile = loaded_as(rope_tile, tl.float32).to(OPERAND)

    # The split's pages, counted from the first page that any query of the row sees.
    first_page = 0
    if WINDOWED:
        if window > 0:
            first_page = tl.maximum(0, seq_len - queries + 1 - window) // PAGE
    pages = (seq_len + PAGE - 1) // PAGE
    share = (tl.maximum(pages - first_page, 0) + splits - 1) // splits
    begin = (first_page + split * share) * PAGE
    stop = tl.minimum(tl.minimum(begin + share * PAGE, seq_len), seq_len - queries + first_token + TOKENS)
    lowest = begin
    if WINDOWED:
        if window > 0:
            lowest = tl.maximum(begin, seq_len - queries + first_token + 1 - window)
    # Tiles of keys lie at the same positions whatever the window: multiples of BLOCK_N from the split's first.
    start = begin + tl.maximum(lowest - begin, 0) // BLOCK_N * BLOCK_N

    table = page_table + row.to(tl.int64) * table_stride
    keys = k_cache + kv_head.to(tl.int64) * k_head_stride
    values = v_cache + kv_head.to(tl.int64) * v_head_stride
    high = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
    for at in range(start, stop, BLOCK_N):
        key = at + tl.arange(0, BLOCK_N)
        readable = (key < stop) & (key >= lowest)
        # 64-bit offsets: a pool may be larger than 2^31 elements. What is not read leads to the null block.
        block = tl.load(table + key // PAGE, mask=readable, other=0).to(tl.int64)
        within = (key % PAGE).to(tl.int64)
        offsets = block * k_block_stride + within * k_token_stride
        k_mask = readable[:, None] & dims_here[None, :]
        k_tile = loaded_as(tl.load(keys + offsets[:, None] + dims[None, :], mask=k_mask, other=0.0), OPERAND)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if LATENT:
            rope_keys = keys + offsets[:, None] + DIM + rope_dims[None, :]
            rope_k_mask = readable[:, None] & rope_here[None, :]
            rope_k = loaded_as(tl.load(rope_keys, mask=rope_k_mask, other=0.0), OPERAND)
            scores = tl.dot(rope_tile, tl.trans(rope_k), scores, input_precision=PRECISION)
        scores *= scale
        if CAPPED:
            if soft_cap > 0.0:
                scores = _soft_capped(scores, soft_cap)
        seen = readable[None, :] & (key[None, :] <= position[:, None])
        if WINDOWED:
            if window > 0:
                seen &= key[None, :] > position[:, None] - window
        scores = tl.where(seen, scores * LOG2E, float("-inf"))
        weights, decay, total, high = weighed(scores, total, high)
        if LATENT:
            v_tile = k_tile
        else:
            v_offsets = block * v_block_stride + within * v_token_stride
            v_at = values + v_offsets[:, None] + dims[None, :]
            v_tile = loaded_as(tl.load(v_at, mask=k_mask, other=0.0), OPERAND)
        sums = tl.dot(weights.to(OPERAND), v_tile, sums * decay[:, None], input_precision=PRECISION)

    blind = total == 0.0
    lse_tile = logarithm(total, high)
    if SUNK:
        sink = tl.load(sinks + head, mask=here, other=0.0) * LOG2E
        # Relative to the larger of the two, so that neither overflows.
        risen = tl.maximum(high, sink)
        decay = tl.where(blind, 0.0, tl.exp2(high - risen))
        total = tl.where(blind, 0.0, total * decay + tl.exp2(sink - risen))
        sums = sums * decay[:, None]
        lse_tile = logarithm(total, risen)
    result = mean(sums, total)
    target = query * QUERY_HEADS + head
    out_at = out + split.to(tl.int64) * out_split_stride + target * DIM
    tl.store(out_at[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=q_mask)
    if WRITE_LSE:
        tl.store(lse + split.to(tl.int64) * lse_split_stride + target, lse_tile, mask=here)


@triton.jit(
    do_not_specialize=["splits", "rows", "lse_split_stride"],
    do_not_specialize_on_alignment=["partial_lse", "sinks", "query_start", "lse"],
)
def merge(
    partials, partial_lse, sinks, query_start, out, lse, split_stride, lse_split_stride, splits, rows,
    QUERY_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    SUNK: tl.constexpr, RAGGED: tl.constexpr, WRITE_LSE: tl.constexpr,
):  # fmt: skip
    """out [T, H, DIM] and lse [T, H] of partials [S, T, H, DIM] and partial_lse [S, T, H], all dense but over S.

    One program a pair of token and head. Parts are added in their order. A part that is alone comes out as it was, bit
    by bit: its weight is exp(0) and the sum of weights 1. RAGGED: the tokens before query_start[0] and from
    query_start[rows] on are left alone.
    """
    target = tl.program_id(0).to(tl.int64)
    if RAGGED:
        token = target // QUERY_HEADS
        if (token < tl.load(query_start)) | (token >= tl.load(query_start + rows)):
            return
    part = tl.arange(0, BLOCK_SPLITS)
    known = tl.load(
        partial_lse + part.to(tl.int64) * lse_split_stride + target, mask=part < splits, other=float("-inf")
    )
    high = tl.max(known, 0)
    blind = high == float("-inf")
    dims = tl.arange(0, BLOCK_DIM)
    dims_here = dims < DIM
    sums = tl.zeros([BLOCK_DIM], tl.float32)
    total = 0.0
    base = tl.where(blind, 0.0, high)
    if SUNK:
        sink = tl.load(sinks + target % QUERY_HEADS)
        base = tl.where(blind, 0.0, tl.maximum(high, sink))
    for index in range(splits):
        at = tl.cast(index, tl.int64)
        own = tl.load(partial_lse + at * lse_split_stride + target)
        weight = tl.exp(own - base)
        mask = dims_here & (own != float("-inf"))  # what an empty part holds is not used
        partial = tl.load(partials + at * split_stride + target * DIM + dims, mask=mask, other=0.0)
        sums += weight * partial
        total += weight
    if SUNK:
        total += tl.where(blind, 0.0, tl.exp(sink - base))
    result = tl.math.div_rn(sums, tl.where(blind, 1.0, total) + tl.zeros([BLOCK_DIM], tl.float32))
    tl.store(out + target * DIM + dims, result.to(out.dtype.element_ty), mask=dims_here)
    if WRITE_LSE:
        tl.store(lse + target, tl.where(blind, float("-inf"), base + tl.log(total)))
