"""norm.rms, norm.fused_add_rms, the gated activations and rotary.apply, in float32; contracts in tokenspeed_kernel.ops.

The operators take no empty tensors.
"""

import torch

from tokenspeed_kernel_npu.operators import call


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """norm.rms."""
    if x.shape[0]:
        out.copy_(normed(x, weight, eps))


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The RMS norm of x [..., H], contiguous."""
    found: torch.Tensor = call("npu_rms_norm", input=x, gamma=weight, epsilon=eps)[0]
    return found


def fused_add_rms(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """norm.fused_add_rms."""
    if x.shape[0]:
        found, _, total = call("npu_add_rms_norm", x1=x, x2=residual, gamma=weight, epsilon=eps)
        residual.copy_(total)
        out.copy_(found)


def _joined(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Both side by side [T, 2I], contiguous: a view where they are the halves of one buffer."""
    width = gate.shape[1]
    one_buffer = gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
    behind = up.storage_offset() - gate.storage_offset() == width
    if one_buffer and behind and gate.stride() == up.stride() == (2 * width, 1):
        return gate.as_strided((gate.shape[0], 2 * width), (2 * width, 1))
    return torch.cat([gate, up], dim=1)


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> None:
    """activation.silu_and_mul."""
    if gate.shape[0]:
        out.copy_(call("npu_swiglu", input=_joined(gate, up), dim=-1))


def clipped(joined: torch.Tensor, alpha: float, limit: float, bias: float) -> torch.Tensor:
    """min(g, limit) * sigmoid(alpha * …) * (clamped u + bias) of the halves g, u of ``joined`` [T, 2I], contiguous."""
    found: torch.Tensor = call(
        "npu_clipped_swiglu", x=joined, dim=-1, alpha=alpha, limit=limit, bias=bias, interleaved=False
    )
    return found


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float, out: torch.Tensor) -> None:
    """activation.clamped_swiglu."""
    if gate.shape[0]:
        out.copy_(clipped(_joined(gate, up), alpha, limit, 1.0))


def clamped_silu(gate: torch.Tensor, up: torch.Tensor, limit: float, out: torch.Tensor) -> None:
    """activation.clamped_silu."""
    if gate.shape[0]:
        out.copy_(clipped(_joined(gate, up), 1.0, limit, 0.0))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [T, heads, R] turned by the angles whose cosines and sines are [T, R/2]."""
    doubled = [
        torch.repeat_interleave(part, 2, dim=-1) if interleaved else torch.cat([part, part], dim=-1)
        for part in (cos, sin)
    ]
    found: torch.Tensor = call(
        "npu_rotary_mul",
        input=x.contiguous().unsqueeze(0),
        r1=doubled[0][None, :, None],
        r2=doubled[1][None, :, None],
        rotary_mode="interleave" if interleaved else "half",
    )
    return found.squeeze(0)


def rotary_apply(
    x: torch.Tensor, positions: torch.Tensor, axes: torch.Tensor | None, cos_sin: torch.Tensor, interleaved: bool
) -> None:
    """rotary.apply."""
    if x.shape[0] == 0:
        return
    rotary = cos_sin.shape[1]
    if axes is None:
        cos, sin = cos_sin[positions[0].long()].chunk(2, dim=-1)
    else:
        pair = torch.arange(rotary // 2, device=x.device)
        places = positions.long()[axes.long()].T
        cos, sin = cos_sin[places, pair], cos_sin[places, pair + rotary // 2]
    turned = x[..., :rotary]
    turned.copy_(rotated(turned, cos, sin, interleaved))
