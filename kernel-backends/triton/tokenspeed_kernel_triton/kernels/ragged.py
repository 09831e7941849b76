"""Attention over keys and values that lie side by side: the rows of a chunk, each over keys of its own."""

import triton
import triton.language as tl

from tokenspeed_kernel_triton.kernels.paged_attention import ragged_row

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(
    do_not_specialize=["rows"], do_not_specialize_on_alignment=["q", "k", "v", "query_start", "key_start", "lse"]
)
def ragged(
    q, k, v, query_start, key_start, out, lse,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride, scale, rows,
    PER_KV: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_REST: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    WRITE_LSE: tl.constexpr, ROUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes out [T, heads, VALUE] and, with WRITE_LSE, lse [T, heads]. Grid: (tiles of BLOCK_M queries, heads).

    A head's DIM elements are two operands, BLOCK_DIM of them and BLOCK_REST for what is left, where there is any: 192
    is 128 and 64, not 256. The softmax runs in base 2, keys ascending, in float32. ROUNDED: operands of products are
    bfloat16, else float32, multiplied in PRECISION; sums are float32.
    """
    OPERAND: tl.constexpr = tl.bfloat16 if ROUNDED else tl.float32
    tile, head = tl.program_id(0), tl.program_id(1)
    row = ragged_row(query_start, rows, tile, BLOCK_M)
    first = tl.load(query_start + row)
    queries = tl.load(query_start + row + 1) - first
    begin = (tile - first // BLOCK_M - row) * BLOCK_M
    if (begin < 0) | (begin >= queries):
        return
    first_key = tl.load(key_start + row)
    keys = tl.load(key_start + row + 1) - first_key
    member = begin + tl.arange(0, BLOCK_M)
    here = member < queries
    query = (first + member).to(tl.int64)
    dims, rest = tl.arange(0, BLOCK_DIM), BLOCK_DIM + tl.arange(0, BLOCK_REST)
    dims_here, rest_here = dims < DIM, rest < DIM
    q_at = q + query[:, None] * q_token_stride + head * q_head_stride
    q_tile = tl.load(q_at + dims[None, :], mask=here[:, None] & dims_here[None, :], other=0.0).to(OPERAND)
    if DIM > BLOCK_DIM:
        q_rest = tl.load(q_at + rest[None, :], mask=here[:, None] & rest_here[None, :], other=0.0).to(OPERAND)
    k_head = k + first_key.to(tl.int64) * k_token_stride + (head // PER_KV) * k_head_stride
    v_head = v + first_key.to(tl.int64) * v_token_stride + (head // PER_KV) * v_head_stride
    values = tl.arange(0, BLOCK_VALUE)

    last_seen = keys - queries + member  # of a masked query
    stop = tl.minimum(keys, keys - queries + begin + BLOCK_M) if CAUSAL else keys
    high = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32)
    for at in range(0, stop, BLOCK_N):
        key = at + tl.arange(0, BLOCK_N)
        readable = key < keys
        k_at = k_head + key.to(tl.int64)[:, None] * k_token_stride
        k_tile = tl.load(k_at + dims[None, :], mask=readable[:, None] & dims_here[None, :], other=0.0).to(OPERAND)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if DIM > BLOCK_DIM:
            k_rest = tl.load(k_at + rest[None, :], mask=readable[:, None] & rest_here[None, :], other=0.0).to(OPERAND)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision=PRECISION)
        seen = readable[None, :]
        if CAUSAL:
            seen &= key[None, :] <= last_seen[:, None]
        scores = tl.where(seen, scores * (scale * _LOG2E), float("-inf"))
        risen = tl.maximum(high, tl.max(scores, 1))
        base = tl.where(risen == float("-inf"), 0.0, risen)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(high - base)
        total = total * decay + tl.sum(weights, 1)
        v_at = v_head + key.to(tl.int64)[:, None] * v_token_stride + values[None, :]
        v_tile = tl.load(v_at, mask=readable[:, None] & (values < VALUE)[None, :], other=0.0).to(OPERAND)
        sums = tl.dot(weights.to(OPERAND), v_tile, sums * decay[:, None], input_precision=PRECISION)
        high = risen
    blind = total == 0.0
    result = tl.where(blind[:, None], 0.0, sums / tl.where(blind, 1.0, total)[:, None])
    place = query * tl.num_programs(1) + head
    tl.store(out + place[:, None] * VALUE + values[None, :], result, mask=here[:, None] & (values < VALUE)[None, :])
    if WRITE_LSE:
        tl.store(lse + place, tl.where(blind, float("-inf"), (high + tl.log2(total)) * _LN2), mask=here)
