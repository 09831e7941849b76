"""What a config.json says of quantised weights: quantization_config of each method that is read.

The matrices themselves say which of them are quantised (``recipes/stored_weights.py``); what is read here tells how the
quantised ones are to be understood. No torch here.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenspeed.recipes.checkpoint_error import CheckpointError
from tokenspeed.recipes.compressed_tensors import compressed_tensors, two_sizes
from tokenspeed.recipes.packed_integers import awq, gptq
from tokenspeed.recipes.weight_scheme import BLOCKS as BLOCKS
from tokenspeed.recipes.weight_scheme import Quantization as Quantization
from tokenspeed.recipes.weight_scheme import WeightScheme as WeightScheme

METHODS = ("compressed-tensors", "fp8", "awq", "gptq", "mxfp4", "modelopt")

_INSTEAD = {
    "bitsandbytes": "the unquantised checkpoint or a GGUF file of the same model",
    "fbgemm_fp8": "the fp8 checkpoint of the model's own publisher, or a compressed-tensors one (float-quantized)",
    "auto-round": "the same model's auto_gptq or auto_awq export",
}
_EVERY_MATRIX = ("Linear", "Embedding")

_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files in which older checkpoints say what newer ones say in config.json, and the method they are of."""


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
        return Quantization(where=where, method=method, rules=compressed_tensors(where, found))
    if method == "modelopt":
        return Quantization(where=where, method=method, rules=_modelopt(where, found))
    readers = {"fp8": _fp8, "awq": awq, "gptq": gptq, "mxfp4": _mxfp4}
    if method in readers:
        return Quantization(where=where, method=method, rules=((_EVERY_MATRIX, readers[method](where, found)),))
    instead = _INSTEAD.get(method, "the unquantised checkpoint or a GGUF file of the same model")
    raise CheckpointError(
        f"{where}: weights quantised by {method or 'an unnamed method'} are not supported ({', '.join(METHODS)} are); "
        f"use {instead}"
    )


def with_quantization_beside(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The configuration ``values``; where it does not speak of quantisation, with what a file beside it says."""
    if values.get("quantization_config") or values.get("compression_config"):
        return values
    for name, method in _BESIDE.items():
        path = folder / name
        if not path.is_file():
            continue
        try:
            found = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read as JSON ({error}); download it again") from error
        if isinstance(found, dict):
            return {**values, "quantization_config": {"quant_method": method, **found}}
    return values


def _fp8(where: str, values: Mapping[str, Any]) -> WeightScheme:
    block = values.get("weight_block_size", [128, 128])
    if block is None:
        return WeightScheme(kind="fp8", strategy="tensor", scale="weight_scale_inv")
    size = two_sizes(where, "weight_block_size", block)
    return WeightScheme(kind="fp8", strategy="block", block=size, scale="weight_scale_inv")


def _mxfp4(_where: str, _values: Mapping[str, Any]) -> WeightScheme:
    return WeightScheme(kind="mxfp4", strategy="group", group=32)


def _modelopt(where: str, values: Mapping[str, Any]) -> tuple[tuple[tuple[str, ...], WeightScheme], ...]:
    """quant_algo of a whole checkpoint, or of each layer under quantized_layers where it is MIXED_PRECISION."""
    inner = values.get("quantization", values)
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"{where}: quantization should be an object, it is {inner!r}")
    algorithm = inner.get("quant_algo")
    if algorithm != "MIXED_PRECISION":
        return ((_EVERY_MATRIX, _modelopt_scheme(where, algorithm, inner)),)
    layers = inner.get("quantized_layers")
    if not isinstance(layers, Mapping) or not all(isinstance(layer, Mapping) for layer in layers.values()):
        raise CheckpointError(f"{where}: quantized_layers should be an object of layers, it is {layers!r}")
    return tuple(
        ((str(name),), _modelopt_scheme(f"{where}: quantized_layers.{name}", layer.get("quant_algo"), layer))
        for name, layer in layers.items()
    )


def _modelopt_scheme(where: str, algorithm: object, values: Mapping[str, Any]) -> WeightScheme:
    if algorithm == "NVFP4":
        group = values.get("group_size", 16)
        if group != 16:
            raise CheckpointError(f"{where}: group_size is {group!r}; NVFP4 has groups of 16")
        return WeightScheme(kind="nvfp4", strategy="group", group=16, whole="weight_scale_2")
    if algorithm == "FP8":
        return WeightScheme(kind="fp8", strategy="tensor")
    raise CheckpointError(
        f"{where}: quant_algo {algorithm!r} is not supported; supported are NVFP4, FP8 and MIXED_PRECISION of both: "
        "use a checkpoint with one of them, or a compressed-tensors or fp8 checkpoint of the same model"
    )
