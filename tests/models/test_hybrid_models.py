"""What configurations of models with states say, in each spelling, what is refused, the rows of their projections."""

import json
import re

import pytest
import torch

from tokenspeed.layers.cache_spec import groups_of_layers
from tokenspeed.models import architecture
from tokenspeed.recipes.model_config import CheckpointError, LinearAttentionConfig, ModelConfig, read_model_config
from tokenspeed.recipes.resolved import ModelSource
from tokenspeed.recipes.stored_weights import decoder_name

QWEN: dict[str, object] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
KIMI: dict[str, object] = {
    **QWEN,
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "num_hidden_layers": 5,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "mla_use_nope": True,
    "model_max_length": 4096,
    "linear_attn_config": {
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3, 5],
        "head_dim": 32,
        "num_heads": 6,
        "short_conv_kernel_size": 3,
    },
    "first_k_dense_replace": 2,
}


def read(values: dict[str, object], **changes: object) -> ModelConfig:
    return read_model_config(ModelSource(kind="random", random_config=json.dumps({**values, **changes})))


def test_qwen3_nexts_defaults_are_transformers() -> None:
    config = read(QWEN)
    assert config.linear == LinearAttentionConfig(
        layers=(0, 1, 2, 4, 5, 6), key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_width=4
    )
    assert config.attending_layers == (3, 7)
    assert (config.head_dim, config.rope.share, config.norm_offset, config.output_gate) == (256, 0.25, 1.0, True)
    assert config.experts is not None
    assert (config.experts.count, config.experts.active, config.experts.shared_gate) == (512, 10, True)
    assert read(QWEN, full_attention_interval=2).attending_layers == (1, 3, 5, 7)


def test_kimi_linear_counts_its_layers_from_one() -> None:
    config = read(KIMI)
    assert config.linear is not None
    assert config.linear.layers == (0, 1, 2, 4)
    assert (config.linear.value_heads, config.linear.key_dim, config.linear.conv_width) == (6, 32, 3)
    assert config.linear.channel_decay
    assert config.experts is not None
    assert config.experts.layers == (2, 3, 4)
    assert (config.context_length, config.rope.kind) == (4096, "none")


@pytest.mark.parametrize("family", ["Qwen3_5", "Qwen3_5Moe"])
def test_the_decoder_of_a_model_that_sees(family: str) -> None:
    """Its dimensions are under text_config, its weights have a prefix; encoder and drafting layers are left out."""
    whole = {
        "architectures": [f"{family}ForConditionalGeneration"],
        "text_config": {key: value for key, value in QWEN.items() if key not in ("architectures", "model_type")},
        "vision_config": {"depth": 2},
        "tie_word_embeddings": True,
    }
    config = read(whole)
    assert config.architecture == ("qwen3_5" if family == "Qwen3_5" else "qwen3_5_moe")
    assert config.tie_word_embeddings
    names = {spec.name for spec in architecture(config.architecture).weights(config, rank=0, world=1)}
    assert decoder_name("model.language_model.layers.0.linear_attn.in_proj_qkv.weight") in names
    ignored = re.compile("|".join(config.ignored_weights))
    for name in ("model.visual.blocks.0.attn.qkv.weight", "mtp.layers.0.mlp.gate_proj.weight"):
        assert ignored.fullmatch(decoder_name(name))
    assert not ignored.fullmatch("model.layers.0.linear_attn.in_proj_qkv.weight")


def test_transformers_name_for_kimis_dense_mlp_is_known() -> None:
    assert decoder_name("model.layers.0.block_sparse_moe.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    for name in ("model.layers.0.block_sparse_moe.experts.1.w1.weight", "model.layers.0.block_sparse_moe.gate.weight"):
        assert decoder_name(name) == name


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        (QWEN, {"layer_types": ["linear_attention"] * 8}, "8 of 8 layers are linear_attention"),
        (QWEN, {"layer_types": ["full_attention", "sliding_attention"] * 4}, "sliding_attention"),
        (QWEN, {"linear_num_value_heads": 24}, "24 value heads of linear attention are not a multiple of its 16"),
        (QWEN, {"linear_conv_kernel_dim": 1}, "they should be at least 1, and 2"),
        (QWEN, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (KIMI, {"mla_use_nope": False}, "mla_use_nope is False"),
        (KIMI, {"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'"),
        (KIMI, {"mlp_layer_types": ["dense"] * 4 + ["none"]}, r"mlp_layer_types holds \['none'\]"),
        (
            KIMI,
            {"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3, 4]}},
            "together they name each of the layers 1 to 5 once",
        ),
    ],
)
def test_what_no_such_model_has_is_refused(values: dict[str, object], changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(values, **changes)


@pytest.mark.parametrize("values", [QWEN, KIMI])
@pytest.mark.parametrize("granularity", [16, 32, 64, 128])
def test_states_are_kept_where_blocks_of_the_history_end(values: dict[str, object], granularity: int) -> None:
    config = read(values)
    history, state = architecture(config.architecture).cache_groups(config, granularity=granularity)
    assert (history.kind, state.kind, state.dtype) == ("full_history", "state", "float32")
    assert state.checkpoint_granularity is not None
    assert state.checkpoint_granularity % history.block_granularity == 0
    assert [owner for (owner,) in groups_of_layers((history, state))] == [
        0 if layer in config.attending_layers else 1 for layer in range(config.num_layers)
    ]


def test_a_ranks_rows_of_a_key_head_stay_together() -> None:
    """Sharded, q and k of each key head go with the v, z, b and a of its value heads."""
    config = read(
        QWEN, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=2, linear_value_head_dim=3
    )
    specs = {spec.name: spec for spec in architecture("qwen3_next").weights(config, rank=1, world=2)}
    spec = specs["model.layers.0.linear_attn.in_proj_qkvz.weight"]
    assert spec.row_order is not None
    start, stop = spec.shard.row_range(spec.shape[0])
    assert (start, stop) == (32, 64)
    order = spec.row_order(stop - start)
    assert sorted(order.tolist()) == list(range(32))
    q, k, v, z = torch.split(order, [4, 4, 12, 12])
    assert q.tolist() == [0, 1, 16, 17]
    assert k.tolist() == [2, 3, 18, 19]
    assert v.tolist() == [*range(4, 10), *range(20, 26)]
    assert z.tolist() == [*range(10, 16), *range(26, 32)]
