"""quantize.rows and quantize.restore: 8-bit integers and floats (e4m3) under float32 scales, there and back.

rows
    ``fn(x, block, out, scales) -> None``
    x float32 [T, K], finite, may be row-strided; out int8 or float8_e4m3fn [T, K], contiguous; scales float32
    [T, ceil(K / block)], contiguous. ``block`` is a Python int: that many elements of a row share a scale, the last
    block of a row may be shorter; K for one scale a row ("token"). T may be 0.
    scale = the largest |x| of the block / M, M = 127 for int8 and 448 for e4m3, one float32 division. out = x / scale
    to the nearest value of the dtype, never beyond M in size. A block of zeros gives scale 0 and zeros. A kernel may
    multiply by a reciprocal: a quotient within a few rounding errors of the middle between two values may go to either.

restore
    ``fn(q, scales, block, out) -> None``
    q int8 or float8_e4m3fn [T, K]; block a pair (rows, columns) of Python ints; scales float32
    [ceil(T / rows), ceil(K / columns)]; out float32 [T, K]; all contiguous. out = q * scale, one float32 product each:
    exact bits. (1, n) undoes ``rows``; (128, 128) is the weight format of DeepSeek-V3's checkpoints.

Roles: input, output, of which one is quantised: ``quantized_format`` makes its format. No traits.
"""

import torch

from tokenspeed_kernel.binding import Bound, bind
from tokenspeed_kernel.registry import Band, KernelSpec, Operation, declare_operation, register_kernel
from tokenspeed_kernel.signature import FLOAT32, FormatError, FormatSignature, ScaleFormat, TensorFormat

LARGEST: dict[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest size of a quantised element, by dtype."""

ROWS = declare_operation(
    Operation(
        family="quantize",
        mode="rows",
        roles=frozenset({"input", "output"}),
        arguments="x [T, K], block, out [T, K], scales [T, ceil(K / block)]",
    )
)

RESTORE = declare_operation(
    Operation(
        family="quantize",
        mode="restore",
        roles=frozenset({"input", "output"}),
        arguments="q [T, K], scales, block (rows, columns), out [T, K]",
    )
)


def quantized_format(dtype: torch.dtype, block: tuple[int, int] | None = None) -> TensorFormat:
    """The format of int8 or float8_e4m3fn elements under a float32 scale a token, or for each block (rows, columns):
    found at run time where rows is 1, fixed in the file otherwise. Raises FormatError for another dtype."""
    if dtype not in LARGEST:
        raise FormatError(f"{dtype} is no quantised dtype; use one of {', '.join(map(str, LARGEST))}")
    scale = ScaleFormat("float32", "token")
    if block is not None and block[0] == 1:
        scale = ScaleFormat("float32", "block", dynamic_block_shape=block)
    elif block is not None:
        scale = ScaleFormat("float32", "block", block_shape=block)
    return TensorFormat(str(dtype).removeprefix("torch."), "int8" if dtype is torch.int8 else "fp8", scale)


def rows_signature(dtype: torch.dtype, block: int | None = None) -> FormatSignature:
    """The signature of quantize.rows to ``dtype``, one scale a token or for each ``block`` elements of it."""
    return FormatSignature.of(input=FLOAT32, output=quantized_format(dtype, None if block is None else (1, block)))


def restore_signature(dtype: torch.dtype, block: tuple[int, int] | None = None) -> FormatSignature:
    """The signature of quantize.restore from ``dtype``, one scale a token or for each block (rows, columns)."""
    return FormatSignature.of(input=quantized_format(dtype, block), output=FLOAT32)


def _reference_spec(mode: str, signatures: frozenset[FormatSignature]) -> KernelSpec:
    return KernelSpec(
        name=f"reference_quantize_{mode}",
        family="quantize",
        mode=mode,
        solution="reference",
        signatures=signatures,
        band=Band.REFERENCE,
        tags=frozenset({"deterministic", "row_invariant"}),
    )


_BLOCKS = (None, 32, 64, 128)


@register_kernel(_reference_spec("rows", frozenset(rows_signature(dtype, b) for dtype in LARGEST for b in _BLOCKS)))
def reference_rows(x: torch.Tensor, block: int, out: torch.Tensor, scales: torch.Tensor) -> None:
    """quantize.rows by PyTorch."""
    rows, width = x.shape
    count = -(-width // block)
    padded = torch.nn.functional.pad(x, (0, count * block - width)).reshape(rows, count, block)
    largest = LARGEST[out.dtype]
    scale = padded.abs().amax(dim=-1) / largest
    quotient = padded / torch.where(scale == 0.0, 1.0, scale).unsqueeze(-1)
    if out.dtype is torch.int8:
        quotient = quotient.round()
    quotient = quotient.clamp(-largest, largest).reshape(rows, count * block)[:, :width]
    out.copy_(quotient.to(out.dtype))
    scales.copy_(scale)


@register_kernel(
    _reference_spec(
        "restore",
        frozenset(
            restore_signature(dtype, block)
            for dtype in LARGEST
            for block in (None, (1, 32), (1, 64), (1, 128), (128, 128))
        ),
    )
)
def reference_restore(q: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], out: torch.Tensor) -> None:
    """quantize.restore by PyTorch."""
    rows, columns = (torch.arange(extent, device=q.device) // size for extent, size in zip(q.shape, block, strict=True))
    out.copy_(q.float() * scales[rows][:, columns])


def bind_quantize_rows(*, dtype: torch.dtype, block: int | None = None, override: str | None = None) -> Bound:
    """Chooses ``fn(x, block, out, scales)`` for one scale a token (block None, the call gives K) or each ``block``."""
    return bind("quantize", "rows", rows_signature(dtype, block), {}, override=override)


def bind_restore(*, dtype: torch.dtype, block: tuple[int, int] | None = None, override: str | None = None) -> Bound:
    """Chooses ``fn(q, scales, block, out)`` for one scale a token (block None, the call gives (1, K)) or each block."""
    return bind("quantize", "restore", restore_signature(dtype, block), {}, override=override)
