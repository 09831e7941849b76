"""A mixture of experts: a router, the experts that it chooses, and one that every token goes to."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from tokenspeed.layers.kernel_choice import Kernel
from tokenspeed.layers.mlp import MATRICES, GatedMlp, mlp_weights
from tokenspeed.layers.parts import ModelParts
from tokenspeed.layers.weights import Ranks, WeightSpec, gate_before_up
from tokenspeed.recipes.model_config import ExpertsConfig, ModelConfig
from tokenspeed_kernel.ops.activation import GatedActivation
from tokenspeed_kernel.ops.moe import Routing


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """What a family's checkpoints call the parts of a mixture, behind the block's own place ("model.layers.0.mlp").

    Attributes:
        block: of the mixture itself, in its layer.
        expert: of one expert, with its number for {}.
        gate, up, down: of its matrices.
        correction: of the router's correction; ``correction_row``: it is stored as [1, experts].
        table: of the experts by token id, in layers that look them up.
        shared: of the shared expert; ``shared_gate`` of its gate, ``shared_matrices`` of its gate, up and down.
        stacked: "": each expert has matrices of its own. Else all experts' lie in one tensor, gate and up together:
            "rows" [experts, outputs, inputs], "columns" [experts, inputs, outputs]; biases beside them, [experts,
            outputs].
        alternating: of stacked ones: gate and up take turns, output by output, where otherwise up follows gate.
    """

    block: str = "mlp"
    router: str = "gate"
    expert: str = "experts.{}"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    correction: str = "gate.e_score_correction_bias"
    correction_row: bool = False
    table: str = "gate.tid2eid"
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"
    shared_matrices: tuple[str, str, str] = MATRICES
    stacked: Literal["", "rows", "columns"] = ""
    alternating: bool = False

    def matrix(self, place: str, part: Literal["gate_up", "down"]) -> str:
        """The name of the weight that holds all experts' matrices of a kind."""
        return f"{place}.experts.{part}_proj" if self.stacked else f"{place}.experts.{part}"


def experts_of(config: ModelConfig) -> ExpertsConfig:
    """The experts; ValueError where the model has none."""
    if config.experts is None:
        raise ValueError(f"{config.architecture}: the configuration has no experts")
    return config.experts


def experts_weights(
    experts: ExpertsConfig,
    place: str,
    hidden: int,
    ranks: Ranks,
    names: ExpertNames | None = None,
    *,
    looked_up: int = 0,
) -> list[WeightSpec]:
    """Router, experts and shared expert at ``place``. Ranks share the columns of every expert, or whole experts (see
    ExpertsConfig.by_expert); the router is on all of them. ``looked_up``: the size of the vocabulary, in a layer whose
    experts are looked up by the token's id."""
    names = names or ExpertNames()
    count, inner = experts.count, experts.intermediate
    specs = [ranks.whole(f"{place}.{names.router}.weight", count, hidden)]
    if experts.biases:
        specs.append(ranks.whole(f"{place}.{names.router}.bias", count))
    if looked_up:
        specs.append(ranks.whole(f"{place}.{names.table}", looked_up, experts.active, below=count))
    elif experts.corrected:
        row = (1, count) if names.correction_row else ()
        specs.append(ranks.whole(f"{place}.{names.correction}", count, stored=row))
    if names.stacked:
        specs += _stacked_weights(experts, place, hidden, ranks, names)
    else:
        each = [f"{place}.{names.expert.format(number)}" for number in range(count)]
        gate_up = tuple(f"{expert}.{part}.weight" for expert in each for part in (names.gate, names.up))
        down = tuple(f"{expert}.{names.down}.weight" for expert in each)
        sections = {} if experts.by_expert else {"sections": (inner,) * (2 * count)}
        share = ranks.rows if experts.by_expert else ranks.columns
        specs.append(ranks.rows(names.matrix(place, "gate_up"), count * 2 * inner, hidden, parts=gate_up, **sections))
        specs.append(share(names.matrix(place, "down"), count * hidden, inner, parts=down))
    if experts.shared_intermediate:
        shared, inner = f"{place}.{names.shared}", experts.shared_intermediate
        specs += mlp_weights(shared, hidden, inner, ranks, names=names.shared_matrices)
    if experts.shared_gate:
        specs.append(ranks.whole(f"{place}.{names.shared_gate}.weight", 1, hidden))
    return specs


