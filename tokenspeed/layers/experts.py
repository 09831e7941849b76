"""A mixture of experts: a router, the experts that it chooses, and one that every token goes to."""

from dataclasses import dataclass

import torch

from tokenspeed.layers.kernels import Kernel
from tokenspeed.layers.mlp import GatedMlp, mlp_weights
from tokenspeed.layers.parts import ModelParts
from tokenspeed.layers.weights import Ranks, WeightSpec
from tokenspeed.recipes.model_config import ExpertsConfig
from tokenspeed_kernel.ops.activation import GatedActivation
from tokenspeed_kernel.ops.moe import Routing


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """What a family's checkpoints call the parts of a mixture, behind the block's own place ("model.layers.0.mlp").

    Attributes:
        expert: of one expert, with its number for {}.
        gate, up, down: of its matrices.
        correction: of the router's correction; "" where there is none.
        shared: of the shared expert; ``shared_gate`` of its gate.
    """

    router: str = "gate"
    expert: str = "experts.{}"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    correction: str = "gate.e_score_correction_bias"
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"


def experts_weights(
    experts: ExpertsConfig, place: str, hidden: int, ranks: Ranks, names: ExpertNames | None = None
) -> list[WeightSpec]:
    """Router, experts and shared expert at ``place``. Ranks share whole experts; the router is on all of them."""
    names = names or ExpertNames()
    count, inner = experts.count, experts.intermediate
    specs = [ranks.whole(f"{place}.{names.router}.weight", count, hidden)]
    if experts.corrected:
        specs.append(ranks.whole(f"{place}.{names.correction}", count))
    each = [f"{place}.{names.expert.format(number)}" for number in range(count)]
    gate_up = tuple(f"{expert}.{part}.weight" for expert in each for part in (names.gate, names.up))
    down = tuple(f"{expert}.{names.down}.weight" for expert in each)
    specs.append(ranks.rows(f"{place}.experts.gate_up", count * 2 * inner, hidden, parts=gate_up))
    specs.append(ranks.rows(f"{place}.experts.down", count * hidden, inner, parts=down))
    if experts.shared_intermediate:
        specs += mlp_weights(f"{place}.{names.shared}", hidden, experts.shared_intermediate, ranks)
    if experts.shared_gate:
        specs.append(ranks.whole(f"{place}.{names.shared_gate}.weight", 1, hidden))
    return specs


class Mixture:
    """Three kernel calls a step, and four or six more where there is a shared expert."""

    def __init__(
        self,
        parts: ModelParts,
        experts: ExpertsConfig,
        place: str,
        *,
        names: ExpertNames | None = None,
        activation: GatedActivation | None = None,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> None:
        names = names or ExpertNames()
        kernels, workspace = parts.kernels, parts.workspace
        routing = Routing(
            experts=experts.count,
            top_k=experts.active,
            scoring=experts.scoring,
            corrected=experts.corrected,
            groups=experts.groups,
            top_groups=experts.top_groups,
            renormalise=experts.renormalise,
            scale=experts.scale,
        )
        matrices = parts.weights.matrices
        # Which experts a token goes to must not hang on the rounding of the router's inputs.
        self._score = kernels.linear(
            matrices[f"{place}.{names.router}.weight"], parts.maybe(f"{place}.{names.router}.bias"), exact=True
        )
        self._route = kernels.route(routing, parts.vector(f"{place}.{names.correction}") if experts.corrected else None)
        self._experts = kernels.experts(
            matrices[f"{place}.experts.gate_up"],
            matrices[f"{place}.experts.down"],
            gate_up_bias,
            down_bias,
            activation or GatedActivation("silu"),
        )
        self._logits = workspace.rows("router", experts.count)
        self._weights = workspace.rows("expert_weights", experts.active)
        self._ids = workspace.integers("expert_ids", experts.active)
        self._shared: GatedMlp | None = None
        self._gate: Kernel | None = None
        if experts.shared_intermediate:
            self._shared = GatedMlp(parts, f"{place}.{names.shared}", experts.shared_intermediate)
            self._shared_out = workspace.rows("shared", parts.config.hidden_size)
            self._add = kernels.add()
        if experts.shared_gate:
            self._gate = parts.linear(f"{place}.{names.shared_gate}", "replicated")
            self._gate_out = workspace.rows("shared_gate", 1)
            self._apply_gate = kernels.sigmoid_gate()

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes ``out`` float32 [T, H] of ``x`` float32 [T, H]."""
        tokens = x.shape[0]
        logits, ids, weights = self._logits(tokens), self._ids(tokens), self._weights(tokens)
        self._score(x, logits)
        self._route(logits, ids, weights)
        self._experts(x, ids, weights, out)
        if self._shared is None:
            return
        shared = self._shared_out(tokens)
        self._shared.forward(x, shared)
        if self._gate is not None:
            gate = self._gate_out(tokens)
            self._gate(x, gate)
            self._apply_gate(shared, gate, shared)
        self._add(shared, out)
