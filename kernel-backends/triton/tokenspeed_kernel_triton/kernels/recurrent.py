"""Layers with a state, token by token: a causal convolution and the gated delta rule; arithmetic in float32.

Offsets into the state are 64 bits: a pool may be larger than 2^31 elements. Block 0 is neither read nor written.
"""

import triton
import triton.language as tl

from tokenspeed_kernel_triton.kernels.elementwise import _sigmoid, softplus
from tokenspeed_kernel_triton.kernels.paged_attention import ragged_row


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["x", "weight", "bias", "state", "starts", "sources", "targets"],
)
def causal_conv(
    x, weight, bias, state, starts, sources, targets, out, x_stride, block_stride, place_stride, rows, channels,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out [T, channels] = silu of the convolution of x. Grid: (tiles of BLOCK_T tokens of a row, tiles of channels).

    BLOCK_T is at least WIDTH - 1: only a row's first tile reads the state before it, and the same tile writes the state
    behind it, so that both may be one block.
    """
    tile = tl.program_id(0)
    row = ragged_row(starts, rows, tile, BLOCK_T)
    first = tl.load(starts + row)
    tokens = tl.load(starts + row + 1) - first
    begin = (tile - first // BLOCK_T - row) * BLOCK_T
    if (begin < 0) | (begin >= tokens):
        return
    source = tl.load(sources + row).to(tl.int64)
    target = tl.load(targets + row).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    here = (channel < channels)[None, :]
    row_x = x + first.to(tl.int64) * x_stride + channel[None, :]
    before = state + source * block_stride + channel[None, :]

    token = begin + tl.arange(0, BLOCK_T)
    sums = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    if BIASED:
        sums += tl.load(bias + channel, mask=channel < channels, other=0.0)[None, :]
    for place in tl.static_range(WIDTH):
        index = (token - (WIDTH - 1) + place)[:, None]
        value = tl.load(row_x + index.to(tl.int64) * x_stride, mask=here & (index >= 0) & (index < tokens), other=0.0)
        if begin == 0:
            kept = before + (index + (WIDTH - 1)).to(tl.int64) * place_stride
            value = tl.where(index < 0, tl.load(kept, mask=here & (index < 0) & (source > 0), other=0.0), value)
        factor = tl.load(weight + place * channels + channel, mask=channel < channels, other=0.0)
        sums += factor[None, :] * value
    out_at = out + (first + token).to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(out_at, sums * _sigmoid(sums), mask=here & (token < tokens)[:, None])

    if (begin == 0) & (target > 0):
        slot = tl.arange(0, BLOCK_W)[:, None]
        last = slot + tokens - (WIDTH - 1)
        used = here & (slot < WIDTH - 1)
        new = tl.load(row_x + last.to(tl.int64) * x_stride, mask=used & (last >= 0), other=0.0)
        kept = before + (last + (WIDTH - 1)).to(tl.int64) * place_stride
        new = tl.where(last < 0, tl.load(kept, mask=used & (last < 0) & (source > 0), other=0.0), new)
        tl.debug_barrier()  # the block may be the one that other threads of this program still read
        tl.store(state + target * block_stride + slot.to(tl.int64) * place_stride + channel[None, :], new, mask=used)


@triton.jit
def log_decays(decay, bias, rate, mask):
    """-rate * log(1 + exp(decay + bias)) of what the pointers lead to; 0, which is no decay, where the mask is not."""
    raw = tl.load(decay, mask=mask, other=0.0) + tl.load(bias, mask=mask, other=0.0)
    return tl.where(mask, -rate * softplus(raw), 0.0)


@triton.jit(
    do_not_specialize=["shortest", "longest"],
    do_not_specialize_on_alignment=["q", "k", "v", "decay", "beta", "state", "starts", "sources", "targets"],
)
def gated_delta(
    q, k, v, decay, beta, rate, bias, state, starts, sources, targets, out,
    q_stride, k_stride, v_stride, decay_stride, beta_stride, block_stride, head_stride, eps, shortest, longest,
    HEADS: tl.constexpr, PER_KEY: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHANNEL: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The rule over the tokens of a row of ``shortest`` to ``longest`` tokens. Grid: (rows, HEADS, tiles of values).

    A program holds BLOCK_V columns of a head's state, which no other column plays a part in.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(starts + row)
    tokens = tl.load(starts + row + 1) - first
    if (tokens < shortest) | (tokens > longest):
        return
    source = tl.load(sources + row).to(tl.int64)
    target = tl.load(targets + row).to(tl.int64)
    key = tl.arange(0, BLOCK_K)
    value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    key_here, value_here = key < KEY, value < VALUE
    key_at = (head // PER_KEY) * KEY + key
    value_at = head * VALUE + value
    held = key[:, None] * VALUE + value[None, :]
    held_here = key_here[:, None] & value_here[None, :]
    matrix = tl.load(
        state + source * block_stride + head * head_stride + held, mask=held_here & (source > 0), other=0.0
    )
    head_rate = tl.load(rate + head)
    for index in range(tokens):
        token = (first + index).to(tl.int64)
        q_row = tl.load(q + token * q_stride + key_at, mask=key_here, other=0.0)
        k_row = tl.load(k + token * k_stride + key_at, mask=key_here, other=0.0)
        v_row = tl.load(v + token * v_stride + value_at, mask=value_here, other=0.0)
        q_row = q_row / tl.sqrt(tl.sum(q_row * q_row, 0) + eps) * KEY**-0.5
        k_row = k_row / tl.sqrt(tl.sum(k_row * k_row, 0) + eps)
        if CHANNEL:
            at = head * KEY + key
            kept = tl.exp(log_decays(decay + token * decay_stride + at, bias + at, head_rate, key_here))
            matrix = matrix * kept[:, None]
        else:
            raw = tl.load(decay + token * decay_stride + head) + tl.load(bias + head)
            matrix = matrix * tl.exp(-head_rate * softplus(raw))
        share = _sigmoid(tl.load(beta + token * beta_stride + head))
        update = share * (v_row - tl.sum(k_row[:, None] * matrix, 0))
        matrix += k_row[:, None] * update[None, :]
        out_at = out + token * (HEADS * VALUE) + value_at
        tl.store(out_at, tl.sum(q_row[:, None] * matrix, 0), mask=value_here)
    if target > 0:
        tl.store(state + target * block_stride + head * head_stride + held, matrix, mask=held_here)
