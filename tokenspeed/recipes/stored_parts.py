"""The tensors that make one quantised weight: do they fit each other, and what shape has it? No torch here."""

import math
import struct
from dataclasses import dataclass
from pathlib import Path

from tokenspeed.recipes.checkpoint_error import CheckpointError
from tokenspeed.recipes.safetensors_file import SafetensorsTensor
from tokenspeed.recipes.weight_scheme import BYTES, Quantization, WeightScheme

FLOAT_DTYPES = ("F32", "BF16", "F16")
"""What a tensor that is not quantised may be."""

_ELEMENTS = {"int8": ("I8",), "fp8": ("F8_E4M3",), "mxfp4": BYTES, "nvfp4": BYTES}
"""What the elements are stored as where no word holds several."""

_SCALES = {
    "int4": FLOAT_DTYPES,
    "int8": FLOAT_DTYPES,
    "fp8": (*FLOAT_DTYPES, "F8_E8M0"),
    "mxfp4": ("U8", "F8_E8M0"),
    "nvfp4": ("F8_E4M3",),
}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor and the file it lies in."""

    path: Path
    name: str
    tensor: SafetensorsTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def __str__(self) -> str:
        return f"{self.path}: {self.name}"


def shape_of(
    values: StoredTensor, stated: StoredTensor | None, scheme: WeightScheme, quantization: Quantization
) -> tuple[int, ...]:
    """(rows, columns), or (experts, rows, columns), of the weight that has the elements ``values``.

    ``stated`` holds (rows, columns) too, where a word may be filled in part. Refuses elements of another kind than the
    configuration says.
    """
    words = scheme.layout != "rows" or values.name.endswith("weight_packed")
    four_bit_floats = scheme.kind in ("mxfp4", "nvfp4")
    expected = ("I32",) if words and not four_bit_floats else _ELEMENTS.get(scheme.kind, ())
    dimensions = 4 if values.name.endswith("_blocks") else 2
    if (
        values.tensor.dtype not in expected
        or len(values.shape) != dimensions
        or min(values.shape) < 1
        or (words and scheme.kind == "fp8")
    ):
        raise CheckpointError(
            f"{values} is stored as {values.tensor.dtype} {list(values.shape)}, {quantization.where} says "
            f"{scheme.kind}; take the config.json that belongs to the weights"
        )
    per_word = 32 // scheme.bits
    if dimensions == 4:
        return (*values.shape[:2], 2 * values.shape[2] * values.shape[3])
    first, second = values.shape
    if four_bit_floats:
        return _whole_groups(values, (first, 2 * second), scheme)
    if scheme.layout == "gptq":
        return second, first * per_word
    if scheme.layout == "awq":
        return second * per_word, first
    if not words:
        return first, second
    return first, _columns(values, stated, per_word)


def _whole_groups(values: StoredTensor, shape: tuple[int, int], scheme: WeightScheme) -> tuple[int, int]:
    if shape[1] % scheme.group:
        raise CheckpointError(
            f"{values} has {shape[1]} columns; {scheme.kind} has groups of {scheme.group}: the file is damaged: "
            "download it again"
        )
    return shape


def _columns(values: StoredTensor, stated: StoredTensor | None, per_word: int) -> int:
    rows, words = values.shape
    if stated is None:
        return words * per_word
    sizes = _integers(stated)
    if len(sizes) != 2 or sizes[0] != rows or -(-sizes[1] // per_word) != words:
        raise CheckpointError(
            f"{values} of shape {list(values.shape)} does not fit {stated.name}, which says {sizes} ({per_word} "
            "columns in a word); the file is damaged: download it again"
        )
    return sizes[1]


def _integers(stored: StoredTensor) -> list[int]:
    """The elements of a small tensor of integers."""
    letter = {"I64": "q", "I32": "i"}.get(stored.tensor.dtype)
    if letter is None or stored.tensor.nbytes > 64:
        raise CheckpointError(f"{stored} should hold the weight's two sizes; the file is damaged: download it again")
    with stored.path.open("rb") as file:
        file.seek(stored.tensor.offset)
        data = file.read(stored.tensor.nbytes)
    return list(struct.unpack(f"<{math.prod(stored.shape)}{letter}", data))


def check_scale(scale: StoredTensor, shape: tuple[int, ...], scheme: WeightScheme, where: Quantization) -> None:
    """Refuses scales of another type, or of another shape than a weight of ``shape`` has under the scheme."""
    *outer, columns = shape
    rows = outer[-1]
    allowed = _SCALES[scheme.kind]
    if scale.tensor.dtype not in allowed:
        raise CheckpointError(
            f"{scale} is stored as {scale.tensor.dtype}; scales may be {', '.join(allowed)}: use a checkpoint with "
            "such scales"
        )
    what: str = scheme.strategy
    if scheme.strategy == "tensor":
        right, expected = math.prod(scale.shape) == 1, "[1]"
    elif scheme.layout != "rows":
        groups = -(-columns // scheme.group) if scheme.strategy == "group" else 1
        right, expected = scale.shape == (groups, rows), str([groups, rows])
        what = f"group (group_size {scheme.group})" if scheme.strategy == "group" else "channel (group_size -1)"
    elif scheme.strategy == "channel":
        right, expected = scale.shape in ((rows,), (rows, 1)), f"[{rows}, 1]"
    else:
        height, width = (1, scheme.group) if scheme.strategy == "group" else scheme.block
        grid = (*outer[:-1], -(-rows // height), -(-columns // width))
        right = scale.shape == grid and (scheme.strategy == "block" or columns % width == 0)
        expected = str(list(grid))
        what = f"group (group_size {width})" if scheme.strategy == "group" else f"block ([{height}, {width}])"
    if not right:
        raise CheckpointError(
            f"{scale} has shape {list(scale.shape)}; with the strategy {what} of {where.where} a weight of "
            f"{' x '.join(map(str, shape))} has {expected}: take the config.json that belongs to the weights"
        )


def check_zero_point(
    zero_point: StoredTensor, scale: StoredTensor, shape: tuple[int, ...], scheme: WeightScheme
) -> None:
    """Zero points lie as the scales do, as bytes, or with several rows in a word."""
    per_word = 32 // scheme.bits
    if scheme.layout != "rows":
        expected = {"I32": (scale.shape[0], -(-shape[0] // per_word))}
    else:
        columns = scale.shape[1] if len(scale.shape) == 2 else 1
        expected = {"I32": (-(-shape[0] // per_word), columns), "I8": (shape[0], columns)}
    if zero_point.shape != expected.get(zero_point.tensor.dtype):
        choices = " or ".join(f"{dtype} {list(size)}" for dtype, size in expected.items())
        raise CheckpointError(
            f"{zero_point} is {zero_point.tensor.dtype} {list(zero_point.shape)}; beside scales of shape "
            f"{list(scale.shape)} it should be {choices}: the file is damaged, or of another version: download it again"
        )


def check_order(order: StoredTensor, columns: int) -> None:
    """The group of each column is one integer a column."""
    if order.tensor.dtype not in ("I32", "I64") or order.shape != (columns,):
        raise CheckpointError(
            f"{order} is {order.tensor.dtype} {list(order.shape)}; it has the group of each column and should be I32 "
            f"[{columns}]: the file is damaged, or of another version: download it again"
        )


def check_whole(whole: StoredTensor) -> None:
    """The scale of a whole matrix is one float32."""
    if whole.tensor.dtype != "F32" or math.prod(whole.shape) != 1:
        raise CheckpointError(
            f"{whole} is {whole.tensor.dtype} {list(whole.shape)}; it has the scale of the whole matrix and should be "
            "F32 [1]: the file is damaged, or of another version: download it again"
        )
