"""A folder of safetensors files, one or several with an index."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from tokenspeed.layers.loader.source import MappedFile
from tokenspeed.layers.weights import WeightSpec
from tokenspeed.recipes.model_config import CheckpointError
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
        for path in _files(folder):
            self._read_header(MappedFile(path))

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

    def _read_header(self, file: MappedFile) -> None:
        size = file.bytes.numel()
        try:
            length = struct.unpack("<Q", bytes(file.bytes[:8].tolist()))[0]
            if 8 + length > size:
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(file.bytes[8 : 8 + length].numpy().tobytes())
            header.pop("__metadata__", None)
            for name, fields in header.items():
                self._add(file, name, fields, start=8 + length)
        except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{file.path}: damaged safetensors header ({error}); download the file again"
            ) from error

    def _add(self, file: MappedFile, name: str, fields: dict[str, object], start: int) -> None:
        shape, offsets = fields["shape"], fields["data_offsets"]
        if not isinstance(shape, list) or not isinstance(offsets, list):
            raise ValueError(f"{name}: shape and data_offsets should be lists")
        dtype = _DTYPES.get(str(fields["dtype"]))
        if dtype is None:
            raise CheckpointError(
                f"{file.path}: {name} is stored as {fields['dtype']}; supported are {', '.join(_DTYPES)}: "
                "use an unquantised checkpoint or a GGUF file"
            )
        begin, end = offsets
        elements = 1
        for extent in shape:
            elements *= extent
        if end - begin != elements * dtype.itemsize or begin < 0 or start + end > file.bytes.numel():
            raise CheckpointError(
                f"{file.path}: {name} of shape {shape} should take bytes {begin} to {end}, the file does not hold "
                "them; it is cut short or damaged: download it again"
            )
        if name in self._entries:
            raise CheckpointError(
                f"{file.path}: {name} is in {self._entries[name].file.path} too; remove one of the files"
            )
        self._entries[name] = _Entry(file, dtype, tuple(shape), start + begin, end - begin)


def _files(folder: Path) -> list[Path]:
    """The files of the checkpoint: those that the index names, else model.safetensors, else all there are."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index}: damaged index ({error}); download it again") from error
        paths = [folder / name for name in names]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise CheckpointError(f"{folder}: {', '.join(missing)} named by {index.name} is missing; download it again")
        return paths
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(f"{folder}: holds no *.safetensors file; convert the checkpoint to safetensors")
    return paths
