"""Quantised matrices of safetensors checkpoints turned into formats that kernels take, a piece of rows at a time.

| stored as | becomes | an element |
|---|---|---|
| int4 under scales | gguf_q4_0 | unchanged |
| int4 under scales with zero points | gguf_q4_1 | scale * quant + minimum: -zero point * scale, rounded as below |
| int8 under scales | gguf_q8_0 | unchanged |
| fp8 (e4m3) under scales | bfloat16 | element * scale in float32, rounded to bfloat16 |

A block's scale and minimum are float16. Most scales are one already: a bfloat16 between 2^-17 and 65504 always is.
Others become the nearest, which moves an element by 2^-11 of itself, or by 2^-25 a step of the integer where the scale
lies below 2^-14: far less than the step it was quantised with. A scale that no float16 comes near (infinite, above
65504, NaN) is refused.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tokenspeed.recipes.model_config import CheckpointError
from tokenspeed.recipes.quantization import BLOCK_COLUMNS, WeightScheme
from tokenspeed_kernel.gguf_packing import pack_blocks

PIECE_ELEMENTS = 1 << 20
"""Elements converted at a time: what a conversion takes beside source and result is some bytes for each."""


@dataclass(frozen=True, kw_only=True)
class StoredMatrix:
    """The tensors of one quantised matrix [rows, columns].

    Attributes:
        values: int32 [rows, words], int8 or float8_e4m3fn [rows, columns].
        scale, zero_point: as the checkpoint has them.
        where: file and weight, for messages.
    """

    scheme: WeightScheme
    shape: tuple[int, int]
    values: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    where: str


def convert(matrix: StoredMatrix, rows: tuple[int, int], columns: tuple[int, int], out: torch.Tensor) -> None:
    """Writes the rows and columns (start, stop) of ``matrix`` to ``out``: uint8 blocks or bfloat16 [rows, ...].

    Raises CheckpointError where the columns would cut a block, or a scale is not finite or too large.
    """
    if matrix.scheme.kind == "fp8":
        _to_bfloat16(matrix, rows, columns, out)
    else:
        _to_blocks(matrix, rows, columns, out)


def _pieces(rows: tuple[int, int], columns: int) -> Iterator[tuple[int, int]]:
    step = max(1, PIECE_ELEMENTS // columns)
    for start in range(*rows, step):
        yield start, min(rows[1], start + step)


def _to_blocks(matrix: StoredMatrix, rows: tuple[int, int], columns: tuple[int, int], out: torch.Tensor) -> None:
    first, last = columns
    if first % BLOCK_COLUMNS or last % BLOCK_COLUMNS:
        raise CheckpointError(
            f"{matrix.where}: columns {first} to {last} would cut a block of {BLOCK_COLUMNS}; divide the model among "
            "fewer ranks"
        )
    scales = _half(matrix, matrix.scale.float().reshape(-1, matrix.scale.shape[-1] if matrix.scale.dim() == 2 else 1))
    minimums = None
    if matrix.zero_point is not None:
        minimums = _half(matrix, -_zero_points(matrix.zero_point, scales.shape) * scales.float())
    for start, stop in _pieces(rows, last - first):
        pack_blocks(
            matrix.scheme.resident,
            _quants(matrix, (start, stop), columns),
            _per_block(matrix, scales, (start, stop), columns),
            None if minimums is None else _per_block(matrix, minimums, (start, stop), columns),
            out=out[start - rows[0] : stop - rows[0]],
        )


def _half(matrix: StoredMatrix, values: torch.Tensor) -> torch.Tensor:
    half = values.to(torch.float16)
    if not bool(torch.isfinite(half).all()):
        worst = values[~torch.isfinite(half)][0].item()
        raise CheckpointError(
            f"{matrix.where}: has a scale of {worst:g}, which is beyond a float16; the checkpoint is damaged, or of a "
            "model that only its unquantised checkpoint can serve"
        )
    return half


def _zero_points(stored: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Zero points of unsigned int4 as float32 of ``shape`` [rows, groups]. Packed ones hold eight rows in a word, each
    plus 8; bytes are signed."""
    if stored.dtype == torch.int8:
        return stored.float().view(shape) + 8.0
    shifts = torch.arange(0, 32, 4, dtype=torch.int32).view(1, 8, 1)
    return ((stored.unsqueeze(1) >> shifts) & 15).flatten(0, 1)[: shape[0]].float()


