"""The weights in a folder of safetensors files: which tensors make one, how it is stored, what it takes in memory.

Read from the headers alone. The loader and the memory plan go by the same list, so that a checkpoint whose parts do not
fit each other is refused before anything is loaded, and the plan counts what will be there. No torch here.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenspeed.recipes.checkpoint_error import CheckpointError
from tokenspeed.recipes.quantization import BLOCK_COLUMNS, Quantization, WeightScheme
from tokenspeed.recipes.safetensors_file import SafetensorsTensor, checkpoint_files, read_safetensors_header

DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I8": 1, "I32": 4, "I64": 8}
FLOAT_DTYPES = ("F32", "BF16", "F16")
"""What a tensor that is not quantised, and a scale, may be."""

_DECODERS = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}

_ELEMENTS = {"int8": "I8", "fp8": "F8_E4M3"}
_PER_WORD = {"int4": 8, "int8": 4}
_PARTS = ("weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape", "weight_g_idx")
# Scales of activations and of a quantised cache: nothing is lost without them, both stay as the engine has them.
_NOT_NEEDED = (
    "input_scale", "input_zero_point", "output_scale", "output_zero_point", "activation_scale", "q_scale", "k_scale",
    "v_scale",
)  # fmt: skip


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


@dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """One weight of the model.

    Attributes:
        shape: of the weight: (rows, columns) or (length,).
        values: its elements, integers perhaps several in a word.
        scheme: how they are quantised; None: they are floats as they lie there.
        scale, zero_point: beside the elements of a quantised matrix.
    """

    shape: tuple[int, ...]
    values: StoredTensor
    scheme: WeightScheme | None = None
    scale: StoredTensor | None = None
    zero_point: StoredTensor | None = None

    @property
    def is_packed(self) -> bool:
        """Whether several integers share a word."""
        return self.values.name.endswith("weight_packed")

    @property
    def resident_bytes(self) -> int:
        """What it takes in memory: a matrix as it is stored, or what a quantised one becomes; a vector as float32."""
        if len(self.shape) == 1:
            return DTYPE_BYTES["F32"] * self.shape[0]
        if self.scheme is None:
            return self.values.tensor.nbytes
        return self.scheme.resident_bytes(*self.shape)


@dataclass(kw_only=True)
class _Module:
    """The tensors of one module by the last part of their names."""

    name: str
    parts: dict[str, StoredTensor] = field(default_factory=dict)


def stored_weights(folder: Path, quantization: Quantization | None) -> dict[str, StoredWeight]:
    """Every weight of the checkpoint in ``folder``, by the name that it has in a checkpoint of the decoder alone.

    Raises CheckpointError, naming file and tensor, where a tensor is there twice or damaged, is stored in a way that
    cannot be read, or does not fit what ``quantization`` or its companions say.
    """
    tensors = _tensors(folder)
    weights: dict[str, StoredWeight] = {}
    modules: dict[str, _Module] = {}
    for name, stored in tensors.items():
        place, _, part = name.rpartition(".")
        if part in _PARTS or (part == "weight" and stored.tensor.dtype not in FLOAT_DTYPES):
            modules.setdefault(place, _Module(name=place)).parts[part] = stored
        elif quantization is None or part not in _NOT_NEEDED:
            weights[name] = StoredWeight(shape=stored.shape, values=stored)
    for module in modules.values():
        dense = weights.get(f"{module.name}.weight")
        weights[f"{module.name}.weight"] = _quantised(module, dense, quantization)
    for name, weight in weights.items():
        if weight.scheme is None and weight.values.tensor.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{weight.values.path}: {name} is stored as {weight.values.tensor.dtype}; supported are "
                f"{', '.join(FLOAT_DTYPES)}: use a checkpoint in one of them or a GGUF file"
            )
    return {decoder_name(name): weight for name, weight in weights.items()}


def decoder_name(name: str) -> str:
    """The name of a tensor as a checkpoint of the decoder alone has it: models that see have theirs under another."""
    for inner, plain in _DECODERS.items():
        if name.startswith(inner):
            return plain + name.removeprefix(inner)
    return name


def _tensors(folder: Path) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for path in checkpoint_files(folder):
        for name, tensor in read_safetensors_header(path).items():
            if name in found:
                raise CheckpointError(f"{path}: {name} is in {found[name].path} too; remove one of the files")
            size = DTYPE_BYTES.get(tensor.dtype)
            if size is not None and tensor.nbytes != math.prod(tensor.shape) * size:
                raise CheckpointError(
                    f"{path}: {name} of shape {list(tensor.shape)} cannot take {tensor.nbytes} bytes; the file is "
                    "damaged: download it again"
                )
            found[name] = StoredTensor(path=path, name=name, tensor=tensor)
    return found


def _quantised(module: _Module, dense: StoredWeight | None, quantization: Quantization | None) -> StoredWeight:
    parts = module.parts
    some = next(iter(parts.values()))
    if dense is not None:
        raise CheckpointError(
            f"{some} stands beside {dense.values.name}, which is stored as {dense.values.tensor.dtype} and needs "
            "none; the checkpoint mixes two versions of a weight: download it again"
        )
    values = parts.get("weight_packed") or parts.get("weight")
    if values is None:
        raise CheckpointError(f"{some} stands alone; {module.name}.weight is missing: download the checkpoint again")
    if quantization is None:
        raise CheckpointError(
            f"{values} is stored as {values.tensor.dtype}; supported are {', '.join(FLOAT_DTYPES)}, and quantised "
            "weights where config.json has their quantization_config: take the config.json that belongs to the weights"
        )
    if "weight_g_idx" in parts:
        raise CheckpointError(
            f"{parts['weight_g_idx']} scatters the columns of a group; use a checkpoint with actorder 'weight', "
            "'static' or none"
        )
    scheme = quantization.scheme_of(module.name)
    if scheme is None:
        raise CheckpointError(
            f"{values} is stored as {values.tensor.dtype}, but no group of {quantization.where} names "
            f"{module.name}; take the config.json that belongs to the weights"
        )
    shape = _shape(parts, values, scheme, quantization)
    scale = _companion(module, scheme.scale, values)
    _check_scale(scale, shape, scheme, quantization)
    zero_point = _companion(module, "weight_zero_point", values) if scheme.zero_points else None
    if zero_point is not None:
        _check_zero_point(zero_point, scale, shape[0])
    return StoredWeight(shape=shape, values=values, scheme=scheme, scale=scale, zero_point=zero_point)


def _companion(module: _Module, part: str, values: StoredTensor) -> StoredTensor:
    found = module.parts.get(part)
    if found is None:
        raise CheckpointError(
            f"{values} has no {module.name}.{part} beside it; the checkpoint is incomplete, or its config.json is of "
            "another: download it again"
        )
    return found


def _shape(
    parts: Mapping[str, StoredTensor], values: StoredTensor, scheme: WeightScheme, quantization: Quantization
) -> tuple[int, int]:
    """(rows, columns) of the weight; refuses elements of another kind than the configuration says."""
    packed = "weight_packed" in parts
    expected = "I32" if packed else _ELEMENTS.get(scheme.kind)
    if values.tensor.dtype != expected or len(values.shape) != 2 or (packed and scheme.kind == "fp8"):
        raise CheckpointError(
            f"{values} is stored as {values.tensor.dtype} {list(values.shape)}, {quantization.where} says "
            f"{scheme.kind}; take the config.json that belongs to the weights"
        )
    rows, columns = values.shape
    if packed:
        per_word = _PER_WORD[scheme.kind]
        if "weight_shape" in parts:
            stated = _integers(parts["weight_shape"])
            if len(stated) != 2 or stated[0] != rows or -(-stated[1] // per_word) != columns:
                raise CheckpointError(
                    f"{values} of shape {list(values.shape)} does not fit {parts['weight_shape'].name}, which says "
                    f"{stated} ({per_word} columns in a word); the file is damaged: download it again"
                )
            columns = stated[1]
        else:
            columns *= per_word
    if scheme.resident != "bfloat16" and columns % BLOCK_COLUMNS:
        raise CheckpointError(
            f"{values} has {columns} columns; {scheme.resident.removeprefix('gguf_')} blocks take {BLOCK_COLUMNS}: use "
            "the unquantised or an fp8 checkpoint of this model"
        )
    return rows, columns


def _integers(stored: StoredTensor) -> list[int]:
    """The elements of a small tensor of integers."""
    letter = {"I64": "q", "I32": "i"}.get(stored.tensor.dtype)
    if letter is None or stored.tensor.nbytes > 64:
        raise CheckpointError(f"{stored} should hold the weight's two sizes; the file is damaged: download it again")
    with stored.path.open("rb") as file:
        file.seek(stored.tensor.offset)
        data = file.read(stored.tensor.nbytes)
    return list(struct.unpack(f"<{math.prod(stored.shape)}{letter}", data))


def _check_scale(scale: StoredTensor, shape: tuple[int, int], scheme: WeightScheme, where: Quantization) -> None:
    rows, columns = shape
    if scale.tensor.dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{scale} is stored as {scale.tensor.dtype}; scales may be {', '.join(FLOAT_DTYPES)}: use a checkpoint "
            "with such scales"
        )
    what: str = scheme.strategy
    if scheme.strategy == "tensor":
        right, expected = math.prod(scale.shape) == 1, "[1]"
    elif scheme.strategy == "channel":
        right, expected = scale.shape in ((rows,), (rows, 1)), f"[{rows}, 1]"
    else:
        height, width = (1, scheme.group) if scheme.strategy == "group" else scheme.block
        grid = (-(-rows // height), -(-columns // width))
        right = scale.shape == grid and (scheme.strategy == "block" or columns % width == 0)
        expected = str(list(grid))
        what = f"group (group_size {width})" if scheme.strategy == "group" else f"block ([{height}, {width}])"
    if not right:
        raise CheckpointError(
            f"{scale} has shape {list(scale.shape)}; with the strategy {what} of {where.where} a weight of "
            f"{rows} x {columns} has {expected}: take the config.json that belongs to the weights"
        )


def _check_zero_point(zero_point: StoredTensor, scale: StoredTensor, rows: int) -> None:
    """Zero points lie as the scales do, as bytes, or with eight rows in a word."""
    columns = scale.shape[1] if len(scale.shape) == 2 else 1
    expected = {"I32": (-(-rows // _PER_WORD["int4"]), columns), "I8": (rows, columns)}
    if zero_point.shape != expected.get(zero_point.tensor.dtype):
        raise CheckpointError(
            f"{zero_point} is {zero_point.tensor.dtype} {list(zero_point.shape)}; beside scales of shape "
            f"{list(scale.shape)} it should be I32 {list(expected['I32'])} or I8 {list(expected['I8'])}: the file is "
            "damaged, or of another version: download it again"
        )
