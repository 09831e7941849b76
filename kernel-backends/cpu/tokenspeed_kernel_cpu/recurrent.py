"""recurrent.causal_conv, recurrent.gated_delta and norm.gated_rms; contracts in tokenspeed_kernel.ops.causal_conv,
.gated_delta and .gated_norm."""

import torch

from tokenspeed_kernel_cpu import _native
from tokenspeed_kernel_cpu.checks import KernelArgumentError, checked, expect, expect_range

_causal_conv = _native.causal_conv
_gated_delta = _native.gated_delta
_gated_norm = _native.gated_norm


def _check_state(state: torch.Tensor, heads: int, elements: int) -> None:
    expect("state", state[:0], torch.float32, (0, heads, 1, elements))
    if state.stride(3) != 1:
        raise KernelArgumentError(f"state has strides {list(state.stride())}; the elements of a head must be dense")


def _check_rows(tokens: int, blocks: int, starts: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    expect("sources", sources, torch.int32, sources.shape[:1])
    expect("targets", targets, torch.int32, sources.shape)
    expect("starts", starts, torch.int32, (sources.shape[0] + 1,))
    expect_range("starts", starts, 0, tokens + 1)
    expect_range("sources", sources, 0, blocks)
    expect_range("targets", targets, 0, blocks)
    if bool((starts.diff() < 0).any()):
        raise KernelArgumentError(f"starts must not descend, got {starts.tolist()}")
    written = targets[targets > 0].tolist()
    if len(set(written)) != len(written):
        raise KernelArgumentError(f"targets holds a block twice: {targets.tolist()}; each row writes its own")
    clash = (targets.unsqueeze(1) == sources) & (targets.unsqueeze(1) > 0)
    if bool(clash.fill_diagonal_(False).any()):
        raise KernelArgumentError(
            f"targets {targets.tolist()} holds the source of another row, sources are {sources.tolist()}"
        )


def _check_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    starts: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    out: torch.Tensor,
) -> None:
    tokens, channels = out.shape
    expect("x", x, torch.float32, (tokens, channels), strided_rows=True)
    expect("weight", weight, torch.float32, (weight.shape[0], channels))
    if bias is not None:
        expect("bias", bias, torch.float32, (channels,))
    expect("out", out, torch.float32, (tokens, channels))
    _check_state(state, weight.shape[0] - 1, channels)
    _check_rows(tokens, state.shape[0], starts, sources, targets)


def _check_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    rate: torch.Tensor,
    bias: torch.Tensor,
    _eps: float,
    state: torch.Tensor,
    starts: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    out: torch.Tensor,
) -> None:
    tokens, heads, value_dim = out.shape
    key_heads, key_dim = k.shape[1:]
    if key_heads == 0 or heads % key_heads:
        raise KernelArgumentError(f"{heads} value heads do not divide among {key_heads} key heads")
    decayed = (heads, key_dim) if decay.dim() == 3 else (heads,)
    for name, part, shape in (
        ("q", q, (key_heads, key_dim)),
        ("k", k, (key_heads, key_dim)),
        ("v", v, (heads, value_dim)),
        ("decay", decay, decayed),
        ("beta", beta, (heads,)),
    ):
        expect(name, part, torch.float32, (tokens, *shape), strided_rows=True)
    expect("rate", rate, torch.float32, (heads,))
    expect("bias", bias, torch.float32, decayed)
    expect("out", out, torch.float32, out.shape)
    _check_state(state, heads, key_dim * value_dim)
    _check_rows(tokens, state.shape[0], starts, sources, targets)


def _check_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, _eps: float, _silu: bool, out: torch.Tensor
) -> None:
    expect("x", x, torch.float32, out.shape)
    expect("gate", gate, torch.float32, out.shape, strided_rows=True)
    expect("weight", weight, torch.float32, out.shape[2:])
    expect("out", out, torch.float32, out.shape)


def _plane(state: torch.Tensor) -> tuple[int, int, int]:
    return state.data_ptr(), state.stride(0), state.stride(1)


@checked(_check_conv)
def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    starts: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out = silu of the weighted sum of a channel's last inputs; the last of them go to the targets."""
    _causal_conv(
        (x.data_ptr(), x.stride(0)),
        x.size(1),
        weight.size(0),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        _plane(state),
        (starts.data_ptr(), sources.data_ptr(), targets.data_ptr(), sources.size(0)),
        out.data_ptr(),
    )


@checked(_check_delta)
def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    rate: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    state: torch.Tensor,
    starts: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """The gated delta rule, token by token; a state is read once and written once where a row has one token."""
    _gated_delta(
        (q.data_ptr(), q.stride(0)),
        (k.data_ptr(), k.stride(0)),
        (v.data_ptr(), v.stride(0)),
        (decay.data_ptr(), decay.stride(0)),
        (beta.data_ptr(), beta.stride(0)),
        rate.data_ptr(),
        bias.data_ptr(),
        k.size(1),
        v.size(1),
        k.size(2),
        v.size(2),
        decay.dim() == 3,
        eps,
        _plane(state),
        (starts.data_ptr(), sources.data_ptr(), targets.data_ptr(), sources.size(0)),
        out.data_ptr(),
    )


@checked(_check_norm)
def gated_rms(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, silu: bool, out: torch.Tensor
) -> None:
    """out = x / rms(x) * weight * (silu or sigmoid)(gate), head by head."""
    _gated_norm(
        x.data_ptr(),
        (gate.data_ptr(), gate.stride(0)),
        weight.data_ptr(),
        eps,
        silu,
        out.data_ptr(),
        x.size(0),
        x.size(1),
        x.size(2),
    )
