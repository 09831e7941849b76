"""What a config.json says of quantised weights: quantization_config of compressed-tensors and of Hugging Face's fp8.

The matrices themselves say which of them are quantised (``recipes/stored_weights.py``); what is read here tells how the
quantised ones are to be understood. No torch here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tokenspeed.recipes.checkpoint_error import CheckpointError

Kind = Literal["int4", "int8", "fp8"]
Strategy = Literal["tensor", "channel", "group", "block"]

BLOCK_COLUMNS = 32
"""Columns of a block of the formats that integers become (gguf_q4_0, gguf_q4_1, gguf_q8_0)."""

BLOCK_BYTES = {"gguf_q4_0": 18, "gguf_q4_1": 20, "gguf_q8_0": 34}
"""Bytes of such a block. A test holds them equal to the kernels'."""

_OTHER_METHODS = {
    "awq": "a compressed-tensors int4 checkpoint (pack-quantized) or a GGUF file of the same model",
    "gptq": "a compressed-tensors int4 checkpoint (pack-quantized) or a GGUF file of the same model",
    "bitsandbytes": "the unquantised checkpoint or a GGUF file of the same model",
    "mxfp4": "a GGUF file of the same model, or an unquantised checkpoint",
    "fbgemm_fp8": "the fp8 checkpoint of the model's own publisher, or a compressed-tensors one (float-quantized)",
    "modelopt": "a compressed-tensors or fp8 checkpoint of the same model",
}
_OTHER_FORMATS = {
    "nvfp4-pack-quantized": "a pack-quantized (int4) or float-quantized (fp8) checkpoint of the same model",
    "mxfp4-pack-quantized": "a pack-quantized (int4) or float-quantized (fp8) checkpoint of the same model",
    "marlin-24": "a pack-quantized checkpoint without sparsity",
    "sparse-24-bitmask": "a checkpoint without sparsity",
    "sparse-bitmask": "a checkpoint without sparsity",
}
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")


