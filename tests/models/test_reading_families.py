"""What released checkpoints of the families say of themselves, in the dialects that they were published in."""

import json

import pytest
from tiny_models import random_config

from tokenspeed.recipes.model_config import CheckpointError, ModelConfig, RopeConfig, read_model_config
from tokenspeed.recipes.resolved import ModelSource


def read(name: str, **changes: object) -> ModelConfig:
    text = random_config(architectures=[name], model_type=None, **changes)
    return read_model_config(ModelSource(kind="random", random_config=text))


def test_gpt_oss() -> None:
    scaling = {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    config = read(
        "GptOssForCausalLM", rope_theta=150000, rope_scaling=scaling, num_local_experts=32, sliding_window=128
    )
    assert (config.rope.kind, config.rope.theta, config.rope.parameters["truncate"]) == ("yarn", 150000.0, 0.0)
    assert (config.sliding_layers, config.sliding_window, config.sinks) == ((0,), 128, True)
    assert config.attention_bias
    assert config.output_bias
    experts = config.experts
    assert experts is not None
    assert (experts.count, experts.active, experts.layers, experts.intermediate) == (32, 4, (0, 1), 96)
    assert (experts.biases, experts.swiglu_alpha, experts.swiglu_limit) == (True, 1.702, 7.0)


def test_minimax_m2() -> None:
    config = read(
        "MiniMaxM2ForCausalLM",
        rotary_dim=8,
        rope_theta=5000000,
        num_local_experts=16,
        num_experts_per_tok=4,
        scoring_func="sigmoid",
        use_routing_bias=True,
        qk_norm_type="per_layer",
        use_qk_norm=True,
        attn_type_list=[1, 1],
        shared_intermediate_size=0,
    )
    assert config.rope == RopeConfig(theta=5000000.0, share=0.5)
    assert config.rope.rotated(16) == 8
    assert config.qk_norm
    assert config.whole_norms
    assert config.experts is not None
    assert (config.experts.scoring, config.experts.corrected, config.experts.count) == ("sigmoid", True, 16)


def test_glm() -> None:
    """Half of a head is rotated where the checkpoint does not say; drafting layers are left out."""
    dense = read("Glm4ForCausalLM")
    assert (dense.rope.share, dense.rope.paired, dense.attention_bias, dense.output_bias) == (0.5, True, True, False)
    moe = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_nextn_predict_layers": 1}
    config = read("Glm4MoeForCausalLM", **moe, use_qk_norm=True, n_shared_experts=1)
    assert (config.rope.share, config.rope.paired, config.qk_norm) == (0.5, False, True)
    assert config.experts is not None
    assert (config.experts.layers, config.experts.shared_intermediate) == ((1,), 32)
    assert config.ignored_weights == (r"model\.layers\.2\..*",)
    assert read("Glm4MoeForCausalLM", **moe, partial_rotary_factor=0.25).rope.share == 0.25


def test_smollm3() -> None:
    """What is published has pretraining_tp 2 and says once more what no_rope_layer_interval says."""
    published = {"num_hidden_layers": 8, "pretraining_tp": 2, "max_window_layers": 28, "tie_word_embeddings": None}
    windows = {"use_sliding_window": False, "sliding_window": None}
    config = read("SmolLM3ForCausalLM", **published, **windows, no_rope_layers=[1, 1, 1, 0] * 2, rope_theta=5000000.0)
    assert (config.unturned_layers, config.sliding_layers, config.rope.theta) == ((3, 7), (), 5000000.0)
    assert config.tie_word_embeddings
    assert [config.rope_of(layer).kind for layer in (2, 3)] == ["default", "none"]
    windows = {"use_sliding_window": True, "sliding_window": 16}
    config = read("SmolLM3ForCausalLM", **published, **windows, no_rope_layer_interval=3)
    assert (config.unturned_layers, config.sliding_layers, config.sliding_window) == ((2, 5), (2, 5), 16)
    assert config.rope.theta == 2000000.0
    config = read("SmolLM3ForCausalLM", **published, **windows, layer_types=["sliding_attention"] * 8)
    assert (config.unturned_layers, len(config.sliding_layers)) == ((3, 7), 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"no_rope_layers": [1]}, r"no_rope_layers is \[1\]; it has a 1 for each of the 2 layers that rotates"),
        ({"no_rope_layers": [1, 2]}, r"no_rope_layers is \[1, 2\]"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0, it should be at least 1"),
    ],
)
def test_smollm3_refuses_layers_that_it_cannot_read(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read("SmolLM3ForCausalLM", **changes)


def test_ernie_4_5() -> None:
    """What is published has keys that say how to train and that layers draft tokens."""
    published = {
        "num_hidden_layers": 6,
        "moe_num_experts": 64,
        "moe_k": 4,
        "moe_intermediate_size": 48,
        "moe_capacity": [64, 64, 64],
        "moe_gate": "topk",
        "moe_use_aux_free": True,
        "use_bias": False,
        "use_rmsnorm": True,
        "num_nextn_predict_layers": 1,
        "rope_theta": 500000,
    }
    config = read("Ernie4_5_MoeForCausalLM", **published)
    assert (config.rope.paired, config.rope.theta, config.rms_norm_eps) == (True, 500000.0, 1e-5)
    assert config.experts is not None
    assert config.experts.layers == (1, 2, 3, 4, 5)
    assert (config.experts.count, config.experts.active, config.experts.shared_intermediate) == (64, 4, 96)
    assert (config.experts.scoring, config.experts.corrected, config.experts.renormalise) == ("softmax", True, True)
    assert config.ignored_weights == (r"model\.mtp_.*",)
    some = {"moe_layer_start_index": 0, "moe_layer_end_index": 4, "moe_layer_interval": 2, "moe_num_shared_experts": 0}
    config = read("Ernie4_5_MoeForCausalLM", **{**published, **some, "moe_use_aux_free": False})
    assert config.experts is not None
    assert (config.experts.layers, config.experts.shared_intermediate) == ((1, 3), 0)
    assert not config.experts.corrected
    assert read("Ernie4_5_MoeForCausalLM", **{**published, "moe_layer_start_index": 6}).experts is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bias": True}, "use_bias is True, supported is False"),
        ({"moe_gate": "top2_fused"}, "moe_gate is 'top2_fused', supported is 'topk'"),
        ({"moe_layer_interval": 0}, "moe_layer_interval is 0, it should be at least 1"),
    ],
)
def test_ernie_4_5_refuses_what_nobody_applies(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read("Ernie4_5_MoeForCausalLM", **changes)


def test_gemma_3_of_before_and_of_the_checkpoints_that_see() -> None:
    config = read(
        "Gemma3ForCausalLM",
        num_hidden_layers=6,
        sliding_window=512,
        sliding_window_pattern=6,
        tie_word_embeddings=None,
        rope_theta=1000000,
        rope_local_base_freq=10000,
        query_pre_attn_scalar=16,
    )
    assert config.sliding_layers == (0, 1, 2, 3, 4)
    assert (config.rope, config.sliding_rope) == (RopeConfig(theta=1000000.0), RopeConfig(theta=10000.0))
    assert (config.attention_scale, config.embedding_scale, config.norm_offset) == (0.25, 8.0, 1.0)
    assert config.tie_word_embeddings
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    seen = read_model_config(ModelSource(kind="random", random_config=json.dumps(whole)))
    assert (seen.vocab_size, seen.num_heads, seen.num_kv_heads, seen.head_dim) == (262208, 8, 4, 256)
    assert seen.rope == RopeConfig(theta=1000000.0, kind="linear", parameters={"factor": 8.0})
    assert seen.sliding_rope == RopeConfig(theta=10000.0)
    assert r"(model\.)?vision_tower\..*" in seen.ignored_weights


def test_gemma_2_has_caps_unless_it_says_none() -> None:
    assert (read("Gemma2ForCausalLM").soft_cap, read("Gemma2ForCausalLM").logit_soft_cap) == (50.0, 30.0)
    config = read("Gemma2ForCausalLM", attn_logit_softcapping=None, final_logit_softcapping=15.0)
    assert (config.soft_cap, config.logit_soft_cap, config.sliding_layers) == (0.0, 15.0, (0,))


LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}