def _quants(matrix: StoredMatrix, rows: tuple[int, int], columns: tuple[int, int]) -> torch.Tensor:
    """The integers as ``pack_blocks`` takes them: uint8 of 4 bits, or int8."""
    part = matrix.values[rows[0] : rows[1]]
    if part.dtype == torch.int8:
        return part[:, columns[0] : columns[1]].contiguous()
    # A word's bytes are in the order of its fields: little-endian, as everything in such a file.
    stored = part.view(torch.uint8)
    if matrix.scheme.kind == "int8":
        return (stored[:, columns[0] : columns[1]] ^ 128).view(torch.int8)
    stored = stored[:, columns[0] // 2 : columns[1] // 2]
    return torch.stack([stored & 15, stored >> 4], dim=-1).flatten(1)


def _per_block(
    matrix: StoredMatrix, values: torch.Tensor, rows: tuple[int, int], columns: tuple[int, int]
) -> torch.Tensor:
    """Scales or minimums [rows or 1, groups or 1] as one for each block of the piece."""
    first, last = columns[0] // BLOCK_COLUMNS, columns[1] // BLOCK_COLUMNS
    if matrix.scheme.strategy != "group":
        part = values if matrix.scheme.strategy == "tensor" else values[rows[0] : rows[1]]
        return part.expand(rows[1] - rows[0], last - first)
    return values[rows[0] : rows[1], torch.arange(first, last) * BLOCK_COLUMNS // matrix.scheme.group]


def _to_bfloat16(matrix: StoredMatrix, rows: tuple[int, int], columns: tuple[int, int], out: torch.Tensor) -> None:
    scale = matrix.scale.float()
    if not bool(torch.isfinite(scale).all()):
        raise CheckpointError(f"{matrix.where}: has a scale that is not finite; the checkpoint is damaged")
    for start, stop in _pieces(rows, columns[1] - columns[0]):
        values = widened(matrix.values[start:stop, columns[0] : columns[1]])
        _scale(matrix, scale, (start, stop), columns, values)
        out[start - rows[0] : stop - rows[0]] = values


def widened(values: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn as float32, a copy; several times as fast as torch has it on the CPU.

    Sign, exponent and significand move to where a float16 has them, which divides the value by 2^8 (subnormals
    included), as the bias of its exponent is greater by 8.
    """
    stored = values.view(torch.uint8)
    bits = stored.to(torch.int16)
    wide = (((bits & 0x7F) << 7) | ((bits & 0x80) << 8)).view(torch.float16).float().mul_(256.0)
    is_nan = (stored & 0x7F) == 0x7F
    return wide.masked_fill_(is_nan, torch.nan) if bool(is_nan.any()) else wide


def _scale(
    matrix: StoredMatrix, scale: torch.Tensor, rows: tuple[int, int], columns: tuple[int, int], values: torch.Tensor
) -> None:
    """Multiplies the piece ``values`` float32 by its scales, in place."""
    if matrix.scheme.strategy == "tensor":
        values *= scale.reshape(1, 1)
        return
    if matrix.scheme.strategy == "channel":
        values *= scale.reshape(-1, 1)[rows[0] : rows[1]]
        return
    height, width = matrix.scheme.block
    blocks = torch.arange(*columns) // width
    for block_row in range(rows[0] // height, -(-rows[1] // height)):
        first, last = max(rows[0], block_row * height), min(rows[1], (block_row + 1) * height)
        values[first - rows[0] : last - rows[0]] *= scale[block_row, blocks]
