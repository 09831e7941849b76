"""moe.route and moe.experts on the device; contracts in tokenspeed_kernel.ops.moe.

Pairs of a token and one of its experts are sorted by expert on the device, so that each expert's tokens are the rows of
tiles. The number of tiles is bounded by pairs and experts: nothing waits for the device, and one token starts no more
tiles than it has experts. Nothing is added atomically.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenspeed_kernel.ops.activation import GatedActivation
from tokenspeed_kernel.ops.moe import Routing
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel_triton import elementwise
from tokenspeed_kernel_triton.linear import tile_of
from tokenspeed_kernel_triton.loading import Launch
from tokenspeed_kernel_triton.planes import Planes, take_apart

STRETCH = 1024
MAX_EXPERTS = 1024
"""That one block of the routing holds."""


def _block(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def route_of(
    routing: Routing, correction: torch.Tensor | None, logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> Launch:
    """The launch of a routing."""
    arguments = (logits, logits if correction is None else correction, ids, weights, float(routing.scale))
    constants = {
        "EXPERTS": routing.experts,
        "BLOCK": _block(routing.experts),
        "TOP_K": routing.top_k,
        "BLOCK_K": _block(routing.top_k),
        "SCORING": routing.scoring,
        "CORRECTED": correction is not None,
        "GROUPS": routing.groups,
        "BLOCK_GROUPS": _block(routing.groups),
        "TOP_GROUPS": routing.top_groups,
        "RENORMALISE": routing.renormalise,
    }
    return Launch("moe", "route", (logits.shape[0],), arguments, constants, warps=1)


def make_route(
    routing: Routing, correction: torch.Tensor | None
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """moe.route."""

    def route(logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        if logits.shape[0]:
            route_of(routing, correction, logits, ids, weights).run()

    return route


def table_route_of(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> Launch:
    """The launch of a routing by the tokens' ids."""
    constants = {"EXPERTS": logits.shape[1], "TOP_K": ids.shape[1], "BLOCK_K": _block(ids.shape[1])}
    arguments = (logits, tokens, table, float(scale), ids, weights)
    return Launch("moe", "table_route", (logits.shape[0],), arguments, constants, warps=1)


def table_route(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """moe.table_route."""
    if logits.shape[0]:
        table_route_of(logits, tokens, table, scale, ids, weights).run()


def by_expert(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs of ids int32 [T, k] in the order of their experts, those of one in the order of the pairs, int32
    [T * k]; and where each expert's begin, int32 [experts + 1]. Pairs without an expert come before all."""
    ordered = torch.sort(ids.flatten(), stable=True)
    bounds = torch.arange(experts + 1, dtype=ids.dtype, device=ids.device)
    starts = torch.searchsorted(ordered.values, bounds, out_int32=True)
    return ordered.indices.to(torch.int32), starts


@dataclass(frozen=True)
class Grouped:
    """One of the two products of all experts.

    Attributes:
        planes: of the weight [experts * outputs, inputs].
        bias: float32 [experts, outputs] or None.
    """

    planes: Planes
    bias: torch.Tensor | None
    experts: int
    rounded: bool

    @property
    def outputs(self) -> int:
        return self.planes.shape[0] // self.experts

    def launch(
        self,
        x: torch.Tensor,
        factors: torch.Tensor | None,
        order: torch.Tensor,
        starts: torch.Tensor,
        out: torch.Tensor,
        top_k: int,
    ) -> Launch:
        """Of x [tokens, inputs], whose rows the order gathers, without ``factors``; with them of x [pairs, inputs] in
        the order."""
        pairs, planes = order.shape[0], self.planes
        tile = tile_of(x.device, -(-pairs // self.experts), planes, self.rounded)
        arguments = (
            x,
            *planes.arguments(x),
            x if self.bias is None else self.bias,
            x if factors is None else factors,
            order,
            starts,
            out,
            self.outputs,
            top_k,
        )
        constants = {
            "EXPERTS": self.experts,
            "BLOCK_EXPERTS": _block(self.experts),
            **planes.constants(tile.depth),
            "BIASED": self.bias is not None,
            "GATHERED": factors is None,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.columns,
            "ROUNDED": self.rounded,
            "PRECISION": tile.precision,
        }
        # no pair begins more than one tile, and every expert's last tile may be short
        grid = (-(-self.outputs // tile.columns), min(pairs, pairs // tile.rows + self.experts))
        return Launch("moe", "grouped", grid, arguments, constants, tile.warps, tile.stages)


def combine_of(parts: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> Launch:
    """The launch that adds up a token's experts."""
    tokens, width = out.shape
    grid = (tokens, -(-width // STRETCH))
    constants = {"TOP_K": ids.shape[1], "BLOCK": STRETCH}
    return Launch("moe", "combine", grid, (parts, ids, out, width), constants)


def _make(
    gate_up: QuantizedTensor,
    down: QuantizedTensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: GatedActivation,
    rounded: bool,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    hidden, intermediate = gate_up.shape[1], down.shape[1]
    experts = down.shape[0] // hidden
    first = Grouped(take_apart(gate_up), gate_up_bias, experts, rounded)
    second = Grouped(take_apart(down), down_bias, experts, rounded)

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        if not x.shape[0]:
            return
        top_k = ids.shape[1]
        order, starts = by_expert(ids, experts)
        inner, act, parts = (
            torch.empty(ids.numel(), width, dtype=torch.float32, device=x.device)
            for width in (2 * intermediate, intermediate, hidden)
        )
        first.launch(x, None, order, starts, inner, top_k).run()
        gate, up = inner[:, :intermediate], inner[:, intermediate:]
        elementwise.gated_of(gate, up, act, activation.kind, activation.alpha, activation.limit).run()
        second.launch(act, weights, order, starts, parts, top_k).run()
        combine_of(parts, ids, out).run()

    return run


def make_experts(
    gate_up: QuantizedTensor,
    down: QuantizedTensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: GatedActivation,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """moe.experts with products of float32."""
    return _make(gate_up, down, gate_up_bias, down_bias, activation, rounded=False)


def make_rounded_experts(
    gate_up: QuantizedTensor,
    down: QuantizedTensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: GatedActivation,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """moe.experts with what goes into both products rounded to bfloat16."""
    return _make(gate_up, down, gate_up_bias, down_bias, activation, rounded=True)
