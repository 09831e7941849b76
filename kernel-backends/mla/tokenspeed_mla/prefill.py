"""The call of the prefill: attention of whole chunks over keys and values that are out of their latents."""

import torch

from tokenspeed_mla.addressing import EXPANDED, VALUE
from tokenspeed_mla.compilation import address_of, compile_prefill, stream_of
from tokenspeed_mla.decode import ALIGNMENT, architecture_of, result_of

MOST_HEADS = 65535
"""Of a launch, along y."""


def mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    key_start: torch.Tensor,
    scale: float,
    *,
    causal: bool,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every row's queries over its keys (DeepSeek-V2, arXiv:2405.04434, section 2.1, not absorbed).

    q            bfloat16 or float16 [T, H, 192]: plain part, then rotary part.
    k, v         of its dtype, [S, H, 192] and [S, H, 128]. Of all three the last stride is 1, the others are multiples
                 of 8.
    query_start, key_start  int32 [B + 1], contiguous, on the device: row b has the queries from query_start[b] up to
                 query_start[b + 1], and its keys alike. Whatever lies behind a row's keys may hold anything.
    scale        of the scores, above 0.
    causal       a row's queries stand at the last positions of its keys and see none beyond their own; otherwise every
                 query sees all keys of its row, as those of a prefix.
    out          [T, H, 128], contiguous, of q's dtype or float32; None: made, of q's dtype.
    lse          float32 [T, H], contiguous; None: made. The natural logarithm of the sum of the exponentials.

    Returns out and lse; a query that sees no key has zeros and -inf, one that belongs to no row is left alone. Parts of
    the keys are put together by their lse (attention.merge_partials). Runs on the present stream and waits for nothing.
    Raises ValueError for operands other than these, and what compile_prefill does.
    """
    _check(q, k, v, query_start, key_start, scale)
    queries, heads, _ = q.shape
    out = result_of("mla_prefill", "out", out, (queries, heads, VALUE), (q.dtype, torch.float32), q)
    lse = result_of("mla_prefill", "lse", lse, (queries, heads), (torch.float32,), q)
    # What other calls may need is compiled by the first one already: nothing may be while serving.
    kernel = compile_prefill(architecture_of(q.device), q.dtype, out.dtype, causal)
    compile_prefill(architecture_of(q.device), q.dtype, out.dtype, not causal)
    rows = query_start.shape[0] - 1
    if queries == 0 or rows == 0:
        return out, lse
    if k.shape[0] == 0:  # a load's tensor has an entry at least; no row reads it
        k, v = k.new_zeros(1, heads, EXPANDED), v.new_zeros(1, heads, VALUE)
    kernel(
        address_of(q, ALIGNMENT),
        address_of(k, ALIGNMENT),
        address_of(v, ALIGNMENT),
        address_of(query_start),
        address_of(key_start),
        address_of(out, ALIGNMENT),
        address_of(lse),
        queries,
        k.shape[0],
        heads,
        rows,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        scale,
        stream_of(q.device),
    )
    return out, lse


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, query_start: torch.Tensor, key_start: torch.Tensor, scale: float
) -> None:
    """ValueError for operands that mla_prefill does not take; the variant is checked when it is compiled."""
    heads = q.shape[1] if q.dim() == 3 else 0
    faults = {
        f"q {tuple(q.shape)} is not [T, H, {EXPANDED}], H from 1 to {MOST_HEADS}": q.dim() != 3
        or q.shape[-1] != EXPANDED
        or not 1 <= heads <= MOST_HEADS,
        f"k {tuple(k.shape)} is not [S, {heads}, {EXPANDED}]": k.dim() != 3 or k.shape[1:] != (heads, EXPANDED),
        f"v {tuple(v.shape)} is not {(k.shape[0], heads, VALUE)}": v.shape != (k.shape[0], heads, VALUE),
        f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; give all one type": len({q.dtype, k.dtype, v.dtype}) > 1,
        f"scale is {scale}; it must be above 0": not scale > 0.0,
    }
    for name, starts in (("query_start", query_start), ("key_start", key_start)):
        faults[f"{name} {starts.dtype} {tuple(starts.shape)} is not a contiguous int32 [B + 1]"] = (
            starts.dim() != 1 or starts.dtype != torch.int32 or starts.shape[0] < 1 or not starts.is_contiguous()
        )
    faults[f"query_start has {query_start.numel()} entries and key_start {key_start.numel()}"] = (
        query_start.numel() != key_start.numel()
    )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        *strides, dense = tensor.stride()
        steps = [tensor.data_ptr(), *(stride * tensor.element_size() for stride in strides)]
        faults[f"{name} begins and steps at bytes {steps}; TMA takes multiples of {ALIGNMENT}"] = any(
            number % ALIGNMENT for number in steps
        )
        faults[f"{name}'s last axis has gaps"] = dense != 1
    found = [fault for fault, is_so in faults.items() if is_so]
    if found:
        raise ValueError(f"mla_prefill: {'; '.join(found)}")
