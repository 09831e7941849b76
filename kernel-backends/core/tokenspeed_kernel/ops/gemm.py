"""gemm.linear: out = x @ weight.T + bias; and gemm.head_linear, the same with a matrix for each head.

linear
    Registered callable: a factory ``make(weight: QuantizedTensor, bias: Tensor | None) -> fn``. The factory may keep
    the weight's planes (they outlive the kernel and may be read-only) and must not change them.
    ``fn(x, out) -> None``: x float32 [T, K], out float32 [T, N]; both contiguous, not overlapping; bias float32 [N]
    or None. T may be 0. The sum over K is in float32 at least. A kernel tagged "row_invariant" gives a row the same
    bits whatever T is.

head_linear
    Registered callable: a factory ``make(weight: QuantizedTensor, heads: int, skipped: int) -> fn``; weight [heads *
    (skipped + N), K], of which the first ``skipped`` rows of each head are left out.
    ``fn(x, out) -> None``: x float32 [T, heads, K], out float32 [T, heads, N]; rows and heads of both at any stride,
    their elements dense; not overlapping. out[t, h] = the head's last N rows @ x[t, h]. T may be 0. Latent attention
    takes its plain queries to the latents by it and its output back (see mla.py), this by the up-projection as it
    lies, in which a head's rows for keys come before those for values.

Roles: input, weight, output. Traits: n, k (of head_linear, those of one head); linear has activations too.

The trait ``activations`` says what x is rounded to before the product: "float32", nothing, is the default; under
"bfloat16" the sums stay float32, and each result lies within 2^-8 of the sum of its terms' absolute values. A kernel
that rounds takes "bfloat16" only, so none is chosen unless somebody asked for it.

Under "int8" and "int16", for weights in blocks, each token's x is taken 32 columns at a time. Their scale is the
largest magnitude over 127 ("int8") or over 127 * 128 ("int16"), and each becomes the nearest multiple of it (either one
at the middle); all become 0 where the largest is below 2^-100, and a NaN or an infinity makes every result of its token
NaN. So a result is off by at most the sum over the columns of the weight's magnitude times half their scale. Here too
a kernel takes the one or the other only.

Under "fp4", for weights whose elements are e2m1 (fp4_rows.FP4_FORMATS), x is quantised as fp4_rows.py says, exactly so,
and the result lies within 2^-12 of the sum of its terms' absolute values: matrix instructions shift the terms that they
add to one exponent and drop what falls off. Who asks for it gets it: no kernel leaves x wider instead, the reference
computes it where no other does, and other weights are refused.
"""

import os
from collections.abc import Callable

import torch

from tokenspeed_kernel.binding import Bound, bind
from tokenspeed_kernel.fp4_rows import FP4_FORMATS, quantise_rows
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.registry import Band, KernelSpec, Operation, declare_operation, register_kernel
from tokenspeed_kernel.selection import SelectionError
from tokenspeed_kernel.signature import FLOAT32, WEIGHT_FORMATS, FormatSignature, TensorFormat
from tokenspeed_kernel.traits import OneOf, Range, TraitDeclaration, TraitValue, one_of, size_trait

ACTIVATIONS_VARIABLE = "TOKENSPEED_KERNEL_ACTIVATIONS"
"""Environment: the ``activations`` of every product whose caller says none."""

ACTIVATIONS = ("float32", "bfloat16", "int8", "int16", "fp4")

LINEAR = declare_operation(
    Operation(
        family="gemm",
        mode="linear",
        roles=frozenset({"input", "weight", "output"}),
        traits={
            "n": size_trait("outputs: rows of the weight", 576),
            "k": size_trait("inputs: columns of the weight", 576),
            "activations": TraitDeclaration(
                (OneOf,), str, "what x is rounded to before the product", "float32", default="float32"
            ),
        },
        bound=("weight", "bias"),
        arguments="x [T, K], out [T, N]",
    )
)

HEAD_LINEAR = declare_operation(
    Operation(
        family="gemm",
        mode="head_linear",
        roles=frozenset({"input", "weight", "output"}),
        traits={
            "n": size_trait("outputs of a head", 512),
            "k": size_trait("inputs of a head", 128),
        },
        bound=("weight", "heads", "skipped"),
        arguments="x [T, heads, K], out [T, heads, N]",
    )
)


def linear_signature(weight: TensorFormat) -> FormatSignature:
    """The signature of a linear with float32 activations and this weight format."""
    return FormatSignature.of(input=FLOAT32, weight=weight, output=FLOAT32)


def _reference_spec(mode: str) -> KernelSpec:
    return KernelSpec(
        name=f"reference_gemm_{mode}",
        family="gemm",
        mode=mode,
        solution="reference",
        signatures=frozenset(linear_signature(weight) for weight in WEIGHT_FORMATS.values()),
        traits={"n": Range(0), "k": Range(1)},
        band=Band.REFERENCE,
        tags=frozenset({"deterministic"}),
    )


