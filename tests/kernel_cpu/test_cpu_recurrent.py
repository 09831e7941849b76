"""Recurrent layers and gates on every instruction set: against the references, and where the bits must not change."""

import os
import subprocess
import sys

import pytest
import torch

from tokenspeed_kernel.ops import (
    bind_add,
    bind_causal_conv,
    bind_gated_delta,
    bind_gated_rms_norm,
    bind_sigmoid_gate,
)
from tokenspeed_kernel_cpu import set_num_threads
from tokenspeed_kernel_cpu.threads import num_threads

HEADS = [(2, 4, 16, 16), (1, 3, 7, 37), (2, 2, 128, 96)]
"""Key heads, value heads, elements of a key and of a value."""


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Delta:
    """The rule's inputs for ``tokens`` tokens of one row, and a call over a part of them."""

    def __init__(self, heads: tuple[int, int, int, int], decay: str, tokens: int) -> None:
        keys, values, key_dim, value_dim = heads
        decayed = (values, key_dim) if decay == "channel" else (values,)
        self.traits = {"key_dim": key_dim, "value_dim": value_dim, "v_per_k": values // keys, "decay": decay}
        self.parts = [
            torch.randn(tokens, *shape)
            for shape in ((keys, key_dim), (keys, key_dim), (values, value_dim), decayed, (values,))
        ]
        self.rate, self.bias = torch.rand(values) + 0.1, torch.randn(decayed)
        self.state = torch.randn(4, values, 1, key_dim * value_dim)
        self.out = torch.full((tokens, values, value_dim), torch.nan)

    def call(self, fn, span: slice, source: int, target: int) -> None:
        parts = [part[span] for part in self.parts]
        rows = ints(0, parts[0].shape[0]), ints(source), ints(target)
        fn(*parts, self.rate, self.bias, 1e-6, self.state, *rows, self.out[span])


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("heads", HEADS)
def test_gated_delta_is_the_references(instruction_set: str, heads: tuple[int, int, int, int], decay: str) -> None:
    inputs = Delta(heads, decay, 21)
    bound = bind_gated_delta(**inputs.traits)
    assert bound.spec.name == "cpu_recurrent_gated_delta"
    before = inputs.state.clone()
    inputs.call(bind_gated_delta(**inputs.traits, override="reference").fn, slice(None), 1, 2)
    expected, expected_state = inputs.out.clone(), inputs.state.clone()
    inputs.state.copy_(before)
    inputs.call(bound.fn, slice(None), 1, 2)
    torch.testing.assert_close(inputs.out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(inputs.state, expected_state, rtol=1e-4, atol=1e-5)
    assert torch.equal(inputs.state[1], before[1])


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_no_bit_hangs_on_chunks_threads_or_company(instruction_set: str, decay: str) -> None:
    """Token by token, in one call, in chunks shorter and longer than what is prepared together, beside other rows."""
    inputs = Delta((2, 6, 32, 136), decay, 40)
    fn, threads = bind_gated_delta(**inputs.traits).fn, num_threads()
    before = inputs.state.clone()
    found = []
    try:
        for count, sizes in ((1, [40]), (3, [40]), (2, [1] * 40), (1, [7, 16, 17]), (1, [32, 8])):
            set_num_threads(count)
            inputs.state.copy_(before)
            start, source = 0, 1
            for size in sizes:
                inputs.call(fn, slice(start, start + size), source, 2)
                start, source = start + size, 2
            found.append((inputs.out.clone(), inputs.state[2].clone()))
        inputs.state.copy_(before)
        together = [torch.cat([part, part[:5]]) for part in inputs.parts]
        out = torch.empty(45, *inputs.out.shape[1:])
        rows = ints(0, 40, 45), ints(1, 1), ints(2, 3)
        fn(*together, inputs.rate, inputs.bias, 1e-6, inputs.state, *rows, out)
        found.append((out[:40].clone(), inputs.state[2].clone()))
        assert torch.equal(out[40:], out[:5])
    finally:
        set_num_threads(threads)
    for out, state in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(state, found[0][1])


@pytest.mark.parametrize(("channels", "width"), [(1, 2), (67, 4), (200, 4), (33, 8)])
@pytest.mark.parametrize("biased", [False, True])
def test_causal_conv(instruction_set: str, channels: int, width: int, biased: bool) -> None:
    """A prompt in chunks and token by token, its state in place, is the whole convolution of transformers' layers."""
    x, weight = torch.randn(23, channels), torch.randn(width, channels)
    bias = torch.randn(channels) if biased else None
    bound = bind_causal_conv(width=width, biased=biased)
    assert bound.spec.name == "cpu_recurrent_causal_conv"
    padded = torch.nn.functional.pad(x.T.unsqueeze(0), (width - 1, 0))
    whole = torch.nn.functional.conv1d(padded, weight.T.unsqueeze(1), bias, groups=channels)[0].T
    outs = []
    for sizes in ([23], [10, 13], [1] * 23):
        state, out = torch.full((3, width - 1, 1, channels), torch.nan), torch.full((23, channels), torch.nan)
        start = 0
        for size in sizes:
            span, source = slice(start, start + size), 1 if start else 0
            bound.fn(x[span], weight, bias, state, ints(0, size), ints(source), ints(1), out[span])
            start += size
        outs.append(out)
        assert torch.equal(state[1, :, 0], x[23 - (width - 1) :])
        assert state[[0, 2]].isnan().all()
    torch.testing.assert_close(outs[0], torch.nn.functional.silu(whole), rtol=1e-5, atol=1e-6)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
@pytest.mark.parametrize("shape", [(0, 2, 16), (3, 5, 67), (1, 32, 128)])
def test_gated_rms(instruction_set: str, gate: str, shape: tuple[int, int, int]) -> None:
    x, weight = torch.randn(shape), torch.randn(shape[2])
    beside = torch.randn(shape[0], shape[1] * shape[2] + 7)
    opened = beside[:, 7:].view(shape)
    bound, expected = bind_gated_rms_norm(gate=gate), torch.empty(shape)
    assert bound.spec.name == "cpu_norm_gated_rms"
    bind_gated_rms_norm(gate=gate, override="reference").fn(x, opened, weight, 1e-6, gate == "silu", expected)
    bound.fn(x, opened, weight, 1e-6, gate == "silu", x)
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "size", "gates"), [(0, 64, 1), (3, 67, 67), (5, 576, 1), (33, 192, 12), (300, 64, 64)]
)
def test_sigmoid_gate_and_add(instruction_set: str, rows: int, size: int, gates: int) -> None:
    x, both = torch.randn(rows, size), torch.randn(rows, gates + 3)
    bound, out, expected = bind_sigmoid_gate(), torch.full((rows, size), torch.nan), torch.empty(rows, size)
    assert bound.spec.name == "cpu_activation_sigmoid_gate"
    bind_sigmoid_gate(override="reference").fn(x, both[:, 3:], expected)
    bound.fn(x, both[:, 3:], out)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-7)
    added = bind_add()
    assert added.spec.name == "cpu_activation_add"
    total = x + out
    added.fn(x, out)
    assert torch.equal(out, total)


