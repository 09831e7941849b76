"""activation.silu_and_mul, activation.clamped_swiglu and activation.clamped_silu.

silu_and_mul: out = silu(gate) * up
    ``fn(gate, up, out) -> None``: float32 [T, I] each; silu(g) = g / (1 + exp(-g)). gate and up may be row-strided
    (the halves of one [T, 2I] buffer): their last stride is 1, their row stride is their own. out is contiguous and
    overlaps neither. T may be 0.

clamped_swiglu: that of gpt-oss
    ``fn(gate, up, alpha, limit, out) -> None``: the same tensors; g = min(gate, limit), u = up clamped to
    [-limit, limit], out = g / (1 + exp(-alpha * g)) * (u + 1). alpha and limit are Python floats above 0.

clamped_silu: that of DeepSeek-V4
    ``fn(gate, up, limit, out) -> None``: the same with out = g / (1 + exp(-g)) * u.

Roles: input, output. No traits.
"""

from dataclasses import dataclass

import torch

from tokenspeed_kernel.binding import Bound, bind
from tokenspeed_kernel.registry import Band, KernelSpec, Operation, declare_operation, register_kernel
from tokenspeed_kernel.signature import FLOAT32, FormatSignature

ACTIVATION_SIGNATURE = FormatSignature.of(input=FLOAT32, output=FLOAT32)

SILU_AND_MUL = declare_operation(
    Operation(
        family="activation",
        mode="silu_and_mul",
        roles=ACTIVATION_SIGNATURE.roles,
        arguments="gate [T, I], up [T, I], out [T, I]",
    )
)

CLAMPED_SWIGLU = declare_operation(
    Operation(
        family="activation",
        mode="clamped_swiglu",
        roles=ACTIVATION_SIGNATURE.roles,
        arguments="gate [T, I], up [T, I], alpha, limit, out [T, I]",
    )
)

CLAMPED_SILU = declare_operation(
    Operation(
        family="activation",
        mode="clamped_silu",
        roles=ACTIVATION_SIGNATURE.roles,
        arguments="gate [T, I], up [T, I], limit, out [T, I]",
    )
)

GATED_ACTIVATIONS = ("silu", "clamped_swiglu", "clamped_silu")


@dataclass(frozen=True)
class GatedActivation:
    """The activation of an MLP whose kernel is made with it.

    Attributes:
        kind: one of GATED_ACTIVATIONS.
        alpha: of clamped_swiglu, above 0; 0.0 for the others, which have none.
        limit: of those that clamp, above 0; 0.0 for silu.
    """

    kind: str
    alpha: float = 0.0
    limit: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in GATED_ACTIVATIONS:
            raise ValueError(f"activation {self.kind!r} is unknown; use one of {', '.join(GATED_ACTIVATIONS)}")
        if self.kind == "silu" and (self.alpha or self.limit):
            raise ValueError(f"silu has no alpha and no limit, got {self.alpha} and {self.limit}; leave them out")
        if self.kind == "clamped_swiglu" and not (self.alpha > 0.0 and self.limit > 0.0):
            raise ValueError(f"clamped_swiglu needs alpha and limit above 0, got {self.alpha} and {self.limit}")
        if self.kind == "clamped_silu" and (self.alpha or not self.limit > 0.0):
            raise ValueError(f"clamped_silu needs a limit above 0 and no alpha, got {self.limit} and {self.alpha}")

    def apply(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """The activation of gate and up, in their dtype."""
        if self.kind == "silu":
            return torch.nn.functional.silu(gate) * up
        clamped = gate.clamp(max=self.limit)
        if self.kind == "clamped_silu":
            return torch.nn.functional.silu(clamped) * up.clamp(-self.limit, self.limit)
        return clamped * torch.sigmoid(self.alpha * clamped) * (up.clamp(-self.limit, self.limit) + 1.0)


def _reference_spec(mode: str) -> KernelSpec:
    return KernelSpec(
        name=f"reference_activation_{mode}",
        family="activation",
        mode=mode,
        solution="reference",
        signatures=frozenset({ACTIVATION_SIGNATURE}),
        band=Band.REFERENCE,
        tags=frozenset({"deterministic"}),
    )


@register_kernel(_reference_spec("silu_and_mul"))
def reference_silu_and_mul(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> None:
    """activation.silu_and_mul by PyTorch."""
    out.copy_(GatedActivation("silu").apply(gate, up))


@register_kernel(_reference_spec("clamped_swiglu"))
def reference_clamped_swiglu(
    gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float, out: torch.Tensor
) -> None:
    """activation.clamped_swiglu by PyTorch."""
    out.copy_(GatedActivation("clamped_swiglu", alpha, limit).apply(gate, up))


@register_kernel(_reference_spec("clamped_silu"))
def reference_clamped_silu(gate: torch.Tensor, up: torch.Tensor, limit: float, out: torch.Tensor) -> None:
    """activation.clamped_silu by PyTorch."""
    out.copy_(GatedActivation("clamped_silu", limit=limit).apply(gate, up))


def bind_clamped_silu(*, override: str | None = None) -> Bound:
    """Chooses ``fn(gate, up, limit, out)``."""
    return bind("activation", "clamped_silu", ACTIVATION_SIGNATURE, {}, override=override)


def bind_silu_and_mul(*, override: str | None = None) -> Bound:
    """Chooses ``fn(gate, up, out)``."""
    return bind("activation", "silu_and_mul", ACTIVATION_SIGNATURE, {}, override=override)


def bind_clamped_swiglu(*, override: str | None = None) -> Bound:
    """Chooses ``fn(gate, up, alpha, limit, out)``."""
    return bind("activation", "clamped_swiglu", ACTIVATION_SIGNATURE, {}, override=override)
