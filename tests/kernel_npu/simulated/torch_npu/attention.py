"""npu_fused_infer_attention_score_v2: paged and dense, BNSD, BSND and TND, masks, lse, and rotated parts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torch_npu.needs import need, need_dense, need_dtype

_LIMIT = 2**31 - 1
_LATENT = 512


@dataclass
class _Call:
    """What a call comes down to. ``rows``: (queries [n, N, D], their rotated part or None, row) of the batch."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_rope: torch.Tensor | None
    key_rope: torch.Tensor | None
    table: torch.Tensor | None
    layout: str
    heads: int
    kv_heads: int
    query_lengths: list[int] | None
    key_lengths: list[int]

    @property
    def batch(self) -> int:
        return len(self.query_lengths or []) if self.layout == "TND" else self.query.shape[0]

    def _tokens(self, x: torch.Tensor, row: int) -> torch.Tensor:
        """[n, N, D] of one row of queries."""
        if self.layout == "BNSD":
            return x[row].transpose(0, 1)
        if self.layout == "BSND":
            return x[row]
        ends = [0, *(self.query_lengths or [])]
        return x[ends[row] : ends[row + 1]]

    def queries(self, row: int) -> torch.Tensor:
        whole = self._tokens(self.query, row)
        return whole if self.query_rope is None else torch.cat([whole, self._tokens(self.query_rope, row)], dim=-1)

    def _entries(self, x: torch.Tensor, row: int) -> torch.Tensor:
        """[L, N, D] of one row of keys or values."""
        if self.table is not None:  # pages [n, heads, block, D]
            length, block = self.key_lengths[row], x.shape[2]
            pages = self.table[row, : -(-length // block)].long()
            need(bool(((pages >= 0) & (pages < x.shape[0])).all()), "a page of the table is out of range")
            return x[pages].transpose(1, 2).flatten(0, 1)[:length]
        if self.layout == "TND":
            ends = [0, *self.key_lengths]
            return x[ends[row] : ends[row + 1]]
        whole = x[row] if self.layout == "BSND" else x[row].transpose(0, 1)
        return whole[: self.key_lengths[row]]

    def keys(self, row: int) -> torch.Tensor:
        whole = self._entries(self.key, row)
        return whole if self.key_rope is None else torch.cat([whole, self._entries(self.key_rope, row)], dim=-1)

    def values(self, row: int) -> torch.Tensor:
        return self._entries(self.value, row)


def _check_lengths(call: _Call) -> None:
    if call.layout == "TND":
        ends = call.query_lengths
        need(
            ends is not None and ends == sorted(ends) and min(ends) >= 0, f"actual_seq_qlen of TND adds up, got {ends}"
        )
        assert ends is not None
        need(
            ends[-1] == call.query.shape[0] <= 1 << 20, f"{call.query.shape[0]} queries, but {ends[-1]} in the lengths"
        )
        need(len(ends) == len(call.key_lengths) <= 4096, "as many lengths of keys as of queries, at most 4096")
        if call.table is None:
            need(call.key_lengths == sorted(call.key_lengths), "actual_seq_kvlen of TND without pages adds up")
            need(call.key_lengths[-1] == call.key.shape[0], "the lengths are not those of key")
    else:
        need(call.query_lengths is None, "this stand-in takes whole rows of queries")
        need(len(call.key_lengths) == call.batch, f"{len(call.key_lengths)} lengths of {call.batch} rows")
    need(min(call.key_lengths) >= 1, "what a row of length 0 gives is not said")


def _check_pages(call: _Call, block: int, queries: int) -> None:
    table, key = call.table, call.key
    assert table is not None
    need(table.dtype is torch.int32 and table.dim() == 2 and table.shape[0] == call.batch, "block_table int32 [B, n]")
    need_dense(block_table=table)
    need(call.layout in ("BNSD", "TND") and key.dim() == 4, "pages [n, KV_N, block, D] go with BNSD and TND")
    need(key.shape[1:3] == (call.kv_heads, block), f"key is {list(key.shape)}, block_size {block}")
    need(table.shape[1] * block >= max(call.key_lengths), "block_table has too few pages")
    if call.query_rope is not None:
        need(block in (16, 128), f"block_size {block}; with rotated parts it is 16 or 128")
    elif queries == 1 and call.layout != "TND":
        need(block % 16 == 0 and 0 < block <= 512, f"block_size {block} is no multiple of 16 up to 512")
    else:
        need(block % 128 == 0 and 128 <= block <= 512, f"block_size {block} is no multiple of 128 up to 512")


def _check_shapes(call: _Call, queries: int) -> None:
    width = call.query.shape[-1]
    need(width % 16 == 0 and width <= 512, f"heads of {width} elements; takes multiples of 16 up to 512")
    need(call.heads <= 256 and call.heads % call.kv_heads == 0, f"{call.heads} heads over {call.kv_heads}")
    need(call.heads // call.kv_heads <= 64 or call.query_rope is not None, "more than 64 query heads a KV head")
    need(max(call.key.numel(), call.value.numel()) <= _LIMIT, "key or value has more than 2^31 - 1 elements")
    need(call.key.shape == call.value.shape, "key and value differ in shape")
    if call.layout == "BSND":
        need(call.heads * width < 65535, "a token of BSND is too wide")
        need(call.query.shape[2] == call.heads and call.key.shape[2] == call.kv_heads, "heads differ from the counts")
    if call.layout == "TND" and width != _LATENT:
        need(width == 128, f"TND takes heads of 128 elements, got {width}")
    if (call.query_rope is None) != (call.key_rope is None):
        need(False, "query_rope and key_rope go together")
    if call.query_rope is None:
        return
    need(call.query_rope.shape == (*call.query.shape[:-1], 64), f"query_rope is {list(call.query_rope.shape)}")
    assert call.key_rope is not None
    need(call.key_rope.shape == (*call.key.shape[:-1], 64), f"key_rope is {list(call.key_rope.shape)}")
    if width == _LATENT:
        need(call.table is not None and call.kv_heads == 1, "latents lie in pages, with one head")
        need(call.heads in (1, 2, 4, 8, 16, 32, 64, 128), f"{call.heads} heads over latents")
        need(queries <= 16, f"{queries} queries of a row over latents; up to 16")
    else:
        need(width == 128 and call.layout == "TND" and call.table is None, "rotated parts beside 128: TND, no pages")


def _check_mask(call: _Call, mask: torch.Tensor | None, mode: int, queries: int) -> None:
    if mode == 0:
        need(mask is None, "this stand-in takes no mask of its own with sparse_mode 0")
        need(call.layout != "TND", "TND without a mask is not what is wanted here")
        return
    need(mode in (3, 4), f"sparse_mode {mode}")
    need(call.layout == "TND" or queries > 1, "a query alone takes no sparse_mode")
    assert mask is not None
    need(mask.shape == (2048, 2048) and mask.dtype in (torch.bool, torch.int8, torch.uint8), "atten_mask [2048, 2048]")
    need(
        bool((mask.bool() == torch.ones(2048, 2048, dtype=torch.bool).triu(1)).all()), "atten_mask hides what is above"
    )


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, before: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row in the operator's own precision: out [n, N, D] and lse [n, N]. ``before``: positions in front of a query
    that it sees; None: no mask."""
    queries, heads, _ = q.shape
    length, kv_heads, _ = k.shape
    grouped = q.float().view(queries, kv_heads, heads // kv_heads, -1)
    scores = torch.einsum("nhgd,lhd->nhgl", grouped, k.float()) * scale
    if before is not None:
        need(queries <= length, f"{queries} queries of a row of {length} keys")
        at, place = torch.arange(length - queries, length).unsqueeze(1), torch.arange(length)
        hidden = (place > at) | (place < at - before)
        scores = scores.masked_fill(hidden[:, None, None, :], -torch.inf)
    most = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - most)
    total = weights.sum(dim=-1, keepdim=True)
    # A weight of 0 times a NaN of a hidden position is a NaN, as it would be in the cube unit.
    summed = torch.einsum("nhgl,lhd->nhgd", weights.to(torch.bfloat16).float(), v.float()) / total
    return summed.flatten(1, 2).to(torch.bfloat16), (most + torch.log(total)).view(queries, heads)


def _results(call: _Call, scale: float, before: int | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for row in range(call.batch):
        yield _attend(call.queries(row), call.keys(row), call.values(row), scale, before)


def fused_infer_attention_score_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    block_table: torch.Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = _LIMIT,
    next_tokens: int = _LIMIT,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    return_softmax_lse: bool = False,
    **others: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    need(all(not other for other in others.values()), f"this stand-in takes none of {sorted(others)}")
    need_dtype((torch.bfloat16,), query=query, key=key, value=value, query_rope=query_rope, key_rope=key_rope)
    need_dense(query=query, key=key, value=value, query_rope=query_rope, key_rope=key_rope)
    need(input_layout in ("BNSD", "BSND", "TND"), f"input_layout {input_layout}")
    need(actual_seq_kvlen is not None, "actual_seq_kvlen must be given")
    assert actual_seq_kvlen is not None
    kv_heads = num_key_value_heads or num_query_heads
    call = _Call(
        query, key, value, query_rope, key_rope, block_table, input_layout, num_query_heads, kv_heads,
        None if actual_seq_qlen is None else list(actual_seq_qlen), list(actual_seq_kvlen),
    )  # fmt: skip
    queries = {"BNSD": query.shape[-2], "BSND": query.shape[1], "TND": 0}[input_layout]
    _check_lengths(call)
    _check_shapes(call, queries)
    _check_mask(call, atten_mask, sparse_mode, queries)
    if block_table is not None:
        _check_pages(call, block_size, queries)
    before = None
    if sparse_mode == 3:
        before = _LIMIT
    elif sparse_mode == 4:
        need(next_tokens == 0 and pre_tokens >= 0, f"a band of {pre_tokens} and {next_tokens}")
        before = pre_tokens
    return _laid_out(call, list(_results(call, softmax_scale, before)), return_softmax_lse)


def _laid_out(
    call: _Call, found: list[tuple[torch.Tensor, torch.Tensor]], with_lse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results as the layout has them; lse [T, N, 1] for TND, [B, N, S, 1] for the others, [1] where not wanted."""
    outs, totals = zip(*found, strict=True)
    if call.layout == "TND":
        out, lse = torch.cat(outs), torch.cat(totals).unsqueeze(-1)
    else:
        out, lse = torch.stack(outs), torch.stack(totals).transpose(1, 2).unsqueeze(-1)
        out = out.transpose(1, 2) if call.layout == "BNSD" else out
    return out.contiguous(), lse.contiguous() if with_lse else torch.zeros(1)


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "npu_fused_infer_attention_score_v2": fused_infer_attention_score_v2,
}