DEBUG_CALLS = """
import torch
from tokenspeed_kernel.ops import *
from tokenspeed_kernel_cpu.checks import KernelArgumentError
f, i = torch.zeros, lambda *s: torch.tensor(s, dtype=torch.int32)
conv = bind_causal_conv(width=4, biased=False).fn
rule = bind_gated_delta(key_dim=4, value_dim=6, v_per_k=2, decay="head").fn
norm, gate, add = bind_gated_rms_norm(gate="silu").fn, bind_sigmoid_gate().fn, bind_add().fn
x, weight, inputs = f(3, 8), f(4, 8), f(5, 3, 1, 8)
rows = (i(0, 1, 3), i(1, 0), i(1, 2))
parts = (f(3, 1, 4), f(3, 1, 4), f(3, 2, 6), f(3, 2), f(3, 2), f(2), f(2), 1e-6)
state, out = f(5, 2, 1, 24), f(3, 2, 6)
wrong = [
    (conv, (x, f(8, 4), None, inputs, *rows, x)),
    (conv, (x, weight, None, f(5, 3, 8), *rows, x)),
    (conv, (x, weight, None, inputs, i(0, 1, 4), *rows[1:], x)),
    (conv, (x, weight, None, inputs, i(0, 2, 1), *rows[1:], x)),
    (conv, (x, weight, None, inputs, rows[0], i(1, 5), rows[2], x)),
    (conv, (x, weight, None, inputs, *rows[:2], i(2, 2), x)),
    (conv, (x, weight, None, inputs, *rows[:2], i(2, 1), x)),
    (rule, (*parts[:3], f(3, 1), *parts[4:], state, *rows, out)),
    (rule, (*parts, f(5, 2, 1, 23), *rows, out)),
    (rule, (*parts[:2], f(3, 3, 6), *parts[3:], state, *rows, f(3, 3, 6))),
    (norm, (f(2, 2, 4), f(2, 2, 5), f(4), 1e-6, True, f(2, 2, 4))),
    (gate, (f(2, 6), f(2, 4), f(2, 6))),
    (add, (f(2, 6), f(6, 2))),
]
for fn, arguments in wrong:
    try:
        fn(*arguments)
    except KernelArgumentError as error:
        print(error)
    else:
        raise SystemExit(f"let pass: {fn} {arguments}")
conv(x, weight, None, inputs, *rows, x.clone())
rule(*parts, state, *rows, out)
"""


def test_debug_mode_checks_arguments() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", DEBUG_CALLS],
        env={**os.environ, "TOKENSPEED_KERNEL_DEBUG": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    messages = ended.stdout.splitlines()
    assert len(messages) == 13
    assert "targets holds a block twice: [2, 2]; each row writes its own" in messages
    assert "targets [2, 1] holds the source of another row, sources are [1, 0]" in messages
    assert "starts must not descend, got [0, 2, 1]" in messages
    assert "4 gates do not divide 6 elements" in messages
