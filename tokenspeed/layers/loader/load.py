"""Brings a model's list of weights together with what a checkpoint holds."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tokenspeed.layers.loader.gguf_source import GgufSource
from tokenspeed.layers.loader.random_source import RandomSource
from tokenspeed.layers.loader.safetensors_source import SafetensorsSource
from tokenspeed.layers.loader.source import WeightSource
from tokenspeed.layers.weights import LoadedWeights, WeightSpec, unpermuted_rows
from tokenspeed.recipes.model_config import CheckpointError, ModelConfig
from tokenspeed.recipes.resolved import ModelSource
from tokenspeed_kernel.quantized import QuantizedTensor


def open_source(source: ModelSource, config: ModelConfig) -> WeightSource:
    """Opens the checkpoint; raises CheckpointError where it is missing or damaged. Reads headers only."""
    if source.kind == "gguf":
        return GgufSource(Path(source.path))
    if source.kind == "random":
        return RandomSource(seed=source.seed, dtype=config.dtype)
    return SafetensorsSource(Path(source.path), config.quantization)


def load_weights(
    source: WeightSource,
    specs: Sequence[WeightSpec],
    *,
    q_and_k_permuted: bool,
    tied: bool,
    report: Callable[[int, int, str], None],
) -> LoadedWeights:
    """Loads every weight of ``specs`` and refuses a checkpoint that has others, or other shapes.

    ``q_and_k_permuted`` undoes the row order of GGUF llama files; ``tied`` accepts (and ignores) a stored output head
    that repeats the embedding. ``report(done, total, name)`` is told about each. Raises CheckpointError.
    """
    _check_names(source, specs, tied=tied)
    matrices: dict[str, QuantizedTensor] = {}
    vectors: dict[str, torch.Tensor] = {}
    for done, spec in enumerate(specs):
        report(done, len(specs), spec.name)
        if source.names() is not None and source.shape(spec.name) != spec.shape:
            raise CheckpointError(
                f"{source.where}: {spec.name} has shape {source.shape(spec.name)}, the configuration says "
                f"{spec.shape}; the weights and the configuration are of different models"
            )
        order = unpermuted_rows(spec.shape[0], spec.rotary_heads) if q_and_k_permuted and spec.rotary_heads else None
        if len(spec.shape) == 2:
            matrices[spec.name] = _matrix(source, spec, order)
        else:
            vectors[spec.name] = _vector(source, spec, order)
    report(len(specs), len(specs), source.where)
    return LoadedWeights(matrices=matrices, vectors=vectors, rotary_factors=source.rotary_factors())


def _matrix(source: WeightSource, spec: WeightSpec, order: torch.Tensor | None) -> QuantizedTensor:
    converted = source.converted(spec)
    if converted is not None:
        return converted
    weight = source.matrix(spec)
    if order is not None:
        weight = weight.select_rows(order)
    start, stop = spec.shard.row_range(spec.shape[0])
    if (start, stop) != (0, spec.shape[0]):
        weight = weight.rows(start, stop)
    start, stop = spec.shard.column_range(spec.shape[1])
    if (start, stop) != (0, spec.shape[1]):
        weight = weight.columns(start, stop)
    return weight


def _vector(source: WeightSource, spec: WeightSpec, order: torch.Tensor | None) -> torch.Tensor:
    vector = source.vector(spec)
    if order is not None:
        vector = vector[order]
    start, stop = spec.shard.row_range(spec.shape[0])
    return vector[start:stop].contiguous()


def _check_names(source: WeightSource, specs: Sequence[WeightSpec], *, tied: bool) -> None:
    held = source.names()
    if held is None:
        return
    wanted = {spec.name for spec in specs}
    missing = sorted(wanted - held)
    if missing:
        raise CheckpointError(
            f"{source.where}: {_some(missing)} missing; the checkpoint is incomplete or of another architecture"
        )
    ignored = {"lm_head.weight"} if tied else set()
    beyond = sorted(name for name in held - wanted - ignored if not name.endswith("rotary_emb.inv_freq"))
    if beyond:
        raise CheckpointError(
            f"{source.where}: {_some(beyond)} unknown to this architecture; leaving weights out would give wrong "
            "answers: use a checkpoint of a supported architecture"
        )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'}"
