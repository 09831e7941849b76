"""Cases of moe.route and moe.experts."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from tokenspeed_kernel.fp4_rows import FP4_GROUP
from tokenspeed_kernel.gguf_blocks import BLOCK_ELEMENTS
from tokenspeed_kernel.numerics.cases import (
    UNIT_ROUNDOFF,
    Buffers,
    Case,
    Close,
    Exact,
    Expectation,
    Outputs,
    register_cases,
)
from tokenspeed_kernel.numerics.fp4_inputs import FP4_SUMS, fp4_inputs
from tokenspeed_kernel.numerics.weights import RandomWeight, random_weight
from tokenspeed_kernel.ops.activation import GatedActivation
from tokenspeed_kernel.ops.moe import SUM_FLOOR, Routing
from tokenspeed_kernel.quantized import DENSE_DTYPES
from tokenspeed_kernel.registry import KernelFunction
from tokenspeed_kernel.signature import WEIGHT_FORMATS, FormatSignature
from tokenspeed_kernel.traits import TraitValue

_FLOAT32 = torch.float32
_ROUNDOFF = UNIT_ROUNDOFF[_FLOAT32]
_FORMAT_NAMES = {tensor_format: name for name, tensor_format in WEIGHT_FORMATS.items()}
_MARGIN = 1e-5  # how far apart the values lie that decide: beyond float32's error, so that the ids are exact


# ---------------------------------------------------------------- routing


@dataclass(frozen=True)
class _Choice:
    """What float64 chooses: ids [T, k], scores of all experts [T, E], and the least gap that decided [T]."""

    ids: torch.Tensor
    scores: torch.Tensor
    gap: torch.Tensor


def _ranked(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best ``count`` of each row, and the least gap among them and to the next. Equal values go to the lower id."""
    ordered = torch.sort(values, dim=-1, descending=True, stable=True)
    gaps = (ordered.values[:, :-1] - ordered.values[:, 1:])[:, :count]
    gap = gaps.amin(dim=-1) if gaps.shape[1] else torch.full((values.shape[0],), torch.inf, dtype=torch.float64)
    return ordered.indices[:, :count], gap


def choose(routing: Routing, logits: torch.Tensor, correction: torch.Tensor | None) -> _Choice:
    """Routing in float64, group by group, without a mask over the experts."""
    wide = logits.double()
    shifted = torch.exp(wide - wide.amax(dim=-1, keepdim=True)) if wide.shape[1] else wide
    if routing.scoring == "softmax":
        scores = shifted / shifted.sum(-1, keepdim=True)
    else:
        scores = 1.0 / (1.0 + torch.exp(-wide)) if routing.scoring == "sigmoid" else torch.log1p(torch.exp(wide)).sqrt()
    choice = wide if correction is None else scores + correction.double()
    if routing.groups == 1:
        ids, gap = _ranked(choice, routing.top_k)
        return _Choice(ids, scores, gap)
    size, rows = routing.experts // routing.groups, torch.arange(logits.shape[0]).unsqueeze(1)
    best = torch.sort(choice.reshape(-1, routing.groups, size), dim=-1, descending=True).values
    groups, group_gap = _ranked(best[..., : 2 if routing.corrected else 1].sum(dim=-1), routing.top_groups)
    members = (groups.sort(dim=-1).values.unsqueeze(-1) * size + torch.arange(size)).flatten(1)
    places, gap = _ranked(choice[rows, members], routing.top_k)
    return _Choice(members[rows, places], scores, torch.minimum(gap, group_gap))


def _decided_logits(
    routing: Routing, correction: torch.Tensor | None, rows: int, generator: torch.Generator
) -> torch.Tensor:
    """float32 [rows, E] whose choice float32 cannot get wrong: rows that are too close are drawn again."""
    logits = torch.randn(rows, routing.experts, generator=generator) * 2.0
    while rows:
        close = choose(routing, logits, correction).gap < _MARGIN
        if not bool(close.any()):
            break
        logits[close] = torch.randn(int(close.sum()), routing.experts, generator=generator) * 2.0
    return logits