@dataclass(frozen=True, kw_only=True)
class WeightScheme:
    """How a quantised matrix [rows, columns] is stored.

    Attributes:
        kind: what an element is: an integer of 4 or 8 bits, or a float8_e4m3.
        strategy: what shares a scale: everything ("tensor"), a row ("channel"), ``group`` columns of a row, or
            ``block`` (rows, columns).
        zero_points: whether each scale has a zero point: an element is (integer - zero point) * scale.
        scale: the name of the scales beside the weight: "weight_scale" or "weight_scale_inv".
    """

    kind: Kind
    strategy: Strategy
    group: int = 0
    block: tuple[int, int] = (0, 0)
    zero_points: bool = False
    scale: str = "weight_scale"

    @property
    def resident(self) -> str:
        """The format that the matrix has in memory, by the name that kernels give it."""
        if self.kind == "fp8":
            return "bfloat16"
        if self.kind == "int8":
            return "gguf_q8_0"
        return "gguf_q4_1" if self.zero_points else "gguf_q4_0"

    def resident_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix in memory; ``columns`` in whole blocks."""
        if self.resident == "bfloat16":
            return 2 * rows * columns
        return rows * (columns // BLOCK_COLUMNS) * BLOCK_BYTES[self.resident]


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """The schemes of a checkpoint.

    Attributes:
        where: the file, for messages.
        method: "compressed-tensors" or "fp8".
        rules: (targets, scheme) in the order of the file; the first that names a module counts. A target is a class
            ("Linear"), a module's name, or a regular expression behind "re:".
    """

    where: str
    method: str
    rules: tuple[tuple[tuple[str, ...], WeightScheme], ...]

    @property
    def block_columns(self) -> int:
        """Columns of a matrix that ranks cannot share out."""
        return BLOCK_COLUMNS if any(scheme.kind != "fp8" for _, scheme in self.rules) else 1

    def scheme_of(self, module: str) -> WeightScheme | None:
        """The scheme of the module ("model.layers.0.mlp.up_proj"); None where no rule names it."""
        kind = "Embedding" if module.endswith("embed_tokens") else "Linear"
        for targets, scheme in self.rules:
            if any(_names(target, module, kind) for target in targets):
                return scheme
        return None


def _names(target: str, module: str, kind: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target in (module, kind)


def read_quantization(where: str, values: Mapping[str, Any]) -> Quantization | None:
    """Reads quantization_config (or compression_config, its older name) of the configuration ``values``.

    None where there is neither. Raises CheckpointError, with the file and what to use instead, for a method or a format
    whose weights this engine cannot take.
    """
    found = values.get("quantization_config") or values.get("compression_config")
    if not found:
        return None
    where = f"{where}: quantization_config"
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{where} should be an object, it is {found!r}")
    method = str(found.get("quant_method") or ("compressed-tensors" if "config_groups" in found else "")).lower()
    if method == "compressed-tensors":
        return Quantization(where=where, method=method, rules=_compressed_tensors(where, found))
    if method == "fp8":
        return Quantization(where=where, method=method, rules=((("Linear", "Embedding"), _fp8(where, found)),))
    instead = _OTHER_METHODS.get(method, "the unquantised checkpoint or a GGUF file of the same model")
    raise CheckpointError(
        f"{where}: weights quantised by {method or 'an unnamed method'} are not supported (compressed-tensors and fp8 "
        f"are); use {instead}"
    )


def _fp8(where: str, values: Mapping[str, Any]) -> WeightScheme:
    block = values.get("weight_block_size", [128, 128])
    if block is None:
        return WeightScheme(kind="fp8", strategy="tensor", scale="weight_scale_inv")
    return WeightScheme(
        kind="fp8", strategy="block", block=_block(where, "weight_block_size", block), scale="weight_scale_inv"
    )


def _block(where: str, key: str, value: object) -> tuple[int, int]:
    if isinstance(value, list) and len(value) == 2 and all(isinstance(size, int) and size > 0 for size in value):
        return value[0], value[1]
    raise CheckpointError(f"{where}: {key} should be two sizes above 0, such as [128, 128], it is {value!r}")


def _compressed_tensors(where: str, values: Mapping[str, Any]) -> tuple[tuple[tuple[str, ...], WeightScheme], ...]:
    for key in ("transform_config", "sparsity_config"):
        extra = values.get(key)
        if extra and (key != "sparsity_config" or extra.get("format", "dense") != "dense"):
            raise CheckpointError(
                f"{where}: {key} is set; leaving it out would give wrong answers: use a checkpoint without it"
            )
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"{where}: config_groups should be an object of groups, it is {groups!r}")
    rules = []
    for name, group in groups.items():
        place = f"{where}: config_groups.{name}"
        if not isinstance(group, Mapping) or not isinstance(group.get("targets"), list):
            raise CheckpointError(f"{place} should be an object with a list of targets, it is {group!r}")
        if group.get("weights") is None:
            continue  # it quantises activations or the cache alone, which stay as the engine has them
        stored_as = str(group.get("format") or values.get("format") or "")
        rules.append((_targets(place, group["targets"]), _scheme(place, stored_as, group["weights"])))
    return tuple(rules)


def _targets(place: str, targets: list[object]) -> tuple[str, ...]:
    for target in map(str, targets):
        if target.startswith("re:"):
            try:
                re.compile(target.removeprefix("re:"))
            except re.error as error:
                raise CheckpointError(f"{place}: target {target!r} is no regular expression ({error})") from error
    return tuple(map(str, targets))


def _scheme(place: str, stored_as: str, weights: Mapping[str, Any]) -> WeightScheme:
    if stored_as not in _FORMATS:
        instead = _OTHER_FORMATS.get(stored_as, "a pack-quantized, int-quantized or float-quantized checkpoint")
        raise CheckpointError(f"{place}: weights in the format {stored_as!r} are not supported; use {instead}")
    kind = _kind(place, stored_as, weights)
    strategy = str(weights.get("strategy") or ("group" if weights.get("group_size") else "tensor"))
    allowed = ("tensor", "channel", "block") if kind == "fp8" else ("tensor", "channel", "group")
    if strategy not in allowed:
        raise CheckpointError(
            f"{place}: strategy {strategy!r} of {kind} weights is not supported; supported are {', '.join(allowed)}: "
            "use a checkpoint with one of them"
        )
    if weights.get("actorder") in ("group", "dynamic"):
        raise CheckpointError(
            f"{place}: actorder {weights['actorder']!r} scatters the columns of a group; use a checkpoint with "
            "actorder 'weight', 'static' or none"
        )
    zero_points = weights.get("symmetric") is False
    if zero_points and (kind != "int4" or strategy == "tensor"):
        raise CheckpointError(
            f"{place}: {kind} weights with zero points and the strategy {strategy!r} are not supported; use a "
            "symmetric checkpoint, or int4 with groups"
        )
    block = _block(place, "block_structure", weights.get("block_structure")) if strategy == "block" else (0, 0)
    return WeightScheme(
        kind=kind,
        strategy=strategy,  # type: ignore[arg-type]  # one of `allowed`
        group=_group(place, weights) if strategy == "group" else 0,
        block=block,
        zero_points=zero_points,
    )


def _kind(place: str, stored_as: str, weights: Mapping[str, Any]) -> Kind:
    bits, element = weights.get("num_bits", 8), str(weights.get("type", "int"))
    if element == "float" and bits == 8 and stored_as != "pack-quantized":
        return "fp8"
    if element == "int" and bits in (4, 8):
        return "int8" if bits == 8 else "int4"
    raise CheckpointError(
        f"{place}: {element} weights of {bits!r} bits in the format {stored_as!r} are not supported; supported are int "
        "of 4 bits, int of 8 bits and float of 8 bits"
    )


def _group(place: str, weights: Mapping[str, Any]) -> int:
    group = weights.get("group_size")
    if not isinstance(group, int) or group <= 0 or group % BLOCK_COLUMNS:
        raise CheckpointError(
            f"{place}: group_size is {group!r}; it should be a multiple of {BLOCK_COLUMNS}, the columns of a block in "
            "memory: use a checkpoint with groups of 32, 64 or 128"
        )
    return group
