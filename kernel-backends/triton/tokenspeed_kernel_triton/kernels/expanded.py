"""Attention over keys and values of each head that lie side by side: given so, or expanded out of a paged latent
cache.

See tokenspeed_kernel.ops.ragged and .mla_expanded. What is expanded is held for some positions at a time; the softmax
so far is kept between them, the sums in ``out``. Keys ascend in tiles that begin at position 0, wherever a call is cut.
"""

import triton
import triton.language as tl

from tokenspeed_kernel_triton.kernels.float8 import loaded_as
from tokenspeed_kernel_triton.kernels.linear import products
from tokenspeed_kernel_triton.kernels.paged_attention import LOG2E, logarithm, mean, ragged_row, weighed


@triton.jit(
    do_not_specialize=["first_key", "positions", "table_stride"],
    do_not_specialize_on_alignment=["page_table", "seq_lens"],
)
def expand(
    cache, elements, high, scales, minima, units, minimum_units, page_table, seq_lens, out,
    block_stride, token_stride, table_stride, first_key, positions, outputs,
    PAGE: tl.constexpr, INPUTS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr,
    ZERO: tl.constexpr, HIGH_BITS: tl.constexpr, HIGH_WIDTH: tl.constexpr, MINIMUM: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [rows, positions, outputs]: the weight [outputs, INPUTS] times the latents from position ``first_key`` on.

    Grid: (tiles of outputs, tiles of positions, rows). Positions that a row does not have are left alone.
    """
    row = tl.program_id(2)
    place = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    seq_len = tl.load(seq_lens + row)
    if first_key + tl.program_id(1) * BLOCK_M >= seq_len:
        return
    key = first_key + place
    here = (key < seq_len) & (place < positions)
    block = tl.load(page_table + row.to(tl.int64) * table_stride + key // PAGE, mask=here, other=0).to(tl.int64)
    latents = cache + block * block_stride + (key % PAGE).to(tl.int64) * token_stride
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    output_here = output < outputs
    STEPS: tl.constexpr = (INPUTS + STEP - 1) // STEP
    sums = products(
        latents[:, None], here, elements, output.to(tl.int64), output_here, high, scales, minima, units, minimum_units,
        0, STEPS,
        INPUTS, KIND, GROUP, STEP, ZERO, HIGH_BITS, HIGH_WIDTH, MINIMUM, UNIT, BLOCK_M, BLOCK_N, ROUNDED, PRECISION,
    )  # fmt: skip
    target = out + (row.to(tl.int64) * positions + place)[:, None] * outputs + output[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=here[:, None] & output_here[None, :])


@triton.jit(
    do_not_specialize=["rows", "first_key", "positions", "first", "last", "table_stride"],
    do_not_specialize_on_alignment=["page_table", "query_start", "key_start", "lse", "highs", "totals"],
)
def attend_rows(
    q, k, v, cache, page_table, query_start, key_start, out, lse, highs, totals,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    block_stride, token_stride, table_stride, scale, rows, first_key, positions, first, last,
    QUERY_HEADS: tl.constexpr, PER_KV: tl.constexpr, TOKENS: tl.constexpr,
    MAIN: tl.constexpr, BLOCK_MAIN: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr,
    VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, LATENT: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXPANDED: tl.constexpr, CAUSAL: tl.constexpr,
    WRITE_LSE: tl.constexpr, ROUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [T, QUERY_HEADS, VALUE] and, with WRITE_LSE, lse [T, QUERY_HEADS]. Grid: (tiles, KV heads).

    Tiles are those of paged_attention.attend with RAGGED; TOKENS * PER_KV rows fit BLOCK_M. A key has MAIN elements and
    REST more. EXPANDED: row b has key_start[b] keys, of which k and v hold the ``positions`` from ``first_key`` on, and
    the cache the REST behind its LATENT elements; what came before is in out, highs and totals unless ``first``, and
    there it goes unless ``last``. Else k and v hold the keys key_start[b] to key_start[b + 1] - 1, whole.
    """
    OPERAND: tl.constexpr = tl.bfloat16 if ROUNDED else tl.float32
    row = ragged_row(query_start, rows, tl.program_id(0), TOKENS)
    kv_head = tl.program_id(1)
    row_start = tl.load(query_start + row)
    queries = tl.load(query_start + row + 1) - row_start
    first_token = (tl.program_id(0) - row_start // TOKENS - row) * TOKENS
    if first_token >= queries:
        return
    if EXPANDED:
        keys = tl.load(key_start + row)
        held = row.to(tl.int64) * positions - first_key
        stop = tl.minimum(keys, first_key + positions)
    else:
        begin = tl.load(key_start + row)
        keys = tl.load(key_start + row + 1) - begin
        held = begin.to(tl.int64)
        stop = keys
    if CAUSAL:
        stop = tl.minimum(stop, keys - queries + first_token + TOKENS)
    if EXPANDED:
        if (stop <= first_key) & (first == 0) & (last == 0):
            return

    member = tl.arange(0, BLOCK_M)
    token = first_token + member // PER_KV
    here = (member < TOKENS * PER_KV) & (token < queries)
    head = kv_head * PER_KV + member % PER_KV
    query = (row_start + token).to(tl.int64)
    position = keys - queries + token
    main, rest, value = tl.arange(0, BLOCK_MAIN), tl.arange(0, BLOCK_REST), tl.arange(0, BLOCK_VALUE)
    main_here, value_here = main < MAIN, value < VALUE
    q_at = q + query[:, None] * q_token_stride + head.to(tl.int64)[:, None] * q_head_stride
    q_mask = here[:, None] & main_here[None, :]
    q_tile = tl.load(q_at + main[None, :], mask=q_mask, other=0.0).to(OPERAND)
    if REST:
        rest_here = rest < REST
        q_rest = tl.load(q_at + MAIN + rest[None, :], mask=here[:, None] & rest_here[None, :], other=0.0).to(OPERAND)

    target = query * QUERY_HEADS + head
    out_at = out + target[:, None] * VALUE + value[None, :]
    out_mask = here[:, None] & value_here[None, :]
    high = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32)
    if EXPANDED:
        if first == 0:
            high = tl.load(highs + target, mask=here, other=float("-inf"))
            total = tl.load(totals + target, mask=here, other=0.0)
            sums = tl.load(out_at, mask=out_mask, other=0.0)
            # nobody writes before everybody has read
            tl.debug_barrier()
    for at in range(first_key, stop, BLOCK_N):
        key = at + tl.arange(0, BLOCK_N)
        readable = key < stop
        k_row = (held + key) * k_token_stride + kv_head.to(tl.int64) * k_head_stride
        k_at = k + k_row[:, None]
        k_tile = tl.load(k_at + main[None, :], mask=readable[:, None] & main_here[None, :], other=0.0).to(OPERAND)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if REST:
            if EXPANDED:
                table_at = page_table + row.to(tl.int64) * table_stride + key // PAGE
                block = tl.load(table_at, mask=readable, other=0).to(tl.int64)
                entry = cache + block * block_stride + (key % PAGE).to(tl.int64) * token_stride
                rest_at = entry[:, None] + LATENT
            else:
                rest_at = k_at + MAIN
            rest_mask = readable[:, None] & rest_here[None, :]
            k_rest = loaded_as(tl.load(rest_at + rest[None, :], mask=rest_mask, other=0.0), OPERAND)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision=PRECISION)
        seen = readable[None, :] & here[:, None]
        if CAUSAL:
            seen &= key[None, :] <= position[:, None]
        scores = tl.where(seen, scores * (scale * LOG2E), float("-inf"))
        weights, decay, total, high = weighed(scores, total, high)
        v_at = v + ((held + key) * v_token_stride + kv_head.to(tl.int64) * v_head_stride)[:, None]
        v_tile = tl.load(v_at + value[None, :], mask=readable[:, None] & value_here[None, :], other=0.0).to(OPERAND)
        sums = tl.dot(weights.to(OPERAND), v_tile, sums * decay[:, None], input_precision=PRECISION)
    if EXPANDED:
        if last == 0:
            tl.store(highs + target, high, mask=here)
            tl.store(totals + target, total, mask=here)
            tl.store(out_at, sums, mask=out_mask)
            return
    tl.store(out_at, mean(sums, total), mask=out_mask)
    if WRITE_LSE:
        tl.store(lse + target, logarithm(total, high), mask=here)
