"""moe.route and moe.experts: which experts a token goes to, and what they make of it.

route
    Registered callable: a factory ``make(routing: Routing, correction: Tensor | None) -> fn``; correction float32 [E],
    given where ``routing.corrected``.
    ``fn(logits, ids, weights) -> None``: logits float32 [T, E], contiguous, left alone; ids int32 [T, k] and weights
    float32 [T, k], contiguous. T may be 0. For each row:

    1. score = softmax(logits), sigmoid(logits) or sqrt(log(1 + exp(logits))) ("sqrtsoftplus"), in float32.
    2. What experts are chosen by: score + correction where there is one; otherwise the logit itself, which orders them
       as the scores do and does not saturate.
    3. With groups above 1, the experts lie in that many groups of equal size. A group's value is the sum of its two
       best choice values with a correction, its best one otherwise; the top_groups best groups stay, experts of the
       others are out.
    4. The k best experts, by choice value descending, then id ascending (groups likewise: the lower one where equal).
    5. weight = score, without correction; divided by (their sum + 1e-20) where ``renormalise``; then times ``scale``.
    A row with a NaN gives some k ids in [0, E).

    DeepSeek-V3, Kimi-K2, GLM-4.5: sigmoid, corrected, groups, renormalise, scale. Qwen3-MoE and Mixtral: softmax,
    renormalise. gpt-oss: the same (a softmax over the chosen logits is the renormalised softmax over all), its router's
    bias being the linear's. DeepSeek-V2: softmax, groups, scale. DeepSeek-V4: sqrtsoftplus, corrected, renormalise,
    scale.

experts
    Registered callable: a factory ``make(gate_up, down, gate_up_bias, down_bias, activation) -> fn``.
    gate_up: QuantizedTensor [E * 2I, H]; expert e has the rows from e * 2I on, the first I of them the gate, the others
    up (a checkpoint that interleaves them has its rows permuted when it is loaded). down: QuantizedTensor [E * H, I].
    gate_up_bias float32 [E, 2I] and down_bias float32 [E, H], or None. activation: a ``GatedActivation``. What a
    factory may do with weights is said in gemm.py.
    ``fn(x, ids, weights, out) -> None``: x and out float32 [T, H], contiguous, not overlapping; ids int32 [T, k], each
    below E; weights float32 [T, k]. An id below 0 is an expert that is not here (padding, or another rank's): it adds
    nothing. T may be 0.
    out = sum over the row's ids of weight * (down @ act(gate @ x + bias, up @ x + bias) + bias), sums in float32 at
    least. Experts that every token goes to are a plain linear, added by the model.

Roles of route: logits, output; traits: experts, top_k, scoring, corrected, grouped. Roles of experts: input, gate_up,
down, output; traits: hidden (H), intermediate (I), activation, biased, and activations: what goes into both products is
rounded to (see gemm.py). Under "fp4" both weights have one format, and what was activated is quantised as x is.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenspeed_kernel.binding import Bound, bind
from tokenspeed_kernel.fp4_rows import FP4_FORMATS, quantise_rows
from tokenspeed_kernel.ops.activation import GATED_ACTIVATIONS, GatedActivation
from tokenspeed_kernel.ops.gemm import allowed_activations, check_fp4
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.registry import Band, KernelSpec, Operation, declare_operation, register_kernel
from tokenspeed_kernel.selection import SelectionError
from tokenspeed_kernel.signature import FLOAT32, WEIGHT_FORMATS, FormatSignature, TensorFormat
from tokenspeed_kernel.traits import (
    OneOf,
    Range,
    TraitBound,
    TraitDeclaration,
    TraitValue,
    flag_trait,
    one_of,
    size_trait,
)

SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")
SUM_FLOOR = 1e-20
"""Added to the sum of the chosen scores before it divides them, as DeepSeek-V3 has it."""


class RoutingError(ValueError):
    """A routing that cannot be."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How experts are chosen; see the module's words.

    Attributes:
        experts, top_k: E and k.
        scoring: one of SCORINGS.
        corrected: whether a correction is added to the scores for the choice.
        groups, top_groups: groups of experts, and how many of them a token may use.
        renormalise: whether the weights of a token are divided by their sum.
        scale: what they are multiplied by at last (routed_scaling_factor).
    """

    experts: int
    top_k: int
    scoring: str
    corrected: bool = False
    groups: int = 1
    top_groups: int = 1
    renormalise: bool = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.scoring not in SCORINGS:
            raise RoutingError(f"scoring {self.scoring!r} is unknown; use one of {', '.join(SCORINGS)}")
        if self.groups < 1 or self.experts < 1 or self.experts % self.groups:
            raise RoutingError(f"{self.experts} experts do not divide into {self.groups} groups of equal size")
        if not 1 <= self.top_groups <= self.groups:
            raise RoutingError(f"top_groups is {self.top_groups}; it must be from 1 to the {self.groups} groups")
        size = self.experts // self.groups
        if self.corrected and self.groups > 1 and size < 2:
            raise RoutingError(f"groups of {size} expert have no two best; use fewer than {self.groups} groups")
        if not 1 <= self.top_k <= size * self.top_groups:
            raise RoutingError(f"top_k is {self.top_k}; {self.top_groups} groups have {size * self.top_groups} experts")

    @property
    def traits(self) -> dict[str, TraitValue]:
        """The traits of a request for this routing."""
        return {
            "experts": self.experts,
            "top_k": self.top_k,
            "scoring": self.scoring,
            "corrected": self.corrected,
            "grouped": self.groups > 1,
        }


def _choice_trait(meaning: str, example: str) -> TraitDeclaration:
    return TraitDeclaration((OneOf,), str, meaning, example)


ROUTE_SIGNATURE = FormatSignature.of(logits=FLOAT32, output=FLOAT32)

ROUTE = declare_operation(
    Operation(
        family="moe",
        mode="route",
        roles=ROUTE_SIGNATURE.roles,
        traits={
            "experts": size_trait("experts to choose from", 128),
            "top_k": size_trait("experts that a token goes to", 8),
            "scoring": _choice_trait("how logits become scores: " + " or ".join(SCORINGS), "softmax"),
            "corrected": flag_trait("a correction is added to the scores for the choice", False),
            "grouped": flag_trait("experts lie in groups, of which a token may use some", False),
        },
        bound=("routing", "correction"),
        arguments="logits [T, E], ids int32 [T, k], weights [T, k]",
    )
)

EXPERTS = declare_operation(
    Operation(
        family="moe",
        mode="experts",
        roles=frozenset({"input", "gate_up", "down", "output"}),
        traits={
            "hidden": size_trait("elements of a token", 2048),
            "intermediate": size_trait("elements between gate and down", 768),
            "activation": _choice_trait("one of " + ", ".join(GATED_ACTIVATIONS), "silu"),
            "biased": flag_trait("gate, up or down have biases", False),
            "activations": TraitDeclaration(
                (OneOf,), str, "what goes into the products is rounded to", "float32", default="float32"
            ),
        },
        bound=("gate_up", "down", "gate_up_bias", "down_bias", "activation"),
        arguments="x [T, H], ids int32 [T, k], weights [T, k], out [T, H]",
    )
)


_EXPERTS_TRAITS: dict[str, TraitBound] = {
    "hidden": Range(1),
    "intermediate": Range(1),
    "activation": one_of(*GATED_ACTIVATIONS),
    "biased": one_of(False, True),
}


def experts_signature(gate_up: TensorFormat, down: TensorFormat) -> FormatSignature:
    """The signature with float32 activations and these weight formats."""
    return FormatSignature.of(input=FLOAT32, gate_up=gate_up, down=down, output=FLOAT32)


def score_of(scoring: str, logits: torch.Tensor) -> torch.Tensor:
    """The scores of logits [T, E]."""
    if scoring == "sqrtsoftplus":
        return torch.sqrt(torch.nn.functional.softplus(logits))
    return torch.sigmoid(logits) if scoring == "sigmoid" else torch.softmax(logits, dim=-1)


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the ``count`` largest of values [T, n], by value descending, then id ascending."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :count]


def _without_other_groups(choice: torch.Tensor, routing: Routing) -> torch.Tensor:
    """choice [T, E] with -inf for the experts of groups that are not chosen."""
    rows = choice.shape[0]
    grouped = choice.reshape(rows, routing.groups, routing.experts // routing.groups)
    value = grouped.topk(2, dim=-1).values.sum(dim=-1) if routing.corrected else grouped.amax(dim=-1)
    out = torch.ones_like(value, dtype=torch.bool).scatter_(1, _best(value, routing.top_groups), False)
    return grouped.masked_fill(out.unsqueeze(-1), -torch.inf).reshape(choice.shape)


@register_kernel(
    KernelSpec(
        name="reference_moe_route",
        family="moe",
        mode="route",
        solution="reference",
        signatures=frozenset({ROUTE_SIGNATURE}),
        traits={
            "experts": Range(1),
            "top_k": Range(1),
            "scoring": one_of(*SCORINGS),
            "corrected": one_of(False, True),
            "grouped": one_of(False, True),
        },
        band=Band.REFERENCE,
        tags=frozenset({"deterministic"}),
    )
)
def make_reference_route(
    routing: Routing, correction: torch.Tensor | None
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """moe.route by PyTorch."""

    def route(logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        scores = score_of(routing.scoring, logits)
        choice = logits if correction is None else scores + correction
        if routing.groups > 1:
            choice = _without_other_groups(choice, routing)
        chosen = _best(choice, routing.top_k)
        found = scores.gather(1, chosen)
        if routing.renormalise:
            found = found / (found.sum(dim=-1, keepdim=True) + SUM_FLOOR)
        ids.copy_(chosen)
        weights.copy_(found * routing.scale)

    return route


@register_kernel(
    KernelSpec(
        name="reference_moe_experts",
        family="moe",
        mode="experts",
        solution="reference",
        signatures=frozenset(
            experts_signature(gate_up, down) for gate_up in WEIGHT_FORMATS.values() for down in WEIGHT_FORMATS.values()
        ),
        traits=_EXPERTS_TRAITS,
        band=Band.REFERENCE,
        tags=frozenset({"deterministic"}),
    )
)
def make_reference_experts(
    gate_up: QuantizedTensor,
    down: QuantizedTensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: GatedActivation,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """moe.experts by PyTorch: one expert after the other, its rows of the weights dequantised when a token needs it."""
    return _reference_experts(gate_up, down, gate_up_bias, down_bias, activation, lambda x: x)


@register_kernel(
    KernelSpec(
        name="reference_moe_experts_fp4",
        family="moe",
        mode="experts",
        solution="reference",
        signatures=frozenset(experts_signature(WEIGHT_FORMATS[name], WEIGHT_FORMATS[name]) for name in FP4_FORMATS),
        traits={**_EXPERTS_TRAITS, "activations": one_of("fp4")},
        band=Band.REFERENCE,
        tags=frozenset({"deterministic"}),
    )
)
def make_reference_fp4_experts(
    gate_up: QuantizedTensor,
    down: QuantizedTensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: GatedActivation,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """moe.experts with activations in four bits, by PyTorch."""
    return _reference_experts(
        gate_up, down, gate_up_bias, down_bias, activation, lambda x: quantise_rows(x, gate_up.format).values()
    )


def _reference_experts(
    gate_up: QuantizedTensor,
    down: QuantizedTensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: GatedActivation,
    taken: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """``taken``: what the products make of rows before they multiply them."""
    hidden, intermediate = gate_up.shape[1], down.shape[1]

    def one(expert: int, x: torch.Tensor) -> torch.Tensor:
        inner = taken(x) @ gate_up.rows(expert * 2 * intermediate, (expert + 1) * 2 * intermediate).dequantize().T
        if gate_up_bias is not None:
            inner += gate_up_bias[expert]
        gate, up = inner.chunk(2, dim=-1)
        result = taken(activation.apply(gate, up)) @ down.rows(expert * hidden, (expert + 1) * hidden).dequantize().T
        return result if down_bias is None else result + down_bias[expert]

    def experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        out.zero_()
        for expert in sorted(set(ids[ids >= 0].tolist())):
            row, place = torch.nonzero(ids == expert, as_tuple=True)
            out.index_add_(0, row, one(expert, x[row]) * weights[row, place].unsqueeze(1))

    return experts


def bind_route(routing: Routing, correction: torch.Tensor | None, *, override: str | None = None) -> Bound:
    """Chooses and makes ``fn(logits, ids, weights)``; RoutingError where the correction does not fit the routing."""
    if correction is None and routing.corrected:
        raise RoutingError("a corrected routing, but no correction was given")
    if correction is not None and not routing.corrected:
        raise RoutingError("a correction was given, but the routing is not corrected; set corrected")
    if correction is not None and (correction.dtype != torch.float32 or tuple(correction.shape) != (routing.experts,)):
        raise RoutingError(
            f"the correction must be float32 [{routing.experts}], got {correction.dtype} {list(correction.shape)}"
        )
    values = {"routing": routing, "correction": correction}
    return bind("moe", "route", ROUTE_SIGNATURE, routing.traits, override=override, bound=values)


def _check_bias(name: str, bias: torch.Tensor | None, shape: tuple[int, int]) -> None:
    if bias is not None and (bias.dtype != torch.float32 or tuple(bias.shape) != shape):
        raise ValueError(f"{name} must be float32 {list(shape)}, got {bias.dtype} {list(bias.shape)}")


def bind_experts(
    gate_up: QuantizedTensor,
    down: QuantizedTensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: GatedActivation,
    *,
    activations: str | None = None,
    override: str | None = None,
) -> Bound:
    """Chooses and makes ``fn(x, ids, weights, out)``; ValueError where weights or biases do not fit each other.

    activations: what goes into the products may be rounded to, as ``bind_linear`` has it; under "fp4" both weights have
    one format, or nothing takes them.
    """
    hidden, intermediate = gate_up.shape[1], down.shape[1]
    experts = down.shape[0] // hidden
    if down.shape[0] % hidden or gate_up.shape[0] != experts * 2 * intermediate:
        raise ValueError(
            f"{gate_up.source} {list(gate_up.shape)} and {down.source} {list(down.shape)} do not fit each other: "
            "gate_up is [experts * 2 * intermediate, hidden], down [experts * hidden, intermediate]"
        )
    _check_bias(f"{gate_up.source}: its bias", gate_up_bias, (experts, 2 * intermediate))
    _check_bias(f"{down.source}: its bias", down_bias, (experts, hidden))
    traits: dict[str, TraitValue] = {
        "hidden": hidden,
        "intermediate": intermediate,
        "activation": activation.kind,
        "biased": gate_up_bias is not None or down_bias is not None,
    }
    values = {
        "gate_up": gate_up,
        "down": down,
        "gate_up_bias": gate_up_bias,
        "down_bias": down_bias,
        "activation": activation,
    }
    signature = experts_signature(gate_up.tensor_format, down.tensor_format)
    allowed = allowed_activations(activations)
    if allowed == "fp4":
        check_fp4(gate_up, down)
    if allowed != "float32":
        try:
            rounded = {**traits, "activations": allowed}
            return bind("moe", "experts", signature, rounded, override=override, bound=values)
        except SelectionError:
            if allowed == "fp4":
                raise
            # nothing rounds here
    return bind("moe", "experts", signature, traits, override=override, bound=values)
