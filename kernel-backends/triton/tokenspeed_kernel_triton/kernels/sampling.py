"""Sampling without sorting: a program takes a row and finds its cuts by bisection over the order of its candidates.

The order is that of the contract, by value descending, then id ascending. A cut is the last candidate that is kept: a
value, as an integer that orders as floats do, and an id. Weights are summed in float64, always in the same order, so
that the sum over what is kept is the same number wherever it is formed.
"""

import triton
import triton.language as tl

_HIGHEST = tl.constexpr(1 << 32)
"""Above every order."""

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _ordered(z):
    """int32 that compares as the floats do; both zeros are one."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(order):
    """The float of an order."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _values(row, place, width, temperature):
    """The logits at ``place`` over the temperature; -inf for NaN and beyond the row."""
    logit = tl.load(row + place, mask=place < width, other=float("-inf"))
    z = tl.math.div_rn(logit, temperature + tl.zeros_like(logit))
    return tl.where(z != z, float("-inf"), z)


@triton.jit
def _kept(order, place, width, cut_value, cut_id):
    return (place < width) & ((order > cut_value) | ((order == cut_value) & (place <= cut_id)))


@triton.jit
def _mass(row, width, temperature, highest, cut_value, cut_id, min_p, least, BLOCK: tl.constexpr):
    """The summed weight of the kept candidates whose order is at least ``least``."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        z = _values(row, place, width, temperature)
        order = _ordered(z)
        weight = tl.exp(z.to(tl.float64) - highest)
        used = _kept(order, place, width, cut_value, cut_id) & (order.to(tl.int64) >= least) & (weight >= min_p)
        total += tl.where(used, weight, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _count(row, width, temperature, least, most, last_id, BLOCK: tl.constexpr):
    """How many candidates have an order from ``least`` to ``most`` and an id up to ``last_id``."""
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        order = _ordered(_values(row, place, width, temperature)).to(tl.int64)
        total += ((place < width) & (order >= least) & (order <= most) & (place <= last_id)).to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def _nth_of_equals(row, width, temperature, order, nth, BLOCK: tl.constexpr):
    """The id of the nth (from 1) of the candidates of this order."""
    low = -1
    high = width - 1
    while high - low > 1:
        middle = (low + high) // 2
        if _count(row, width, temperature, order, order, middle, BLOCK) >= nth:
            high = middle
        else:
            low = middle
    return high


@triton.jit
def _cut_at(row, width, temperature, highest, top, cut_value, cut_id, min_p, target, BLOCK: tl.constexpr):
    """The first candidate, as (order, id), at which the summed weight of what is kept reaches ``target`` > 0."""
    low = cut_value.to(tl.int64)
    high = top.to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        if _mass(row, width, temperature, highest, cut_value, cut_id, min_p, middle, BLOCK) >= target:
            low = middle
        else:
            high = middle
    above = _mass(row, width, temperature, highest, cut_value, cut_id, min_p, low + 1, BLOCK)
    last_id = tl.where(low == cut_value, cut_id, width - 1)
    equals = _count(row, width, temperature, low, low, last_id, BLOCK)
    weight = tl.exp(value_of(low.to(tl.int32)).to(tl.float64) - highest)
    nth = tl.ceil((target - above) / weight).to(tl.int32)
    nth = tl.minimum(tl.maximum(nth, 1), equals)
    return low.to(tl.int32), _nth_of_equals(row, width, temperature, low, nth, BLOCK)


@triton.jit
def _mixed(h):
    h ^= h >> 30
    h *= _MIX_1
    h ^= h >> 27
    h *= _MIX_2
    return h ^ (h >> 31)


@triton.jit
def hashed(seed, choice, position):
    """The hash of the three numbers."""
    h = _mixed(seed.to(tl.uint64) + _GOLDEN)
    h = _mixed((h ^ choice.to(tl.int64).to(tl.uint64)) + _GOLDEN)
    return _mixed((h ^ position.to(tl.int64).to(tl.uint64)) + _GOLDEN)


@triton.jit
def further(h, number):
    """The hash with one more number."""
    return _mixed((h ^ number.to(tl.int64).to(tl.uint64)) + _GOLDEN)


@triton.jit
def share_of(h):
    """The float32 in (0, 1] of a hash."""
    return ((h >> 40).to(tl.int32).to(tl.float32) + 0.5) * 5.9604644775390625e-08


@triton.jit
def best_of(row, width, temperature, BLOCK: tl.constexpr):
    """The order of the largest candidate, and the lowest id that has it."""
    best = tl.full([BLOCK], -9223372036854775808, tl.int64)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        order = _ordered(_values(row, place, width, temperature)).to(tl.int64)
        # of equal ones the lowest id: it is subtracted below the order's bits
        best = tl.maximum(best, tl.where(place < width, (order << 32) - place, best))
    highest_key = tl.max(best, 0)
    top = ((highest_key + 4294967295) >> 32).to(tl.int32)
    return top, ((top.to(tl.int64) << 32) - highest_key).to(tl.int32)


@triton.jit
def kept_of(row, width, temperature, highest, top, top_k, top_p, BLOCK: tl.constexpr):
    """The last candidate, as (order, id), that top-k and top-p keep."""
    cut_value = top * 0 - 2147483647
    cut_id = width - 1
    if (top_k > 0) & (top_k < width):
        low = cut_value.to(tl.int64)
        high = top.to(tl.int64) + 1
        while high - low > 1:
            middle = (low + high) >> 1
            if _count(row, width, temperature, middle, _HIGHEST, width, BLOCK) >= top_k:
                low = middle
            else:
                high = middle
        above = _count(row, width, temperature, low + 1, _HIGHEST, width, BLOCK)
        cut_value = low.to(tl.int32)
        cut_id = _nth_of_equals(row, width, temperature, low, top_k - above, BLOCK)
    if top_p < 1.0:
        none = highest * 0.0
        everything = cut_value.to(tl.int64)
        total = _mass(row, width, temperature, highest, cut_value, cut_id, none, everything, BLOCK)
        target = top_p.to(tl.float64) * total
        cut_value, cut_id = _cut_at(row, width, temperature, highest, top, cut_value, cut_id, none, target, BLOCK)
    return cut_value, cut_id


@triton.jit
def drawn_of(row, width, temperature, highest, top, cut_value, cut_id, min_p, u, BLOCK: tl.constexpr):
    """The id of the first kept candidate at which the summed weights reach the share ``u`` of all."""
    total = _mass(row, width, temperature, highest, cut_value, cut_id, min_p, cut_value.to(tl.int64), BLOCK)
    _, drawn = _cut_at(row, width, temperature, highest, top, cut_value, cut_id, min_p, u * total, BLOCK)
    return drawn


@triton.jit(do_not_specialize=["width"])
def sample(
    logits, temperatures, top_ks, top_ps, min_ps, seeds, choices, positions, out, width, BLOCK: tl.constexpr
):  # fmt: skip
    """Draws a token for each row. Grid: (rows,)."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * width
    temperature = tl.load(temperatures + index)
    top_k = tl.load(top_ks + index)
    if top_k == 1:
        temperature = temperature * 0.0 + 1.0  # greedy is by the logits themselves
    top, drawn = best_of(row, width, temperature, BLOCK)
    z_max = value_of(top)
    if (top_k != 1) & (tl.abs(z_max) != float("inf")):
        highest = z_max.to(tl.float64)
        cut_value, cut_id = kept_of(row, width, temperature, highest, top, top_k, tl.load(top_ps + index), BLOCK)
        min_p = tl.load(min_ps + index).to(tl.float64)
        u = share_of(hashed(tl.load(seeds + index), tl.load(choices + index), tl.load(positions + index))).to(
            tl.float64
        )
        drawn = drawn_of(row, width, temperature, highest, top, cut_value, cut_id, min_p, u, BLOCK)
    tl.store(out + index, drawn)


