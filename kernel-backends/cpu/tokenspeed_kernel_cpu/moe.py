"""moe.route and moe.experts; contracts: tokenspeed_kernel.ops.moe."""

import torch

from tokenspeed_kernel.ops.activation import GatedActivation
from tokenspeed_kernel.ops.moe import Routing
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel_cpu import _native
from tokenspeed_kernel_cpu.checks import Kernel, checked, expect, expect_range
from tokenspeed_kernel_cpu.threads import follow_torch


def make_route(routing: Routing, correction: torch.Tensor | None) -> Kernel:
    """``fn(logits [T, E], ids int32 [T, k], weights [T, k])``. Keeps the correction alive."""
    dense = None if correction is None else correction.contiguous()
    run = _native.Router(
        routing.experts,
        routing.top_k,
        getattr(_native.Scoring, routing.scoring),
        routing.groups,
        routing.top_groups,
        routing.renormalise,
        routing.scale,
        0 if dense is None else dense.data_ptr(),
    ).route

    def check(logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        expect("logits", logits, torch.float32, (logits.shape[0], routing.experts))
        expect("ids", ids, torch.int32, (logits.shape[0], routing.top_k))
        expect("weights", weights, torch.float32, ids.shape)

    @checked(check)
    def route(logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, _alive: object = dense) -> None:
        run(logits.data_ptr(), logits.size(0), ids.data_ptr(), weights.data_ptr())

    return route


def _check_table_route(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    table: torch.Tensor,
    _scale: float,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    rows, experts = logits.shape
    expect("logits", logits, torch.float32, (rows, experts))
    expect("tokens", tokens, torch.int32, (rows,))
    expect("table", table, torch.int32, table.shape)
    expect_range("tokens", tokens, 0, table.shape[0])
    expect_range("table", table, 0, experts)
    expect("ids", ids, torch.int32, (rows, table.shape[1]))
    expect("weights", weights, torch.float32, ids.shape)


@checked(_check_table_route)
def table_route(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """The experts that the table has for each token, weighed by the logits."""
    _native.table_route(
        logits.data_ptr(),
        tokens.data_ptr(),
        logits.size(0),
        table.data_ptr(),
        logits.size(1),
        table.size(1),
        scale,
        ids.data_ptr(),
        weights.data_ptr(),
    )


def _matrix(weight: QuantizedTensor) -> _native.Matrix:
    return _native.Matrix(weight.format, *weight.shape, weight.plane.data_ptr(), 0)


def make_experts(
    gate_up: QuantizedTensor,
    down: QuantizedTensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: GatedActivation,
) -> Kernel:
    """See ``_experts``."""
    return _experts(gate_up, down, gate_up_bias, down_bias, activation, rounded=False)


def make_rounded_experts(
    gate_up: QuantizedTensor,
    down: QuantizedTensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: GatedActivation,
) -> Kernel:
    """See ``_experts``; what goes into the products is rounded to bfloat16. bfloat16 weights, on the instruction set
    avx512_bf16 only: a call raises RuntimeError where another was put in force meanwhile."""
    return _experts(gate_up, down, gate_up_bias, down_bias, activation, rounded=True)


def _experts(
    gate_up: QuantizedTensor,
    down: QuantizedTensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: GatedActivation,
    *,
    rounded: bool,
) -> Kernel:
    """``fn(x [T, H], ids int32 [T, k], weights [T, k], out [T, H])``. Keeps weights and biases alive; holds no copy of
    the weights."""
    follow_torch()
    biases = [None if bias is None else bias.contiguous() for bias in (gate_up_bias, down_bias)]
    gate_up_address, down_address = (0 if bias is None else bias.data_ptr() for bias in biases)
    run = _native.Mixture(
        _matrix(gate_up),
        _matrix(down),
        gate_up_address,
        down_address,
        activation.alpha or 1.0,
        activation.limit,
        1.0 if activation.kind == "clamped_swiglu" else 0.0,
        rounded,
    ).apply
    hidden = gate_up.shape[1]
    count = down.shape[0] // hidden

    def check(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        expect("x", x, torch.float32, (x.shape[0], hidden))
        expect("ids", ids, torch.int32, (x.shape[0], ids.shape[-1]))
        expect_range("ids", ids.clamp(min=0), 0, count)
        expect("weights", weights, torch.float32, ids.shape)
        expect("out", out, torch.float32, x.shape)

    @checked(check)
    def experts(
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        _alive: object = (gate_up, down, biases),
    ) -> None:
        run(x.data_ptr(), ids.data_ptr(), weights.data_ptr(), x.size(0), ids.size(1), out.data_ptr())

    return experts
