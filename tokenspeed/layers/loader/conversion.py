"""Quantised matrices of safetensors checkpoints turned into formats that kernels take, a piece of rows at a time.

| stored as | becomes | an element |
|---|---|---|
| integers of 4 bits under scales | gguf_q4_0 | unchanged |
| the same with zero points (AWQ, GPTQ) | gguf_q4_1 | scale * quant + minimum: -zero point * scale, rounded as below |
| integers of 8 bits under scales | gguf_q8_0 | unchanged |
| MXFP4 | gguf_mxfp4 | unchanged |
| NVFP4 | nvfp4 | unchanged, but for a float32 quotient where the scale of the whole matrix divides |
| fp8 (e4m3) under scales | fp8_blocks | unchanged |
| what no block holds (WeightScheme.resident) | bfloat16 | element * scale, rounded: by 2^-9 of itself at most |

A block's scale and minimum are float16. Most scales are one already: a bfloat16 between 2^-17 and 65504 always is.
Others become the nearest, which moves an element by 2^-11 of itself, or by 2^-25 a step of the integer where the scale
lies below 2^-14: far less than the step it was quantised with. A minimum moves all elements of its group by 2^-11 of
itself: up to a hundredth of a step at the largest zero point, 16. A scale that no float16 comes near (infinite, above
65504, NaN) is refused.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from tokenspeed.layers.loader.stored_elements import PER_WORD_ROWS, IntegerMatrix, StoredMatrix, nibbles, widened
from tokenspeed.recipes.model_config import CheckpointError
from tokenspeed.recipes.weight_scheme import BLOCKS
from tokenspeed_kernel.float_packing import pack_fp8, pack_mxfp4, pack_nvfp4
from tokenspeed_kernel.gguf_blocks import TWICE_E2M1
from tokenspeed_kernel.gguf_packing import pack_blocks

PIECE_ELEMENTS = 1 << 20
"""Elements converted at a time: what a conversion takes beside source and result is some bytes for each."""

Range = tuple[int, int]
Piece = Callable[[Range, torch.Tensor], None]
"""Writes the rows (start, stop) to a tensor [stop - start, ...]."""


def convert(
    matrix: StoredMatrix,
    rows: Sequence[Range],
    columns: Range,
    out: torch.Tensor,
    order: torch.Tensor | None = None,
) -> None:
    """Writes the rows, all those ranges of them, and columns (start, stop) of ``matrix`` to ``out``: uint8 blocks or
    bfloat16 [rows, ...].

    ``order`` int64 [rows]: row i of ``out`` is row order[i] of those. Raises CheckpointError where the columns would
    cut a block, a scale is not finite or too large, or what the scheme says of zero points or groups does not hold.
    """
    resident = matrix.resident
    if resident != "bfloat16" and (columns[0] % BLOCKS[resident][0] or columns[1] % BLOCKS[resident][0]):
        raise CheckpointError(
            f"{matrix.where}: columns {columns[0]} to {columns[1]} would cut a block of {BLOCKS[resident][0]}; divide "
            "the model among fewer ranks"
        )
    write = _piece_of(matrix, columns)
    places = None if order is None else _inverse(order)
    last = 0
    for start, stop in (piece for each in rows for piece in _pieces(each, columns[1] - columns[0])):
        first, last = last, last + stop - start
        if places is None:
            write((start, stop), out[first:last])
            continue
        part = torch.empty_like(out[first:last])
        write((start, stop), part)
        out[places[first:last]] = part


def _pieces(rows: Range, columns: int) -> Iterator[Range]:
    step = max(1, PIECE_ELEMENTS // columns)
    if step > PER_WORD_ROWS:
        step -= step % PER_WORD_ROWS
    for start in range(*rows, step):
        yield start, min(rows[1], start + step)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0])
    return places


def _piece_of(matrix: StoredMatrix, columns: Range) -> Piece:
    """What writes a piece of rows in the format that the matrix becomes."""
    kind = matrix.scheme.kind
    if kind == "mxfp4":
        return _mxfp4(matrix, columns)
    if kind == "nvfp4":
        return _nvfp4(matrix, columns)
    if kind == "fp8":
        return _floats_of_eight_bits(matrix, columns)
    integers = IntegerMatrix(matrix)
    return _integers(integers, columns) if matrix.resident == "bfloat16" else _blocks(integers, columns)


# ---------------------------------------------------------------- integers


def _blocks(matrix: IntegerMatrix, columns: Range) -> Piece:
    resident, where = matrix.stored.resident, matrix.stored.where
    scales = _half(where, matrix.scales)
    minimums = None if matrix.zero_points is None else _half(where, -matrix.zero_points * scales.float())
    group = matrix.groups[columns[0] : columns[1] : BLOCKS[resident][0]]

    def per_block(values: torch.Tensor, rows: Range) -> torch.Tensor:
        part = values if values.shape[0] == 1 else values[rows[0] : rows[1]]
        return part[:, group].expand(rows[1] - rows[0], -1)

    def piece(rows: Range, out: torch.Tensor) -> None:
        quants = matrix.quants(rows, columns)
        if resident == "gguf_q8_0":
            quants = (quants ^ 128).view(torch.int8)
        low = None if minimums is None else per_block(minimums, rows)
        pack_blocks(resident, quants, per_block(scales, rows), low, out=out)

    return piece


def _half(where: str, values: torch.Tensor) -> torch.Tensor:
    half = values.to(torch.float16)
    if not bool(torch.isfinite(half).all()):
        worst = values[~torch.isfinite(half)][0].item()
        raise CheckpointError(
            f"{where}: has a scale of {worst:g}, which is beyond a float16; the checkpoint is damaged, or of a model "
            "that only its unquantised checkpoint can serve"
        )
    return half


def _integers(matrix: IntegerMatrix, columns: Range) -> Piece:
    scales, zeros = _finite(matrix.stored.where, matrix.scales), matrix.zero_points
    group = matrix.groups[columns[0] : columns[1]]

    def per_column(values: torch.Tensor, rows: Range) -> torch.Tensor:
        return (values if values.shape[0] == 1 else values[rows[0] : rows[1]])[:, group]

    def piece(rows: Range, out: torch.Tensor) -> None:
        quants = matrix.quants(rows, columns).float()
        quants -= matrix.middle if zeros is None else per_column(zeros, rows)
        out.copy_(quants.mul_(per_column(scales, rows)))

    return piece


def _finite(where: str, scale: torch.Tensor) -> torch.Tensor:
    wide = scale.float()
    if not bool(torch.isfinite(wide).all()):
        raise CheckpointError(f"{where}: has a scale that is not finite; the checkpoint is damaged")
    return wide


# ---------------------------------------------------------------- floats


def _mxfp4(matrix: StoredMatrix, columns: Range) -> Piece:
    exponents = matrix.scale.view(torch.uint8).reshape(matrix.shape[0], -1)
    if bool((exponents == 255).any()):
        raise CheckpointError(f"{matrix.where}: has a scale that is not a number; the checkpoint is damaged")
    values = matrix.values.reshape(matrix.shape[0], -1)

    def piece(rows: Range, out: torch.Tensor) -> None:
        scales = exponents[rows[0] : rows[1], columns[0] // 32 : columns[1] // 32]
        pack_mxfp4(nibbles(values, rows, columns), scales, out=out)

    return piece


def _nvfp4(matrix: StoredMatrix, columns: Range) -> Piece:
    """In blocks, or in bfloat16 where the columns are no whole blocks."""
    assert matrix.whole is not None, "stored_weights looks for it"
    whole = matrix.whole.reshape(1)
    if matrix.scheme.whole == "weight_global_scale":
        whole = 1.0 / whole
    scales = _finite(matrix.where, matrix.scale)
    _finite(matrix.where, whole)
    first, last = columns[0] // 16, -(-columns[1] // 16)

    def blocks(rows: Range, out: torch.Tensor) -> None:
        part = matrix.scale.view(torch.uint8)[rows[0] : rows[1], first:last]
        pack_nvfp4(nibbles(matrix.values, rows, columns), part, whole, out=out)

    def dense(rows: Range, out: torch.Tensor) -> None:
        table = torch.tensor(TWICE_E2M1, dtype=torch.float32)
        part = (scales[rows[0] : rows[1], first:last] * whole * 0.5).repeat_interleave(16, dim=1)
        skipped = columns[0] - 16 * first
        part = part[:, skipped : skipped + columns[1] - columns[0]]
        out.copy_(table[nibbles(matrix.values, rows, columns).int()] * part)

    return dense if matrix.resident == "bfloat16" else blocks


def _floats_of_eight_bits(matrix: StoredMatrix, columns: Range) -> Piece:
    """In blocks, or in bfloat16 where the columns or those of a scale are no whole blocks."""
    scale = _finite(matrix.where, matrix.scale)

    def blocks(rows: Range, out: torch.Tensor) -> None:
        part = matrix.values[rows[0] : rows[1], columns[0] : columns[1]]
        pack_fp8(part, _scales_of(matrix, scale, rows, columns), out=out)

    def dense(rows: Range, out: torch.Tensor) -> None:
        values = widened(matrix.values[rows[0] : rows[1], columns[0] : columns[1]])
        _scale(matrix, scale, rows, columns, values)
        out.copy_(values)

    return dense if matrix.resident == "bfloat16" else blocks


def _scales_of(matrix: StoredMatrix, scale: torch.Tensor, rows: Range, columns: Range) -> torch.Tensor:
    """float32 [rows, blocks]: the scale of each block of the piece."""
    width = BLOCKS[matrix.resident][0]
    shape = (rows[1] - rows[0], (columns[1] - columns[0]) // width)
    if matrix.scheme.strategy == "tensor":
        return scale.reshape(1, 1).expand(shape)
    if matrix.scheme.strategy == "channel":
        return scale.reshape(-1, 1)[rows[0] : rows[1]].expand(shape)
    height, wide = matrix.scheme.block
    places = torch.arange(columns[0], columns[1], width) // wide
    return scale[torch.arange(*rows) // height][:, places]


def _scale(matrix: StoredMatrix, scale: torch.Tensor, rows: Range, columns: Range, values: torch.Tensor) -> None:
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
