"""embedding.lookup: out[t] = weight[ids[t]].

Contract
    Registered callable: a factory ``make(weight: QuantizedTensor) -> fn``; see gemm.py for what it may do with the
    weight.
    ``fn(ids, out) -> None``: ids int32 [T], each in [0, N); out float32 [T, H], contiguous. T may be 0. The same
    bits as ``weight.dequantize()``: a look-up rounds nothing. An id out of range is the caller's fault; the
    reference raises IndexError, a native kernel need not.

Roles: weight, output. No traits.
"""

from collections.abc import Callable

import torch

from tokenspeed_kernel.binding import Bound, bind
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.registry import Band, KernelSpec, Operation, declare_operation, register_kernel
from tokenspeed_kernel.signature import FLOAT32, WEIGHT_FORMATS, FormatSignature, TensorFormat

LOOKUP = declare_operation(
    Operation(
        family="embedding",
        mode="lookup",
        roles=frozenset({"weight", "output"}),
        bound=("weight",),
        arguments="ids int32 [T], out [T, H]",
    )
)


def lookup_signature(weight: TensorFormat) -> FormatSignature:
    """The signature of a look-up in this weight format."""
    return FormatSignature.of(weight=weight, output=FLOAT32)


@register_kernel(
    KernelSpec(
        name="reference_embedding_lookup",
        family="embedding",
        mode="lookup",
        solution="reference",
        signatures=frozenset(lookup_signature(weight) for weight in WEIGHT_FORMATS.values()),
        band=Band.REFERENCE,
        tags=frozenset({"deterministic", "row_invariant"}),
    )
)
def make_reference_lookup(weight: QuantizedTensor) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """The contract above by PyTorch: the rows asked for are copied, then dequantised."""

    def lookup(ids: torch.Tensor, out: torch.Tensor) -> None:
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < weight.shape[0]):
            raise IndexError(
                f"{weight.source}: token ids from {int(ids.min())} to {int(ids.max())}; "
                f"the embedding has rows 0 to {weight.shape[0] - 1}"
            )
        out.copy_(weight.select_rows(ids).dequantize())

    return lookup


def bind_embedding(weight: QuantizedTensor, *, override: str | None = None) -> Bound:
    """Chooses and makes ``fn(ids int32 [T], out float32 [T, H])`` for this embedding."""
    return bind(
        "embedding", "lookup", lookup_signature(weight.tensor_format), {}, override=override, bound={"weight": weight}
    )
