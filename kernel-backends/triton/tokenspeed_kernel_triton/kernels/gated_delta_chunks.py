"""The gated delta rule over chunks of a row's tokens: triangular systems instead of steps (arXiv:2406.06484).

Within a chunk u[i], what token i adds to the state, follows from the state before the chunk and the tokens before i:
u[i] + beta[i] * sum over j < i of (k[i] . D[i, j] k[j]) u[j] = beta[i] * (v[i] - (D[i, 0] k[i])^T S), where D[i, j] is
the decay behind token j up to and with token i. ``pairs`` makes the matrix of that system, in blocks of 16 tokens, and
inverts the blocks on its diagonal; ``solve`` inverts it whole and applies it; ``walk`` takes a state through the
chunks.

A decay is the exponential of a sum of logarithms that are all below zero, never of a difference, and no factor is above
1: between blocks it is split at the first token of the later one, within a block it is added up token by token. A sum
without its own token is of the next token's logarithm on, not a sum with a part taken off.
"""

import triton
import triton.language as tl

from tokenspeed_kernel_triton.kernels.elementwise import _sigmoid
from tokenspeed_kernel_triton.kernels.paged_attention import ragged_row
from tokenspeed_kernel_triton.kernels.recurrent import log_decays

BLOCK = tl.constexpr(16)

STRETCH = tl.constexpr(32)
"""Elements of a key or a value at a time."""


@triton.jit
def _part(x, token, here, stride, offset, place, length, WIDTH: tl.constexpr):
    """The elements ``place`` of the tokens' heads over their lengths, [tokens, places]; 0 where a token is not here."""
    at = x + token[:, None] * stride + offset + place[None, :]
    return tl.load(at, mask=here[:, None] & (place < WIDTH)[None, :], other=0.0) / length[:, None]


