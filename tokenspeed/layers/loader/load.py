"""Brings a model's list of weights together with what a checkpoint holds."""

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Protocol

import torch

from tokenspeed.layers.loader.gguf_source import GgufSource
from tokenspeed.layers.loader.random_source import RandomSource
from tokenspeed.layers.loader.row_stack import RowStack
from tokenspeed.layers.loader.safetensors_source import SafetensorsSource
from tokenspeed.layers.loader.source import WeightSource, share_of
from tokenspeed.layers.loader.transposed import turned
from tokenspeed.layers.weights import LoadedWeights, WeightSpec, unpermuted_rows
from tokenspeed.recipes.model_config import CheckpointError, ModelConfig
from tokenspeed.recipes.resolved import ModelSource
from tokenspeed_kernel.quantized import QuantizedTensor


class WeightMemory(Protocol):
    """Where loaded weights stay."""

    def keep(self, runs: Sequence[Sequence[QuantizedTensor]]) -> list[QuantizedTensor]:
        """The same weights in the same order where they stay: as they are, or copies, those of a run one behind the
        other in a piece of memory of their own, which is let go when they are. All that is read of the given ones is
        read when this returns."""
        ...

    def keep_vector(self, vector: torch.Tensor) -> torch.Tensor:
        """The same of a small weight."""
        ...


class WhereRead:
    """Weights stay where their source has them: of most that is the file's own memory."""

    def keep(self, runs: Sequence[Sequence[QuantizedTensor]]) -> list[QuantizedTensor]:
        return [weight for run in runs for weight in run]

    def keep_vector(self, vector: torch.Tensor) -> torch.Tensor:
        return vector


WHERE_READ = WhereRead()


def open_source(source: ModelSource, config: ModelConfig) -> WeightSource:
    """Opens the checkpoint; raises CheckpointError where it is missing or damaged. Reads headers only."""
    if source.kind == "gguf":
        return GgufSource(Path(source.path))
    if source.kind == "random":
        return RandomSource(seed=source.seed, dtype=config.dtype)
    return SafetensorsSource(Path(source.path), config.quantization, config.ignored_weights)


def load_weights(
    source: WeightSource,
    specs: Sequence[WeightSpec],
    *,
    memory: WeightMemory = WHERE_READ,
    q_and_k_permuted: bool,
    ignored: Sequence[str],
    report: Callable[[int, int, str], None],
) -> LoadedWeights:
    """Loads every weight of ``specs`` to ``memory``, a layer at a time, and refuses a checkpoint that has others, or
    other shapes.

    ``q_and_k_permuted`` undoes the row order of GGUF llama files; ``ignored`` are regular expressions for the names of
    tensors that may be there all the same. ``report(done, total, name)`` is told about each. Raises CheckpointError.
    """
    _check_names(source, specs, ignored=ignored)
    if source.names() is not None:
        for spec in specs:
            _check_shapes(source, spec)
    matrices: dict[str, QuantizedTensor] = {}
    vectors: dict[str, torch.Tensor] = {}
    for _, layer in groupby(enumerate(specs), key=lambda numbered: _layer_of(numbered[1].name)):
        read: list[tuple[WeightSpec, QuantizedTensor]] = []
        for done, spec in layer:
            report(done, len(specs), spec.name)
            weight = read_weight(source, spec, q_and_k_permuted=q_and_k_permuted)
            if isinstance(weight, QuantizedTensor):
                read.append((spec, weight))
            else:
                vectors[spec.name] = memory.keep_vector(weight)
        _keep(source, memory, read, matrices)
    report(len(specs), len(specs), source.where)
    return LoadedWeights(matrices=matrices, vectors=vectors, rotary_factors=source.rotary_factors())


def read_weight(source: WeightSource, spec: WeightSpec, *, q_and_k_permuted: bool) -> QuantizedTensor | torch.Tensor:
    """The rank's part of one weight, a matrix or a vector, where the source has it; see load_weights."""
    order = unpermuted_rows(spec.shape[0], spec.rotary_heads) if q_and_k_permuted and spec.rotary_heads else None
    if not spec.is_matrix:
        return _vector(source, spec, order)
    return _stack(source, spec) if spec.parts else _matrix(source, spec, order)


def _layer_of(name: str) -> str:
    """The layer that a weight belongs to; of one outside of all layers its name."""
    found = re.match(r"model\.layers\.\d+\.", name)
    return found[0] if found else name


def _keep(
    source: WeightSource,
    memory: WeightMemory,
    read: Sequence[tuple[WeightSpec, QuantizedTensor]],
    matrices: dict[str, QuantizedTensor],
) -> None:
    """Puts what was read where it stays; of what was copied there nothing else is kept."""
    runs = [[weight for _, weight in run] for _, run in groupby(read, key=lambda pair: _run_of(*pair))]
    kept = memory.keep(runs)
    copied = False
    for (spec, weight), held in zip(read, kept, strict=True):
        matrices[spec.name] = held
        if held is not weight:
            copied = True
            for tensor in spec.tensors:
                source.forget(tensor.name)
    if copied:
        source.reuse()


