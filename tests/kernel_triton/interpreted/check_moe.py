"""Mixtures of experts by Triton's interpreter against the reference: routings, absent experts, empty ones, formats."""

import pytest
import torch

from tokenspeed_kernel.gguf_blocks import BLOCK_ELEMENTS
from tokenspeed_kernel.numerics.weights import random_weight
from tokenspeed_kernel.ops.activation import GatedActivation
from tokenspeed_kernel.ops.moe import Routing, make_reference_experts, make_reference_route
from tokenspeed_kernel.ops.table_route import reference_table_route
from tokenspeed_kernel_triton import moe

HIDDEN, INTERMEDIATE, EXPERTS = 64, 32, 5


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20261130)


def routings():
    yield Routing(experts=12, top_k=3, scoring="sigmoid", corrected=True, groups=4, top_groups=2, scale=2.5)
    for more in (
        {"scoring": "softmax"},
        {"scoring": "softmax", "groups": 3, "top_groups": 2, "renormalise": False},
        {"scoring": "sqrtsoftplus", "corrected": True},
    ):
        yield pytest.param(Routing(experts=12, top_k=4, **more), marks=pytest.mark.long)


@pytest.mark.parametrize("routing", routings())
def test_the_same_experts_are_chosen_ties_and_nan_included(routing):
    logits = torch.randn(4, 12) * 4.0
    logits[1] = logits[1].round()
    correction = torch.randn(12) if routing.corrected else None
    results = []
    for make in (make_reference_route, moe.make_route):
        ids, weights = torch.empty(4, routing.top_k, dtype=torch.int32), torch.empty(4, routing.top_k)
        make(routing, correction)(logits, ids, weights)
        results.append((ids, weights))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[1][1], results[0][1], rtol=3e-6, atol=1e-7)
    logits[0, 3] = torch.nan
    ids, weights = results[1]
    moe.make_route(routing, correction)(logits, ids, weights)
    assert all(len(set(row)) == routing.top_k and min(row) >= 0 and max(row) < 12 for row in ids.tolist())


def test_a_group_counts_by_its_two_best_where_there_is_a_correction():
    """Group 0 has the best expert, group 1 the two best together; without a correction the best alone decides."""
    logits = torch.tensor([[3.0, -3.0, -3.0, 2.0, 1.9, -3.0]])
    for scoring, correction, first in (("sigmoid", torch.zeros(6), 3), ("softmax", None, 0)):
        routing = Routing(experts=6, top_k=1, scoring=scoring, corrected=correction is not None, groups=2, top_groups=1)
        ids, weights = torch.empty(1, 1, dtype=torch.int32), torch.empty(1, 1)
        moe.make_route(routing, correction)(logits, ids, weights)
        assert ids.item() == first


def test_experts_out_of_a_table():
    logits, tokens = torch.randn(5, 12) * 20.0, torch.tensor([3, 0, 6, 3, 1], dtype=torch.int32)
    table = torch.stack([torch.randperm(12)[:3] for _ in range(7)]).to(torch.int32)
    results = []
    for fn in (reference_table_route, moe.table_route):
        ids, weights = torch.empty(5, 3, dtype=torch.int32), torch.empty(5, 3)
        fn(logits, tokens, table, 1.5, ids, weights)
        results.append((ids, weights))
    assert torch.equal(results[1][0], results[0][0])
    torch.testing.assert_close(results[1][1], results[0][1], rtol=3e-6, atol=1e-7)


def test_pairs_are_sorted_by_expert_and_those_of_nobody_come_first():
    ids = torch.tensor([[2, -1, 0], [0, 4, 2]], dtype=torch.int32)
    order, starts = moe.by_expert(ids, EXPERTS)
    assert order.tolist() == [1, 2, 3, 0, 5, 4]
    assert starts.tolist() == [1, 3, 3, 5, 5, 6]


def formats():
    yield "bfloat16", "bfloat16", True
    for name in ("float32", "gguf_q4_0", "gguf_mxfp4", "fp8_blocks"):
        yield pytest.param(name, name, False, marks=pytest.mark.long)
    for names in (("gguf_q8_0", "gguf_q5_0"), ("nvfp4", "nvfp4")):
        yield pytest.param(*names, True, marks=pytest.mark.long)


@pytest.mark.parametrize(("name", "down_name", "rounded"), formats())
def test_experts_with_absent_ones_and_one_that_nobody_chose(name, down_name, rounded):
    """Expert 3 has no token, expert 0 has most, one pair has no expert at all; gate and down of different formats."""
    generator = torch.Generator().manual_seed(1)
    inner, outer = max(INTERMEDIATE, BLOCK_ELEMENTS.get(down_name, 0)), max(HIDDEN, BLOCK_ELEMENTS.get(name, 0))
    gate_up = random_weight(name, EXPERTS * 2 * inner, outer, generator).weight
    down = random_weight(down_name, EXPERTS * outer, inner, generator).weight
    biases = torch.randn(EXPERTS, 2 * inner), torch.randn(EXPERTS, outer)
    ids = torch.randint(0, 3, (20, 2), dtype=torch.int32)
    ids[:, 0] = 0
    ids[4] = torch.tensor([-1, 4])
    x, weights, found, expected = torch.randn(20, outer), torch.rand(20, 2), *torch.empty(2, 20, outer)
    activation = GatedActivation("clamped_swiglu", 1.7, 7.0)
    make_reference_experts(gate_up, down, *biases, activation)(x, ids, weights, expected)
    make = moe.make_rounded_experts if rounded else moe.make_experts
    make(gate_up, down, *biases, activation)(x, ids, weights, found)
    bound = 3e-2 if rounded else 1e-5
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


def test_no_tokens_launch_nothing():
    weight = random_weight("float32", 8, 4, torch.Generator()).weight
    nothing = torch.empty(0, 4)
    make = moe.make_experts(
        weight, random_weight("float32", 4, 4, torch.Generator()).weight, None, None, GatedActivation("silu")
    )
    make(nothing, torch.empty(0, 1, dtype=torch.int32), torch.empty(0, 1), nothing)
