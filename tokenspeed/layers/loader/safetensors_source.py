"""A folder of safetensors files, one or several with an index, quantised or not."""

from collections.abc import Sequence
from pathlib import Path

import torch

from tokenspeed.layers.huge_memory import huge_zeros
from tokenspeed.layers.loader.conversion import convert
from tokenspeed.layers.loader.source import MappedFile
from tokenspeed.layers.loader.stored_elements import StoredMatrix
from tokenspeed.layers.weights import WeightSpec
from tokenspeed.recipes.stored_parts import StoredTensor
from tokenspeed.recipes.stored_weights import StoredWeight, stored_weights
from tokenspeed.recipes.weight_scheme import Quantization
from tokenspeed_kernel.quantized import QuantizedTensor

_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_FORMATS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class SafetensorsSource:
    """Weights as they lie in ``folder``: bfloat16, float16 and float32 matrices are read in place, quantised ones
    become blocks or bfloat16 (see conversion.py), and what they are made of is given back to the system at once.
    Tensors that match one of ``ignored`` are as if they were not there."""

    def __init__(self, folder: Path, quantization: Quantization | None, ignored: Sequence[str] = ()) -> None:
        self.where = str(folder)
        self._weights = stored_weights(folder, quantization, ignored)
        paths = {part.path for weight in self._weights.values() for part in weight.parts}
        self._files = {path: MappedFile(path) for path in sorted(paths)}
        self._converted = _ConvertedMemory(
            sum(weight.resident_bytes for weight in self._weights.values() if weight.scheme is not None)
        )

    def names(self) -> frozenset[str]:
        return frozenset(self._weights)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights[name].shape

    def matrix(self, spec: WeightSpec) -> QuantizedTensor:
        values = self._weights[spec.name].values
        rows, columns = spec.shape
        data = self._view(values).view(rows, columns)
        return QuantizedTensor(
            format=_FORMATS[data.dtype],
            shape=(rows, columns),
            planes={"data": data},
            source=f"{values.path.name}:{spec.name}",
        )

    def converted(self, spec: WeightSpec, /) -> QuantizedTensor | None:
        weight = self._weights[spec.name]
        if weight.scheme is None:
            return None
        rows = spec.row_ranges
        columns = spec.shard.column_range(spec.shape[1])
        shape = (sum(stop - start for start, stop in rows), columns[1] - columns[0])
        plane = self._converted.take(shape[0], weight.scheme.row_bytes(spec.shape[1]) * shape[1] // spec.shape[1])
        order = None if spec.row_order is None else spec.row_order(shape[0])
        return self._convert(weight, spec, rows, columns, plane, order)

    def _convert(
        self,
        weight: StoredWeight,
        spec: WeightSpec,
        rows: Sequence[tuple[int, int]],
        columns: tuple[int, int],
        plane: torch.Tensor,
        order: torch.Tensor | None,
    ) -> QuantizedTensor:
        """Those rows and columns (start, stop) of a quantised weight, made in ``plane``; its pages of the file are
        given back."""
        assert weight.scheme is not None, "whoever calls looks for it"
        assert weight.scale is not None, "stored_weights looks for it"
        matrix = StoredMatrix(
            scheme=weight.scheme,
            shape=(spec.shape[0], spec.shape[1]),
            values=self._view(weight.values),
            scale=self._view(weight.scale),
            zero_point=self._maybe(weight.zero_point),
            order=self._maybe(weight.order),
            whole=self._maybe(weight.whole),
            where=f"{weight.values.path}: {spec.name}",
        )
        resident = matrix.resident
        if resident == "bfloat16":
            plane = plane.view(torch.bfloat16)
        convert(matrix, rows, columns, plane, order)
        del matrix
        self.forget(spec.name)
        return QuantizedTensor(
            format=resident,
            shape=(plane.shape[0], columns[1] - columns[0]),
            planes={"data" if resident == "bfloat16" else "blocks": plane},
            source=f"{weight.values.path.name}:{weight.values.name}",
        )

    def is_converted(self, name: str) -> bool:
        return self._weights[name].scheme is not None

    def vector(self, spec: WeightSpec) -> torch.Tensor:
        weight = self._weights[spec.name]
        if weight.scheme is not None and len(spec.shape) == 2:
            rows, columns = spec.shape
            plane = torch.empty(rows, weight.scheme.row_bytes(columns), dtype=torch.uint8)
            return self._convert(weight, spec, [(0, rows)], (0, columns), plane, None).dequantize()
        dtype = torch.int32 if spec.below else torch.float32
        return self._view(weight.values).to(dtype, copy=True).view(spec.shape)

    def forget(self, name: str) -> None:
        for part in self._weights[name].parts:
            self._files[part.path].forget(part.tensor.offset, part.tensor.nbytes)

    def reuse(self) -> None:
        self._converted.reuse()

    def rotary_factors(self) -> torch.Tensor | None:
        return None

    def _maybe(self, stored: StoredTensor | None) -> torch.Tensor | None:
        return None if stored is None else self._view(stored)

    def _view(self, stored: StoredTensor) -> torch.Tensor:
        tensor = stored.tensor
        flat = self._files[stored.path].view(tensor.offset, tensor.nbytes, _DTYPES[tensor.dtype])
        return flat.view(tensor.shape)


class _ConvertedMemory:
    """One piece of memory that converted matrices fill one behind the other, in the order of the model: neighbours
    (q, k and v; gate and up) then join without a copy."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = huge_zeros(nbytes) if nbytes else torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, rows: int, row_bytes: int) -> torch.Tensor:
        """The next uint8 [rows, row_bytes], zeros."""
        start, self._used = self._used, self._used + rows * row_bytes
        return self._bytes[start : self._used].view(rows, row_bytes)

    def reuse(self) -> None:
        """Takes everything back that was given out."""
        self._bytes[: self._used].zero_()
        self._used = 0
