"""Recurrent operations: their references against the plain recurrence, and mistakes that their cases catch."""

import dataclasses

import pytest
import torch

from tokenspeed_kernel.numerics import verify_kernel
from tokenspeed_kernel.ops.causal_conv import reference_causal_conv
from tokenspeed_kernel.ops.gated_delta import reference_gated_delta
from tokenspeed_kernel.ops.gated_norm import reference_gated_rms
from tokenspeed_kernel.registry import Band, RegisteredKernel, global_registry


def conv_that_reverses_its_weight(x, weight, bias, state, starts, sources, targets, out):
    reference_causal_conv(x, weight.flip(0), bias, state, starts, sources, targets, out)


def conv_that_forgets_the_state(x, weight, bias, state, starts, sources, targets, out):
    reference_causal_conv(x, weight, bias, state, starts, torch.zeros_like(sources), targets, out)


def conv_that_goes_on_in_the_source(x, weight, bias, state, starts, sources, targets, out):
    reference_causal_conv(x, weight, bias, state, starts, sources, torch.where(sources > 0, sources, targets), out)


def conv_that_writes_to_block_0(x, weight, bias, state, starts, sources, targets, out):
    reference_causal_conv(x, weight, bias, state, starts, sources, targets, out)
    if (targets == 0).any():
        state[0] = 0.0


def conv_without_its_bias(x, weight, bias, state, starts, sources, targets, out):
    reference_causal_conv(x, weight, None, state, starts, sources, targets, out)


def delta(change):
    """The reference of the rule with some of its arguments changed, by name."""
    names = ("q", "k", "v", "decay", "beta", "rate", "bias", "eps", "state", "starts", "sources", "targets", "out")

    def wrong(*arguments):
        given = dict(zip(names, arguments, strict=True))
        reference_gated_delta(**{**given, **change(given)})

    return wrong


DELTA_MISTAKES = {
    "bias left out": lambda a: {"bias": torch.zeros_like(a["bias"])},
    "beta opened twice": lambda a: {"beta": torch.sigmoid(a["beta"])},
    "keys not of length one": lambda a: {"eps": 1.0},
    "values as keys": lambda a: {"q": a["k"]},
    "rate as it is stored": lambda a: {"rate": a["rate"].log().abs() + 0.01},
    "no state": lambda a: {"sources": torch.zeros_like(a["sources"])},
    "state left in the source": lambda a: {"targets": torch.where(a["sources"] > 0, a["sources"], a["targets"])},
}


def delta_with_other_heads(q, k, v, decay, beta, rate, bias, eps, state, starts, sources, targets, out):
    """Value head h reads key head h % Hk."""
    heads, keys = v.shape[1], k.shape[1]
    order = torch.arange(heads) % keys
    reference_gated_delta(
        q[:, order], k[:, order], v, decay, beta, rate, bias, eps, state, starts, sources, targets, out
    )


def norm_that_gates_before_it(x, gate, weight, eps, silu, out):
    gated = x * (torch.nn.functional.silu(gate) if silu else torch.sigmoid(gate))
    out.copy_(gated * torch.rsqrt(gated.square().mean(dim=-1, keepdim=True) + eps) * weight)


def norm_with_the_other_gate(x, gate, weight, eps, silu, out):
    reference_gated_rms(x, gate, weight, eps, not silu, out)


@pytest.mark.parametrize(
    ("operation", "fn", "message"),
    [
        ("recurrent.causal_conv", conv_that_reverses_its_weight, "out: "),
        ("recurrent.causal_conv", conv_that_forgets_the_state, "out: "),
        ("recurrent.causal_conv", conv_that_goes_on_in_the_source, "state: "),
        ("recurrent.causal_conv", conv_that_writes_to_block_0, "state: "),
        ("recurrent.causal_conv", conv_without_its_bias, "out: "),
        *(("recurrent.gated_delta", delta(change), "elements wrong") for change in DELTA_MISTAKES.values()),
        ("recurrent.gated_delta", delta_with_other_heads, "elements wrong"),
        ("norm.gated_rms", norm_that_gates_before_it, "elements wrong"),
        ("norm.gated_rms", norm_with_the_other_gate, "elements wrong"),
    ],
)
def test_a_mistake_is_caught(reference_registry, operation, fn, message):
    spec = global_registry().reference(*operation.split(".")).spec
    wrong = dataclasses.replace(spec, name="wrong", solution="wrong", band=Band.PLUGIN)
    report = verify_kernel(RegisteredKernel(wrong, fn, "test"), reference_registry)
    lines = [line for failure in report.failures for line in (failure.case, *failure.details)]
    assert message in "\n".join(lines)
    assert not any("raised" in line for line in lines), lines


def test_rows_that_share_a_source_go_on_apart(reference_registry):
    """Two prompts that begin with one checkpoint: each writes its own block, the checkpoint stays."""
    for kernel in reference_registry.kernels("recurrent", "causal_conv"):
        state = torch.randn(4, 3, 1, 8)
        before = state[1].clone()
        x, out = torch.randn(2, 8), torch.empty(2, 8)
        rows = (torch.tensor(part, dtype=torch.int32) for part in ([0, 1, 2], [1, 1], [2, 3]))
        kernel.fn(x, torch.randn(4, 8), None, state, *rows, out)
        assert torch.equal(state[1], before)
        for row, block in enumerate((2, 3)):
            assert torch.equal(state[block, :, 0], torch.cat([before[1:, 0], x[row : row + 1]]))