@triton.jit(do_not_specialize=["width", "k"])
def logprobs(logits, ids, out_logprob, top_ids, top_logprobs, width, k, BLOCK: tl.constexpr):
    """The log-probability of one id of each row, and the k best candidates with theirs. Grid: (rows,)."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * width
    high = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        high = tl.maximum(high, tl.load(row + place, mask=place < width, other=float("-inf")))
    most = tl.max(high, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        total += tl.exp(tl.load(row + place, mask=place < width, other=float("-inf")) - most)
    normaliser = most + tl.log(tl.sum(total, 0))
    tl.store(out_logprob + index, tl.load(row + tl.load(ids + index)) - normaliser)
    last = tl.full([BLOCK], 9223372036854775807, tl.int64)
    for rank in range(k):
        best = tl.full([BLOCK], -9223372036854775808, tl.int64)
        for start in range(0, width, BLOCK):
            place = start + tl.arange(0, BLOCK)
            order = _ordered(_values(row, place, width, 1.0)).to(tl.int64)
            key = (order << 32) - place
            best = tl.maximum(best, tl.where((place < width) & (key < last), key, best))
        key = tl.max(best, 0)
        order = (key + 4294967295) >> 32
        best_id = ((order << 32) - key).to(tl.int32)
        at = index * k + rank
        tl.store(top_ids + at, best_id)
        tl.store(top_logprobs + at, tl.load(row + best_id) - normaliser)
        last = tl.zeros([BLOCK], tl.int64) + key


@triton.jit(do_not_specialize=["width"])
def has_nan(logits, out, width, BLOCK: tl.constexpr):
    """Whether a row holds a NaN. Grid: (rows,)."""
    index = tl.program_id(0).to(tl.int64)
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(logits + index * width + place, mask=place < width, other=0.0)
        found |= (value != value).to(tl.int32)
    tl.store(out + index, tl.max(found, 0) != 0)


@triton.jit(do_not_specialize=["width", "words"])
def apply_token_mask(logits, mask, rows, width, words, BLOCK: tl.constexpr):
    """-inf where the row's mask has no bit. Grid: (rows, stretches of BLOCK tokens)."""
    index = tl.program_id(0).to(tl.int64)
    mask_row = tl.load(rows + index).to(tl.int64)
    if mask_row >= 0:
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        here = place < width
        word = tl.load(mask + mask_row * words + place // 32, mask=here, other=0)
        allowed = (word >> (place % 32)) & 1
        tl.store(logits + index * width + place, float("-inf"), mask=here & (allowed == 0))


@triton.jit(do_not_specialize=["width"])
def apply_penalties(
    logits, counts, prompt_mask, rows, presences, frequencies, repetitions, width, BLOCK: tl.constexpr
):  # fmt: skip
    """Repetition, then frequency, then presence. Grid: (rows, stretches of BLOCK tokens)."""
    index = tl.program_id(0).to(tl.int64)
    pool = tl.load(rows + index).to(tl.int64) * width
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = place < width
    logit = tl.load(logits + index * width + place, mask=here, other=0.0)
    count = tl.load(counts + pool + place, mask=here, other=0)
    prompted = tl.load(prompt_mask + pool + place, mask=here, other=0) != 0
    repetition = tl.load(repetitions + index) + tl.zeros_like(logit)
    repeated = tl.where(logit > 0.0, tl.math.div_rn(logit, repetition), logit * repetition)
    logit = tl.where((count > 0) | prompted, repeated, logit)
    logit -= tl.load(frequencies + index) * count.to(tl.float32)
    logit -= tl.where(count > 0, tl.load(presences + index), 0.0)
    tl.store(logits + index * width + place, logit, mask=here)
