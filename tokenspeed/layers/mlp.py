"""The gated MLP: down(act(gate(x)) * up(x))."""

import torch

from tokenspeed.layers.parts import ModelParts
from tokenspeed.layers.weights import Ranks, WeightSpec


def mlp_weights(
    place: str, hidden: int, intermediate: int, ranks: Ranks, *, biases: bool = False, joined: bool = False
) -> list[WeightSpec]:
    """gate, up and down at ``place`` ("model.layers.0.mlp"). ``joined``: gate and up are one matrix; every rank has all
    of such an MLP then, for a range of its rows would be a part of one of them alone."""
    if joined:
        gate_up = ranks.whole(f"{place}.gate_up_proj.weight", 2 * intermediate, hidden)
        return [gate_up, ranks.whole(f"{place}.down_proj.weight", hidden, intermediate)]
    specs = []
    for name, rows, columns, write in (
        ("gate", intermediate, hidden, ranks.rows),
        ("up", intermediate, hidden, ranks.rows),
        ("down", hidden, intermediate, ranks.columns),
    ):
        specs.append(write(f"{place}.{name}_proj.weight", rows, columns))
        if biases:
            bias = ranks.whole if name == "down" else ranks.rows
            specs.append(bias(f"{place}.{name}_proj.bias", rows))
    return specs


class GatedMlp:
    """Three kernel calls a step. ``memory``: MLPs that run at the same time need buffers of their own names."""

    def __init__(self, parts: ModelParts, place: str, intermediate: int, *, memory: str = "") -> None:
        workspace = parts.workspace
        joined = parts.config.joined_gate_up
        gate_up = ["gate_up_proj"] if joined else ["gate_proj", "up_proj"]
        self._gate_up = parts.stacked([f"{place}.{name}" for name in gate_up]).forward
        self._down = parts.linear(f"{place}.down_proj", "replicated" if joined else "columns")
        silu = parts.config.activation == "silu"
        self._activate = parts.kernels.silu_and_mul() if silu else parts.kernels.gelu_tanh_and_mul()
        self._both = workspace.stacked(f"{memory}gate_up", ((intermediate,), (intermediate,)))
        self._activated = workspace.rows(f"{memory}activated", intermediate)

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes ``out`` float32 [T, H] of ``x`` float32 [T, H]."""
        tokens = x.shape[0]
        gate, up = self._gate_up(x, self._both(tokens))
        activated = self._activated(tokens)
        self._activate(gate, up, activated)
        self._down(activated, out)
