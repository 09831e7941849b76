"""recurrent.causal_conv: a short convolution over the tokens of each channel, then silu; its state is in paged blocks.

Contract
    ``fn(x, weight, bias, state, starts, sources, targets, out) -> None``
    x        float32 [T, C]; rows may be apart, the elements of a row are dense.
    weight   float32 [W, C], W at least 2: the oldest input's first. Checkpoints have it as [C, 1, W]; this way round
             the channels of a token lie side by side in everything that is read.
    bias     float32 [C] or None.
    state    float32 view [blocks, W - 1, 1, C], strided (the channels are dense): the last W - 1 inputs of every
             channel, the oldest first.
    starts   int32 [B + 1]: row b has the tokens starts[b] … starts[b + 1] - 1; it does not descend.
    sources  int32 [B]: the block with the state before the row's first token; 0: there is none, it is zeros.
    targets  int32 [B]: the block that takes the state behind its last token; 0: nothing is written.
    out      float32 [T, C], contiguous.
    For the tokens t of a row, with its inputs x[t'] and, before its first token, those of its source:
    a[t] = bias + sum over w of weight[w] * x[t - (W - 1) + w], out[t] = a[t] / (1 + exp(-a[t])).

    A row's target may be its own source; no other row's source or target is. Several rows may have one source. A row
    without tokens writes nothing. Block 0 is neither read nor written. Rows of out that belong to no row are left
    alone. T and B may be 0. Nothing else overlaps.
    Tag "row_invariant": the bits depend neither on other rows nor on how a row's tokens are cut into calls.

Roles: input, weight, state. Traits: width (W), biased.
"""

import torch

from tokenspeed_kernel.binding import Bound, bind
from tokenspeed_kernel.registry import Band, KernelSpec, Operation, declare_operation, register_kernel
from tokenspeed_kernel.signature import FLOAT32, FormatSignature
from tokenspeed_kernel.traits import Range, flag_trait, one_of, size_trait

CONV_SIGNATURE = FormatSignature.of(input=FLOAT32, weight=FLOAT32, state=FLOAT32)

CAUSAL_CONV = declare_operation(
    Operation(
        family="recurrent",
        mode="causal_conv",
        roles=CONV_SIGNATURE.roles,
        traits={
            "width": size_trait("inputs that an output depends on", 4),
            "biased": flag_trait("there is a bias", False, default=False),
        },
        arguments="x [T, C], weight [W, C], bias [C], state, starts [B + 1], sources [B], targets [B], out [T, C]",
    )
)


@register_kernel(
    KernelSpec(
        name="reference_recurrent_causal_conv",
        family="recurrent",
        mode="causal_conv",
        solution="reference",
        signatures=frozenset({CONV_SIGNATURE}),
        traits={"width": Range(2), "biased": one_of(False, True)},
        band=Band.REFERENCE,
        tags=frozenset({"deterministic"}),
    )
)
def reference_causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    starts: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """recurrent.causal_conv by PyTorch."""
    width = weight.shape[0]
    for row, (source, target) in enumerate(zip(sources.tolist(), targets.tolist(), strict=True)):
        tokens = x[int(starts[row]) : int(starts[row + 1])]
        if tokens.shape[0] == 0:
            continue
        before = state[source, :, 0] if source else x.new_zeros(width - 1, x.shape[1])
        inputs = torch.cat([before, tokens])
        total = torch.zeros_like(tokens) if bias is None else bias.expand_as(tokens).clone()
        for place in range(width):
            total += weight[place] * inputs[place : place + tokens.shape[0]]
        out[int(starts[row]) : int(starts[row + 1])] = torch.nn.functional.silu(total)
        if target:
            state[target, :, 0] = inputs[tokens.shape[0] :]


def bind_causal_conv(*, width: int, biased: bool, override: str | None = None) -> Bound:
    """Chooses ``fn(x, weight, bias, state, starts, sources, targets, out)``."""
    return bind("recurrent", "causal_conv", CONV_SIGNATURE, {"width": width, "biased": biased}, override=override)
