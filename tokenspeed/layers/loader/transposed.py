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
    start, stop = spec.shard.row_range(spec.shape[0])
    if start % each or stop % each:
        raise CheckpointError(
            f"{source.where}: {experts} experts of {spec.name} cannot be divided among {spec.shard.world} ranks"
        )
    stored = source.matrix(replace(spec, shape=(experts * columns, each), stored=(), transposed=False))
    data = stored.plane.view(experts, columns, each)
    memory = huge_zeros((stop - start) * columns * data.element_size()).view(data.dtype).view(stop - start, columns)
    order = None if spec.row_order is None else spec.row_order(each)
    for place, expert in enumerate(range(start // each, stop // each)):
        here = memory[place * each : (place + 1) * each]
        if order is None:
            here.copy_(data[expert].T)
        else:  # turned first: taking columns apart one element at a time is six times as slow
            torch.index_select(data[expert].T.contiguous(), 0, order, out=here)
    source.forget(spec.name)
    return QuantizedTensor(
        format=stored.format, shape=(stop - start, columns), planes={"data": memory}, source=stored.source
    )
