"""moe.route and moe.experts: the reference's numbers, and the same bits whatever else is in the batch."""

from collections.abc import Callable

import pytest
import torch

import tokenspeed_kernel_cpu
from tokenspeed_kernel.numerics.moe_cases import ROUTINGS, choose
from tokenspeed_kernel.ops import bind_experts, bind_route
from tokenspeed_kernel.ops.activation import GatedActivation
from tokenspeed_kernel.ops.moe import Routing
from tokenspeed_kernel.platform import current_platform
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel_cpu import checks

MakeWeight = Callable[[str, int, int], QuantizedTensor]

SILU = GatedActivation("silu")
CLAMPED = GatedActivation("clamped_swiglu", 1.702, 7.0)


# ---------------------------------------------------------------- routing


def _route(
    routing: Routing, logits: torch.Tensor, correction: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    bound = bind_route(routing, correction)
    assert bound.spec.name == "cpu_moe_route"
    ids = torch.full((logits.shape[0], routing.top_k), -99, dtype=torch.int32)
    weights = torch.full(ids.shape, torch.nan)
    bound.fn(logits, ids, weights)
    return ids, weights


def _correction(routing: Routing) -> torch.Tensor | None:
    return torch.randn(routing.experts) * 0.2 if routing.corrected else None


@pytest.mark.parametrize("name", ROUTINGS)
def test_tokens_go_where_float64_sends_them(instruction_set: str, name: str) -> None:
    routing, logits = ROUTINGS[name], torch.randn(300, ROUTINGS[name].experts) * 2.0
    correction = _correction(routing)
    ids, weights = _route(routing, logits, correction)
    exact = choose(routing, logits, correction)
    clear = exact.gap > 1e-5
    assert bool(clear.float().mean() > 0.9)
    assert torch.equal(ids[clear].long(), exact.ids[clear])
    expected = exact.scores.gather(1, ids.long())
    if routing.renormalise:
        expected = expected / expected.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(weights.double(), expected * routing.scale, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("name", ["Qwen3-MoE", "DeepSeek-V3"])
def test_a_row_is_routed_alike_in_any_batch(instruction_set: str, name: str) -> None:
    routing = ROUTINGS[name]
    correction, logits = _correction(routing), torch.randn(300, routing.experts)
    ids, weights = _route(routing, logits, correction)
    for rows in (slice(0, 0), slice(0, 1), slice(7, 30), slice(299, 300)):
        few_ids, few_weights = _route(routing, logits[rows], correction)
        assert torch.equal(few_ids, ids[rows])
        assert torch.equal(few_weights, weights[rows])


@pytest.mark.parametrize("name", ROUTINGS)
def test_ties_go_to_the_lower_id(instruction_set: str, name: str) -> None:
    routing = ROUTINGS[name]
    correction = torch.zeros(routing.experts) if routing.corrected else None
    ids, _ = _route(routing, torch.zeros(3, routing.experts), correction)
    assert ids.tolist() == [list(range(routing.top_k))] * 3


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("where", ["one", "many", "all"])
def test_not_a_number_still_names_experts(instruction_set: str, name: str, where: str) -> None:
    routing = ROUTINGS[name]
    correction, logits = _correction(routing), torch.randn(3, routing.experts)
    clean, _ = _route(routing, logits, correction)
    logits[1, : {"one": 1, "many": routing.experts - 1, "all": routing.experts}[where]] = torch.nan
    ids, _ = _route(routing, logits, correction)
    assert torch.equal(ids[[0, 2]], clean[[0, 2]])
    named = sorted(set(ids[1].tolist()))
    assert len(named) == routing.top_k
    assert named[0] >= 0
    assert named[-1] < routing.experts


def test_infinities_are_ordered(instruction_set: str) -> None:
    routing = Routing(experts=6, top_k=3, scoring="softmax")
    logits = torch.tensor([[-torch.inf, 2.0, -torch.inf, 1.0, -torch.inf, -torch.inf]])
    ids, weights = _route(routing, logits, None)
    assert ids.tolist() == [[1, 3, 0]]
    torch.testing.assert_close(weights, torch.tensor([[0.7310586, 0.2689414, 0.0]]))


# ---------------------------------------------------------------- experts


def _apply(fn: Callable[..., None], x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out = torch.full(x.shape, torch.nan)
    fn(x, ids, weights, out)
    return out


def _ids(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    return torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).to(torch.int32)


FORMATS = ("float32", "bfloat16", "float16", "gguf_q4_0", "gguf_q4_1", "gguf_q8_0", "gguf_q4_k", "gguf_q6_k")
FORMATS += ("gguf_mxfp4", "nvfp4", "fp8_blocks")
SHAPES = [(name, name, 5, 3, 256, 256) for name in FORMATS]
SHAPES += [("gguf_q4_k", "gguf_q6_k", 4, 2, 256, 256), ("bfloat16", "gguf_q8_0", 4, 2, 67, 96)]
SHAPES += [("bfloat16", "bfloat16", 3, 2, 45, 33), ("float32", "float32", 1, 1, 1, 1)]


@pytest.mark.parametrize(("gate_up_format", "down_format", "experts", "top_k", "hidden", "inner"), SHAPES)
def test_agrees_with_float64_and_not_with_the_batch(
    instruction_set: str,
    random_weight: MakeWeight,
    gate_up_format: str,
    down_format: str,
    experts: int,
    top_k: int,
    hidden: int,
    inner: int,
) -> None:
    gate_up = random_weight(gate_up_format, experts * 2 * inner, hidden)
    down = random_weight(down_format, experts * hidden, inner)
    biased = inner % 2 == 1
    biases = (torch.randn(experts, 2 * inner), torch.randn(experts, hidden)) if biased else (None, None)
    activation = CLAMPED if biased else SILU
    bound = bind_experts(gate_up, down, *biases, activation)
    assert bound.spec.name == "cpu_moe_experts"
    x, ids, weights = torch.randn(40, hidden), _ids(40, experts, top_k), torch.rand(40, top_k)
    whole = _apply(bound.fn, x, ids, weights)
    first = gate_up.dequantize().double().view(experts, 2 * inner, hidden)
    second = down.dequantize().double().view(experts, hidden, inner)
    expected = torch.zeros(40, hidden, dtype=torch.float64)
    for token in range(40):
        for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
            gate, up = (first[expert] @ x[token].double() + (biases[0][expert] if biased else 0.0)).chunk(2)
            result = second[expert] @ activation.apply(gate, up) + (biases[1][expert] if biased else 0.0)
            expected[token] += weight * result
    torch.testing.assert_close(whole.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    for part in (slice(0, 0), slice(0, 1), slice(3, 5), slice(7, 24), slice(39, 40)):
        assert torch.equal(_apply(bound.fn, x[part], ids[part], weights[part]), whole[part])


def _small(random_weight: MakeWeight, experts: int = 4, hidden: int = 64, inner: int = 32) -> Callable[..., None]:
    gate_up = random_weight("bfloat16", experts * 2 * inner, hidden)
    return bind_experts(gate_up, random_weight("bfloat16", experts * hidden, inner), None, None, SILU).fn


def test_experts_that_are_elsewhere_add_nothing(instruction_set: str, random_weight: MakeWeight) -> None:
    fn, x, weights = _small(random_weight), torch.randn(3, 64), torch.rand(3, 2)
    weights[0, 1], weights[1] = torch.nan, torch.nan
    ids = torch.tensor([[2, -1], [-1, -7], [0, 3]], dtype=torch.int32)
    out = _apply(fn, x, ids, weights)
    assert torch.equal(out[1], torch.zeros(64))
    assert torch.equal(out[:1], _apply(fn, x[:1], ids[:1, :1], weights[:1, :1].contiguous()))
    assert torch.equal(_apply(fn, x[:0], ids[:0], weights[:0]), torch.zeros(0, 64))


def test_the_order_of_a_tokens_experts_changes_no_bit(instruction_set: str, random_weight: MakeWeight) -> None:
    fn, x, ids, weights = _small(random_weight, 6), torch.randn(5, 64), _ids(5, 6, 4), torch.rand(5, 4)
    turned = _apply(fn, x, ids.flip(1).contiguous(), weights.flip(1).contiguous())
    assert torch.equal(turned, _apply(fn, x, ids, weights))


def test_an_expert_twice_counts_twice(instruction_set: str, random_weight: MakeWeight) -> None:
    fn, x = _small(random_weight), torch.randn(3, 64)
    once = _apply(fn, x, torch.tensor([[1], [2], [1]], dtype=torch.int32), torch.ones(3, 1))
    twice = _apply(fn, x, torch.tensor([[1, 1], [2, 2], [-1, 1]], dtype=torch.int32), torch.ones(3, 2))
    assert torch.equal(twice[:2], 2.0 * once[:2])
    assert torch.equal(twice[2], once[2])
    single = _apply(fn, x[:1], torch.tensor([[1, 1]], dtype=torch.int32), torch.ones(1, 2))
    assert torch.equal(single, twice[:1])


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "inner"),
    [(1100, 2, 1, 64, 32), (300, 8, 7, 4096, 32)],
    ids=["more tokens of an expert than one group", "more experts than one wave"],
)
def test_work_beyond_its_bounds_is_divided(
    instruction_set: str, random_weight: MakeWeight, tokens: int, experts: int, top_k: int, hidden: int, inner: int
) -> None:
    fn = _small(random_weight, experts, hidden, inner)
    x, weights = torch.randn(tokens, hidden), torch.rand(tokens, top_k)
    ids = _ids(tokens, experts, top_k)
    if top_k == 1:
        ids[:] = 1
        ids[600:603] = 0
    whole = _apply(fn, x, ids, weights)
    assert not whole.isnan().any()
    for part in (slice(0, 3), slice(599, 604), slice(tokens - 1, tokens)):
        assert torch.equal(_apply(fn, x[part], ids[part], weights[part]), whole[part])


def test_the_number_of_threads_changes_no_bit(instruction_set: str, random_weight: MakeWeight) -> None:
    fn = _small(random_weight, 8, 512, 160)
    x, ids, weights = torch.randn(33, 512), _ids(33, 8, 3), torch.rand(33, 3)
    before = tokenspeed_kernel_cpu.num_threads()
    try:
        tokenspeed_kernel_cpu.set_num_threads(1)
        alone = [_apply(fn, x[:tokens], ids[:tokens], weights[:tokens]) for tokens in (1, 33)]
        for count in (2, 3, 7):
            tokenspeed_kernel_cpu.set_num_threads(count)
            for result in alone:
                tokens = result.shape[0]
                assert torch.equal(_apply(fn, x[:tokens], ids[:tokens], weights[:tokens]), result), f"{count} threads"
    finally:
        tokenspeed_kernel_cpu.set_num_threads(before)


def test_not_a_number_stays_in_its_row(instruction_set: str, random_weight: MakeWeight) -> None:
    fn, x = _small(random_weight), torch.randn(9, 64)
    x[4, 63] = torch.nan
    out = _apply(fn, x, _ids(9, 4, 2), torch.rand(9, 2))
    assert out.isnan().any(dim=1).tolist() == [row == 4 for row in range(9)]


def test_experts_beyond_two_gigabytes() -> None:
    """Only the pages of two experts are touched."""
    experts, hidden, inner = 200, 4096, 1024
    if current_platform().memory_bytes < 16 << 30:
        pytest.skip("needs room for 5 GB of addresses")
    gate_up = torch.empty(experts, 2 * inner, hidden, dtype=torch.bfloat16)
    down = torch.empty(experts, hidden, inner, dtype=torch.bfloat16)
    assert gate_up.nbytes > 3 << 30
    for tensor in (gate_up, down):
        tensor[0], tensor[-1] = torch.randn(tensor.shape[1:]) * 0.02, torch.randn(tensor.shape[1:]) * 0.02
    fn = bind_experts(
        *(QuantizedTensor.from_dense(w.flatten(0, 1), "large") for w in (gate_up, down)), None, None, SILU
    ).fn
    x = torch.randn(1, hidden)
    out = _apply(fn, x, torch.tensor([[experts - 1, 0]], dtype=torch.int32), torch.tensor([[0.25, 0.75]]))
    expected = torch.zeros(hidden)
    for expert, weight in ((0, 0.75), (experts - 1, 0.25)):
        gate, up = (gate_up[expert].float() @ x[0]).chunk(2)
        expected += weight * (down[expert].float() @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(out[0], expected, rtol=1e-4, atol=1e-4)


def test_debug_mode_checks_arguments(monkeypatch: pytest.MonkeyPatch, random_weight: MakeWeight) -> None:
    monkeypatch.setattr(checks, "DEBUG", True)
    experts, route = _small(random_weight, 3), bind_route(Routing(experts=5, top_k=2, scoring="softmax"), None).fn
    f, ids = torch.zeros, torch.zeros(2, 1, dtype=torch.int32)
    for fn, arguments, words in (
        (route, (f(2, 6), ids, f(2, 2)), r"logits has shape \[2, 6\]; it must be \[2, 5\]"),
        (route, (f(2, 5), ids, f(2, 2)), r"ids has shape \[2, 1\]; it must be \[2, 2\]"),
        (experts, (f(2, 5), ids, f(2, 1), f(2, 5)), r"x has shape \[2, 5\]; it must be \[2, 64\]"),
        (experts, (f(2, 64), ids + 3, f(2, 1), f(2, 64)), r"ids holds values from 3 to 3; they must lie in \[0, 3\)"),
        (experts, (f(2, 64), ids, f(2, 2), f(2, 64)), r"weights has shape \[2, 2\]; it must be \[2, 1\]"),
        (experts, (f(2, 64), ids, f(2, 1), f(3, 64)), r"out has shape \[3, 64\]"),
    ):
        with pytest.raises(checks.KernelArgumentError, match=words):
            fn(*arguments)
    experts(f(2, 64), ids - 1, f(2, 1), f(2, 64))
