"""The gated MLP: down(act(gate(x)) * up(x))."""

import torch

from tokenspeed.layers.kernel_choice import Kernel
from tokenspeed.layers.parts import ModelParts
from tokenspeed.layers.weights import Ranks, WeightSpec

MATRICES = ("gate_proj", "up_proj", "down_proj")
"""What most checkpoints call the matrices of an MLP."""


def mlp_weights(
    place: str,
    hidden: int,
    intermediate: int,
    ranks: Ranks,
    *,
    names: tuple[str, str, str] = MATRICES,
    biases: bool = False,
    joined: bool = False,
) -> list[WeightSpec]:
    """gate, up and down, by their ``names``, at ``place`` ("model.layers.0.mlp"). ``joined``: gate and up are one
    matrix."""
    if joined:
        both = (intermediate, intermediate)
        gate_up = ranks.rows(f"{place}.gate_up_proj.weight", 2 * intermediate, hidden, sections=both)
        return [gate_up, ranks.columns(f"{place}.down_proj.weight", hidden, intermediate)]
    specs = []
    gate, up, down = (f"{place}.{name}" for name in names)
    for matrix, rows, columns, write in (
        (gate, intermediate, hidden, ranks.rows),
        (up, intermediate, hidden, ranks.rows),
        (down, hidden, intermediate, ranks.columns),
    ):
        specs.append(write(f"{matrix}.weight", rows, columns))
        if biases:
            bias = ranks.whole if matrix == down else ranks.rows
            specs.append(bias(f"{matrix}.bias", rows))
    return specs


class GatedMlp:
    """Three kernel calls a step. ``intermediate``: of this rank; ``limit``: what gate and up are clamped at; 0.0: at
    nothing; ``partial``: what the ranks give is left for the caller to sum."""

    def __init__(
        self,
        parts: ModelParts,
        place: str,
        intermediate: int,
        *,
        names: tuple[str, str, str] = MATRICES,
        limit: float = 0.0,
        partial: bool = False,
    ) -> None:
        workspace = parts.workspace
        joined = parts.config.joined_gate_up
        *gate_up, down = ("gate_up_proj", "down_proj") if joined else names
        self._gate_up = parts.stacked([f"{place}.{name}" for name in gate_up]).forward
        self._down = (parts.partial if partial else parts.linear)(f"{place}.{down}", "columns")
        self._activate, self._limits = _activation_of(parts, limit)
        self._both = workspace.stacked("gate_up", ((intermediate,), (intermediate,)))
        self._activated = workspace.rows("activated", intermediate)

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes ``out`` float32 [T, H] of ``x`` float32 [T, H]."""
        tokens = x.shape[0]
        gate, up = self._gate_up(x, self._both(tokens))
        activated = self._activated(tokens)
        self._activate(gate, up, *self._limits, activated)
        self._down(activated, out)


def _activation_of(parts: ModelParts, limit: float) -> tuple[Kernel, tuple[float, ...]]:
    """The kernel and what it takes between its inputs and its output."""
    if limit:
        return parts.kernels.clamped_silu(), (limit,)
    silu = parts.config.activation == "silu"
    return parts.kernels.silu_and_mul() if silu else parts.kernels.gelu_tanh_and_mul(), ()
