"""activation.sigmoid_gate and activation.add; contracts in tokenspeed_kernel.ops.gating."""

import torch

from tokenspeed_kernel_cpu import _native
from tokenspeed_kernel_cpu.checks import KernelArgumentError, checked, expect

_sigmoid_gate = _native.sigmoid_gate
_add = _native.add


def _check_gate(x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> None:
    rows, size = out.shape
    expect("x", x, torch.float32, (rows, size))
    expect("gate", gate, torch.float32, (rows, gate.shape[1]), strided_rows=True)
    expect("out", out, torch.float32, (rows, size))
    if gate.shape[1] == 0 or size % gate.shape[1]:
        raise KernelArgumentError(f"{gate.shape[1]} gates do not divide {size} elements")


def _check_add(x: torch.Tensor, out: torch.Tensor) -> None:
    expect("x", x, torch.float32, out.shape)
    expect("out", out, torch.float32, out.shape)


@checked(_check_gate)
def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> None:
    """out = x * sigmoid(gate), each gate that of the elements in its place."""
    _sigmoid_gate(x.data_ptr(), (gate.data_ptr(), gate.stride(0)), out.data_ptr(), x.size(0), x.size(1), gate.size(1))


@checked(_check_add)
def add(x: torch.Tensor, out: torch.Tensor) -> None:
    """out += x."""
    _add(x.data_ptr(), out.data_ptr(), x.numel())