def _route_case(name: str, routing: Routing, correction: torch.Tensor | None, logits: torch.Tensor) -> Case:
    rows = logits.shape[0]

    def run(fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        ids = buffers.output("ids", (rows, routing.top_k), torch.int32)
        weights = buffers.output("weights", (rows, routing.top_k), _FLOAT32)
        held = buffers.read_only("logits", logits)
        for start in range(0, max(1, rows), max(1, step)):
            part = slice(start, start + step)
            fn(held[part], ids[part], weights[part])
        return {"ids": ids, "weights": weights}

    def expect() -> dict[str, Expectation]:
        chosen = choose(routing, logits, correction)
        weights = chosen.scores.gather(1, chosen.ids)
        if routing.renormalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + SUM_FLOOR)
        weights = weights * routing.scale
        # the exponent's rounding is the relative error of an exponential
        relative = _ROUNDOFF * (logits.abs().amax(dim=-1, keepdim=True).double() * 4.0 + routing.experts**0.5 + 64.0)
        return {
            "ids": Exact(chosen.ids.to(torch.int32)),
            "weights": Close(weights, relative * weights.abs() + 1e-37 * routing.scale),
        }

    values = {"routing": routing, "correction": correction}
    return Case(name, routing.traits, partial(run, step=rows), expect, values, partial(run, step=1))


ROUTINGS: dict[str, Routing] = {
    "Qwen3-MoE": Routing(experts=128, top_k=8, scoring="softmax"),
    "gpt-oss": Routing(experts=32, top_k=4, scoring="softmax"),
    "weights as they are": Routing(experts=60, top_k=4, scoring="softmax", renormalise=False),
    "DeepSeek-V3": Routing(experts=256, top_k=8, scoring="sigmoid", corrected=True, groups=8, top_groups=4, scale=2.5),
    "DeepSeek-V2": Routing(
        experts=160, top_k=6, scoring="softmax", groups=8, top_groups=3, renormalise=False, scale=16.0
    ),
    "Kimi-K2": Routing(experts=384, top_k=8, scoring="sigmoid", corrected=True, scale=2.827),
    "DeepSeek-V4": Routing(experts=64, top_k=6, scoring="sqrtsoftplus", corrected=True, scale=1.5),
    "one of one": Routing(experts=1, top_k=1, scoring="sigmoid"),
    "all of seven": Routing(experts=7, top_k=7, scoring="softmax"),
}


def route_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """The routings of known models, no rows, choice values below 0, ties, logits so large that scores saturate."""
    for name, routing in ROUTINGS.items():
        correction = torch.randn(routing.experts, generator=generator) * 0.2 if routing.corrected else None
        for rows in (9, 0) if routing.experts < 40 else (9,):
            logits = _decided_logits(routing, correction, rows, generator)
            yield _route_case(f"{name}, {rows} rows", routing, correction, logits)
    routing = ROUTINGS["DeepSeek-V3"]
    correction = torch.rand(routing.experts, generator=generator) - 3.0  # an expert that is out is not one worth 0
    logits = _decided_logits(routing, correction, 5, generator)
    yield _route_case("choice values below 0", routing, correction, logits)
    for name, routing in (("ties", ROUTINGS["Qwen3-MoE"]), ("ties of groups", ROUTINGS["DeepSeek-V2"])):
        logits = torch.randint(-1, 2, (5, routing.experts), generator=generator).float()
        yield _route_case(name, routing, None, logits)
    saturated = Routing(experts=16, top_k=3, scoring="sigmoid")
    logits = torch.randperm(16, generator=generator).float().reshape(1, 16) * torch.tensor([[4.0], [-4.0], [0.5]])
    yield _route_case("scores that saturate", saturated, None, logits + torch.tensor([[30.0], [-20.0], [0.0]]))


def table_route_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """The sizes of DeepSeek-V4, one expert of one, no rows, scores that underflow."""
    for name, rows, experts, top_k, spread in (
        ("DeepSeek-V4", 9, 64, 6, 2.0),
        ("one of one", 3, 1, 1, 1.0),
        ("no rows", 0, 8, 2, 1.0),
        ("scores far apart", 5, 8, 3, 40.0),
    ):
        logits = torch.randn(rows, experts, generator=generator) * spread
        table = torch.rand(50, experts, generator=generator).argsort(dim=1)[:, :top_k].to(torch.int32)
        tokens = torch.randint(0, 50, (rows,), generator=generator, dtype=torch.int32)
        yield _table_case(name, logits, tokens, table)


