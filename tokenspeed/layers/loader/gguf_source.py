"""One GGUF file, or the parts of a split one; its tensors are read in place, in the format they are stored in."""

from pathlib import Path

import torch

from tokenspeed.layers.huge_memory import huge_zeros
from tokenspeed.layers.loader.gguf_tensors import ROTARY_FACTORS, Composite, named_tensors
from tokenspeed.layers.loader.source import MappedFile, share_of
from tokenspeed.layers.weights import WeightSpec
from tokenspeed.recipes.gguf_file import GgufError, GgufTensor, read_gguf_header
from tokenspeed.recipes.model_config import CheckpointError
from tokenspeed_kernel.quantized import QuantizedTensor

_DENSE = {
    "F32": (torch.float32, "float32"),
    "F16": (torch.float16, "float16"),
    "BF16": (torch.bfloat16, "bfloat16"),
}
_QUANTIZED = {
    "Q4_0": "gguf_q4_0",
    "Q4_1": "gguf_q4_1",
    "Q5_0": "gguf_q5_0",
    "Q5_1": "gguf_q5_1",
    "Q8_0": "gguf_q8_0",
    "MXFP4": "gguf_mxfp4",
    "Q2_K": "gguf_q2_k",
    "Q3_K": "gguf_q3_k",
    "Q4_K": "gguf_q4_k",
    "Q5_K": "gguf_q5_k",
    "Q6_K": "gguf_q6_k",
}


class GgufSource:
    """The tensors of one model under their Hugging Face names."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        try:
            header = read_gguf_header(path)
        except GgufError as error:
            raise CheckpointError(str(error)) from error
        self._files = {file: MappedFile(Path(file)) for file in {tensor.path for tensor in header.tensors.values()}}
        self._factors = header.tensors.get(ROTARY_FACTORS)
        self._tensors, self._composites = named_tensors(header)

    def names(self) -> frozenset[str]:
        return frozenset((*self._tensors, *self._composites))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._composites[name].shape if name in self._composites else self._tensors[name].shape

    def matrix(self, spec: WeightSpec) -> QuantizedTensor:
        return self._rows_of(self._tensors[spec.name])

    def converted(self, spec: WeightSpec, /) -> QuantizedTensor | None:
        composite = self._composites.get(spec.name)
        if composite is None:
            return None
        if composite.kind == "up_projection":
            return self._up_projection(spec, composite)
        whole = [self._rows_of(part) for part in composite.parts]
        experts = composite.shape[0]
        try:
            held, _ = spec.of_experts(experts)
        except ValueError as error:
            raise CheckpointError(f"{self.where}: {error}") from None
        if composite.kind == "rows":
            return share_of(whole[0], spec)
        inner = spec.shape[0] // experts // 2
        first, last = spec.shard.row_range(inner) if spec.sections else (0, inner)
        planes = [part.plane.view(experts, inner, -1)[held.start : held.stop, first:last] for part in whole]
        width, dtype = planes[0].shape[2], planes[0].dtype
        shape = (len(held), 2, last - first, width)
        memory = huge_zeros(len(held) * 2 * (last - first) * width * dtype.itemsize).view(dtype).view(shape)
        for place, plane in enumerate(planes):
            memory[:, place] = plane
        del whole, planes
        self.forget(spec.name)
        return self._made(spec, composite, memory.view(-1, width))

    def is_converted(self, name: str) -> bool:
        return name in self._composites

    def vector(self, spec: WeightSpec) -> torch.Tensor:
        composite = self._composites.get(spec.name)
        if composite is None:
            return self._floats(self._tensors[spec.name]).view(spec.shape)
        parts = [self._floats(part).view(part.shape) for part in composite.parts]
        # Gate and up take turns, as in the checkpoints whose order the model puts right.
        return (parts[0] if len(parts) == 1 else torch.stack(parts, dim=-1)).reshape(spec.shape)

    def forget(self, name: str) -> None:
        composite = self._composites.get(name)
        for tensor in composite.parts if composite else (self._tensors[name],):
            self._files[tensor.path].forget(tensor.offset, tensor.nbytes)

    def reuse(self) -> None:
        """Nothing: what is converted has memory of its own."""

    def rotary_factors(self) -> torch.Tensor | None:
        return None if self._factors is None else self._floats(self._factors)

    def _rows_of(self, tensor: GgufTensor) -> QuantizedTensor:
        """All rows of a tensor of two or three dimensions, one below the other: a view of the file."""
        *outer, columns = tensor.shape
        rows = 1
        for extent in outer:
            rows *= extent
        source = f"{Path(tensor.path).name}:{tensor.name}"
        view = self._files[tensor.path].view
        if tensor.type_name in _DENSE:
            dtype, name = _DENSE[tensor.type_name]
            data = view(tensor.offset, tensor.nbytes, dtype).view(rows, columns)
            return QuantizedTensor(format=name, shape=(rows, columns), planes={"data": data}, source=source)
        if tensor.type_name in _QUANTIZED:
            blocks = view(tensor.offset, tensor.nbytes, torch.uint8).view(rows, tensor.nbytes // rows)
            quantized = _QUANTIZED[tensor.type_name]
            return QuantizedTensor(format=quantized, shape=(rows, columns), planes={"blocks": blocks}, source=source)
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} is stored as {tensor.type_name}; supported are "
            f"{', '.join([*_DENSE, *_QUANTIZED])}: take a file quantised to one of these"
        )

    def _up_projection(self, spec: WeightSpec, composite: Composite) -> QuantizedTensor:
        """[heads * (plain + value), latent] as it is before the keys are turned: in bfloat16 where the file has blocks,
        which a turn does not leave whole."""
        keys, values = (self._rows_of(part) for part in composite.parts)
        heads, latent, plain = composite.parts[0].shape
        dense = (
            torch.bfloat16
            if keys.is_blocked or values.is_blocked
            else torch.promote_types(keys.plane.dtype, values.plane.dtype)
        )
        turned = keys.dequantize(dense).view(heads, latent, plain).transpose(1, 2)
        whole = torch.cat([turned, values.dequantize(dense).view(heads, -1, latent)], dim=1)
        start, stop = spec.shard.row_range(spec.shape[0])
        self.forget(spec.name)
        return self._made(spec, composite, whole.reshape(-1, latent)[start:stop])

    def _made(self, spec: WeightSpec, composite: Composite, plane: torch.Tensor) -> QuantizedTensor:
        """A weight whose elements lie in ``plane``, in the format of its parts, or in the plane's type."""
        source = f"{Path(self.where).name}: {' + '.join(part.name for part in composite.parts)}"
        if plane.dtype != torch.uint8:
            return QuantizedTensor.from_dense(plane, source)
        quantized = _QUANTIZED[composite.parts[0].type_name]
        return QuantizedTensor(quantized, (plane.shape[0], spec.shape[1]), {"blocks": plane}, source)

    def _floats(self, tensor: GgufTensor) -> torch.Tensor:
        """The tensor's elements as float32, a copy."""
        if tensor.type_name not in _DENSE:
            raise CheckpointError(
                f"{tensor.path}: {tensor.name} is stored as {tensor.type_name}; a vector is one of {', '.join(_DENSE)}"
            )
        found = self._files[tensor.path].view(tensor.offset, tensor.nbytes, _DENSE[tensor.type_name][0])
        return found.to(torch.float32, copy=True)