def _stacked_weights(
    experts: ExpertsConfig, place: str, hidden: int, ranks: Ranks, names: ExpertNames
) -> list[WeightSpec]:
    """All experts' matrices, and their biases, as one tensor each."""
    count, inner, whole = experts.count, experts.intermediate, experts.by_expert
    turned = names.stacked == "columns"
    order = gate_before_up(inner if whole else inner // ranks.world) if names.alternating else None
    # What takes turns is shared out in pairs.
    each = (2 * inner,) if names.alternating else (inner, inner)
    both: dict[str, Any] = {"row_order": order} if whole else {"row_order": order, "sections": each * count}
    specs = []
    for part, rows, columns, share, bias, own in (
        ("gate_up", 2 * inner, hidden, ranks.rows, ranks.rows, both),
        ("down", hidden, inner, ranks.rows if whole else ranks.columns, ranks.rows if whole else ranks.whole, {}),
    ):
        name = f"{place}.experts.{part}_proj"
        stored = (count, columns, rows) if turned else (count, rows, columns)
        specs.append(share(name, count * rows, columns, stored=stored, transposed=turned, **own))
        if experts.biases:
            specs.append(bias(f"{name}_bias", count * rows, stored=(count, rows), **own))
    return specs


class Mixture:
    """Three kernel calls a step, and four or six more where there is a shared expert. ``looked_up``: the layer has its
    experts by the token's id."""

    def __init__(
        self,
        parts: ModelParts,
        experts: ExpertsConfig,
        place: str,
        *,
        names: ExpertNames | None = None,
        looked_up: bool = False,
    ) -> None:
        names = names or ExpertNames()
        kernels, workspace = parts.kernels, parts.workspace
        gate_up, down = names.matrix(place, "gate_up"), names.matrix(place, "down")
        # Which experts a token goes to must not hang on the rounding of the router's inputs.
        self._score = kernels.linear(
            parts.matrix(f"{place}.{names.router}.weight"),
            parts.vector(f"{place}.{names.router}.bias") if experts.biases else None,
            exact=True,
        )
        self._scale, self._table = experts.scale, parts.vector(f"{place}.{names.table}") if looked_up else None
        self._route = kernels.table_route() if looked_up else _route_of(parts, experts, f"{place}.{names.correction}")
        down_bias = _of_experts(parts, f"{down}_bias", experts)
        if experts.held:
            self._route = _here_only(self._route, experts)
        elif down_bias is not None and parts.communication.rank > 0:
            down_bias = torch.zeros_like(down_bias)  # it counts once
        self._experts = kernels.experts(
            parts.matrix(gate_up),
            parts.matrix(down),
            _of_experts(parts, f"{gate_up}_bias", experts),
            down_bias,
            _activation_of(experts),
        )
        self._sum_over_ranks = parts.communication.all_reduce
        self._logits = workspace.rows("router", experts.count)
        self._weights = workspace.rows("expert_weights", experts.active)
        self._ids = workspace.integers("expert_ids", experts.active)
        self._shared: GatedMlp | None = None
        self._gate: Kernel | None = None
        if experts.shared_intermediate:
            shared, inner = f"{place}.{names.shared}", experts.shared_intermediate
            self._shared = GatedMlp(
                parts, shared, inner, names=names.shared_matrices, limit=experts.limit, partial=True
            )
            self._shared_out = workspace.rows("shared", parts.config.hidden_size)
            self._add = kernels.add()
        if experts.shared_gate:
            self._gate = parts.linear(f"{place}.{names.shared_gate}", "replicated")
            self._gate_out = workspace.rows("shared_gate", 1)
            self._apply_gate = kernels.sigmoid_gate()

    def forward(self, x: torch.Tensor, out: torch.Tensor, token_ids: torch.Tensor | None = None) -> None:
        """Writes ``out`` float32 [T, H] of ``x`` float32 [T, H], of the tokens int32 [T] where their experts are looked
        up."""
        count = x.shape[0]
        logits, ids, weights = self._logits(count), self._ids(count), self._weights(count)
        self._score(x, logits)
        if self._table is None:
            self._route(logits, ids, weights)
        else:
            self._route(logits, token_ids, self._table, self._scale, ids, weights)
        self._experts(x, ids, weights, out)
        if self._shared is not None:
            self._add_shared(self._shared, x, out)
        self._sum_over_ranks(out)

    def _add_shared(self, expert: GatedMlp, x: torch.Tensor, out: torch.Tensor) -> None:
        count = x.shape[0]
        shared = self._shared_out(count)
        expert.forward(x, shared)
        if self._gate is not None:
            gate = self._gate_out(count)
            self._gate(x, gate)
            self._apply_gate(shared, gate, shared)
        self._add(shared, out)


def _of_experts(parts: ModelParts, name: str, experts: ExpertsConfig) -> torch.Tensor | None:
    """The vector ``name`` as float32 [experts, outputs]; None where the experts have no biases."""
    return parts.vector(name).view(experts.held or experts.count, -1) if experts.biases else None


def _here_only(route: Kernel, experts: ExpertsConfig) -> Kernel:
    """``route``, whose ids are of the experts that this rank has, from 0 on, and -1 where another rank has it."""
    first, held = experts.first_held, experts.held

    def routed(*arguments: Any) -> None:
        route(*arguments)
        ids: torch.Tensor = arguments[-2]
        ids.sub_(first)
        ids.masked_fill_((ids < 0) | (ids >= held), -1)

    return routed


def _route_of(parts: ModelParts, experts: ExpertsConfig, correction: str) -> Kernel:
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
    return parts.kernels.route(routing, parts.vector(correction) if experts.corrected else None)


def _activation_of(experts: ExpertsConfig) -> GatedActivation:
    if experts.limit:
        return GatedActivation("clamped_silu", limit=experts.limit)
    if experts.swiglu_limit:
        return GatedActivation("clamped_swiglu", experts.swiglu_alpha, experts.swiglu_limit)
    return GatedActivation("silu")
