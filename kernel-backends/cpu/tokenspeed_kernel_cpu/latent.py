"""attention.mla_prologue, mla_decode, mla_decode_partial, mla_extend and merge_partials; contracts in
tokenspeed_kernel.ops.mla and .merge."""

import torch

from tokenspeed_kernel_cpu import _native
from tokenspeed_kernel_cpu.attention import KV_TYPES
from tokenspeed_kernel_cpu.checks import KernelArgumentError, checked, expect, expect_range

_mla_prologue = _native.mla_prologue
_mla_attend = _native.mla_attend
_merge_partials = _native.merge_partials


def check_latent_cache(latent_cache: torch.Tensor, width: int) -> None:
    expect("latent_cache", latent_cache[:0], tuple(KV_TYPES), (0, 1, latent_cache.shape[2], width))
    if latent_cache.stride(3) != 1:
        raise KernelArgumentError(
            f"latent_cache must have entries of {width} dense elements, got strides {list(latent_cache.stride())}"
        )


def _check_prologue(
    q: torch.Tensor,
    compressed: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    latent_norm: torch.Tensor,
    _eps: float,
    latent_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    tokens, heads, dim = q.shape
    rotary, latent = cos_sin.shape[1], latent_norm.shape[0]
    check_latent_cache(latent_cache, latent + rotary)
    expect("q", q, torch.float32, (tokens, heads, dim), strided_rows=True)
    if dim < rotary:
        raise KernelArgumentError(f"q has heads of {dim} elements; the {rotary} that are rotated must be among them")
    expect("compressed", compressed, torch.float32, (tokens, latent + rotary), strided_rows=True)
    expect("positions", positions, torch.int32, (tokens,))
    expect("cos_sin", cos_sin, torch.float32, (cos_sin.shape[0], rotary))
    expect("latent_norm", latent_norm, torch.float32, (latent,))
    expect("slots", slots, torch.int64, (tokens,))
    expect_range("positions", positions, 0, cos_sin.shape[0])
    expect_range("slots", slots.clamp(min=0), 0, latent_cache.shape[0] * latent_cache.shape[2])


def _check_read(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    parts: tuple[int, ...] = (),
) -> None:
    tokens, heads, latent = q_latent.shape
    check_latent_cache(latent_cache, latent + q_rope.shape[2])
    for name, q, width in (("q_latent", q_latent, latent), ("q_rope", q_rope, q_rope.shape[2])):
        expect(name, q[:0], torch.float32, (0, heads, width))
        if q.shape[0] != tokens or q.stride(2) != 1:
            raise KernelArgumentError(
                f"{name} has shape {list(q.shape)} and strides {list(q.stride())}; it must have {tokens} rows of heads "
                "that are dense in memory"
            )
    expect("out", out, torch.float32, (*parts, tokens, heads, latent))
    if lse is not None:
        expect("lse", lse, torch.float32, (*parts, tokens, heads))
    page_size, rows = latent_cache.shape[2], seq_lens.shape[0]
    expect("page_table", page_table, torch.int32, (rows, page_table.shape[1]), strided_rows=True)
    expect("seq_lens", seq_lens, torch.int32, (rows,))
    expect_range("seq_lens", seq_lens, 0, page_table.shape[1] * page_size + 1)
    read = torch.arange(page_table.shape[1]) < (seq_lens.unsqueeze(1) + page_size - 1) // page_size
    expect_range("page_table", page_table[read], 0, latent_cache.shape[0])


def _check_width(q_latent: torch.Tensor, seq_lens: torch.Tensor) -> None:
    tokens, rows = q_latent.shape[0], seq_lens.shape[0]
    if (rows == 0 and tokens) or (rows and tokens % rows):
        raise KernelArgumentError(f"{tokens} queries do not divide among {rows} rows")


def _check_decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    _scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    _check_width(q_latent, seq_lens)
    _check_read(q_latent, q_rope, latent_cache, page_table, seq_lens, out, lse)


def _check_partial(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    _scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    _check_width(q_latent, seq_lens)
    _check_read(q_latent, q_rope, latent_cache, page_table, seq_lens, out, lse, tuple(out.shape[:1]))


def _check_extend(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    _scale: float,
    out: torch.Tensor,
) -> None:
    expect("query_start", query_start, torch.int32, (seq_lens.shape[0] + 1,))
    expect_range("query_start", query_start, 0, q_latent.shape[0] + 1)
    if bool((query_start.diff() < 0).any()):
        raise KernelArgumentError(f"query_start must not descend, got {query_start.tolist()}")
    _check_read(q_latent, q_rope, latent_cache, page_table, seq_lens, out, None)


def _check_merge(
    partials: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    parts, tokens, heads, dim = partials.shape
    if parts == 0:
        raise KernelArgumentError("partials has no parts; there must be one at least")
    expect("partials", partials, torch.float32, partials.shape)
    expect("partial_lse", partial_lse, torch.float32, (parts, tokens, heads))
    expect("out", out, torch.float32, (tokens, heads, dim))
    if lse is not None:
        expect("lse", lse, torch.float32, (tokens, heads))


@checked(_check_prologue)
def mla_prologue(
    q: torch.Tensor,
    compressed: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    latent_norm: torch.Tensor,
    eps: float,
    latent_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Rotates the end of every head of q in place; norms and rotates ``compressed`` on its way to the cache, which it
    leaves as it is. Padding is not written."""
    tokens, q_heads, head_dim = q.shape
    rotary = cos_sin.size(1)
    _mla_prologue(
        q.data_ptr(),
        q.stride(0),
        q_heads,
        head_dim - rotary,
        compressed.data_ptr(),
        compressed.stride(0),
        latent_norm.size(0),
        rotary,
        tokens,
        positions.data_ptr(),
        cos_sin.data_ptr(),
        latent_norm.data_ptr(),
        eps,
        KV_TYPES[latent_cache.dtype],
        latent_cache.data_ptr(),
        latent_cache.stride(0),
        latent_cache.stride(2),
        latent_cache.size(2),
        slots.data_ptr(),
    )


def _attend(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor | None,
    seq_lens: torch.Tensor,
    scale: float,
    parts: int,
    rounded: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    rows = seq_lens.size(0)
    if rows == 0:
        return
    tokens, q_heads, latent = q_latent.shape
    _mla_attend(
        q_latent.data_ptr(),
        q_latent.stride(0),
        q_latent.stride(1),
        latent,
        q_rope.data_ptr(),
        q_rope.stride(0),
        q_rope.stride(1),
        q_rope.size(2),
        tokens,
        q_heads,
        KV_TYPES[latent_cache.dtype],
        latent_cache.data_ptr(),
        latent_cache.stride(0),
        latent_cache.stride(2),
        latent_cache.size(2),
        page_table.data_ptr(),
        page_table.stride(0),
        0 if query_start is None else query_start.data_ptr(),
        tokens // rows,
        seq_lens.data_ptr(),
        rows,
        scale,
        parts,
        rounded,
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
    )


@checked(_check_decode)
def mla_decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Latent attention of the last q.rows / B positions of every row."""
    _attend(q_latent, q_rope, latent_cache, page_table, None, seq_lens, scale, 1, False, out, lse)


@checked(_check_partial)
def mla_decode_partial(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """The same over each of out.size(0) parts of a row's pages, apart."""
    _attend(q_latent, q_rope, latent_cache, page_table, None, seq_lens, scale, out.size(0), False, out, lse)


@checked(_check_extend)
def mla_extend(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Latent attention of the queries that query_start gives each row, at its last positions."""
    _attend(q_latent, q_rope, latent_cache, page_table, query_start, seq_lens, scale, 1, False, out, None)


@checked(_check_decode)
def rounded_mla_decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """mla_decode with queries and weights rounded to bfloat16, over a bfloat16 cache; RuntimeError where an instruction
    set other than avx512_bf16 was put in force meanwhile."""
    _attend(q_latent, q_rope, latent_cache, page_table, None, seq_lens, scale, 1, True, out, lse)


@checked(_check_partial)
def rounded_mla_decode_partial(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """mla_decode_partial, rounded in the same way."""
    _attend(q_latent, q_rope, latent_cache, page_table, None, seq_lens, scale, out.size(0), True, out, lse)


@checked(_check_extend)
def rounded_mla_extend(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """mla_extend, rounded in the same way."""
    _attend(q_latent, q_rope, latent_cache, page_table, query_start, seq_lens, scale, 1, True, out, None)


@checked(_check_merge)
def merge_partials(
    partials: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """One output from those over parts of the keys."""
    parts, tokens, heads, dim = partials.shape
    _merge_partials(
        partials.data_ptr(),
        partial_lse.data_ptr(),
        parts,
        tokens * heads,
        dim,
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
    )
