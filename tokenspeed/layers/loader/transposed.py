"""Experts' matrices that lie in the checkpoint with their inputs as rows (gpt-oss), turned one expert at a time."""

from dataclasses import replace

import torch

from tokenspeed.layers.huge_memory import huge_zeros
from tokenspeed.layers.loader.source import WeightSource
from tokenspeed.layers.weights import WeightSpec
from tokenspeed.recipes.model_config import CheckpointError
from tokenspeed_kernel.quantized import QuantizedTensor


def turned(source: WeightSource, spec: WeightSpec) -> QuantizedTensor:
    """The rank's experts of ``spec``, stored [experts, columns, rows of one], as [their rows, columns].

    The result is the only copy: what of the file was read for it is given back. Raises CheckpointError where experts
    cannot be divided among the ranks.
    """
    experts, columns, each = spec.stored
    try:
        held, ranges = spec.of_experts(experts)
    except ValueError as error:
        raise CheckpointError(f"{source.where}: {error}") from None
    first, last = spec.shard.column_range(columns)
    rows = sum(stop - start for start, stop in ranges)
    stored = source.matrix(replace(spec, shape=(experts * columns, each), stored=(), transposed=False, sections=()))
    data = stored.plane.view(experts, columns, each)
    shape = (len(held) * rows, last - first)
    memory = huge_zeros(shape[0] * shape[1] * data.element_size()).view(data.dtype).view(shape)
    order = None if spec.row_order is None else spec.row_order(rows)
    for place, expert in enumerate(held):
        here = memory[place * rows : (place + 1) * rows]
        pieces = [data[expert, first:last, start:stop] for start, stop in ranges]
        part = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        if order is None:
            here.copy_(part.T)
        else:  # turned first: taking columns apart one element at a time is six times as slow
            torch.index_select(part.T.contiguous(), 0, order, out=here)
    source.forget(spec.name)
    return QuantizedTensor(format=stored.format, shape=shape, planes={"data": memory}, source=stored.source)