@triton.jit
def _length(x, token, here, stride, offset, eps, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """The lengths of the tokens' heads, with eps under the root; above 0, for a token that is not here has one too."""
    value = _part(x, token, here, stride, offset, tl.arange(0, BLOCK_WIDTH), tl.full([1], 1.0, tl.float32), WIDTH)
    return tl.sqrt(tl.maximum(tl.sum(value * value, 1) + eps, 1e-38))


@triton.jit
def _unit(x, token, here, stride, offset, eps, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Heads of length 1 of the tokens, [tokens, BLOCK_WIDTH]."""
    length = _length(x, token, here, stride, offset, eps, WIDTH, BLOCK_WIDTH)
    return _part(x, token, here, stride, offset, tl.arange(0, BLOCK_WIDTH), length, WIDTH)


@triton.jit
def _logarithms(decay, bias, rate, token, here, stride, head, key, KEY: tl.constexpr, CHANNEL: tl.constexpr):
    """The logarithms of the tokens' decays, [tokens, keys] of the channels ``key``, or [tokens, 1] of the head."""
    if CHANNEL:
        at, used = head * KEY + key[None, :], here[:, None] & (key < KEY)[None, :]
    else:
        at, used = head + tl.zeros([1, 1], tl.int32), here[:, None]
    return log_decays(decay + token[:, None] * stride + at, bias + at, rate, used)


@triton.jit
def _place(starts, rows, tile, shortest, SIZE: tl.constexpr):
    """Of a tile of SIZE tokens: the row's first token, its number of tokens (0 where this tile has none) and the tile's
    first token among them."""
    row = ragged_row(starts, rows, tile, SIZE)
    first = tl.load(starts + row)
    tokens = tl.load(starts + row + 1) - first
    begin = (tile - first // SIZE - row) * SIZE
    return first, tl.where((begin < 0) | (begin >= tokens) | (tokens < shortest), 0, tokens), begin


@triton.jit(
    do_not_specialize=["rows", "shortest"], do_not_specialize_on_alignment=["q", "k", "decay", "beta", "starts"]
)
def pairs(
    q, k, decay, beta, rate, bias, starts, updates, seen, q_stride, k_stride, decay_stride, beta_stride, eps, rows,
    shortest, HEADS: tl.constexpr, PER_KEY: tl.constexpr, KEY: tl.constexpr, CHANNEL: tl.constexpr,
    BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the tokens of a chunk are to each other, for a block of 16 of them and a head. Grid: (blocks, HEADS).

    Writes updates [T, HEADS, CHUNK]: beta[i] * (k[i] . D[i, j] k[j]) in the columns of earlier blocks, the inverse of 1
    + that in the block's own; and seen [T, HEADS, CHUNK]: q[i] . D[i, j] k[j] for j <= i. Later columns are left alone.
    """
    first, tokens, begin = _place(starts, rows, tl.program_id(0), shortest, BLOCK)
    if tokens == 0:
        return
    head = tl.program_id(1)
    key_head = (head // PER_KEY) * KEY
    member, key = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    line, column = member[:, None], member[None, :]
    own_place = begin % CHUNK
    token_of_chunk = (first + begin - own_place).to(tl.int64)
    token, here = token_of_chunk + own_place + member, begin + member < tokens
    head_rate = tl.load(rate + head)
    q_tile = _unit(q, token, here, q_stride, key_head, eps, KEY, BLOCK_K) * KEY**-0.5
    k_tile = _unit(k, token, here, k_stride, key_head, eps, KEY, BLOCK_K)
    logs = _logarithms(decay, bias, head_rate, token, here, decay_stride, head, key, KEY, CHANNEL)
    share = _sigmoid(tl.load(beta + token * beta_stride + head, mask=here, other=0.0))

    own, looked = tl.zeros([BLOCK, BLOCK], tl.float32), tl.zeros([BLOCK, BLOCK], tl.float32)
    later = tl.zeros_like(logs)
    for back in range(BLOCK):
        j = BLOCK - 1 - back
        kept = tl.exp(later) * tl.sum(tl.where(line == j, k_tile, 0.0), 0)[None, :]
        own = tl.where(column == j, tl.sum(k_tile * kept, 1)[:, None], own)
        looked = tl.where(column == j, tl.sum(q_tile * kept, 1)[:, None], looked)
        later += tl.where(line >= j, tl.sum(tl.where(line == j, logs, 0.0), 0)[None, :], 0.0)
    own = tl.where(column < line, own * share[:, None], 0.0)
    inverse = tl.where(line == column, 1.0, 0.0)
    for i in range(1, BLOCK):
        factors = tl.sum(tl.where(line == i, own, 0.0), 0)
        solved = tl.sum(factors[:, None] * inverse, 0)
        inverse -= tl.where(line == i, solved[None, :], 0.0)

    at = (token * HEADS + head)[:, None] * CHUNK + column
    tl.store(updates + at + own_place, inverse, mask=here[:, None])
    tl.store(seen + at + own_place, tl.where(column <= line, looked, 0.0), mask=here[:, None])

    if own_place > 0:
        # what a thread holds of whole keys would not fit its registers: stretches of them
        earlier = tl.arange(0, CHUNK)
        other, there = token_of_chunk + earlier, earlier < own_place
        length = _length(k, token, here, k_stride, key_head, eps, KEY, BLOCK_K)
        q_length = _length(q, token, here, q_stride, key_head, eps, KEY, BLOCK_K)
        other_length = _length(k, other, there, k_stride, key_head, eps, KEY, BLOCK_K)
        met, looked_back = tl.zeros([BLOCK, CHUNK], tl.float32), tl.zeros([BLOCK, CHUNK], tl.float32)
        for start in range(0, KEY, STRETCH):
            part = start + tl.arange(0, STRETCH)
            own_logs = _logarithms(decay, bias, head_rate, token, here, decay_stride, head, part, KEY, CHANNEL)
            since = tl.exp(tl.cumsum(own_logs, 0))
            inner = earlier + 1 < own_place
            behind = _logarithms(decay, bias, head_rate, other + 1, inner, decay_stride, head, part, KEY, CHANNEL)
            until = tl.exp(tl.cumsum(behind, 0, reverse=True))
            k_other = _part(k, other, there, k_stride, key_head, part, other_length, KEY)
            k_other = tl.trans(k_other * until)
            k_part = _part(k, token, here, k_stride, key_head, part, length, KEY) * since
            q_part = _part(q, token, here, q_stride, key_head, part, q_length, KEY) * since
            met = tl.dot(k_part, k_other, met, input_precision=PRECISION)
            looked_back = tl.dot(q_part, k_other, looked_back, input_precision=PRECISION)
        earlier_at = (token * HEADS + head)[:, None] * CHUNK + earlier[None, :]
        stored = here[:, None] & there[None, :]
        tl.store(updates + earlier_at, met * share[:, None], mask=stored)
        tl.store(seen + earlier_at, looked_back * KEY**-0.5, mask=stored)


@triton.jit(
    do_not_specialize=["rows", "shortest"], do_not_specialize_on_alignment=["k", "v", "decay", "beta", "starts"]
)
def solve(
    k, v, decay, beta, rate, bias, starts, updates, from_state, from_values, k_stride, v_stride, decay_stride,
    beta_stride, eps, rows, shortest, HEADS: tl.constexpr, PER_KEY: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, CHANNEL: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Solves the system of a chunk and a head: u = from_values - from_state @ S. Grid: (chunks, HEADS).

    from_state [T, HEADS, KEY] and from_values [T, HEADS, VALUE]. With B the system's blocks on the diagonal and L those
    below, the inverse is that of 1 + N, N = B^-1 L, times B^-1; no power of N from the number of blocks on is left.
    """
    first, tokens, begin = _place(starts, rows, tl.program_id(0), shortest, CHUNK)
    if tokens == 0:
        return
    head = tl.program_id(1)
    member = tl.arange(0, CHUNK)
    token, here = (first + begin + member).to(tl.int64), begin + member < tokens
    line, column = member[:, None] // BLOCK, member[None, :] // BLOCK
    at = (token * HEADS + head)[:, None] * CHUNK + member[None, :]
    inverse = tl.load(updates + at, mask=here[:, None] & (line == column), other=0.0)
    if CHUNK > BLOCK:
        below = tl.load(updates + at, mask=here[:, None] & (line > column), other=0.0)
        below = -tl.dot(inverse, below, input_precision=PRECISION)
        if CHUNK > 2 * BLOCK:
            square = tl.dot(below, below, input_precision=PRECISION)
            inverse = tl.dot(square, inverse, inverse, input_precision=PRECISION)
        inverse = tl.dot(below, inverse, inverse, input_precision=PRECISION)
    inverse *= _sigmoid(tl.load(beta + token * beta_stride + head, mask=here, other=0.0))[None, :]

    key_head = (head // PER_KEY) * KEY
    length = _length(k, token, here, k_stride, key_head, eps, KEY, BLOCK_K)
    head_rate = tl.load(rate + head)
    for start in range(0, KEY, STRETCH):
        part = start + tl.arange(0, STRETCH)
        logs = _logarithms(decay, bias, head_rate, token, here, decay_stride, head, part, KEY, CHANNEL)
        k_tile = _part(k, token, here, k_stride, key_head, part, length, KEY) * tl.exp(tl.cumsum(logs, 0))
        result = tl.dot(inverse, k_tile, input_precision=PRECISION)
        used = here[:, None] & (part < KEY)[None, :]
        tl.store(from_state + (token * HEADS + head)[:, None] * KEY + part[None, :], result, mask=used)
    for start in range(0, VALUE, STRETCH):
        value = start + tl.arange(0, STRETCH)
        used = here[:, None] & (value < VALUE)[None, :]
        v_at = v + token[:, None] * v_stride + head * VALUE + value[None, :]
        result = tl.dot(inverse, tl.load(v_at, mask=used, other=0.0), input_precision=PRECISION)
        tl.store(from_values + (token * HEADS + head)[:, None] * VALUE + value[None, :], result, mask=used)


@triton.jit(
    do_not_specialize=["shortest", "tokens_apart"],
    do_not_specialize_on_alignment=["q", "k", "decay", "state", "starts", "sources", "targets"],
)
def walk(
    q, k, decay, rate, bias, state, starts, sources, targets, seen, from_state, from_values, scratch, out,
    q_stride, k_stride, decay_stride, block_stride, head_stride, eps, shortest, tokens_apart,
    HEADS: tl.constexpr, PER_KEY: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHANNEL: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes BLOCK_V columns of a head's state through the chunks of a row. Grid: (rows, HEADS, tiles of values).

    Between chunks a state lies in scratch [slots, HEADS, KEY, VALUE]: that of the row, or, where ``tokens_apart`` is
    above 0, one for so many tokens.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(starts + row)
    tokens = tl.load(starts + row + 1) - first
    if (tokens == 0) | (tokens < shortest):
        return
    source = tl.load(sources + row).to(tl.int64)
    target = tl.load(targets + row).to(tl.int64)
    member, value = tl.arange(0, CHUNK), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    value_here = value < VALUE
    key_head = (head // PER_KEY) * KEY
    before = state + source * block_stride + head * head_stride
    behind = state + target * block_stride + head * head_stride
    slot = row
    if tokens_apart > 0:
        slot = first // tokens_apart
    between = scratch + (slot.to(tl.int64) * HEADS + head) * (KEY * VALUE)
    head_rate = tl.load(rate + head)
    visible = member[:, None] // BLOCK >= member[None, :] // BLOCK
    for begin in range(0, tokens, CHUNK):
        token, here = (first + begin + member).to(tl.int64), begin + member < tokens
        place = (token * HEADS + head)[:, None]
        used = here[:, None] & value_here[None, :]
        matrix_at = before if begin == 0 else between
        known = (begin > 0) | (source > 0)
        q_length = _length(q, token, here, q_stride, key_head, eps, KEY, BLOCK_K)
        result = tl.zeros([CHUNK, BLOCK_V], tl.float32)
        u_tile = tl.load(from_values + place * VALUE + value[None, :], mask=used, other=0.0)
        for start in range(0, KEY, STRETCH):
            key = start + tl.arange(0, STRETCH)
            held = key[:, None] * VALUE + value[None, :]
            matrix = tl.load(matrix_at + held, mask=(key < KEY)[:, None] & value_here[None, :] & known, other=0.0)
            w_part = tl.load(
                from_state + place * KEY + key[None, :], mask=here[:, None] & (key < KEY)[None, :], other=0.0
            )
            u_tile -= tl.dot(w_part, matrix, input_precision=PRECISION)
            logs = _logarithms(decay, bias, head_rate, token, here, decay_stride, head, key, KEY, CHANNEL)
            q_part = _part(q, token, here, q_stride, key_head, key, q_length, KEY) * tl.exp(tl.cumsum(logs, 0))
            result = tl.dot(q_part, matrix, result, input_precision=PRECISION)
        looked = tl.load(seen + place * CHUNK + member[None, :], mask=here[:, None] & visible, other=0.0)
        result = tl.dot(looked, u_tile, result * KEY**-0.5, input_precision=PRECISION)
        tl.store(out + place * VALUE + value[None, :], result, mask=used)
        tl.debug_barrier()  # all threads have read the state that is about to change

        last = begin + CHUNK >= tokens
        new_at = behind if last else between
        written = (target > 0) | (begin + CHUNK < tokens)
        k_length = _length(k, token, here, k_stride, key_head, eps, KEY, BLOCK_K)
        followed = (member < CHUNK - 1) & (begin + member + 1 < tokens)
        for start in range(0, KEY, STRETCH):
            key = start + tl.arange(0, STRETCH)
            held = key[:, None] * VALUE + value[None, :]
            held_here = (key < KEY)[:, None] & value_here[None, :]
            matrix = tl.load(matrix_at + held, mask=held_here & known, other=0.0)
            logs = _logarithms(decay, bias, head_rate, token, here, decay_stride, head, key, KEY, CHANNEL)
            later = _logarithms(decay, bias, head_rate, token + 1, followed, decay_stride, head, key, KEY, CHANNEL)
            k_part = _part(k, token, here, k_stride, key_head, key, k_length, KEY)
            k_part *= tl.exp(tl.cumsum(later, 0, reverse=True))
            matrix *= tl.exp(tl.sum(logs, 0))[:, None]
            matrix = tl.dot(tl.trans(k_part), u_tile, matrix, input_precision=PRECISION)
            tl.store(new_at + held, matrix, mask=held_here & written)
        tl.debug_barrier()  # the next chunk reads what other threads wrote
