"""attention.write, compress and apply_sinks, and rotary.apply; contracts in tokenspeed_kernel.ops.compressed and
.rotary."""

import torch

from tokenspeed_kernel.ops.kv_cache import row_dtype
from tokenspeed_kernel_cpu import _native
from tokenspeed_kernel_cpu.attention import KV_TYPES
from tokenspeed_kernel_cpu.checks import KernelArgumentError, checked, expect, expect_range

_apply_sinks = _native.apply_sinks
_compress = _native.compress
_write_entries = _native.write_entries
_rotary = _native.rotary


def _check_cache(name: str, cache: torch.Tensor, width: int) -> None:
    expect(name, cache[:0], tuple(KV_TYPES), (0, 1, cache.shape[2], width))
    if cache.stride(3) != 1:
        raise KernelArgumentError(
            f"{name} must have entries of {width} dense elements, got strides {list(cache.stride())}"
        )


def _check_write(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    tokens, width = x.shape
    _check_cache("cache", cache, width)
    expect("x", x, torch.float32, (tokens, width), strided_rows=True)
    expect("slots", slots, torch.int64, (tokens,))
    expect_range("slots", slots.clamp(min=0), 0, cache.shape[0] * cache.shape[2])


def _check_compress(
    values_cache: torch.Tensor,
    gates_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    bias: torch.Tensor,
    norm: torch.Tensor,
    _eps: float,
    cos_sin: torch.Tensor,
    entry_cache: torch.Tensor,
    entry_slots: torch.Tensor,
    overlapping: bool,
) -> None:
    stride, width, page = bias.shape[0], norm.shape[0], values_cache.shape[2]
    columns = width * (2 if overlapping else 1)
    for name, cache in (("values_cache", values_cache), ("gates_cache", gates_cache)):
        _check_cache(name, cache, columns)
        if cache.dtype != row_dtype(entry_cache.dtype) or cache.shape[2] != page:
            raise KernelArgumentError(
                f"{name} is {cache.dtype} in pages of {cache.shape[2]}; rows of entries in {entry_cache.dtype} are "
                f"{row_dtype(entry_cache.dtype)}, values and gates in pages of one size"
            )
    _check_cache("entry_cache", entry_cache, width)
    expect("bias", bias, torch.float32, (stride, columns))
    expect("norm", norm, torch.float32, (width,))
    expect("cos_sin", cos_sin, torch.float32, cos_sin.shape)
    rows, tokens = seq_lens.shape[0], entry_slots.shape[0]
    expect("query_start", query_start, torch.int32, (rows + 1,))
    expect_range("query_start", query_start, 0, tokens + 1)
    expect("page_table", page_table, torch.int32, (rows, page_table.shape[1]), strided_rows=True)
    expect("seq_lens", seq_lens, torch.int32, (rows,))
    expect_range("seq_lens", seq_lens, 0, page_table.shape[1] * page + 1)
    expect("entry_slots", entry_slots, torch.int64, (tokens,))
    expect_range("entry_slots", entry_slots.clamp(min=0), 0, entry_cache.shape[0] * entry_cache.shape[2] * stride)


def _check_sinks(x: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    expect("x", x, torch.float32, x.shape)
    expect("lse", lse, torch.float32, x.shape[:2])
    expect("sinks", sinks, torch.float32, x.shape[1:2])


def _check_rotary(
    x: torch.Tensor, positions: torch.Tensor, axes: torch.Tensor | None, cos_sin: torch.Tensor, _interleaved: bool
) -> None:
    tokens, heads, width = x.shape
    expect("x", x[:0], torch.float32, (0, heads, width))
    if x.numel() and x.stride(2) != 1:
        raise KernelArgumentError(f"x has strides {list(x.stride())}; the elements of a head must be dense in memory")
    expect("cos_sin", cos_sin, torch.float32, cos_sin.shape)
    if cos_sin.shape[1] > width or cos_sin.shape[1] % 2:
        raise KernelArgumentError(f"cos_sin rotates {cos_sin.shape[1]} elements; x has heads of {width}")
    expect("positions", positions, torch.int32, (positions.shape[0], tokens), strided_rows=True)
    expect_range("positions", positions, 0, cos_sin.shape[0])
    if axes is not None:
        expect("axes", axes, torch.int32, (cos_sin.shape[1] // 2,))
        expect_range("axes", axes, 0, positions.shape[0])


@checked(_check_write)
def write(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Rows as they are at their slots. Padding is not written."""
    tokens, width = x.shape
    _write_entries(
        x.data_ptr(),
        x.stride(0),
        tokens,
        width,
        KV_TYPES[cache.dtype],
        cache.data_ptr(),
        cache.stride(0),
        cache.stride(2),
        cache.size(2),
        slots.data_ptr(),
    )


@checked(_check_compress)
def compress(
    values_cache: torch.Tensor,
    gates_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    bias: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    entry_cache: torch.Tensor,
    entry_slots: torch.Tensor,
    overlapping: bool,
) -> None:
    """The entries that the queries complete. Padding is not written."""
    _compress(
        values_cache.data_ptr(),
        values_cache.stride(0),
        values_cache.stride(2),
        gates_cache.data_ptr(),
        gates_cache.stride(0),
        gates_cache.stride(2),
        values_cache.size(2),
        KV_TYPES[values_cache.dtype],
        page_table.data_ptr(),
        page_table.stride(0),
        query_start.data_ptr(),
        seq_lens.data_ptr(),
        seq_lens.size(0),
        bias.data_ptr(),
        bias.size(0),
        bias.size(1),
        norm.data_ptr(),
        norm.size(0),
        eps,
        cos_sin.data_ptr(),
        cos_sin.size(1),
        KV_TYPES[entry_cache.dtype],
        entry_cache.data_ptr(),
        entry_cache.stride(0),
        entry_cache.stride(2),
        entry_cache.size(2),
        entry_slots.data_ptr(),
        overlapping,
    )


@checked(_check_sinks)
def apply_sinks(x: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Each head keeps exp(lse) of exp(lse) + exp(sink), in place."""
    _apply_sinks(x.data_ptr(), lse.data_ptr(), sinks.data_ptr(), *x.shape)


@checked(_check_rotary)
def rotary(
    x: torch.Tensor, positions: torch.Tensor, axes: torch.Tensor | None, cos_sin: torch.Tensor, interleaved: bool
) -> None:
    """Rotates the first cos_sin.size(1) elements of every head in place."""
    tokens, heads, _ = x.shape
    _rotary(
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        heads,
        tokens,
        positions.data_ptr(),
        positions.stride(0),
        0 if axes is None else axes.data_ptr(),
        cos_sin.data_ptr(),
        cos_sin.size(1),
        interleaved,
    )
