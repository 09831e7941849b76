"""Writers of caches that sparse and compressed attention read, and what a sink takes from an output.

Pairs are as in rotary.py. Offsets into caches are 64 bits; a slot below 0 is one of the null block.
"""

import triton
import triton.language as tl

from tokenspeed_kernel_triton.kernels.float8 import loaded_as, stored_as
from tokenspeed_kernel_triton.kernels.rotary import _slot_offset, _turned


@triton.jit
def row_of(query_start, rows, query):
    """The row that a query belongs to: the last one b with query_start[b] <= query."""
    low, high = 0, rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) <= query:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["slots"])
def write(
    x, cache, slots, width, x_stride, block_stride, token_stride, PAGE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Row t of x [T, width] to its slot. Grid: (T, stretches of BLOCK)."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = place < width
    value = tl.load(x + token * x_stride + place, mask=here, other=0.0)
    entry = cache + _slot_offset(slots, token, block_stride, token_stride, PAGE)
    tl.store(entry + place, stored_as(value, cache.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize_on_alignment=["lse", "sinks"])
def apply_sinks(x, lse, sinks, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """x [T, HEADS, DIM] in place, times 1 / (1 + exp(sink - lse)). Grid: (T * HEADS,)."""
    head = tl.program_id(0).to(tl.int64)
    known = tl.load(lse + head)
    above = tl.load(sinks + head % HEADS) - known
    small = tl.exp(-tl.abs(above))
    share = tl.where(above >= 0.0, small, 1.0) / (1.0 + small)
    place = tl.arange(0, BLOCK)
    here = place < DIM
    value = tl.load(x + head * DIM + place, mask=here, other=0.0)
    tl.store(x + head * DIM + place, tl.where(known == float("-inf"), 0.0, value * share), mask=here)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def index_prologue(
    q, key, positions, cos_sin, norm_weight, norm_bias, eps, cache, slots,
    q_stride, key_stride, table_stride, block_stride, token_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, HEADS + 1): the first 2 * HALF elements of each head of q; then the key, normed, to its slot."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair, rest = tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_REST)
    here, behind = pair < HALF, rest < DIM - 2 * HALF
    angle = cos_sin + tl.load(positions + token).to(tl.int64) * table_stride + pair
    cos, sin = tl.load(angle, mask=here, other=0.0), tl.load(angle + HALF, mask=here, other=0.0)
    at = q + token * q_stride + head * DIM
    if head == HEADS:
        at = key + token * key_stride
    low, high = tl.load(at + pair, mask=here, other=0.0), tl.load(at + HALF + pair, mask=here, other=0.0)
    if head < HEADS:
        low, high = _turned(low, high, cos, sin)
        tl.store(at + pair, low, mask=here)
        tl.store(at + HALF + pair, high, mask=here)
    else:
        tail = tl.load(at + 2 * HALF + rest, mask=behind, other=0.0)
        mean = (tl.sum(low, 0) + tl.sum(high, 0) + tl.sum(tail, 0)) / DIM
        low = tl.where(here, low - mean, 0.0)
        high = tl.where(here, high - mean, 0.0)
        tail = tl.where(behind, tail - mean, 0.0)
        variance = (tl.sum(low * low, 0) + tl.sum(high * high, 0) + tl.sum(tail * tail, 0)) / DIM
        factor = 1.0 / tl.sqrt(variance + eps)
        low = low * factor * tl.load(norm_weight + pair, mask=here, other=0.0)
        high = high * factor * tl.load(norm_weight + HALF + pair, mask=here, other=0.0)
        tail = tail * factor * tl.load(norm_weight + 2 * HALF + rest, mask=behind, other=0.0)
        low += tl.load(norm_bias + pair, mask=here, other=0.0)
        high += tl.load(norm_bias + HALF + pair, mask=here, other=0.0)
        tail += tl.load(norm_bias + 2 * HALF + rest, mask=behind, other=0.0)
        low, high = _turned(low, high, cos, sin)
        entry = cache + _slot_offset(slots, token, block_stride, token_stride, PAGE)
        kind = cache.dtype.element_ty
        tl.store(entry + pair, stored_as(low, kind), mask=here)
        tl.store(entry + HALF + pair, stored_as(high, kind), mask=here)
        tl.store(entry + 2 * HALF + rest, stored_as(tail, kind), mask=behind)


@triton.jit
def _weighed(
    values, gates, table, bias, column, here, stop,
    values_block_stride, values_token_stride, gates_block_stride, gates_token_stride,
    STRIDE: tl.constexpr, DIM: tl.constexpr, OVERLAPPING: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The elements ``column`` of an entry that ends before ``stop``, a softmax of gates over its tokens in float32."""
    COUNT: tl.constexpr = 2 * STRIDE if OVERLAPPING else STRIDE
    WIDTH: tl.constexpr = 2 * DIM if OVERLAPPING else DIM
    high = tl.full(column.shape, float("-inf"), tl.float32)
    total, sums = tl.zeros(column.shape, tl.float32), tl.zeros(column.shape, tl.float32)
    for index in range(tl.maximum(0, COUNT - stop), COUNT):
        position = stop - COUNT + index
        block, within = tl.load(table + position // PAGE).to(tl.int64), (position % PAGE).to(tl.int64)
        place = column + (index // STRIDE * DIM if OVERLAPPING else 0)
        gate = tl.load(gates + block * gates_block_stride + within * gates_token_stride + place, mask=here, other=0.0)
        score = loaded_as(gate, tl.float32) + tl.load(bias + index % STRIDE * WIDTH + place, mask=here, other=0.0)
        value_at = values + block * values_block_stride + within * values_token_stride + place
        value = loaded_as(tl.load(value_at, mask=here, other=0.0), tl.float32)
        risen = tl.maximum(high, score)
        decay, weight = tl.exp(high - risen), tl.exp(score - risen)
        total = total * decay + weight
        sums = sums * decay + weight * value
        high = risen
    return tl.where(here, sums / total, 0.0)


@triton.jit(
    do_not_specialize=["rows", "table_stride"],
    do_not_specialize_on_alignment=["page_table", "query_start", "seq_lens", "entry_slots"],
)
def compress(
    values, gates, page_table, query_start, seq_lens, bias, norm, eps, cos_sin, cache, entry_slots,
    rows, table_stride, values_block_stride, values_token_stride, gates_block_stride, gates_token_stride,
    angle_stride, block_stride, token_stride,
    STRIDE: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, OVERLAPPING: tl.constexpr,
    BLOCK_PLAIN: tl.constexpr, BLOCK_HALF: tl.constexpr, PAGE: tl.constexpr, ENTRY_PAGE: tl.constexpr,
):  # fmt: skip
    """The entry that a token ends, where it ends one, to its slot. Grid: (tokens,)."""
    query = tl.program_id(0)
    if (query < tl.load(query_start)) | (query >= tl.load(query_start + rows)):
        return
    row = row_of(query_start, rows, query)
    stop = tl.load(seq_lens + row) - (tl.load(query_start + row + 1) - 1 - query)
    if (stop < STRIDE) | (stop % STRIDE != 0):
        return
    PLAIN: tl.constexpr = DIM - ROTARY
    table = page_table + row.to(tl.int64) * table_stride
    place, pair = tl.arange(0, BLOCK_PLAIN), tl.arange(0, BLOCK_HALF)
    inside, here = place < PLAIN, pair < ROTARY // 2
    plain = _weighed(
        values, gates, table, bias, place, inside, stop,
        values_block_stride, values_token_stride, gates_block_stride, gates_token_stride,
        STRIDE, DIM, OVERLAPPING, PAGE,
    )  # fmt: skip
    low = _weighed(
        values, gates, table, bias, PLAIN + 2 * pair, here, stop,
        values_block_stride, values_token_stride, gates_block_stride, gates_token_stride,
        STRIDE, DIM, OVERLAPPING, PAGE,
    )  # fmt: skip
    high = _weighed(
        values, gates, table, bias, PLAIN + 2 * pair + 1, here, stop,
        values_block_stride, values_token_stride, gates_block_stride, gates_token_stride,
        STRIDE, DIM, OVERLAPPING, PAGE,
    )  # fmt: skip
    squares = tl.sum(plain * plain, 0) + tl.sum(low * low, 0) + tl.sum(high * high, 0)
    factor = 1.0 / tl.sqrt(squares / DIM + eps)
    plain = plain * factor * tl.load(norm + place, mask=inside, other=0.0)
    low = low * factor * tl.load(norm + PLAIN + 2 * pair, mask=here, other=0.0)
    high = high * factor * tl.load(norm + PLAIN + 2 * pair + 1, mask=here, other=0.0)
    angle = cos_sin + (stop - STRIDE).to(tl.int64) * angle_stride + pair
    low, high = _turned(
        low, high, tl.load(angle, mask=here, other=0.0), tl.load(angle + ROTARY // 2, mask=here, other=0.0)
    )
    slot = tl.maximum(tl.load(entry_slots + query), 0) // STRIDE
    entry = cache + slot // ENTRY_PAGE * block_stride + slot % ENTRY_PAGE * token_stride
    kind = cache.dtype.element_ty
    tl.store(entry + place, stored_as(plain, kind), mask=inside)
    tl.store(entry + PLAIN + 2 * pair, stored_as(low, kind), mask=here)
    tl.store(entry + PLAIN + 2 * pair + 1, stored_as(high, kind), mask=here)
