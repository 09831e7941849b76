"""Residual streams of hyper-connections; see tokenspeed_kernel.ops.hyper. Their projections are plain products."""

import triton
import triton.language as tl

from tokenspeed_kernel_triton.kernels.elementwise import _sigmoid


@triton.jit(do_not_specialize=["width"])
def begin(x, streams, width, STREAMS: tl.constexpr, BLOCK: tl.constexpr):
    """Every stream becomes x. Grid: (T, stretches of BLOCK)."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = place < width
    value = tl.load(x + token * width + place, mask=here, other=0.0)
    for stream in tl.static_range(STREAMS):
        tl.store(streams + (token * STREAMS + stream) * width + place, value, mask=here)


@triton.jit
def _balanced(matrix, known, floor, rounds):
    """A matrix whose columns, then its rows and columns in turn, are divided by their sums + floor. Rows and columns
    that are not ``known`` are 0 and stay so, whatever the floor."""
    matrix = matrix / tl.where(known, tl.sum(matrix, 0) + floor, 1.0)[None, :]
    for _ in range(rounds - 1):
        matrix = matrix / tl.where(known, tl.sum(matrix, 1) + floor, 1.0)[:, None]
        matrix = matrix / tl.where(known, tl.sum(matrix, 0) + floor, 1.0)[None, :]
    return matrix


@triton.jit(
    do_not_specialize=["width", "rounds"], do_not_specialize_on_alignment=["z", "base", "scale", "post", "comb"]
)
def mix(
    streams, z, base, scale, eps, floor, rounds, post, comb, out, width,
    STREAMS: tl.constexpr, BLOCK_STREAMS: tl.constexpr, BLOCK: tl.constexpr, MIXING: tl.constexpr,
):  # fmt: skip
    """out, and with MIXING post and comb, of a token whose projection, of what was not normed yet, is z. Grid: (T,)."""
    OUTPUTS: tl.constexpr = (2 + STREAMS) * STREAMS if MIXING else STREAMS
    token = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, BLOCK_STREAMS)
    known = stream < STREAMS
    row = streams + token * STREAMS * width + stream[:, None] * width
    squares = tl.zeros([BLOCK_STREAMS], tl.float32)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tile = tl.load(row + place[None, :], mask=known[:, None] & (place < width)[None, :], other=0.0)
        squares += tl.sum(tile * tile, 1)
    factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / (STREAMS * width) + eps)
    own = z + token * OUTPUTS
    shift = tl.load(base + stream, mask=known, other=0.0)
    before = tl.load(own + stream, mask=known, other=0.0) * factor * tl.load(scale) + shift
    before = tl.where(known, _sigmoid(before) + floor, 0.0)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        here = place < width
        tile = tl.load(row + place[None, :], mask=known[:, None] & here[None, :], other=0.0)
        tl.store(out + token * width + place, tl.sum(tile * before[:, None], 0), mask=here)
    if MIXING:
        shift = tl.load(base + STREAMS + stream, mask=known, other=0.0)
        after = tl.load(own + STREAMS + stream, mask=known, other=0.0) * factor * tl.load(scale + 1) + shift
        tl.store(post + token * STREAMS + stream, 2.0 * _sigmoid(after), mask=known)
        place = stream[:, None] * STREAMS + stream[None, :]
        here = known[:, None] & known[None, :]
        shift = tl.load(base + 2 * STREAMS + place, mask=here, other=0.0)
        logit = tl.load(own + 2 * STREAMS + place, mask=here, other=0.0) * factor * tl.load(scale + 2) + shift
        logit = tl.where(here, logit, float("-inf"))
        most = tl.max(logit, 1)
        weight = tl.exp(logit - tl.where(known, most, 0.0)[:, None])
        matrix = weight / tl.where(known, tl.sum(weight, 1), 1.0)[:, None] + floor
        matrix = _balanced(tl.where(here, matrix, 0.0), known, floor, rounds)
        tl.store(comb + token * STREAMS * STREAMS + place, matrix, mask=here)


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["post", "comb"])
def spread(
    x, post, comb, streams, width, STREAMS: tl.constexpr, BLOCK_STREAMS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Stream k becomes post[k] * x + the sum of comb[j, k] * stream j. Grid: (T, stretches of BLOCK)."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stream = tl.arange(0, BLOCK_STREAMS)
    known, here = stream < STREAMS, place < width
    value = tl.load(x + token * width + place, mask=here, other=0.0)
    shares = tl.load(post + token * STREAMS + stream, mask=known, other=0.0)
    mixed = shares[:, None] * value[None, :]
    row = streams + token * STREAMS * width
    for index in tl.static_range(STREAMS):
        shares = tl.load(comb + (token * STREAMS + index) * STREAMS + stream, mask=known, other=0.0)
        value = tl.load(row + index * width + place, mask=here, other=0.0)
        mixed += shares[:, None] * value[None, :]
    # nobody writes before everybody has read
    tl.debug_barrier()
    tl.store(row + stream[:, None] * width + place[None, :], mixed, mask=known[:, None] & here[None, :])
