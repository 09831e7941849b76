"""quantization_config of compressed-tensors: groups of modules, each with a scheme."""

import re
from collections.abc import Mapping
from typing import Any

from tokenspeed.recipes.checkpoint_error import CheckpointError
from tokenspeed.recipes.weight_scheme import Kind, WeightScheme

_INSTEAD = {
    "marlin-24": "a pack-quantized checkpoint without sparsity",
    "sparse-24-bitmask": "a checkpoint without sparsity",
    "sparse-bitmask": "a checkpoint without sparsity",
}
_FLOATS_OF_FOUR_BITS: dict[str, Kind] = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4"}
_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense",
    *_FLOATS_OF_FOUR_BITS,
)  # fmt: skip


def compressed_tensors(where: str, values: Mapping[str, Any]) -> tuple[tuple[tuple[str, ...], WeightScheme], ...]:
    """The rules of Quantization; raises CheckpointError for what cannot be read."""
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


def two_sizes(where: str, key: str, value: object) -> tuple[int, int]:
    """(rows, columns) of a block; CheckpointError where ``value`` is none."""
    if isinstance(value, list) and len(value) == 2 and all(isinstance(size, int) and size > 0 for size in value):
        return value[0], value[1]
    raise CheckpointError(f"{where}: {key} should be two sizes above 0, such as [128, 128], it is {value!r}")


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
        instead = _INSTEAD.get(stored_as, "a pack-quantized, int-quantized or float-quantized checkpoint")
        raise CheckpointError(f"{place}: weights in the format {stored_as!r} are not supported; use {instead}")
    if stored_as in _FLOATS_OF_FOUR_BITS:
        return _four_bit_floats(place, _FLOATS_OF_FOUR_BITS[stored_as], weights)
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
    block = two_sizes(place, "block_structure", weights.get("block_structure")) if strategy == "block" else (0, 0)
    return WeightScheme(
        kind=kind,
        strategy=strategy,  # type: ignore[arg-type]  # one of `allowed`
        group=_group(place, weights) if strategy == "group" else 0,
        block=block,
        zero_points=zero_points,
    )


def _four_bit_floats(place: str, kind: Kind, weights: Mapping[str, Any]) -> WeightScheme:
    whole, group = ("weight_global_scale", 16) if kind == "nvfp4" else ("", 32)
    if weights.get("num_bits", 4) != 4 or weights.get("group_size", group) != group:
        raise CheckpointError(
            f"{place}: num_bits is {weights.get('num_bits')!r} and group_size {weights.get('group_size')!r}; {kind} "
            f"weights have 4 bits and groups of {group}: take the config.json that belongs to the weights"
        )
    return WeightScheme(kind=kind, strategy="group", group=group, whole=whole)


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
    if not isinstance(group, int) or group <= 0:
        raise CheckpointError(
            f"{place}: group_size is {group!r}; it should be a number of columns, such as 32: take the config.json "
            "that belongs to the weights"
        )
    return group
