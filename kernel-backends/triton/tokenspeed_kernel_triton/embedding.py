"""embedding.lookup on the device; contract in tokenspeed_kernel.ops.embedding. Weights are read as they lie."""

from collections.abc import Callable

import torch

from tokenspeed_kernel.gguf_blocks import BLOCK_BYTES
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel_triton.loading import Launch

STRETCH = 1024
"""Elements of a row that one block takes."""


def lookup_of(ids: torch.Tensor, weight: QuantizedTensor, out: torch.Tensor) -> Launch:
    """The launch of a look-up."""
    tokens, width = out.shape
    constants = {
        "FORMAT": weight.format if weight.is_blocked else "dense",
        "ELEMENTS": weight.block_elements,
        "BYTES": BLOCK_BYTES.get(weight.format, 0),
        "BLOCK": STRETCH,
    }
    arguments = (ids, weight.plane, out, width, weight.plane.shape[1])
    return Launch("blocks", "lookup", (tokens, -(-width // STRETCH)), arguments, constants)


def make_lookup(weight: QuantizedTensor) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """embedding.lookup."""

    def lookup(ids: torch.Tensor, out: torch.Tensor) -> None:
        if out.numel():
            lookup_of(ids, weight, out).run()

    return lookup
