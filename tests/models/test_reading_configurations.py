"""read_model_config: what checkpoints say of themselves, in each dialect, and what is refused."""

import json
from pathlib import Path

import pytest
from tiny_models import random_config

from tokenspeed.recipes.model_config import CheckpointError, ModelConfig, RopeConfig, read_model_config
from tokenspeed.recipes.resolved import ModelSource

QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def read(**changes: object) -> ModelConfig:
    return read_model_config(ModelSource(kind="random", random_config=random_config(**changes)))


def read_folder(folder: Path) -> ModelConfig:
    return read_model_config(ModelSource(kind="folder", path=str(folder)))


def test_dimensions() -> None:
    config = read()
    assert (config.architecture, config.vocab_size, config.hidden_size, config.num_layers) == ("llama", 128, 64, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.context_length) == (4, 2, 16, 256)
    assert (config.bos_token_id, config.eos_token_ids, config.dtype) == (1, (2,), "float32")
    assert not config.q_and_k_permuted


def test_defaults_that_checkpoints_leave_out() -> None:
    config = read(num_key_value_heads=None, head_dim=None, rms_norm_eps=None, tie_word_embeddings=None)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert not config.tie_word_embeddings
    assert read(model_type="qwen3", architectures=["Qwen3ForCausalLM"], head_dim=None).head_dim == 128


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({}, RopeConfig(theta=10000.0)),
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5)),
        (
            {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig(theta=7.0, kind="linear", parameters={"factor": 2.0}),
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 9.0, "factor": 2.0}},
            RopeConfig(theta=9.0, kind="linear", parameters={"factor": 2.0}),
        ),
    ],
)
def test_rotary_dialects(changes: dict[str, object], rope: RopeConfig) -> None:
    assert read(**changes).rope == rope


@pytest.mark.parametrize(
    ("changes", "window", "layers"),
    [
        ({}, 0, ()),
        ({"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}, 0, ()),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, 0, ()),
        ({"use_sliding_window": True, "sliding_window": 8}, 0, ()),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, 8, (1, 2)),
        ({"use_sliding_window": True, "max_window_layers": 0}, 4096, (0, 1, 2)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 1,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            8,
            (0, 2),
        ),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"] * 3}, 0, ()),
    ],
)
def test_windows_are_read_as_transformers_reads_them(
    changes: dict[str, object], window: int, layers: tuple[int, ...]
) -> None:
    from transformers import Qwen3Config

    config = read(**QWEN3, num_hidden_layers=3, **changes)
    assert (config.sliding_window, config.sliding_layers) == (window, layers)
    theirs = Qwen3Config(num_hidden_layers=3, **changes)
    assert tuple(i for i, kind in enumerate(theirs.layer_types) if kind == "sliding_attention") == layers
    assert not layers or theirs.sliding_window == window


def test_end_of_sequence_ids_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(random_config(eos_token_id=2))
    assert read_folder(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert read_folder(tmp_path).eos_token_ids == (2, 7)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "architecture MambaForCausalLM is not supported; nearest are LlamaForCausalLM, .*; supported are Llama",
        ),
        ({"architectures": [], "model_type": "mamba"}, "'mamba' is not supported"),
        ({"architectures": [], "model_type": "qwen9_5_moe"}, "nearest are qwen3_5_moe, qwen3_moe, "),
        ({"hidden_size": "64"}, "hidden_size should be an integer, it is '64'"),
        ({"hidden_size": None}, "hidden_size should be an integer, it is None"),
        ({"num_hidden_layers": 0}, "num_layers is 0, it should be at least 1"),
        ({"num_attention_heads": 3}, "3 attention heads are not a multiple of 2"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', supported is 'silu'"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "has sliding_attention, but no window is in force"),
        ({**QWEN3, "layer_types": ["full_attention", "sliding_attention"]}, "but no window is in force; set use_"),
        ({"layer_types": ["full_attention", "linear_attention"]}, r"holds 2 entries with \['linear_attention'\]"),
        ({"layer_types": ["full_attention"]}, "layer_types holds 1 entries; supported are .* each of the 2 layers"),
        ({**QWEN3, "use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0, it should be at least 1"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "random weights are not quantised; leave",
        ),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "rotary scaling 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor should be a number, it is None"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor should be above 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"attention_bias": "yes"}, "attention_bias should be true or false"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps should be a number"),
        ({"eos_token_id": 128}, r"end-of-sequence ids \[128\] lie outside the vocabulary of 128"),
    ],
)
def test_refusals(changes: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(**changes)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: has no config\.json; give the folder"):
        read_folder(tmp_path / "nowhere")


def test_broken_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{\n  "hidden_size": 64,\n}')
    with pytest.raises(CheckpointError, match=r"config\.json: line 3, column 1: not JSON"):
        read_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="a JSON object was expected, it holds a list"):
        read_folder(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_folder(tmp_path)
