"""gemm.linear: out = x @ weight.T + bias.

Contract
    Registered callable: a factory ``make(weight: QuantizedTensor, bias: Tensor | None) -> fn``. The factory may keep
    the weight's planes (they outlive the kernel and may be read-only) and must not change them.
    ``fn(x, out) -> None``: x float32 [T, K], out float32 [T, N]; both contiguous, not overlapping; bias float32 [N]
    or None. T may be 0. The sum over K is in float32 at least. A kernel tagged "row_invariant" gives a row the same
    bits whatever T is.

Roles: input, weight, output. Traits: n, k.
"""

from collections.abc import Callable

import torch

from tokenspeed_kernel.binding import Bound, bind
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.registry import Band, KernelSpec, Operation, declare_operation, register_kernel
from tokenspeed_kernel.signature import FLOAT32, WEIGHT_FORMATS, FormatSignature, TensorFormat
from tokenspeed_kernel.traits import Range, size_trait

LINEAR = declare_operation(
    Operation(
        family="gemm",
        mode="linear",
        roles=frozenset({"input", "weight", "output"}),
        traits={
            "n": size_trait("outputs: rows of the weight", 576),
            "k": size_trait("inputs: columns of the weight", 576),
        },
        bound=("weight", "bias"),
        arguments="x [T, K], out [T, N]",
    )
)


def linear_signature(weight: TensorFormat) -> FormatSignature:
    """The signature of a linear with float32 activations and this weight format."""
    return FormatSignature.of(input=FLOAT32, weight=weight, output=FLOAT32)


@register_kernel(
    KernelSpec(
        name="reference_gemm_linear",
        family="gemm",
        mode="linear",
        solution="reference",
        signatures=frozenset(linear_signature(weight) for weight in WEIGHT_FORMATS.values()),
        traits={"n": Range(0), "k": Range(1)},
        band=Band.REFERENCE,
        tags=frozenset({"deterministic"}),
    )
)
def make_reference_linear(
    weight: QuantizedTensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """The contract above by PyTorch; the weight is dequantised to float32 once, when it is bound."""
    matrix = weight.dequantize().T

    def linear(x: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(x, matrix, out=out)
        if bias is not None:
            out += bias

    return linear


def bind_linear(weight: QuantizedTensor, bias: torch.Tensor | None, *, override: str | None = None) -> Bound:
    """Chooses and makes ``fn(x [T, K] float32, out [T, N] float32)`` for this weight and bias (float32 [N] or None).

    Raises SelectionError where nothing takes the weight, ValueError where the bias does not fit it.
    """
    n, k = weight.shape
    if bias is not None and (bias.dtype != torch.float32 or tuple(bias.shape) != (n,)):
        raise ValueError(f"{weight.source}: its bias must be float32 [{n}], got {bias.dtype} {list(bias.shape)}")
    return bind(
        "gemm",
        "linear",
        linear_signature(weight.tensor_format),
        {"n": n, "k": k},
        override=override,
        bound={"weight": weight, "bias": bias},
    )