def test_deepseek_v2_and_mistral_4() -> None:
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    grouped = {**experts, "n_group": 4, "topk_group": 2}
    v2 = read("DeepseekV2ForCausalLM", **LATENT, **grouped, topk_method="group_limited_greedy", norm_topk_prob=False)
    assert v2.experts is not None
    assert (v2.experts.groups, v2.experts.top_groups, v2.experts.renormalise, v2.experts.scoring) == (
        4, 2, False, "softmax",
    )  # fmt: skip
    greedy = read("DeepseekV2ForCausalLM", **LATENT, **grouped, topk_method="greedy").experts
    assert greedy is not None
    assert (greedy.groups, greedy.top_groups) == (1, 1)
    rope = {
        "type": "yarn",
        "rope_theta": 10000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "llama_4_scaling_beta": 0.1,
        "partial_rotary_factor": 0.5,
    }
    mistral = read("Mistral4ForCausalLM", **LATENT, **experts, rope_parameters=rope)
    assert mistral.latent is not None
    assert (mistral.latent.growth, mistral.latent.growth_length, mistral.rope.share) == (0.1, 8192, 1.0)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("MiniMaxM2ForCausalLM", {"attn_type_list": [0, 1]}, r"attn_type_list is \[0, 1\], supported is 1"),
        ("MiniMaxM2ForCausalLM", {"qk_norm_type": "per_head"}, "qk_norm_type is 'per_head'"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "scores of Gemma 3 have no cap"),
        ("Gemma3ForCausalLM", {"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ("DeepseekV2ForCausalLM", {**LATENT, "norm_topk_prob": True}, "norm_topk_prob is True"),
        ("DeepseekV2ForCausalLM", {**LATENT, "topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("Glm4MoeLiteForCausalLM", {**LATENT, "attention_bias": True}, "attention_bias is True"),
        ("Mistral4ForCausalLM", {**LATENT, "n_group": 2}, "n_group is 2"),
        ("Mistral4ForCausalLM", LATENT, "rope_parameters should be an object"),
        ("GptOssForCausalLM", {"layer_types": ["full_attention"]}, "layer_types holds 1 entries"),
        ("MixtralForCausalLM", {"sliding_window": -1}, "sliding_window is -1"),
    ],
)
def test_what_would_have_to_be_ignored_is_refused(name: str, changes: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(name, **changes)
