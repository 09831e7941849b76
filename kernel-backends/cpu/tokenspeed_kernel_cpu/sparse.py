"""attention.index_prologue, index_select and mla_selected; contracts in tokenspeed_kernel.ops.sparse."""

import torch

from tokenspeed_kernel_cpu import _native
from tokenspeed_kernel_cpu.attention import KV_TYPES
from tokenspeed_kernel_cpu.checks import KernelArgumentError, checked, expect, expect_range

_index_prologue = _native.index_prologue
_index_select = _native.index_select
_mla_selected = _native.mla_selected


def _check_cache(name: str, cache: torch.Tensor, width: int) -> None:
    expect(name, cache[:0], tuple(KV_TYPES), (0, 1, cache.shape[2], width))
    if cache.stride(3) != 1:
        raise KernelArgumentError(
            f"{name} must have entries of {width} dense elements, got strides {list(cache.stride())}"
        )


def _check_rows(query_start: torch.Tensor, page_table: torch.Tensor, rows: int, tokens: int) -> None:
    expect("query_start", query_start, torch.int32, (rows + 1,))
    expect_range("query_start", query_start, 0, tokens + 1)
    if bool((query_start.diff() < 0).any()):
        raise KernelArgumentError(f"query_start must not descend, got {query_start.tolist()}")
    expect("page_table", page_table, torch.int32, (rows, page_table.shape[1]), strided_rows=True)


