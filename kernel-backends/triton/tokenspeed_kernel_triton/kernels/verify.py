"""Tokens that were drafted ahead: the walk down a row's tree, along drawn tokens or by rejection.

A row is one program's, so its outcome depends on no other. Nothing is sorted: what was kept, and what is left of it, is
found by bisection as in kernels/sampling.py.
"""

import triton
import triton.language as tl

from tokenspeed_kernel_triton.kernels.sampling import (
    _kept,
    _mass,
    _ordered,
    _values,
    best_of,
    drawn_of,
    further,
    hashed,
    kept_of,
    share_of,
    value_of,
)


@triton.jit
def _child(drafted, parents, nodes, node, token, BLOCK: tl.constexpr):
    """The first child of the node with this token; ``nodes`` where it has none."""
    found = nodes
    for start in range(0, nodes, BLOCK):
        place = start + tl.arange(0, BLOCK)
        here = place < nodes
        fits = (tl.load(parents + place, mask=here, other=-2) == node) & here
        fits &= tl.load(drafted + place, mask=here, other=0) == token
        found = tl.minimum(found, tl.min(tl.where(fits, place, nodes), 0))
    return found


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["path", "tokens"])
def verify(drawn, drafted, parents, starts, path, tokens, counts, width, BLOCK: tl.constexpr):
    """The walk along drawn tokens. Grid: (rows,)."""
    row = tl.program_id(0)
    first = tl.load(starts + row)
    nodes = tl.load(starts + row + 1) - first
    out = row.to(tl.int64) * width
    node = first * 0
    count = first * 0
    while (node < nodes) & (count < width):
        token = tl.load(drawn + first + node)
        tl.store(path + out + count, node)
        tl.store(tokens + out + count, token)
        count += 1
        node = _child(drafted + first, parents + first, nodes, node, token, BLOCK)
    tl.store(counts + row, count)
    for rest in range(count, width):
        tl.store(path + out + rest, -1)
        tl.store(tokens + out + rest, -1)


@triton.jit
def _rest(
    row, proposal, width, temperature, highest, cut_value, cut_id, min_p, taken, order, last_id, BLOCK: tl.constexpr
):
    """What is left of the kept candidates above the order, and of those of it up to ``last_id``: the sum of their
    weights less ``taken`` times what was proposed, where that is above 0."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        z = _values(row, place, width, temperature)
        own = _ordered(z)
        weight = tl.exp(z.to(tl.float64) - highest)
        used = _kept(own, place, width, cut_value, cut_id) & (weight >= min_p)
        used &= (own.to(tl.int64) > order) | ((own.to(tl.int64) == order) & (place <= last_id))
        q = tl.load(proposal + place, mask=place < width, other=0.0).to(tl.float64)
        total += tl.where(used, tl.maximum(weight - taken * q, 0.0), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _drawn_of_rest(
    row, proposal, width, temperature, highest, top, cut_value, cut_id, min_p, taken, target, BLOCK: tl.constexpr
):
    """The first candidate at which what is left reaches ``target``."""
    low = cut_value.to(tl.int64) - 1
    high = top.to(tl.int64)
    # the order: everything above ``high`` is short of the target, everything from ``low + 1`` on is not
    while high - low > 1:
        middle = (low + high) >> 1
        if (
            _rest(row, proposal, width, temperature, highest, cut_value, cut_id, min_p, taken, middle, -1, BLOCK)
            >= target
        ):
            low = middle
        else:
            high = middle
    first = -1
    last = width - 1
    while last - first > 1:
        middle_id = (first + last) // 2
        if (
            _rest(row, proposal, width, temperature, highest, cut_value, cut_id, min_p, taken, high, middle_id, BLOCK)
            >= target
        ):
            last = middle_id
        else:
            first = middle_id
    return last


@triton.jit(
    do_not_specialize=["proposal_stride", "vocabulary", "width"], do_not_specialize_on_alignment=["path", "tokens"]
)
def verify_proposals(
    logits, temperatures, top_ks, top_ps, min_ps, seeds, choices, positions, proposals, drafted, parents, starts,
    path, tokens, counts, proposal_stride, vocabulary, width, BLOCK: tl.constexpr,
):  # fmt: skip
    """The walk by rejection. Grid: (rows,)."""
    row = tl.program_id(0)
    first = tl.load(starts + row)
    nodes = tl.load(starts + row + 1) - first
    out = row.to(tl.int64) * width
    node = first * 0
    count = first * 0
    while (node < nodes) & (count < width):
        at = (first + node).to(tl.int64)
        logit = logits + at * vocabulary
        proposal = proposals + at * proposal_stride
        temperature = tl.load(temperatures + at)
        top_k = tl.load(top_ks + at)
        if top_k == 1:
            temperature = temperature * 0.0 + 1.0  # greedy is by the logits themselves
        top, token = best_of(logit, vocabulary, temperature, BLOCK)
        z_max = value_of(top)
        after = nodes
        if (top_k == 1) | (tl.abs(z_max) == float("inf")):
            after = _child(drafted + first, parents + first, nodes, node, token, BLOCK)
        else:
            highest = z_max.to(tl.float64)
            cut_value, cut_id = kept_of(
                logit, vocabulary, temperature, highest, top, top_k, tl.load(top_ps + at), BLOCK
            )
            min_p = tl.load(min_ps + at).to(tl.float64)
            least = cut_value.to(tl.int64)
            h = hashed(tl.load(seeds + at), tl.load(choices + at), tl.load(positions + at))
            taken = highest * 0.0
            left = _mass(logit, vocabulary, temperature, highest, cut_value, cut_id, min_p, least, BLOCK)
            tried = nodes * 0
            child = node + 1
            while (child < nodes) & (after == nodes):
                if tl.load(parents + first + child) == node:
                    tried += 1
                    draft = tl.load(drafted + first + child)
                    place = draft + tl.arange(0, 1)
                    z = _values(logit, place, vocabulary, temperature)
                    weight = tl.exp(z.to(tl.float64) - highest)
                    used = _kept(_ordered(z), place, vocabulary, cut_value, cut_id) & (weight >= min_p)
                    q = tl.load(proposal + draft).to(tl.float64)
                    rest = tl.sum(tl.where(used, tl.maximum(weight - taken * q, 0.0), 0.0), 0)
                    if (rest > 0.0) & (share_of(further(h, tried)).to(tl.float64) * q * left <= rest):
                        after = child
                        token = draft
                    else:
                        taken += left
                        left = _rest(
                            logit, proposal, vocabulary, temperature, highest, cut_value, cut_id, min_p, taken,
                            least - 1, -1, BLOCK,
                        )  # fmt: skip
                child += 1
            if after == nodes:
                u = share_of(h).to(tl.float64)
                if (taken > 0.0) & (left > 0.0):
                    token = _drawn_of_rest(
                        logit, proposal, vocabulary, temperature, highest, top, cut_value, cut_id, min_p, taken,
                        u * left, BLOCK,
                    )  # fmt: skip
                else:
                    token = drawn_of(logit, vocabulary, temperature, highest, top, cut_value, cut_id, min_p, u, BLOCK)
        tl.store(path + out + count, node)
        tl.store(tokens + out + count, token)
        count += 1
        node = after
    tl.store(counts + row, count)
    for rest_place in range(count, width):
        tl.store(path + out + rest_place, -1)
        tl.store(tokens + out + rest_place, -1)
