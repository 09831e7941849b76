"""sampling.verify and sampling.verify_proposals: what becomes of tokens that were drafted ahead.

A row's drafts are a tree of nodes; a chain is a tree whose nodes have a child each. The model computes logits at every
node at once: those of a node are of the token that follows it. Node 0 is the row's last known token, so that a row of
one node is a plain decode, and its outcome that of sampling.sample.

Common to both
    drafted int32 [N]: the token that each node stands for; that of a row's first node is not read. parents int32 [N]:
    the parent of each node, counted from the row's first, before the node; -1 for the first. starts int32 [B + 1]: row
    b has the nodes starts[b] … starts[b+1] - 1. path and tokens int32 [B, W], counts int32 [B], contiguous. N and B may
    be 0, W is at least 1.
    The walk begins at the row's first node. Each node on the way gives one token; where that is the token of one of its
    children, the walk goes on there. path has the nodes on the way, counted from the row's first, tokens what they
    gave, counts how many they are: W at most, and 0 for a row without nodes. Beyond them path and tokens are -1.

verify
    ``fn(drawn, drafted, parents, starts, path, tokens, counts) -> None``
    drawn int32 [N]: what sampling.sample drew (or, greedy, found) at each node. A node gives its drawn token, and the
    walk goes to the first child with that token. The outcome is what decoding one token at a time gives, whatever was
    drafted, since what is drawn depends on seed, choice and position alone.

verify_proposals
    ``fn(logits, temperature, top_k, top_p, min_p, seed, choice, position, proposals, drafted, parents, starts, path,
    tokens, counts) -> None``
    logits float32 [N, V], left alone; the seven behind them as in sampling.sample, for each node. proposals float32
    [N, V], rows at any stride: where a node has children, the distribution that they were drawn from, each for itself
    (not without repetition); elsewhere they are not read. Tokens are distributed as those of sampling.sample are, but
    are not the same ones: drafts that are likely under both survive more often (Leviathan et al., arXiv:2211.17192;
    for several children Miao et al., arXiv:2305.09781). For a node, with w the weights of the candidates that
    sampling.sample keeps, 0 for all others, and q its row of proposals:

    1. taken = 0, left = the sum of w.
    2. For each child in order, i = 1, 2, …, with its token x: it is taken where rest(x) > 0 and u_i * q[x] * left <=
       rest(x), rest(t) = max(w[t] - taken * q[t], 0). Otherwise taken += left, and left = the sum of rest.
    3. Where no child was taken, the token is drawn with the weights rest, or w where left is not above 0, as in step 6
       of sampling.sample.

    Sums and products in float64, q widened. u_i is formed as the uniform number of sampling.sample is, from
    mix((h ^ i) + G) with h the hash of that number. Greedy (top_k = 1) and infinite logits keep one candidate, and a
    child is taken where it is that one.

Roles: logits. No traits.
"""

from itertools import pairwise

import torch

from tokenspeed_kernel.binding import Bound, bind
from tokenspeed_kernel.ops.sampling import SAMPLING_SIGNATURE, kept_candidates, uniform
from tokenspeed_kernel.registry import Band, KernelSpec, Operation, declare_operation, register_kernel

_OUTCOME = "drafted [N], parents [N], starts [B + 1], path [B, W], tokens [B, W], counts [B]"

VERIFY = declare_operation(
    Operation(
        family="sampling", mode="verify", roles=SAMPLING_SIGNATURE.roles, arguments=f"drawn int32 [N], {_OUTCOME}"
    )
)
VERIFY_PROPOSALS = declare_operation(
    Operation(
        family="sampling",
        mode="verify_proposals",
        roles=SAMPLING_SIGNATURE.roles,
        arguments="logits [N, V], temperature, top_k, top_p, min_p, seed, choice, position, proposals [N, V], "
        + _OUTCOME,
    )
)


def _reference_spec(mode: str) -> KernelSpec:
    return KernelSpec(
        name=f"reference_sampling_{mode}",
        family="sampling",
        mode=mode,
        solution="reference",
        signatures=frozenset({SAMPLING_SIGNATURE}),
        band=Band.REFERENCE,
        tags=frozenset({"deterministic", "row_invariant"}),
    )


