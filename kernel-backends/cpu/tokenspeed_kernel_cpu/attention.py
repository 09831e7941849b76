"""attention.gqa_prologue, attention.decode and attention.extend; contract in tokenspeed_kernel.ops.attention."""

import torch

from tokenspeed_kernel_cpu import _native
from tokenspeed_kernel_cpu.checks import KernelArgumentError, checked, expect, expect_range

KV_TYPES = {
    torch.float32: _native.KvType.float32,
    torch.bfloat16: _native.KvType.bfloat16,
    torch.float16: _native.KvType.float16,
    torch.float8_e4m3fn: _native.KvType.e4m3,
}

_gqa_prologue = _native.gqa_prologue
_attend = _native.attend


def _check_caches(k_cache: torch.Tensor, v_cache: torch.Tensor, head_dim: int) -> None:
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        expect(name, cache[:0], tuple(KV_TYPES), (0, *k_cache.shape[1:]))
        if cache.dtype != k_cache.dtype or cache.shape != k_cache.shape:
            raise KernelArgumentError(f"{name} differs from k_cache in dtype or shape; the two must agree")
        if cache.shape[3] != head_dim or cache.stride(3) != 1:
            raise KernelArgumentError(f"{name} must have heads of {head_dim} dense elements, got {list(cache.shape)}")


def _check_prologue(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    _eps: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    tokens, heads, dim = q.shape
    _check_caches(k_cache, v_cache, dim)
    expect("q", q, torch.float32, (tokens, heads, dim), strided_rows=True)
    expect("k", k, torch.float32, (tokens, k_cache.shape[1], dim), strided_rows=True)
    expect("v", v, torch.float32, (tokens, k_cache.shape[1], dim), strided_rows=True)
    expect("positions", positions, torch.int32, (tokens,))
    rotary = cos_sin.shape[1]
    if rotary % 2 or not 0 < rotary <= dim:
        raise KernelArgumentError(f"cos_sin has {rotary} columns; it must have an even number, at most {dim}, a head's")
    expect("cos_sin", cos_sin, torch.float32, (cos_sin.shape[0], rotary))
    expect("slots", slots, torch.int64, (tokens,))
    expect_range("positions", positions, 0, cos_sin.shape[0])
    expect_range("slots", slots.clamp(min=0), 0, k_cache.shape[0] * k_cache.shape[2])
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            expect(name, norm, torch.float32, (dim,))


def _check_read(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    queries: torch.Tensor | int,
    seq_lens: torch.Tensor,
    window: int,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    soft_cap: float,
) -> None:
    """``queries``: of each row. Table entries before the window of a row's first query may be anything."""
    granularity = k_cache.shape[2]
    if type(window) is not int or window < 0:
        raise KernelArgumentError(f"window is {window!r}; it must be an int, 0 for none or the positions a query sees")
    if sinks is not None:
        expect("sinks", sinks, torch.float32, (q.shape[1],))
    if not soft_cap >= 0.0:
        raise KernelArgumentError(f"soft_cap is {soft_cap!r}; it must be above 0, or 0.0 for none")
    _check_caches(k_cache, v_cache, q.shape[2])
    expect("q", q, torch.float32, q.shape, strided_rows=True)
    expect("out", out, torch.float32, q.shape)
    expect("page_table", page_table, torch.int32, (seq_lens.shape[0], page_table.shape[1]), strided_rows=True)
    expect("seq_lens", seq_lens, torch.int32, seq_lens.shape[:1])
    expect_range("seq_lens", seq_lens, 0, page_table.shape[1] * granularity + 1)
    page = torch.arange(page_table.shape[1])
    first = (seq_lens - queries + 1 - window).clamp(min=0) if window else torch.zeros_like(seq_lens)
    read = page < (seq_lens.unsqueeze(1) + granularity - 1) // granularity
    read &= page >= first.unsqueeze(1) // granularity
    expect_range("page_table", page_table[read], 0, k_cache.shape[0])


def _check_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    _scale: float,
    window: int,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
    soft_cap: float = 0.0,
) -> None:
    rows = seq_lens.shape[0]
    if (rows == 0 and q.shape[0]) or (rows and q.shape[0] % rows):
        raise KernelArgumentError(f"{q.shape[0]} queries do not divide among {rows} rows")
    _check_read(q, k_cache, v_cache, page_table, q.shape[0] // max(1, rows), seq_lens, window, out, sinks, soft_cap)


def _check_extend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    _scale: float,
    window: int,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
    soft_cap: float = 0.0,
) -> None:
    expect("query_start", query_start, torch.int32, (seq_lens.shape[0] + 1,))
    expect_range("query_start", query_start, 0, q.shape[0] + 1)
    if bool((query_start.diff() < 0).any()):
        raise KernelArgumentError(f"query_start must not descend, got {query_start.tolist()}")
    _check_read(q, k_cache, v_cache, page_table, query_start.diff(), seq_lens, window, out, sinks, soft_cap)