def _run_of(spec: WeightSpec, weight: QuantizedTensor) -> tuple[str, int, str]:
    """Equal of neighbours that may be joined. A mixture's matrices never are, so that kernels that hold them in another
    form let go of what was loaded."""
    of_experts = bool(spec.parts) or len(spec.stored) == 3
    return weight.format, weight.shape[1], spec.name if of_experts else ""


def _check_shapes(source: WeightSource, spec: WeightSpec) -> None:
    for tensor in spec.tensors:
        expected = tensor.stored or tensor.shape
        found = source.shape(tensor.name)
        # Quantised experts of a layer lie one behind the other, their rows in full, however the unquantised ones lie.
        if len(found) == 3 and source.is_converted(tensor.name):
            expected = (found[0], tensor.shape[0] // max(1, found[0]), *tensor.shape[1:])
        if found != expected:
            raise CheckpointError(
                f"{source.where}: {tensor.name} has shape {found}, the configuration says "
                f"{expected}; the weights and the configuration are of different models"
            )


def _matrix(source: WeightSource, spec: WeightSpec, order: torch.Tensor | None) -> QuantizedTensor:
    weight = source.converted(spec)
    if weight is not None:
        return weight
    if spec.transposed and source.names() is not None:
        return turned(source, spec)
    whole = source.matrix(spec)
    if order is not None:
        whole = whole.select_rows(order)
    weight = share_of(whole, spec)
    if spec.row_order is None:
        if (
            weight is not whole
            and weight.plane.untyped_storage().data_ptr() != whole.plane.untyped_storage().data_ptr()
        ):
            source.forget(spec.name)  # it was copied
        return weight
    ordered = weight.select_rows(spec.row_order(weight.shape[0]))
    source.forget(spec.name)
    return ordered


def _stack(source: WeightSource, spec: WeightSpec) -> QuantizedTensor:
    """The rank's parts in one piece of memory. What lies in a file is copied once and given back there, so that no part
    is held twice; parts that are converted come out one behind the other."""
    tensors = spec.tensors
    if not spec.sections:
        start, stop = spec.shard.row_range(spec.shape[0])
        each = spec.shape[0] // len(spec.parts)
        if start % each or stop % each:
            raise CheckpointError(
                f"{source.where}: {len(spec.parts)} parts of {spec.name} cannot be divided among {spec.shard.world} "
                "ranks"
            )
        tensors = tensors[start // each : stop // each]
    stack: RowStack | None = None
    for place, tensor in enumerate(tensors):
        part = source.converted(tensor)
        part = share_of(source.matrix(tensor), tensor) if part is None else part
        if stack is None:
            stack = RowStack(part, len(tensors), source=f"{source.where}: {spec.name}")
        elif part.format != stack.format:
            raise CheckpointError(
                f"{source.where}: {tensor.name} is stored as {part.format}, {tensors[0].name} as {stack.format}; the "
                "parts of one weight must be stored alike"
            )
        stack.put(place, part)
        source.forget(tensor.name)
    assert stack is not None, "a spec with parts has one at least"
    whole = stack.whole
    return whole if spec.row_order is None else whole.select_rows(spec.row_order(whole.shape[0]))


def _vector(source: WeightSource, spec: WeightSpec, order: torch.Tensor | None) -> torch.Tensor:
    vector = torch.cat([source.vector(tensor) for tensor in spec.tensors]).view(spec.shape)
    if spec.below and not bool(((vector >= 0) & (vector < spec.below)).all()):
        raise CheckpointError(
            f"{source.where}: {spec.name} has numbers from {int(vector.min())} to {int(vector.max())}, they should lie "
            f"below {spec.below} and not below 0; the file is damaged, or of another model: download it again"
        )
    if spec.offset:
        vector = vector + spec.offset
    if order is not None:
        vector = vector[order]
    vector = torch.cat([vector[start:stop] for start, stop in spec.row_ranges])
    if spec.row_order is not None:
        vector = vector[spec.row_order(vector.shape[0])]
    return vector.contiguous()


def _check_names(source: WeightSource, specs: Sequence[WeightSpec], *, ignored: Sequence[str]) -> None:
    held = source.names()
    if held is None:
        return
    wanted = {tensor.name for spec in specs for tensor in spec.tensors}
    missing = sorted(wanted - held)
    if missing:
        headless = "; if it was made for embeddings it needs none: set tie_word_embeddings to true in its config.json"
        raise CheckpointError(
            f"{source.where}: {_some(missing)} missing; the checkpoint is incomplete or of another architecture"
            f"{headless if missing == ['lm_head.weight'] else ''}"
        )
    left_out = re.compile("|".join((r".*rotary_emb\.inv_freq", *ignored)))
    beyond = sorted(name for name in held - wanted if left_out.fullmatch(name) is None)
    if beyond:
        raise CheckpointError(
            f"{source.where}: {_some(beyond)} unknown to this architecture; leaving weights out would give wrong "
            "answers: use a checkpoint of a supported architecture"
        )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'}"