def _check_prologue(
    q: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    _eps: float,
    index_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    tokens, heads, width = q.shape
    rotary = cos_sin.shape[1]
    _check_cache("index_cache", index_cache, width)
    expect("q", q, torch.float32, (tokens, heads, width), strided_rows=True)
    expect("key", key, torch.float32, (tokens, width), strided_rows=True)
    expect("positions", positions, torch.int32, (tokens,))
    expect("cos_sin", cos_sin, torch.float32, (cos_sin.shape[0], rotary))
    if rotary > width:
        raise KernelArgumentError(f"cos_sin rotates {rotary} elements; q has heads of {width}")
    for name, norm in (("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        expect(name, norm, torch.float32, (width,))
    expect("slots", slots, torch.int64, (tokens,))
    expect_range("positions", positions, 0, cos_sin.shape[0])
    expect_range("slots", slots.clamp(min=0), 0, index_cache.shape[0] * index_cache.shape[2])


def _check_select(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    stride: int,
    selected: torch.Tensor,
) -> None:
    tokens, heads, width = q.shape
    _check_cache("index_cache", index_cache, width)
    expect("q", q, torch.float32, (tokens, heads, width), strided_rows=True)
    expect("weights", weights, torch.float32, (tokens, heads))
    expect("selected", selected, torch.int32, (tokens, selected.shape[1]))
    if selected.shape[1] < 1 or stride < 1:
        raise KernelArgumentError(f"{selected.shape[1]} entries of {stride} tokens; both must be 1 at least")
    rows, page = seq_lens.shape[0], index_cache.shape[2]
    _check_rows(query_start, page_table, rows, tokens)
    expect("seq_lens", seq_lens, torch.int32, (rows,))
    expect_range("seq_lens", seq_lens, 0, (page_table.shape[1] * page + 1) * stride)
    read = torch.arange(page_table.shape[1]) < (seq_lens.unsqueeze(1) // stride + page - 1) // page
    read &= (seq_lens // stride > selected.shape[1]).unsqueeze(1)
    expect_range("page_table", page_table[read], 0, index_cache.shape[0])


def _check_selected(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    selected: torch.Tensor,
    _scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    tokens, heads, latent = q_latent.shape
    _check_cache("latent_cache", latent_cache, latent + q_rope.shape[2])
    for name, q in (("q_latent", q_latent), ("q_rope", q_rope)):
        expect(name, q[:0], torch.float32, (0, heads, q.shape[2]))
        if q.shape[0] != tokens or (q.shape[2] and q.stride(2) != 1):
            raise KernelArgumentError(
                f"{name} has shape {list(q.shape)} and strides {list(q.stride())}; it must have {tokens} rows of heads "
                "that are dense in memory"
            )
    expect("out", out, torch.float32, (tokens, heads, latent))
    if lse is not None:
        expect("lse", lse, torch.float32, (tokens, heads))
    rows = query_start.shape[0] - 1
    _check_rows(query_start, page_table, rows, tokens)
    expect("selected", selected, torch.int32, (tokens, selected.shape[1]))
    for row in range(rows):
        lists = selected[query_start[row] : query_start[row + 1]]
        expect_range("selected", lists, -1, page_table.shape[1] * latent_cache.shape[2])
        if bool(((lists[:, :-1] < 0) & (lists[:, 1:] >= 0)).any()):
            raise KernelArgumentError("selected has entries behind a negative one; those must come last")
        used = page_table[row][(lists[lists >= 0] // latent_cache.shape[2]).long()]
        expect_range("page_table", used, 0, latent_cache.shape[0])


@checked(_check_prologue)
def index_prologue(
    q: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    eps: float,
    index_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Rotates the beginning of every head of q in place; norms and rotates ``key`` on its way to the cache, and leaves
    it as it is. Padding is not written."""
    tokens, heads, width = q.shape
    _index_prologue(
        q.data_ptr(),
        q.stride(0),
        heads,
        key.data_ptr(),
        key.stride(0),
        width,
        cos_sin.size(1),
        tokens,
        positions.data_ptr(),
        cos_sin.data_ptr(),
        norm_weight.data_ptr(),
        norm_bias.data_ptr(),
        eps,
        KV_TYPES[index_cache.dtype],
        index_cache.data_ptr(),
        index_cache.stride(0),
        index_cache.stride(2),
        index_cache.size(2),
        slots.data_ptr(),
    )


@checked(_check_select)
def index_select(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    stride: int,
    selected: torch.Tensor,
) -> None:
    """The best entries for every query. A query that sees no more than it may choose has nothing scored."""
    _, heads, width = q.shape
    _index_select(
        q.data_ptr(),
        q.stride(0),
        weights.data_ptr(),
        heads,
        width,
        KV_TYPES[index_cache.dtype],
        index_cache.data_ptr(),
        index_cache.stride(0),
        index_cache.stride(2),
        index_cache.size(2),
        page_table.data_ptr(),
        page_table.stride(0),
        query_start.data_ptr(),
        seq_lens.data_ptr(),
        seq_lens.size(0),
        stride,
        selected.data_ptr(),
        selected.size(1),
    )


def _attend(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    selected: torch.Tensor,
    scale: float,
    rounded: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    tokens, heads, latent = q_latent.shape
    _mla_selected(
        q_latent.data_ptr(),
        q_latent.stride(0),
        q_latent.stride(1),
        latent,
        q_rope.data_ptr(),
        q_rope.stride(0),
        q_rope.stride(1),
        q_rope.size(2),
        tokens,
        heads,
        KV_TYPES[latent_cache.dtype],
        latent_cache.data_ptr(),
        latent_cache.stride(0),
        latent_cache.stride(2),
        latent_cache.size(2),
        page_table.data_ptr(),
        page_table.stride(0),
        query_start.data_ptr(),
        query_start.size(0) - 1,
        selected.data_ptr(),
        selected.size(1),
        scale,
        rounded,
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
    )


@checked(_check_selected)
def mla_selected(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    selected: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Latent attention of every query over the entries of its own list."""
    _attend(q_latent, q_rope, latent_cache, page_table, query_start, selected, scale, False, out, lse)


@checked(_check_selected)
def rounded_mla_selected(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    selected: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """mla_selected with queries and weights rounded to bfloat16, over a bfloat16 cache; RuntimeError where an
    instruction set other than avx512_bf16 was put in force meanwhile."""
    _attend(q_latent, q_rope, latent_cache, page_table, query_start, selected, scale, True, out, lse)
