"""GGUF's legacy blocks, taken apart by hand: 32 consecutive elements of a row share one block.

| format | bytes | layout | element |
|---|---|---|---|
| gguf_q4_0 | 18 | float16 d; 16 bytes of nibbles | d * (nibble - 8) |
| gguf_q4_1 | 20 | float16 d; float16 m; 16 bytes of nibbles | d * nibble + m |
| gguf_q8_0 | 34 | float16 d; 32 int8 | d * int8 |

Byte j of the nibbles holds element j in its low half and element j + 16 in its high half. Little-endian throughout.
"""

import torch

BLOCK_ELEMENTS = 32

BLOCK_BYTES: dict[str, int] = {"gguf_q4_0": 18, "gguf_q4_1": 20, "gguf_q8_0": 34}


def _halves(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte ``start`` of each block, as float32 [..., 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The 32 nibbles that begin at byte ``start`` of each block, as float32 [..., 32]."""
    packed = blocks[..., start : start + 16]
    return torch.cat([packed & 15, packed >> 4], dim=-1).float()


def dequantize_blocks(format_name: str, blocks: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K / 32 * block bytes] of a blocked format to float32 [N, K]."""
    size = BLOCK_BYTES[format_name]
    rows = blocks.shape[0]
    count = blocks.shape[1] // size
    parts = blocks.reshape(rows, count, size)
    if format_name == "gguf_q4_0":
        values = _halves(parts, 0) * (_nibbles(parts, 2) - 8.0)
    elif format_name == "gguf_q4_1":
        values = _halves(parts, 0) * _nibbles(parts, 4) + _halves(parts, 2)
    else:
        values = _halves(parts, 0) * parts[..., 2:].contiguous().view(torch.int8).float()
    return values.reshape(rows, count * BLOCK_ELEMENTS)
