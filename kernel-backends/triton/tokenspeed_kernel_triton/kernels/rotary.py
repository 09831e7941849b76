"""Rotary embedding alone, and the prologues of attention: norm, rotary and the write of the cache in one launch.

A program takes one head of one token. Pairs are (i, i + R/2), or neighbours where INTERLEAVED.
"""

import triton
import triton.language as tl

from tokenspeed_kernel_triton.kernels.float8 import stored_as


@triton.jit
def _turned(low, high, cos, sin):
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _slot_offset(slots, token, block_stride, token_stride, PAGE: tl.constexpr):
    """64-bit offset of the token's entry; a slot below 0 is one of the null block."""
    slot = tl.maximum(tl.load(slots + token), 0)
    return slot // PAGE * block_stride + slot % PAGE * token_stride


@triton.jit
def apply(
    x, positions, axes, cos_sin, token_stride, head_stride, axis_stride, table_stride,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr, MANY_AXES: tl.constexpr,
):  # fmt: skip
    """Rotates the first 2 * HALF elements of each head of x in place. Grid: (tokens, heads)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    pair = tl.arange(0, BLOCK_HALF)
    here = pair < HALF
    axis = tl.load(axes + pair, mask=here, other=0).to(tl.int64) if MANY_AXES else pair.to(tl.int64) * 0
    position = tl.load(positions + axis * axis_stride + token, mask=here, other=0).to(tl.int64)
    cos = tl.load(cos_sin + position * table_stride + pair, mask=here, other=0.0)
    sin = tl.load(cos_sin + position * table_stride + HALF + pair, mask=here, other=0.0)
    at = x + token * token_stride + head * head_stride
    low_at, high_at = (at + 2 * pair, at + 2 * pair + 1) if INTERLEAVED else (at + pair, at + HALF + pair)
    low, high = _turned(tl.load(low_at, mask=here, other=0.0), tl.load(high_at, mask=here, other=0.0), cos, sin)
    tl.store(low_at, low, mask=here)
    tl.store(high_at, high, mask=here)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def gqa_prologue(
    q, k, v, positions, cos_sin, q_norm, k_norm, eps, k_cache, v_cache, slots,
    q_stride, k_stride, v_stride, table_stride,
    k_block_stride, k_head_stride, k_token_stride, v_block_stride, v_head_stride, v_token_stride,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, NORMED: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, QUERY_HEADS + 2 * KV_HEADS): the heads of q, then of k, then of v.

    A head is its rotated pairs, BLOCK_HALF of them, and the REST behind: DIM - 2 * HALF elements.
    """
    REST: tl.constexpr = DIM - 2 * HALF
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_query, is_key = head < QUERY_HEADS, head < QUERY_HEADS + KV_HEADS
    kv_head = tl.maximum(head - QUERY_HEADS, 0) % KV_HEADS
    pair, rest = tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_REST)
    here, behind = pair < HALF, rest < REST
    if is_query:
        at = q + token * q_stride + head * DIM
    elif is_key:
        at = k + token * k_stride + kv_head * DIM
    else:
        at = v + token * v_stride + kv_head * DIM
    low = tl.load(at + pair, mask=here, other=0.0)
    high = tl.load(at + HALF + pair, mask=here, other=0.0)
    tail = tl.load(at + 2 * HALF + rest, mask=behind, other=0.0)
    if is_key:
        if NORMED:
            weight = q_norm if is_query else k_norm
            squares = tl.sum(low * low, 0) + tl.sum(high * high, 0) + tl.sum(tail * tail, 0)
            factor = 1.0 / tl.sqrt(squares / DIM + eps)
            low = low * factor * tl.load(weight + pair, mask=here, other=0.0)
            high = high * factor * tl.load(weight + HALF + pair, mask=here, other=0.0)
            tail = tail * factor * tl.load(weight + 2 * HALF + rest, mask=behind, other=0.0)
        position = tl.load(positions + token).to(tl.int64)
        cos = tl.load(cos_sin + position * table_stride + pair, mask=here, other=0.0)
        sin = tl.load(cos_sin + position * table_stride + HALF + pair, mask=here, other=0.0)
        low, high = _turned(low, high, cos, sin)
    if is_query:
        tl.store(at + pair, low, mask=here)
        tl.store(at + HALF + pair, high, mask=here)
        if NORMED:
            tl.store(at + 2 * HALF + rest, tail, mask=behind)
    else:
        if is_key:
            entry = k_cache + _slot_offset(slots, token, k_block_stride, k_token_stride, PAGE) + kv_head * k_head_stride
        else:
            entry = v_cache + _slot_offset(slots, token, v_block_stride, v_token_stride, PAGE) + kv_head * v_head_stride
        kind = k_cache.dtype.element_ty
        tl.store(entry + pair, stored_as(low, kind), mask=here)
        tl.store(entry + HALF + pair, stored_as(high, kind), mask=here)
        tl.store(entry + 2 * HALF + rest, stored_as(tail, kind), mask=behind)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def mla_prologue(
    q, compressed, positions, cos_sin, latent_norm, eps, cache, slots,
    q_stride, compressed_stride, table_stride, block_stride, token_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, LATENT: tl.constexpr, BLOCK_LATENT: tl.constexpr,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, HEADS + 1): the last 2 * HALF elements of each query head; then the entry of the cache."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, BLOCK_HALF)
    here = pair < HALF
    position = tl.load(positions + token).to(tl.int64)
    cos = tl.load(cos_sin + position * table_stride + pair, mask=here, other=0.0)
    sin = tl.load(cos_sin + position * table_stride + HALF + pair, mask=here, other=0.0)
    if head < HEADS:
        at = q + token * q_stride + head * HEAD_DIM + HEAD_DIM - 2 * HALF
    else:
        at = compressed + token * compressed_stride + LATENT
    low = tl.load(at + pair, mask=here, other=0.0)
    high = tl.load(at + HALF + pair, mask=here, other=0.0)
    low, high = _turned(low, high, cos, sin)
    if head < HEADS:
        tl.store(at + pair, low, mask=here)
        tl.store(at + HALF + pair, high, mask=here)
    else:
        place = tl.arange(0, BLOCK_LATENT)
        inside = place < LATENT
        latent = tl.load(compressed + token * compressed_stride + place, mask=inside, other=0.0)
        factor = 1.0 / tl.sqrt(tl.sum(latent * latent, 0) / LATENT + eps)
        latent = latent * factor * tl.load(latent_norm + place, mask=inside, other=0.0)
        entry = cache + _slot_offset(slots, token, block_stride, token_stride, PAGE)
        kind = cache.dtype.element_ty
        tl.store(entry + place, stored_as(latent, kind), mask=inside)
        tl.store(entry + LATENT + pair, stored_as(low, kind), mask=here)
        tl.store(entry + LATENT + HALF + pair, stored_as(high, kind), mask=here)
