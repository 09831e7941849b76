"""Integers and their scales put together into GGUF's blocks of 32; gguf_blocks.py has the layouts and takes them apart.

A weight that another format holds as integers under scales of 32 columns or more is the same weight in these blocks, so
that the kernels for them serve it: no element changes where the scale is a float16.
"""

import torch

from tokenspeed_kernel.gguf_blocks import BLOCK_BYTES, BLOCK_ELEMENTS

PACKED_FORMATS = ("gguf_q4_0", "gguf_q4_1", "gguf_q8_0")
"""The formats that ``pack_blocks`` makes."""


def pack_blocks(
    format_name: str,
    quants: torch.Tensor,
    scales: torch.Tensor,
    minimums: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Blocks uint8 [N, K / 32 * block bytes] of a format in PACKED_FORMATS, in ``out`` where it is given.

    quants [N, K]: of gguf_q4_0 uint8 below 16, an element being scale * (quant - 8); of gguf_q4_1 the same, an element
    being scale * quant + minimum; of gguf_q8_0 int8, an element being scale * quant. scales and (gguf_q4_1 only)
    minimums float16 [N, K / 32]. Raises ValueError where they do not fit each other.
    """
    _check(format_name, quants, scales, minimums)
    rows, columns = quants.shape
    size, blocks = BLOCK_BYTES[format_name], columns // BLOCK_ELEMENTS[format_name]
    if out is None:
        out = torch.empty(rows, blocks * size, dtype=torch.uint8)
    elif out.dtype != torch.uint8 or tuple(out.shape) != (rows, blocks * size):
        raise ValueError(
            f"{format_name}: out must be uint8 [{rows}, {blocks * size}], got {out.dtype} {list(out.shape)}"
        )
    parts = out.view(rows, blocks, size)
    parts[..., :2] = _bytes(scales)
    if minimums is not None:
        parts[..., 2:4] = _bytes(minimums)
    if format_name == "gguf_q8_0":
        parts[..., 2:] = quants.view(torch.uint8).view(rows, blocks, 32)
    else:
        halves = quants.view(rows, blocks, 2, 16)
        parts[..., size - 16 :] = halves[:, :, 0] | (halves[:, :, 1] << 4)
    return out


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """float16 [N, blocks] as uint8 [N, blocks, 2]."""
    return values.contiguous().view(torch.uint8).view(*values.shape, 2)


def _check(format_name: str, quants: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None) -> None:
    if format_name not in PACKED_FORMATS:
        raise ValueError(f"{format_name!r} cannot be packed; use one of {', '.join(PACKED_FORMATS)}")
    dtype = torch.int8 if format_name == "gguf_q8_0" else torch.uint8
    if quants.dim() != 2 or quants.dtype != dtype or not quants.is_contiguous():
        raise ValueError(
            f"{format_name}: quants must be {dtype} [N, K], dense, got {quants.dtype} {list(quants.shape)}"
        )
    rows, columns = quants.shape
    if columns % BLOCK_ELEMENTS[format_name]:
        raise ValueError(f"{format_name}: {columns} columns do not divide into blocks of {BLOCK_ELEMENTS[format_name]}")
    if (minimums is not None) != (format_name == "gguf_q4_1"):
        raise ValueError(f"{format_name}: minimums belong to gguf_q4_1, and only there")
    for name, values in (("scales", scales), ("minimums", minimums)):
        shape = (rows, columns // BLOCK_ELEMENTS[format_name])
        if values is not None and (values.dtype != torch.float16 or tuple(values.shape) != shape):
            raise ValueError(
                f"{format_name}: {name} must be float16 {list(shape)}, got {values.dtype} {list(values.shape)}"
            )
