"""The weights in a folder of safetensors files: which tensors make one, how it is stored, what it takes in memory.

Read from the headers alone. The loader and the memory plan go by the same list, so that a checkpoint whose parts do not
fit each other is refused before anything is loaded, and the plan counts what will be there. No torch here.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenspeed.recipes.checkpoint_error import CheckpointError
from tokenspeed.recipes.safetensors_file import SafetensorsTensor, read_checkpoint_headers
from tokenspeed.recipes.stored_parts import (
    FLOAT_DTYPES,
    StoredTensor,
    check_order,
    check_scale,
    check_whole,
    check_zero_point,
    shape_of,
)
from tokenspeed.recipes.weight_scheme import Quantization, WeightScheme

DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8}

_DECODERS = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    # DeepSeek-V4's makers', who leave "model." away where they find it.
    "layers.": "model.layers.",
    "embed.weight": "model.embed_tokens.weight",
    # Checkpoints of embedding models, which were saved without the head that generates.
    "embed_tokens.": "model.embed_tokens.",
    "model.embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "model.head.weight": "lm_head.weight",
    "hc_head_": "model.hc_head.hc_",
    "model.hc_head_": "model.hc_head.hc_",
}

_VALUES = ("weight_packed", "qweight", "blocks", "weight")
"""What the elements of a quantised matrix may be called, behind the name of its module."""

_PARTS = (
    "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "weight_zero_point",
    "weight_shape", "weight_g_idx", "qweight", "qzeros", "scales", "g_idx",
)  # fmt: skip
_ALSO = {"scale": "weight_scale_inv"}
"""What transformers calls a part that has another name in the checkpoint of a model's makers."""
_FUSED = {"_blocks": "blocks", "_scales": "weight_scale"}
"""Endings by which the experts of gpt-oss, one tensor for all of a layer, have their parts."""

_DENSE_AS_MIXTURE = re.compile(r"(model\.layers\.\d+)\.block_sparse_moe\.((?:gate|up|down)_proj\.\w+)")
"""transformers writes the dense MLPs of Kimi Linear under the name of its mixtures."""

# Scales of activations and of a quantised cache: nothing is lost without them, both stay as the engine has them.
_NOT_NEEDED = (
    "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point", "activation_scale",
    "q_scale", "k_scale", "v_scale",
)  # fmt: skip


_TABLES = ".tid2eid"
"""Whole numbers that are no weights: the experts of each token."""

_SMALL = ("_bias", "conv1d.weight", ".A_log", ".ape", "_fn")
"""Endings of small numbers of several dimensions that models want as float32: what experts add, short convolutions and
the decay of states, what positions within an entry add, what mixes residual streams."""


@dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """One weight of the model.

    Attributes:
        shape: of the weight: (rows, columns), (length,), or (experts, rows, columns) where one tensor holds them all.
        values: its elements, integers perhaps several in a word.
        scheme: how they are quantised; None: they are floats as they lie there.
        scale, zero_point, order, whole: beside the elements of a quantised matrix; ``order`` has the group of each
            column, ``whole`` the scale of the whole matrix.
    """

    shape: tuple[int, ...]
    values: StoredTensor
    scheme: WeightScheme | None = None
    scale: StoredTensor | None = None
    zero_point: StoredTensor | None = None
    order: StoredTensor | None = None
    whole: StoredTensor | None = None

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """Every tensor that is read for it."""
        found = (self.values, self.scale, self.zero_point, self.order, self.whole)
        return tuple(part for part in found if part is not None)

    @property
    def resident_bytes(self) -> int:
        """What it takes in memory: a matrix as it is stored, or what a quantised one becomes; vectors and other small
        numbers as float32, a table as int32."""
        if len(self.shape) == 1 or self.values.name.endswith((*_SMALL, _TABLES)):
            return DTYPE_BYTES["F32"] * math.prod(self.shape)
        if self.scheme is None:
            return self.values.tensor.nbytes
        return math.prod(self.shape[:-1]) * self.scheme.row_bytes(self.shape[-1])


@dataclass(kw_only=True)
class _Module:
    """The tensors of one quantised weight by the last part of their names, under the name that the weight has."""

    name: str
    weight: str
    parts: dict[str, StoredTensor] = field(default_factory=dict)


def stored_weights(
    folder: Path, quantization: Quantization | None, ignored: Sequence[str] = ()
) -> dict[str, StoredWeight]:
    """Every weight of the checkpoint in ``folder``, by the name that it has in a checkpoint of the decoder alone, but
    for those whose name one of the regular expressions ``ignored`` matches: nobody looks at how they are stored.

    Raises CheckpointError, naming file and tensor, where a tensor is there twice or damaged, is stored in a way that
    cannot be read, or does not fit what ``quantization`` or its companions say.
    """
    weights: dict[str, StoredWeight] = {}
    modules: dict[str, _Module] = {}
    left_out = re.compile("|".join(ignored) or "(?!)")
    tensors = {
        name: stored for name, stored in _tensors(folder).items() if left_out.fullmatch(decoder_name(name)) is None
    }
    for name, stored in tensors.items():
        place, _, part = name.rpartition(".")
        fused = next((ending for ending in _FUSED if name.endswith(ending)), None)
        if part in _PARTS or _is_quantised(stored, part, tensors.get(f"{place}.weight")):
            modules.setdefault(place, _Module(name=place, weight=f"{place}.weight")).parts[part] = stored
        elif fused and stored.tensor.dtype in ("U8", "F8_E8M0"):
            whole = name.removesuffix(fused)
            modules.setdefault(whole, _Module(name=whole, weight=whole)).parts[_FUSED[fused]] = stored
        elif quantization is None or part not in _NOT_NEEDED:
            weights[name] = StoredWeight(shape=stored.shape, values=stored)
    for module in modules.values():
        weights[module.weight] = _quantised(module, weights.get(module.weight), quantization)
    for name, weight in weights.items():
        if name.endswith(_TABLES) and weight.values.tensor.dtype in ("I32", "I64"):
            continue
        if weight.scheme is None and weight.values.tensor.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{weight.values.path}: {name} is stored as {weight.values.tensor.dtype}; supported are "
                f"{', '.join(FLOAT_DTYPES)}: use a checkpoint in one of them or a GGUF file"
            )
    return _by_decoder_name(weights)


