"""Attention of one row over a paged cache, by PyTorch: what the references of grouped-query and latent attention
share."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ScoreRules:
    """What is done with a score q·k besides scaling it.

    Attributes:
        scale: factor of q·k.
        window: positions that a query sees, its own the last of them; 0: all.
        soft_cap: the scaled score s becomes soft_cap * tanh(s / soft_cap); 0: it stays.
        sinks: float32 [Hq], a score for each head that takes part in the softmax and has no value; None: none.
    """

    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None


def gather(cache: torch.Tensor, pages: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """The positions first … stop-1 of cache [blocks, heads, g, D], float32 [heads, stop - first, D]; no other page is
    read."""
    heads, granularity, width = cache.shape[1:]
    first_page = first // granularity
    used = pages[first_page : (stop + granularity - 1) // granularity].long()
    begin = first_page * granularity
    return cache[used].float().transpose(0, 1).reshape(heads, -1, width)[:, first - begin : stop - begin]


def _scores(q: torch.Tensor, keys: torch.Tensor, position: torch.Tensor, first: int, rules: ScoreRules) -> torch.Tensor:
    """float32 [n, heads, q_per_kv, L]; -inf where a query at ``position`` [n] does not see the key."""
    heads, length, width = keys.shape
    grouped = q.reshape(q.shape[0], heads, q.shape[1] // heads, width)
    scores = torch.einsum("nhgd,hld->nhgl", grouped, keys) * rules.scale
    if rules.soft_cap:
        scores = rules.soft_cap * torch.tanh(scores / rules.soft_cap)
    key_position = torch.arange(first, first + length, device=keys.device)
    hidden = key_position > position.unsqueeze(1)
    if rules.window:
        hidden |= key_position <= position.unsqueeze(1) - rules.window
    return scores.masked_fill(hidden[:, None, None, :], -torch.inf)


def attend_row(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pages: torch.Tensor,
    seq_len: int,
    rules: ScoreRules,
    part: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The queries q [n, Hq, D] of one row, at its last n positions, over the keys of its positions.

    ``part``: only the keys of these positions [start, stop). Returns out float32 [n, Hq, Dv] and the logarithm of the
    sum of the exponentials of the scores, float32 [n, Hq]; a query that sees no key gives zeros and -inf.
    """
    queries, query_heads = q.shape[:2]
    begin, stop = part or (0, seq_len)
    first = max(begin, seq_len - queries + 1 - rules.window) if rules.window else begin
    out = q.new_zeros(queries, query_heads, v_cache.shape[3])
    lse = q.new_full((queries, query_heads), -torch.inf)
    if first >= stop or queries == 0:
        return out, lse
    keys, values = gather(k_cache, pages, first, stop), gather(v_cache, pages, first, stop)
    scores = _scores(q, keys, torch.arange(seq_len - queries, seq_len, device=q.device), first, rules)
    unseen = torch.isneginf(scores).all(dim=-1).reshape(queries, query_heads)
    if rules.sinks is not None:
        sinks = rules.sinks.reshape(1, *scores.shape[1:3], 1)
        scores = torch.cat([scores, sinks.expand(queries, -1, -1, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[1]]
    result = torch.einsum("nhgl,hld->nhgd", weights, values).reshape(out.shape)
    total = torch.logsumexp(scores, dim=-1).reshape(lse.shape)
    return torch.where(unseen.unsqueeze(-1), out, result), torch.where(unseen, lse, total)