def _table_case(name: str, logits: torch.Tensor, tokens: torch.Tensor, table: torch.Tensor) -> Case:
    rows, top_k, scale = logits.shape[0], table.shape[1], 1.5

    def run(fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        ids = buffers.output("ids", (rows, top_k), torch.int32)
        weights = buffers.output("weights", (rows, top_k), _FLOAT32)
        held, of = buffers.read_only("logits", logits), buffers.read_only("table", table)
        ours = buffers.read_only("tokens", tokens)
        for start in range(0, max(1, rows), max(1, step)):
            part = slice(start, start + step)
            fn(held[part], ours[part], of, scale, ids[part], weights[part])
        return {"ids": ids, "weights": weights}

    def expect() -> dict[str, Expectation]:
        chosen = table[tokens.long()]
        scores = torch.log1p(torch.exp(logits.double())).sqrt().gather(1, chosen.long())
        weights = scores / (scores.sum(dim=1, keepdim=True) + SUM_FLOOR) * scale
        relative = _ROUNDOFF * (logits.abs().amax(dim=1, keepdim=True).double() * 4.0 + 64.0)
        return {"ids": Exact(chosen), "weights": Close(weights, relative * weights + 1e-30)}

    return Case(name, {}, partial(run, step=rows), expect, split=partial(run, step=1))


# ---------------------------------------------------------------- experts


@dataclass(frozen=True)
class _Layer:
    """Random experts; gate_up [E * 2I, H], down [E * H, I]."""

    gate_up: RandomWeight
    down: RandomWeight
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    activation: GatedActivation
    activations: str = "float32"

    @property
    def _rounding(self) -> float:
        if self.activations == "fp4":
            return FP4_SUMS
        return 0.0 if self.activations == "float32" else UNIT_ROUNDOFF[getattr(torch, self.activations)]

    def _taken(self, x: torch.Tensor, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What a product makes of x [K] that is off by ``error`` before it multiplies it, and how far that is off."""
        if self.activations != "fp4":
            return x, error
        group = FP4_GROUP[self.gate_up.weight.format]
        value, slack = fp4_inputs(x.unsqueeze(0), group, error.unsqueeze(0))
        return value[0], slack[0]

    @property
    def hidden(self) -> int:
        return self.gate_up.weight.shape[1]

    @property
    def intermediate(self) -> int:
        return self.down.weight.shape[1]

    def one(self, expert: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Float64 output [H] of an expert for one token x [H], and the error that float32 may make."""
        hidden, width = self.hidden, self.intermediate
        rows = slice(expert * 2 * width, (expert + 1) * 2 * width)
        x, _ = self._taken(x, torch.zeros_like(x))
        inner, size = self.gate_up.values[rows] @ x, self.gate_up.magnitude[rows] @ x.abs()
        if self.gate_up_bias is not None:
            inner, size = inner + self.gate_up_bias[expert].double(), size + self.gate_up_bias[expert].double().abs()
        error = (self._rounding + _ROUNDOFF * (hidden**0.5 + 8.0)) * size
        middle, middle_error = self._activate(inner[:width], inner[width:], error[:width], error[width:])
        middle, middle_error = self._taken(middle, middle_error)
        rows = slice(expert * hidden, (expert + 1) * hidden)
        result, size = self.down.values[rows] @ middle, self.down.magnitude[rows] @ middle.abs()
        inherited = self.down.magnitude[rows] @ middle_error
        if self.down_bias is not None:
            result, size = result + self.down_bias[expert].double(), size + self.down_bias[expert].double().abs()
        inherited = inherited * (1.0 + self._rounding)
        return result, inherited + (self._rounding + _ROUNDOFF * (width**0.5 + 8.0)) * size

    def _activate(
        self, gate: torch.Tensor, up: torch.Tensor, gate_error: torch.Tensor, up_error: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The activation and its error. The slope of g * sigmoid(a * g) lies within 1.1, whatever a is."""
        alpha = 1.0
        if self.activation.kind == "clamped_swiglu":
            alpha, limit = self.activation.alpha, self.activation.limit
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1.0
        elif self.activation.kind == "clamped_silu":
            gate, up = gate.clamp(max=self.activation.limit), up.clamp(-self.activation.limit, self.activation.limit)
        gated = gate / (1.0 + torch.exp(-alpha * gate))
        error = 1.1 * gate_error * up.abs() + gated.abs() * up_error + 1.1 * gate_error * up_error
        return gated * up, error + 64.0 * _ROUNDOFF * gated.abs() * (up.abs() + 1.0)


def _experts_case(name: str, layer: _Layer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Case:
    rows, hidden = x.shape

    def run(fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        out = buffers.output("out", (rows, hidden), _FLOAT32)
        held = (buffers.read_only("x", x), buffers.read_only("ids", ids), buffers.read_only("weights", weights))
        for start in range(0, max(1, rows), max(1, step)):
            part = slice(start, start + step)
            fn(*(tensor[part] for tensor in held), out[part])
        return {"out": out}

    def expect() -> dict[str, Expectation]:
        value, bound = torch.zeros(2, rows, hidden, dtype=torch.float64)
        for row in range(rows):
            for expert, weight in zip(ids[row].tolist(), weights[row].double(), strict=True):
                if expert >= 0:
                    result, error = layer.one(expert, x[row].double())
                    value[row] += weight * result
                    bound[row] += weight.abs() * (error + _ROUNDOFF * (ids.shape[1] + 4.0) * result.abs())
        return {"out": Close(value, bound)}

    traits: dict[str, TraitValue] = {
        "hidden": hidden,
        "intermediate": layer.intermediate,
        "activation": layer.activation.kind,
        "biased": layer.gate_up_bias is not None or layer.down_bias is not None,
        "activations": layer.activations,
    }
    bound = {
        "gate_up": layer.gate_up.weight,
        "down": layer.down.weight,
        "gate_up_bias": layer.gate_up_bias,
        "down_bias": layer.down_bias,
        "activation": layer.activation,
    }
    return Case(name, traits, partial(run, step=rows), expect, bound, partial(run, step=1))


@dataclass(frozen=True)
class _ExpertsShape:
    name: str
    rows: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    activation: GatedActivation
    biased: bool = False
    absent: bool = False


_SILU = GatedActivation("silu")
_CLAMPED = GatedActivation("clamped_swiglu", 1.702, 7.0)

_EXPERTS_SHAPES = (
    _ExpertsShape("one row", 1, 3, 2, 64, 32, _SILU),
    _ExpertsShape("no rows", 0, 4, 2, 32, 32, _SILU),
    _ExpertsShape("odd sizes, experts elsewhere", 7, 5, 3, 67, 33, _SILU, absent=True),
    _ExpertsShape("gpt-oss", 6, 4, 2, 96, 64, _CLAMPED, biased=True),
    _ExpertsShape("DeepSeek-V4", 6, 4, 2, 96, 64, GatedActivation("clamped_silu", limit=2.0)),
    _ExpertsShape("one expert for all", 40, 1, 1, 64, 96, _SILU, biased=True),
)


def _experts_inputs(
    shape: _ExpertsShape, gate_up: str, down: str, generator: torch.Generator
) -> tuple[_Layer, torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = shape.hidden if gate_up in DENSE_DTYPES else -(-shape.hidden // 256) * 256
    width = shape.intermediate if down in DENSE_DTYPES else -(-shape.intermediate // 256) * 256
    layer = _Layer(
        random_weight(gate_up, shape.experts * 2 * width, hidden, generator),
        random_weight(down, shape.experts * hidden, width, generator),
        torch.randn(shape.experts, 2 * width, generator=generator) if shape.biased else None,
        torch.randn(shape.experts, hidden, generator=generator) if shape.biased else None,
        shape.activation,
    )
    x = torch.randn(shape.rows, hidden, generator=generator) * (8.0 if shape.activation.limit else 1.0)
    picks = [torch.randperm(shape.experts, generator=generator)[: shape.top_k] for _ in range(shape.rows)]
    ids = torch.stack(picks).to(torch.int32) if picks else torch.zeros(0, shape.top_k, dtype=torch.int32)
    if shape.absent:
        ids[0] = -1  # a padded row: it comes out as zeros
        ids[1, 0], ids[2, 1] = -1, -7
    return layer, x, ids, torch.rand(shape.rows, shape.top_k, generator=generator)


def experts_cases(signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Odd sizes, no rows, experts without tokens, padding, every activation, biases; two different weight formats
    once. With bfloat16 weights and with blocks all of it again for kernels that may round what goes into the products;
    with weights of four bits for kernels that quantise it so."""
    gate_up, down = _FORMAT_NAMES[signature["gate_up"]], _FORMAT_NAMES[signature["down"]]
    shapes = _EXPERTS_SHAPES if gate_up == down else _EXPERTS_SHAPES[:1]
    for shape in shapes:
        layer, *inputs = _experts_inputs(shape, gate_up, down, generator)
        yield _experts_case(shape.name, layer, *inputs)
        if gate_up == down == "bfloat16" or {gate_up, down} <= BLOCK_ELEMENTS.keys():
            yield _experts_case(f"{shape.name}, rounded", replace(layer, activations="bfloat16"), *inputs)
        if gate_up == down and gate_up in FP4_GROUP:
            yield _experts_case(f"{shape.name}, fp4", replace(layer, activations="fp4"), *inputs)


register_cases("moe.route", route_cases)
register_cases("moe.table_route", table_route_cases)
register_cases("moe.experts", experts_cases)