@register_kernel(_reference_spec("linear"))
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


@register_kernel(
    KernelSpec(
        name="reference_gemm_linear_fp4",
        family="gemm",
        mode="linear",
        solution="reference",
        signatures=frozenset(linear_signature(WEIGHT_FORMATS[name]) for name in FP4_FORMATS),
        traits={"n": Range(0), "k": Range(1), "activations": one_of("fp4")},
        band=Band.REFERENCE,
        tags=frozenset({"deterministic"}),
    )
)
def make_reference_fp4_linear(
    weight: QuantizedTensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """gemm.linear with activations in four bits, by PyTorch."""
    multiply = make_reference_linear(weight, bias)

    def linear(x: torch.Tensor, out: torch.Tensor) -> None:
        multiply(quantise_rows(x, weight.format).values(), out)

    return linear


@register_kernel(_reference_spec("head_linear"))
def make_reference_head_linear(
    weight: QuantizedTensor, heads: int, skipped: int
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """gemm.head_linear by PyTorch."""
    matrices = weight.dequantize().reshape(heads, weight.shape[0] // heads, weight.shape[1])[:, skipped:]

    def head_linear(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.einsum("thk,hnk->thn", x, matrices))

    return head_linear


def allowed_activations(activations: str | None) -> str:
    """``activations`` or, where it is None, what the environment says, else "float32"; ValueError where it is
    unknown."""
    allowed = activations or os.environ.get(ACTIVATIONS_VARIABLE) or "float32"
    if allowed not in ACTIVATIONS:
        where = "activations" if activations else ACTIVATIONS_VARIABLE
        raise ValueError(f"{where} is {allowed!r}; use one of {', '.join(ACTIVATIONS)}")
    return allowed


def check_fp4(*weights: QuantizedTensor) -> None:
    """Raises ValueError, naming the weight, where products with it cannot take activations of four bits."""
    for weight in weights:
        if weight.format not in FP4_FORMATS:
            raise ValueError(
                f"{weight.source}: activations are fp4, but the weight is {weight.format}; only weights in "
                f"{' or '.join(sorted(FP4_FORMATS))} multiply activations of four bits: leave activations at auto"
            )


def bind_linear(
    weight: QuantizedTensor,
    bias: torch.Tensor | None,
    *,
    activations: str | None = None,
    override: str | None = None,
) -> Bound:
    """Chooses and makes ``fn(x [T, K] float32, out [T, N] float32)`` for this weight and bias (float32 [N] or None).

    activations: what x may be rounded to, one of ACTIVATIONS; None: what TOKENSPEED_KERNEL_ACTIVATIONS says, else
    "float32". Where no kernel rounds so with this weight, or the override names one that does not, nothing is rounded;
    but of "fp4".

    Raises SelectionError where nothing takes the weight, ValueError where the bias does not fit it, ``activations`` is
    unknown, or it is "fp4" and the weight has other elements.
    """
    n, k = weight.shape
    if bias is not None and (bias.dtype != torch.float32 or tuple(bias.shape) != (n,)):
        raise ValueError(f"{weight.source}: its bias must be float32 [{n}], got {bias.dtype} {list(bias.shape)}")
    allowed = allowed_activations(activations)
    signature, bound = linear_signature(weight.tensor_format), {"weight": weight, "bias": bias}
    if allowed == "fp4":
        check_fp4(weight)
    if allowed != "float32":
        try:
            traits: dict[str, TraitValue] = {"n": n, "k": k, "activations": allowed}
            return bind("gemm", "linear", signature, traits, override=override, bound=bound)
        except SelectionError:
            if allowed == "fp4":
                raise
            # nothing rounds here
    return bind("gemm", "linear", signature, {"n": n, "k": k}, override=override, bound=bound)


def bind_head_linear(weight: QuantizedTensor, heads: int, *, skipped: int = 0, override: str | None = None) -> Bound:
    """Chooses and makes ``fn(x [T, heads, K] float32, out [T, heads, N] float32)`` for a weight [heads * (skipped + N),
    K], of which the first ``skipped`` rows of each head are left out.

    Raises SelectionError where nothing takes the weight, ValueError where its rows do not divide into the heads, or a
    head has fewer than are skipped.
    """
    rows, k = weight.shape
    if heads < 1 or rows % heads:
        raise ValueError(f"{weight.source}: {rows} rows do not divide into {heads} heads")
    if not 0 <= skipped <= rows // heads:
        raise ValueError(f"{weight.source}: {skipped} rows of a head cannot be skipped, it has {rows // heads}")
    return bind(
        "gemm",
        "head_linear",
        linear_signature(weight.tensor_format),
        {"n": rows // heads - skipped, "k": k},
        override=override,
        bound={"weight": weight, "heads": heads, "skipped": skipped},
    )