def _children(parents: list[int], node: int) -> list[int]:
    return [child for child, parent in enumerate(parents) if parent == node]


@register_kernel(_reference_spec("verify"))
def reference_verify(
    drawn: torch.Tensor,
    drafted: torch.Tensor,
    parents: torch.Tensor,
    starts: torch.Tensor,
    path: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """sampling.verify by PyTorch."""
    path.fill_(-1)
    tokens.fill_(-1)
    counts.zero_()
    bounds = starts.tolist()
    for row, (first, stop) in enumerate(pairwise(bounds)):
        known, wanted, tree = (x[first:stop].tolist() for x in (drafted, drawn, parents))
        node: int | None = 0 if stop > first else None
        while node is not None and int(counts[row]) < path.shape[1]:
            step = int(counts[row])
            path[row, step], tokens[row, step] = node, wanted[node]
            counts[row] += 1
            node = next((child for child in _children(tree, node) if known[child] == wanted[node]), None)


def _decided(
    ids: torch.Tensor, weights: torch.Tensor, proposal: torch.Tensor, children: list[int], key: tuple[int, int, int]
) -> tuple[int, int | None]:
    """Steps 1 to 3 of the module's words: the token, and which of ``children`` (tokens) was taken."""
    taken, left = 0.0, float(weights.sum())
    q = proposal.double()[ids]
    for index, token in enumerate(children):
        place = torch.nonzero(ids == token).flatten()
        rest = max(float(weights[place] - taken * q[place]), 0.0) if place.numel() else 0.0
        if rest > 0.0 and uniform(*key, index + 1) * float(proposal[token].double()) * left <= rest:
            return token, index
        taken += left
        left = float((weights - taken * q).clamp(min=0.0).sum())
    rests = (weights - taken * q).clamp(min=0.0) if taken > 0.0 and left > 0.0 else weights
    running = torch.cumsum(rests, dim=0)
    drawn = int((running < uniform(*key) * running[-1]).sum())
    return int(ids[min(drawn, ids.shape[0] - 1)]), None


@register_kernel(_reference_spec("verify_proposals"))
def reference_verify_proposals(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    choice: torch.Tensor,
    position: torch.Tensor,
    proposals: torch.Tensor,
    drafted: torch.Tensor,
    parents: torch.Tensor,
    starts: torch.Tensor,
    path: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """sampling.verify_proposals by PyTorch."""
    path.fill_(-1)
    tokens.fill_(-1)
    counts.zero_()
    bounds = starts.tolist()
    for row, (first, stop) in enumerate(pairwise(bounds)):
        known, tree = drafted[first:stop].tolist(), parents[first:stop].tolist()
        node: int | None = 0 if stop > first else None
        while node is not None and int(counts[row]) < path.shape[1]:
            step, at = int(counts[row]), first + node
            greedy = int(top_k[at]) == 1
            z = logits[at] if greedy else logits[at] / temperature[at]
            ids, weights = kept_candidates(z, int(top_k[at]), float(top_p[at]), float(min_p[at]))
            children = _children(tree, node)
            drafts = [known[child] for child in children]
            if ids.shape[0] == 1:
                only = int(ids[0])
                token, place = only, drafts.index(only) if only in drafts else None
            else:
                key = (int(seed[at]), int(choice[at]), int(position[at]))
                token, place = _decided(ids, weights, proposals[at], drafts, key)
            path[row, step], tokens[row, step] = node, token
            counts[row] += 1
            node = None if place is None else children[place]


def bind_verify(*, override: str | None = None) -> Bound:
    """Chooses ``fn(drawn, drafted, parents, starts, path, tokens, counts)``."""
    return bind("sampling", "verify", SAMPLING_SIGNATURE, {}, override=override)


def bind_verify_proposals(*, override: str | None = None) -> Bound:
    """Chooses ``fn(logits, temperature, top_k, top_p, min_p, seed, choice, position, proposals, drafted, parents,
    starts, path, tokens, counts)``."""
    return bind("sampling", "verify_proposals", SAMPLING_SIGNATURE, {}, override=override)
