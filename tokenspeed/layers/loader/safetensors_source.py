"""A folder of safetensors files, one or several with an index."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from tokenspeed.layers.loader.source import MappedFile
from tokenspeed.layers.weights import WeightSpec
from tokenspeed.recipes.model_config import CheckpointError
from tokenspeed.recipes.safetensors_file import checkpoint_files, read_safetensors_header
from tokenspeed_kernel.quantized import QuantizedTensor

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_FORMATS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class _Entry:
    file: MappedFile
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsSource:
    """Weights as they lie in ``folder``: bfloat16, float16 and float32 matrices are read in place."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._entries: dict[str, _Entry] = {}
        for path in checkpoint_files(folder):
            self._add_file(MappedFile(path))

    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def matrix(self, spec: WeightSpec) -> QuantizedTensor:
        entry = self._entries[spec.name]
        data = entry.file.view(entry.offset, entry.nbytes, entry.dtype).view(entry.shape)
        rows, columns = entry.shape
        return QuantizedTensor(
            format=_FORMATS[entry.dtype],
            shape=(rows, columns),
            planes={"data": data},
            source=f"{entry.file.path.name}:{spec.name}",
        )

    def vector(self, spec: WeightSpec) -> torch.Tensor:
        entry = self._entries[spec.name]
        return entry.file.view(entry.offset, entry.nbytes, entry.dtype).to(torch.float32, copy=True)

    def rotary_factors(self) -> torch.Tensor | None:
        return None

    def _add_file(self, file: MappedFile) -> None:
        for name, tensor in read_safetensors_header(file.path).items():
            dtype = _DTYPES.get(tensor.dtype)
            if dtype is None:
                raise CheckpointError(
                    f"{file.path}: {name} is stored as {tensor.dtype}; supported are {', '.join(_DTYPES)}: "
                    "use an unquantised checkpoint or a GGUF file"
                )
            if tensor.nbytes != math.prod(tensor.shape) * dtype.itemsize:
                raise CheckpointError(
                    f"{file.path}: {name} of shape {list(tensor.shape)} cannot take {tensor.nbytes} bytes; the file is "
                    "damaged: download it again"
                )
            if name in self._entries:
                raise CheckpointError(
                    f"{file.path}: {name} is in {self._entries[name].file.path} too; remove one of the files"
                )
            self._entries[name] = _Entry(file, dtype, tensor.shape, tensor.offset, tensor.nbytes)
