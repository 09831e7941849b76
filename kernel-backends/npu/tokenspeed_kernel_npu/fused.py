"""npu_fused_infer_attention_score_v2, in the forms that are used here.

bfloat16 throughout; scores and softmax are float32 inside, the result is rounded to bfloat16. What each form asks for
said by torch_npu's documentation of the operator; docs/design/npu-kernels.md has what follows from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch

from tokenspeed_kernel_npu.operators import call
from tokenspeed_kernel_npu.pages import Paged

TND_HEAD_DIM = 128
"""Elements of a head of which queries of ragged rows can lie side by side (layout TND)."""

RAGGED_PAGES = 128
"""A page of ragged rows is a multiple of so many tokens."""

MOST_PER_KV = 64
"""Query heads of one KV head."""

MOST_WIDE = 65535
"""Elements of a token's queries in layout BSND; fewer."""

MASK_SIDE = 2048
ALL = 2**31 - 1
"""Tokens before or behind a query, where nothing limits them."""

_CAUSAL, _BAND = 3, 4  # sparse_mode, both aligned at the last query and the last key


@cache
def _mask(device: torch.device) -> torch.Tensor:
    """bool [2048, 2048], True above the diagonal: the operator makes the masks of _CAUSAL and _BAND of it."""
    return torch.ones(MASK_SIDE, MASK_SIDE, dtype=torch.bool, device=device).triu(1)


@dataclass(frozen=True)
class Attended:
    """out bfloat16 and lse float32, both without the axes of length 1."""

    out: torch.Tensor
    lse: torch.Tensor | None

    @staticmethod
    def joined(parts: "Sequence[Attended]") -> "Attended":
        """Those of several calls, one behind the other."""
        if len(parts) == 1:
            return parts[0]
        totals = [part.lse for part in parts if part.lse is not None]
        return Attended(torch.cat([part.out for part in parts]), torch.cat(totals) if totals else None)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    heads: tuple[int, int],
    scale: float,
    layout: str,
    query_lengths: list[int] | None,
    key_lengths: list[int],
    *,
    ropes: tuple[torch.Tensor, torch.Tensor] | None = None,
    table: torch.Tensor | None = None,
    page: int = 0,
    window: int | None = None,
    lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``heads``: of queries and of keys. ``window``: None for no mask at all, 0 for a causal one."""
    if layout == "BSND" and heads[0] * query.shape[-1] >= MOST_WIDE:
        raise ValueError(
            f"{heads[0]} query heads of {query.shape[-1]} elements: npu_fused_infer_attention_score_v2 takes fewer "
            f"than {MOST_WIDE} together; share them out over more ranks"
        )
    mode = 0 if window is None else _BAND if window else _CAUSAL
    query_rope, key_rope = ropes or (None, None)
    found: tuple[torch.Tensor, torch.Tensor] = call(
        "npu_fused_infer_attention_score_v2",
        query=query,
        key=key,
        value=value,
        query_rope=query_rope,
        key_rope=key_rope,
        atten_mask=None if window is None else _mask(query.device),
        actual_seq_qlen=query_lengths,
        actual_seq_kvlen=key_lengths,
        block_table=table,
        num_query_heads=heads[0],
        num_key_value_heads=heads[1],
        softmax_scale=scale,
        pre_tokens=window - 1 if window else ALL,
        next_tokens=0 if window else ALL,
        input_layout=layout,
        sparse_mode=mode,
        block_size=page,
        return_softmax_lse=lse,
    )
    return found


def single_paged(query: torch.Tensor, paged: Paged, lengths: list[int], scale: float, lse: bool) -> Attended:
    """One query [B, Hq, D] a row, over pages of a multiple of 16 tokens; each of ``lengths`` is at least 1."""
    heads = (query.shape[1], paged.k.shape[1])
    out, total = _attend(
        query.unsqueeze(2),
        paged.k,
        paged.v,
        heads,
        scale,
        "BNSD",
        None,
        lengths,
        table=paged.table,
        page=paged.k.shape[2],
        lse=lse,
    )
    return Attended(out.squeeze(2), total[..., 0, 0] if lse else None)


def single_dense(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scale: float, lse: bool
) -> Attended:
    """One query [B, Hq, D] a row, over the first ``lengths`` of keys [B, L, Hkv, D]."""
    heads = (query.shape[1], k.shape[2])
    out, total = _attend(query.unsqueeze(1), k, v, heads, scale, "BSND", None, lengths, lse=lse)
    return Attended(out.squeeze(1), total[..., 0, 0] if lse else None)


def single_latent(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    latents: torch.Tensor,
    rotated: torch.Tensor,
    table: torch.Tensor,
    lengths: list[int],
    scale: float,
) -> Attended:
    """One query [B, Hq, 512] and [B, Hq, 64] a row, over pages [pages, 1, 128, 512] and [pages, 1, 128, 64]."""
    out, total = _attend(
        query.unsqueeze(2),
        latents,
        latents,
        (query.shape[1], 1),
        scale,
        "BNSD",
        None,
        lengths,
        ropes=(query_rope.unsqueeze(2), rotated),
        table=table,
        page=latents.shape[2],
        lse=True,
    )
    return Attended(out.squeeze(2), total[..., 0, 0])


def ragged_paged(
    query: torch.Tensor, paged: Paged, counts: list[int], lengths: list[int], scale: float, lse: bool
) -> Attended:
    """The last counts[b] positions of each row, as queries [T, Hq, 128] side by side; pages of a multiple of 128."""
    heads = (query.shape[1], paged.k.shape[1])
    out, total = _attend(
        query,
        paged.k,
        paged.v,
        heads,
        scale,
        "TND",
        list(accumulate(counts)),
        lengths,
        table=paged.table,
        page=paged.k.shape[2],
        window=0,
        lse=lse,
    )
    return Attended(out, total[..., 0] if lse else None)


def ragged_dense(
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    counts: list[int],
    lengths: list[int],
    scale: float,
    *,
    window: int = 0,
    ropes: tuple[torch.Tensor, torch.Tensor] | None = None,
    lse: bool = False,
) -> Attended:
    """The same over keys [S, Hkv, D] side by side, lengths[b] of them a row. With ``ropes``, those of queries and keys,
    Hkv is Hq."""
    heads = (query.shape[1], k.shape[1])
    if k.shape[2] == TND_HEAD_DIM:
        ends = list(accumulate(counts)), list(accumulate(lengths))
        out, total = _attend(query, k, v, heads, scale, "TND", *ends, ropes=ropes, window=window, lse=lse)
        return Attended(out, total[..., 0] if lse else None)
    parts, sized = [], ((query, counts), (k, lengths), (v, lengths))
    for q, keys, values in zip(*(torch.split(x, n) for x, n in sized), strict=True):
        whole = (q.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0))
        # A query alone sees all its keys; the operator takes no such mask with it.
        masked = window if q.shape[0] > 1 else None
        out, total = _attend(*whole, heads, scale, "BSND", None, [keys.shape[0]], window=masked, lse=lse)
        parts.append(Attended(out.squeeze(0), total[0, ..., 0].T if lse else None))
    return Attended.joined(parts)
