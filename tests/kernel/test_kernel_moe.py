"""Routing and experts against the models they come from, and what does not fit is refused."""

import re

import pytest
import torch

from tokenspeed_kernel.numerics.moe_cases import ROUTINGS
from tokenspeed_kernel.ops.activation import GatedActivation, bind_clamped_swiglu
from tokenspeed_kernel.ops.moe import Routing, RoutingError, bind_experts, bind_route
from tokenspeed_kernel.quantized import QuantizedTensor

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS = 24, 16, 8, 3, 11


def route(routing, logits, correction=None):
    """ids and weights of moe.route's reference."""
    ids = torch.full((logits.shape[0], routing.top_k), -1, dtype=torch.int32)
    weights = torch.full(ids.shape, torch.nan)
    bind_route(routing, correction, override="reference")(logits, ids, weights)
    return ids, weights


def by_expert(ids, weights, experts):
    """float32 [T, E]: the weight of every expert, whatever the order of the chosen ones."""
    return torch.zeros(ids.shape[0], experts).scatter_(1, ids.long(), weights)


def run_experts(gate_up, down, biases, activation, x, ids, weights):
    """moe.experts' reference for weights [E, 2I, H] and [E, H, I]."""
    out = torch.full_like(x, torch.nan)
    bound = bind_experts(
        QuantizedTensor.from_dense(gate_up.flatten(0, 1).contiguous(), "gate_up"),
        QuantizedTensor.from_dense(down.flatten(0, 1).contiguous(), "down"),
        *biases,
        activation,
        override="reference",
    )
    bound(x, ids, weights, out)
    return out


@pytest.mark.parametrize(
    ("groups", "top_groups", "renormalise", "correction"),
    [(4, 2, True, 0.3), (1, 1, True, 0.3), (2, 1, False, 0.3), (4, 2, True, 3.0)],
)
def test_routing_and_experts_of_deepseek_v3(groups, top_groups, renormalise, correction):
    """Large corrections too: some make the choice value of a whole group negative."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts, DeepseekV3TopkRouter

    torch.manual_seed(1)
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        n_group=groups,
        topk_group=top_groups,
        norm_topk_prob=renormalise,
        routed_scaling_factor=2.5,
    )
    config._experts_implementation = "eager"
    router, experts = DeepseekV3TopkRouter(config), DeepseekV3Experts(config)
    for parameter in (router.weight, experts.gate_up_proj, experts.down_proj):
        torch.nn.init.normal_(parameter, std=0.3)
    router.e_score_correction_bias.normal_(std=correction)
    x = torch.randn(TOKENS, HIDDEN)
    with torch.no_grad():
        logits, expected_weights, expected_ids = router(x)
        expected = experts(x, expected_ids, expected_weights)
    routing = Routing(
        experts=EXPERTS,
        top_k=TOP_K,
        scoring="sigmoid",
        corrected=True,
        groups=groups,
        top_groups=top_groups,
        renormalise=renormalise,
        scale=2.5,
    )
    ids, weights = route(routing, logits.detach(), router.e_score_correction_bias)
    wanted = by_expert(expected_ids, expected_weights, EXPERTS)
    torch.testing.assert_close(by_expert(ids, weights, EXPERTS), wanted, rtol=1e-5, atol=1e-6)
    both = experts.gate_up_proj.detach(), experts.down_proj.detach()
    found = run_experts(*both, (None, None), GatedActivation("silu"), x, ids, weights)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("renormalise", [True, False])
def test_routing_of_qwen3_moe(renormalise):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    torch.manual_seed(2)
    router = Qwen3MoeTopKRouter(
        Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=TOP_K, norm_topk_prob=renormalise)
    )
    torch.nn.init.normal_(router.weight)
    with torch.no_grad():
        logits = torch.nn.functional.linear(x := torch.randn(TOKENS, HIDDEN), router.weight)
        _, expected_weights, expected_ids = router(x)
    ids, weights = route(Routing(experts=EXPERTS, top_k=TOP_K, scoring="softmax", renormalise=renormalise), logits)
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


def test_routing_and_experts_of_gpt_oss():
    """Its softmax over the chosen logits is our renormalised one; its interleaved gate and up are our halves."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter

    torch.manual_seed(3)
    config = GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = "eager"
    router, experts = GptOssTopKRouter(config), GptOssExperts(config)
    for parameter in (*router.parameters(), *experts.parameters()):
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(TOKENS, HIDDEN) * 3.0
    with torch.no_grad():
        logits, expected_weights, expected_ids = router(x)
        expected = experts(x, expected_ids, expected_weights)
        gate_up, bias = experts.gate_up_proj.transpose(1, 2), experts.gate_up_proj_bias
        biases = torch.cat([bias[:, 0::2], bias[:, 1::2]], dim=1), experts.down_proj_bias.detach()
        halves, down = torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], dim=1), experts.down_proj.transpose(1, 2)
    ids, weights = route(Routing(experts=EXPERTS, top_k=TOP_K, scoring="softmax"), logits)
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)
    activation = GatedActivation("clamped_swiglu", config.swiglu_alpha, config.swiglu_limit)
    found = run_experts(halves, down, biases, activation, x, ids, weights)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    assert activation == GatedActivation("clamped_swiglu", 1.702, 7.0)


def test_deepseek_v2_takes_the_groups_with_the_best_expert():
    """By hand: groups {0, 1}, {2, 3}, {4, 5}; the best single experts are 2 and 5, although 0 + 1 have the largest
    sum."""
    logits = torch.tensor([[1.0, 0.9, 1.1, -9.0, -9.0, 1.2]])
    routing = Routing(experts=6, top_k=3, scoring="softmax", groups=3, top_groups=2, renormalise=False, scale=16.0)
    ids, weights = route(routing, logits)
    assert ids.tolist()[0][:2] == [5, 2]
    torch.testing.assert_close(weights[0], torch.softmax(logits[0], 0)[ids[0].long()] * 16.0)


