"""Floats of four (e2m1) and eight bits (e4m3) and their scales put together into blocks; gguf_blocks.py has the
layouts.

No element changes: what MXFP4, NVFP4 and fp8 checkpoints hold is put into another order.
"""

import torch

from tokenspeed_kernel.gguf_blocks import BLOCK_BYTES, split_last


def pack_mxfp4(nibbles: torch.Tensor, exponents: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """gguf_mxfp4 blocks uint8 [N, K / 32 * 17], in ``out`` where it is given.

    nibbles uint8 [N, K] below 16, each an e2m1; exponents uint8 [N, K / 32], each an e8m0. Raises ValueError where they
    do not fit each other.
    """
    rows, columns = nibbles.shape
    _check("gguf_mxfp4", nibbles, exponents, 32, 1)
    parts = _blocks("gguf_mxfp4", rows, columns // 32, out)
    parts[..., :1] = exponents.unsqueeze(-1)
    _put_nibbles(nibbles, parts[..., 1:])
    return parts.flatten(1)


def pack_nvfp4(
    nibbles: torch.Tensor, scales: torch.Tensor, whole: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """nvfp4 blocks uint8 [N, K / 64 * 40], in ``out`` where it is given.

    nibbles uint8 [N, K] below 16, each an e2m1; scales uint8 [N, K / 16], each an e4m3; whole float32 [1]. Raises
    ValueError where they do not fit each other.
    """
    rows, columns = nibbles.shape
    _check("nvfp4", nibbles, scales, 64, 4)
    if whole.dtype != torch.float32 or whole.numel() != 1:
        raise ValueError(f"nvfp4: the scale of all must be one float32, got {whole.dtype} {list(whole.shape)}")
    parts = _blocks("nvfp4", rows, columns // 64, out)
    parts[..., :4] = whole.reshape(1).view(torch.uint8)
    parts[..., 4:8] = split_last(scales, -1, 4)
    _put_nibbles(nibbles, parts[..., 8:])
    return parts.flatten(1)


def pack_fp8(elements: torch.Tensor, scales: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """fp8_blocks uint8 [N, K / 128 * 132], in ``out`` where it is given.

    elements float8_e4m3fn [N, K]; scales float32 [N, K / 128]. A NaN makes its whole block NaN. Raises ValueError where
    they do not fit each other.
    """
    rows, columns = elements.shape
    if elements.dtype != torch.float8_e4m3fn or columns % 128:
        raise ValueError(
            f"fp8_blocks: elements must be float8_e4m3fn [N, K] with K a multiple of 128, got {elements.dtype} "
            f"{list(elements.shape)}"
        )
    if scales.dtype != torch.float32 or tuple(scales.shape) != (rows, columns // 128):
        raise ValueError(
            f"fp8_blocks: scales must be float32 [{rows}, {columns // 128}], got {scales.dtype} {list(scales.shape)}"
        )
    parts = _blocks("fp8_blocks", rows, columns // 128, out)
    stored = split_last(elements.view(torch.uint8), -1, 128)
    unsound = ((stored & 0x7F) == 0x7F).any(dim=-1)
    parts[..., :4] = split_last(scales.masked_fill(unsound, torch.nan).view(torch.uint8), -1, 4)
    parts[..., 4:] = stored
    return parts.flatten(1)


def _blocks(format_name: str, rows: int, blocks: int, out: torch.Tensor | None) -> torch.Tensor:
    """``out``, or new memory, as uint8 [rows, blocks, block bytes]."""
    size = BLOCK_BYTES[format_name]
    if out is None:
        out = torch.empty(rows, blocks * size, dtype=torch.uint8)
    elif out.dtype != torch.uint8 or tuple(out.shape) != (rows, blocks * size):
        raise ValueError(
            f"{format_name}: out must be uint8 [{rows}, {blocks * size}], got {out.dtype} {list(out.shape)}"
        )
    return out.view(rows, blocks, size)


def _put_nibbles(nibbles: torch.Tensor, out: torch.Tensor) -> None:
    """nibbles [N, K] to out [N, blocks, bytes]: byte j of each 16 holds the elements j and j + 16 of 32."""
    halves = split_last(nibbles, -1, 2, 16)
    packed = halves[:, :, 0] | (halves[:, :, 1] << 4)
    out.copy_(packed.view(out.shape))


def _check(format_name: str, nibbles: torch.Tensor, scales: torch.Tensor, elements: int, of_block: int) -> None:
    if nibbles.dim() != 2 or nibbles.dtype != torch.uint8 or nibbles.shape[1] % elements:
        raise ValueError(
            f"{format_name}: nibbles must be uint8 [N, K] with K a multiple of {elements}, got {nibbles.dtype} "
            f"{list(nibbles.shape)}"
        )
    shape = (nibbles.shape[0], nibbles.shape[1] // elements * of_block)
    if scales.dtype != torch.uint8 or tuple(scales.shape) != shape:
        raise ValueError(
            f"{format_name}: the scales' bytes must be uint8 {list(shape)}, got {scales.dtype} {list(scales.shape)}"
        )