@checked(_check_prologue)
def gqa_prologue(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Norms and rotates q in place; norms and rotates k, and writes it and v at their slots. Padding is not written."""
    tokens, q_heads, head_dim = q.shape
    _gqa_prologue(
        q.data_ptr(),
        q.stride(0),
        q_heads,
        k.data_ptr(),
        k.stride(0),
        k.size(1),
        v.data_ptr(),
        v.stride(0),
        tokens,
        head_dim,
        positions.data_ptr(),
        cos_sin.data_ptr(),
        cos_sin.size(1),
        0 if q_norm is None else q_norm.data_ptr(),
        0 if k_norm is None else k_norm.data_ptr(),
        eps,
        KV_TYPES[k_cache.dtype],
        k_cache.data_ptr(),
        k_cache.stride(),
        v_cache.data_ptr(),
        v_cache.stride(),
        k_cache.size(2),
        slots.data_ptr(),
    )


def _read(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor | None,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    soft_cap: float,
    rounded: bool,
) -> None:
    rows = seq_lens.size(0)
    if rows == 0:
        return
    tokens, q_heads, head_dim = q.shape
    _, kv_heads, page_size, _ = k_cache.shape
    _attend(
        q.data_ptr(),
        q.stride(0),
        q_heads,
        kv_heads,
        head_dim,
        KV_TYPES[k_cache.dtype],
        k_cache.data_ptr(),
        k_cache.stride(),
        v_cache.data_ptr(),
        v_cache.stride(),
        page_size,
        page_table.data_ptr(),
        page_table.stride(0),
        0 if query_start is None else query_start.data_ptr(),
        tokens // rows,
        seq_lens.data_ptr(),
        rows,
        scale,
        window,
        rounded,
        out.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        soft_cap,
    )


@checked(_check_decode)
def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
    soft_cap: float = 0.0,
) -> None:
    """Attention of the last q.rows / B positions of every row, over the ``window`` positions before each (0: all).
    ``sinks`` and ``soft_cap``: see the contract."""
    _read(q, k_cache, v_cache, page_table, None, seq_lens, scale, window, out, sinks, soft_cap, False)


@checked(_check_extend)
def extend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
    soft_cap: float = 0.0,
) -> None:
    """Attention of the queries that query_start gives each row, at its last positions; ``window`` as in decode."""
    _read(q, k_cache, v_cache, page_table, query_start, seq_lens, scale, window, out, sinks, soft_cap, False)


@checked(_check_decode)
def rounded_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
    soft_cap: float = 0.0,
) -> None:
    """decode with queries and weights rounded to bfloat16, over a cache of bfloat16 or e4m3; RuntimeError where
    an instruction set other than avx512_bf16 was put in force meanwhile."""
    _read(q, k_cache, v_cache, page_table, None, seq_lens, scale, window, out, sinks, soft_cap, True)


@checked(_check_extend)
def rounded_extend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
    soft_cap: float = 0.0,
) -> None:
    """extend with queries and weights rounded to bfloat16, as in rounded_decode."""
    _read(q, k_cache, v_cache, page_table, query_start, seq_lens, scale, window, out, sinks, soft_cap, True)
