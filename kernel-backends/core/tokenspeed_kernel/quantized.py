"""Weights as kernels take them: a format, a shape, and planes of bytes that may lie in a read-only file mapping."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tokenspeed_kernel.gguf_blocks import BLOCK_BYTES, BLOCK_ELEMENTS, dequantize_blocks
from tokenspeed_kernel.signature import WEIGHT_FORMATS, TensorFormat

DENSE_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class WeightError(ValueError):
    """A weight that does not fit its format; the message names its source."""


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A weight matrix [N, K] (N outputs, K inputs, row-major), dense or in blocks.

    Attributes:
        format: a key of signature.WEIGHT_FORMATS.
        shape: (N, K) in elements.
        planes: dense formats: {"data": [N, K] of the dtype}; blocked formats: {"blocks": uint8 [N, K / block elements *
            block bytes]}, GGUF's as they lie in the file (see gguf_blocks.py). Contiguous. They may be read-only:
            nothing here writes them.
        source: where it came from (file and tensor name), for errors.
    """

    format: str
    shape: tuple[int, int]
    planes: Mapping[str, torch.Tensor]
    source: str

    def __post_init__(self) -> None:
        if self.format not in WEIGHT_FORMATS:
            raise WeightError(f"{self.source}: format {self.format!r} is unknown; use one of {sorted(WEIGHT_FORMATS)}")
        rows, columns = self.shape
        if rows < 0 or columns <= 0:
            raise WeightError(f"{self.source}: shape {self.shape} must be (rows >= 0, columns > 0)")
        if columns % self.block_elements:
            raise WeightError(
                f"{self.source}: {columns} columns do not divide into {self.format} blocks of {self.block_elements}"
            )
        if set(self.planes) != {self._plane_name}:
            raise WeightError(
                f"{self.source}: {self.format} has one plane {self._plane_name!r}, got {sorted(self.planes)}"
            )
        plane, dtype, width = self.plane, torch.uint8, self._row_width(columns)
        if not self.is_blocked:
            dtype = DENSE_DTYPES[self.format]
        if plane.dtype != dtype or tuple(plane.shape) != (rows, width):
            raise WeightError(
                f"{self.source}: plane {self._plane_name!r} of a {self.format} {self.shape} weight must be "
                f"{dtype} [{rows}, {width}], got {plane.dtype} {list(plane.shape)}"
            )
        if not plane.is_contiguous():
            raise WeightError(f"{self.source}: plane {self._plane_name!r} is not contiguous; call .contiguous() on it")

    @classmethod
    def from_dense(cls, data: torch.Tensor, source: str) -> "QuantizedTensor":
        """A float32, bfloat16 or float16 matrix [N, K] as a weight, without a copy. Raises WeightError for other
        dtypes."""
        name = str(data.dtype).removeprefix("torch.")
        if name not in DENSE_DTYPES or data.dim() != 2:
            raise WeightError(f"{source}: {data.dtype} {list(data.shape)} is not a matrix of {sorted(DENSE_DTYPES)}")
        return cls(name, (data.shape[0], data.shape[1]), {"data": data}, source)

    @property
    def is_blocked(self) -> bool:
        """Whether the format is one of blocks."""
        return self.format in BLOCK_BYTES

    @property
    def block_elements(self) -> int:
        """Columns that cannot be taken apart: those of a block, 1 for a dense format."""
        return BLOCK_ELEMENTS.get(self.format, 1)

    @property
    def _plane_name(self) -> str:
        return "blocks" if self.is_blocked else "data"

    @property
    def plane(self) -> torch.Tensor:
        """The one plane all present formats have."""
        return self.planes[self._plane_name]

    @property
    def tensor_format(self) -> TensorFormat:
        """The format for a signature."""
        return WEIGHT_FORMATS[self.format]

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        return sum(plane.numel() * plane.element_size() for plane in self.planes.values())

    def _row_width(self, columns: int) -> int:
        """Plane elements that ``columns`` weight columns take."""
        return columns // self.block_elements * BLOCK_BYTES.get(self.format, 1)

    def _with_plane(self, plane: torch.Tensor, columns: int, source: str) -> "QuantizedTensor":
        return QuantizedTensor(self.format, (plane.shape[0], columns), {self._plane_name: plane}, source)

    def rows(self, start: int, stop: int) -> "QuantizedTensor":
        """Rows start … stop-1, a view. Raises WeightError where they are not all there."""
        if not 0 <= start <= stop <= self.shape[0]:
            raise WeightError(f"{self.source}: rows {start} to {stop} of a weight with {self.shape[0]} rows")
        return self._with_plane(self.plane[start:stop], self.shape[1], f"{self.source}[{start}:{stop}]")

    def select_rows(self, index: torch.Tensor) -> "QuantizedTensor":
        """The rows that ``index`` (integers, 1-dimensional) names, in its order, a copy.

        Raises WeightError for an index out of range.
        """
        if index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
            raise WeightError(f"{self.source}: row index must be 1-dimensional int32 or int64, got {index.dtype}")
        if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < self.shape[0]):
            raise WeightError(
                f"{self.source}: row index from {int(index.min())} to {int(index.max())}, "
                f"but there are rows 0 to {self.shape[0] - 1}"
            )
        return self._with_plane(self.plane[index.long()], self.shape[1], f"{self.source}[selected rows]")

    def columns(self, start: int, stop: int) -> "QuantizedTensor":
        """Columns start … stop-1, a copy. Raises WeightError where they are not all there or would cut a block."""
        if not 0 <= start < stop <= self.shape[1]:
            raise WeightError(f"{self.source}: columns {start} to {stop} of a weight with {self.shape[1]} columns")
        if start % self.block_elements or stop % self.block_elements:
            raise WeightError(
                f"{self.source}: columns {start} to {stop} would cut a {self.format} block; "
                f"use multiples of {self.block_elements}"
            )
        plane = self.plane[:, self._row_width(start) : self._row_width(stop)].contiguous()
        return self._with_plane(plane, stop - start, f"{self.source}[:, {start}:{stop}]")

    @staticmethod
    def concat(parts: Sequence["QuantizedTensor"]) -> "QuantizedTensor":
        """The rows of all parts, one below the other, a copy. Raises WeightError where formats or widths differ."""
        if not parts:
            raise WeightError("concat of no weights; give at least one")
        first = parts[0]
        for part in parts[1:]:
            if part.format != first.format or part.shape[1] != first.shape[1]:
                raise WeightError(
                    f"cannot put {part.source} ({part.format}, {part.shape[1]} columns) below "
                    f"{first.source} ({first.format}, {first.shape[1]} columns); formats and widths must be equal"
                )
        plane = torch.cat([part.plane for part in parts])
        return first._with_plane(plane, first.shape[1], " + ".join(part.source for part in parts))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight as a dense [N, K] tensor of ``dtype``, computed in float32; a copy, except of a dense weight in
        ``dtype``."""
        if not self.is_blocked:
            return self.plane.to(dtype)
        return dequantize_blocks(self.format, self.plane).to(dtype)
