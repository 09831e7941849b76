"""The gated MLP: down(silu(gate(x)) * up(x))."""

import torch

from tokenspeed.layers.parts import ModelParts
from tokenspeed.layers.weights import Ranks, WeightSpec


def mlp_weights(place: str, hidden: int, intermediate: int, ranks: Ranks, *, biases: bool = False) -> list[WeightSpec]:
    """gate, up and down at ``place`` ("model.layers.0.mlp")."""
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
        self._gate_up = parts.stacked([f"{place}.gate_proj", f"{place}.up_proj"]).forward
        self._down = parts.linear(f"{place}.down_proj", "columns")
        self._activate = parts.kernels.silu_and_mul()
        self._both = workspace.stacked(f"{memory}gate_up", ((intermediate,), (intermediate,)))
        self._activated = workspace.rows(f"{memory}activated", intermediate)

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes ``out`` float32 [T, H] of ``x`` float32 [T, H]."""
        tokens = x.shape[0]
        gate, up = self._gate_up(x, self._both(tokens))
        activated = self._activated(tokens)
        self._activate(gate, up, activated)
        self._down(activated, out)