def test_an_expert_of_another_group_is_out_even_where_all_values_are_negative():
    routing = Routing(experts=6, top_k=2, scoring="sigmoid", corrected=True, groups=3, top_groups=1)
    ids, _ = route(routing, torch.tensor([[0.0, 0.1, 0.3, 0.2, 0.5, -9.0]]), torch.full((6,), -4.0))
    assert ids.tolist() == [[2, 3]]


def test_equal_values_go_to_the_lower_id():
    ids, _ = route(Routing(experts=6, top_k=4, scoring="softmax"), torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, 0.0]]))
    assert ids.tolist() == [[1, 3, 0, 2]]
    # a sigmoid that is 1 for both in float32: the logits decide
    ids, _ = route(Routing(experts=2, top_k=1, scoring="sigmoid"), torch.tensor([[30.0, 40.0]]))
    assert ids.tolist() == [[1]]


@pytest.mark.parametrize("name", sorted(ROUTINGS))
def test_ids_are_different_and_a_row_with_a_nan_still_gives_some(name):
    routing = ROUTINGS[name]
    logits = torch.randn(6, routing.experts)
    logits[0, 0], logits[1] = torch.nan, torch.nan
    logits[2] = -torch.inf
    ids, weights = route(routing, logits, torch.zeros(routing.experts) if routing.corrected else None)
    assert all(len(set(row)) == routing.top_k for row in ids.tolist())
    assert bool(((ids >= 0) & (ids < routing.experts)).all())
    if routing.renormalise:
        torch.testing.assert_close(weights[3:].sum(dim=1), torch.full((3,), routing.scale))


def test_absent_experts_add_nothing_and_padding_is_zero():
    gate_up, down = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN), torch.randn(EXPERTS, HIDDEN, INTERMEDIATE)
    x, weights = torch.randn(2, HIDDEN), torch.rand(2, 2)
    silu = GatedActivation("silu")
    some = run_experts(gate_up, down, (None, None), silu, x, torch.tensor([[4, -1], [-1, -1]]).int(), weights)
    alone = run_experts(gate_up, down, (None, None), silu, x[:1], torch.tensor([[4]]).int(), weights[:1, :1])
    assert torch.equal(some[:1], alone)
    assert bool((some[1] == 0.0).all())


def test_clamped_swiglu_by_hand():
    out = torch.empty(1, 3)
    gate, up = torch.tensor([[100.0, -100.0, 1.0]]), torch.tensor([[50.0, -50.0, 2.0]])
    bind_clamped_swiglu(override="reference")(gate, up, 1.702, 7.0, out)
    expected = [8 * 7 / (1 + 2.718281828 ** (-1.702 * 7)), 0.0, 3 / (1 + 2.718281828**-1.702)]
    torch.testing.assert_close(out, torch.tensor([expected]), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring": "linear"}, "scoring 'linear' is unknown; use one of softmax, sigmoid"),
        ({"groups": 3}, "8 experts do not divide into 3 groups"),
        ({"groups": 4, "top_groups": 5}, "top_groups is 5; it must be from 1 to the 4 groups"),
        ({"groups": 8, "top_groups": 2, "corrected": True}, "groups of 1 expert have no two best"),
        ({"groups": 4, "top_groups": 1, "top_k": 3}, "top_k is 3; 1 groups have 2 experts"),
        ({"top_k": 0}, "top_k is 0"),
    ],
)
def test_a_routing_that_cannot_be(changes, message):
    with pytest.raises(RoutingError, match=re.escape(message)):
        Routing(**{"experts": 8, "top_k": 2, "scoring": "softmax", **changes})


def test_a_correction_that_does_not_fit_is_refused():
    corrected = Routing(experts=8, top_k=2, scoring="sigmoid", corrected=True)
    with pytest.raises(RoutingError, match="corrected routing, but no correction was given"):
        bind_route(corrected, None)
    with pytest.raises(RoutingError, match=r"the correction must be float32 \[8\], got torch.float32 \[7\]"):
        bind_route(corrected, torch.zeros(7))
    with pytest.raises(RoutingError, match="a correction was given, but the routing is not corrected"):
        bind_route(Routing(experts=8, top_k=2, scoring="sigmoid"), torch.zeros(8))


@pytest.mark.parametrize(
    ("gate_up", "down", "biases", "message"),
    [
        ((61, 8), (16, 15), (None, None), "do not fit each other"),
        ((60, 8), (17, 15), (None, None), "do not fit each other"),
        ((60, 8), (24, 15), (None, None), "do not fit each other"),
        ((60, 8), (24, 10), (torch.zeros(3, 10), None), r"up: its bias must be float32 \[3, 20\]"),
        ((60, 8), (24, 10), (None, torch.zeros(3, 8).double()), r"down: its bias must be float32 \[3, 8\]"),
    ],
)
def test_experts_that_do_not_fit_are_refused(gate_up, down, biases, message):
    weights = [QuantizedTensor.from_dense(torch.zeros(s), n) for s, n in ((gate_up, "up"), (down, "down"))]
    with pytest.raises(ValueError, match=message):
        bind_experts(*weights, *biases, GatedActivation("silu"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gelu",), "activation 'gelu' is unknown; use one of silu, clamped_swiglu"),
        (("silu", 1.0), "silu has no alpha and no limit"),
        (("clamped_swiglu", 1.702), "clamped_swiglu needs alpha and limit above 0"),
    ],
)
def test_an_activation_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        GatedActivation(*arguments)