def _by_decoder_name(weights: dict[str, StoredWeight]) -> dict[str, StoredWeight]:
    found: dict[str, StoredWeight] = {}
    for name, weight in weights.items():
        twin = found.setdefault(decoder_name(name), weight)
        if twin is not weight:
            raise CheckpointError(
                f"{weight.values} is the weight that {twin.values} is too; the folder holds two versions of a "
                "checkpoint: download it again"
            )
    return found


def decoder_name(name: str) -> str:
    """The name of a tensor as a checkpoint of the decoder alone has it: models that see have theirs under another, and
    DeepSeek-V4 comes in its makers' names and in those of transformers."""
    for inner, plain in _DECODERS.items():
        if name.startswith(inner):
            name = plain + name.removeprefix(inner)
            break
    return _DENSE_AS_MIXTURE.sub(r"\1.mlp.\2", name).replace(".attn.kv_norm.", ".attn.norm.")


def _tensors(folder: Path) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for path, header in read_checkpoint_headers(folder):
        for name, tensor in header.items():
            if name in found:
                raise CheckpointError(f"{path}: {name} is in {found[name].path} too; remove one of the files")
            _check_size(path, name, tensor)
            found[name] = StoredTensor(path=path, name=name, tensor=tensor)
    return found


def _check_size(path: Path, name: str, tensor: SafetensorsTensor) -> None:
    size = DTYPE_BYTES.get(tensor.dtype)
    if size is not None and tensor.nbytes != math.prod(tensor.shape) * size:
        raise CheckpointError(
            f"{path}: {name} of shape {list(tensor.shape)} cannot take {tensor.nbytes} bytes; the file is damaged: "
            "download it again"
        )


def _is_quantised(stored: StoredTensor, part: str, weight: StoredTensor | None) -> bool:
    """Whether the tensor whose name ends in ``part`` tells itself that it belongs to a quantised weight. ``weight``:
    the one beside it; what is called a scale may be a weight of its own (of residual streams)."""
    if part == "weight":
        return stored.tensor.dtype not in FLOAT_DTYPES
    beside = weight is not None and weight.tensor.dtype not in FLOAT_DTYPES
    return part == "scale" and (beside or stored.tensor.dtype == "F8_E8M0")


def _quantised(module: _Module, dense: StoredWeight | None, quantization: Quantization | None) -> StoredWeight:
    parts = module.parts
    some = next(iter(parts.values()))
    if dense is not None:
        raise CheckpointError(
            f"{some} stands beside {dense.values.name}, which is stored as {dense.values.tensor.dtype} and needs "
            "none; the checkpoint mixes two versions of a weight: download it again"
        )
    values = next((parts[name] for name in _VALUES if name in parts), None)
    if values is None:
        raise CheckpointError(f"{some} stands alone; {module.weight} is missing: download the checkpoint again")
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
    scheme = quantization.scheme_of(module.name, values.tensor.dtype)
    if scheme is None:
        raise CheckpointError(
            f"{values} is stored as {values.tensor.dtype}, but no group of {quantization.where} names "
            f"{module.name}; take the config.json that belongs to the weights"
        )
    shape = shape_of(values, parts.get("weight_shape"), scheme, quantization)
    scale = _companion(module, scheme.scale, values)
    check_scale(scale, shape, scheme, quantization)
    zero_point = order = whole = None
    if scheme.layout != "rows":
        zero_point = _companion(module, "qzeros", values)
    elif scheme.zero_points:
        zero_point = _companion(module, "weight_zero_point", values)
    if zero_point is not None:
        check_zero_point(zero_point, scale, shape, scheme)
    if scheme.layout == "gptq":
        order = _companion(module, "g_idx", values) if scheme.is_scattered else parts.get("g_idx")
        if order is not None:
            check_order(order, shape[-1])
    if scheme.whole:
        whole = _companion(module, scheme.whole, values)
        check_whole(whole)
    return StoredWeight(
        shape=shape, values=values, scheme=scheme, scale=scale, zero_point=zero_point, order=order, whole=whole
    )


def _companion(module: _Module, part: str, values: StoredTensor) -> StoredTensor:
    found = module.parts.get(part) or module.parts.get(_ALSO.get(part, part))
    if found is None:
        fused = next(
            (ending for ending, name in _FUSED.items() if values.name.endswith("_blocks") and name == part), ""
        )
        name = f"{module.name}{fused}" if fused else f"{module.name}.{part}"
        raise CheckpointError(
            f"{values} has no {name} beside it; the checkpoint is incomplete, or its config.json is of another: "
            "download it again"
        )
    return found
