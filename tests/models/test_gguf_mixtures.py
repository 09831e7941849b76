"""GGUF files of mixtures of experts give the logits of their safetensors twins."""

from pathlib import Path

import numpy as np
import pytest
from gguf_mixtures import make, write
from model_checks import check_prompt
from thread_ranks import build_ranks
from tiny_models import build, resolved

from tokenspeed.recipes.checkpoint_size import read_checkpoint
from tokenspeed.recipes.gguf_file import GgufError, read_gguf_header
from tokenspeed.recipes.model_config import CheckpointError, read_model_config
from tokenspeed.recipes.resolved import ModelSource

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]


@pytest.mark.parametrize(
    ("name", "experts", "others", "absorbed"),
    [
        ("qwen3moe", "Q8_0", "Q4_0", False),
        ("qwen3moe", "MXFP4", "F16", False),
        ("deepseek2", "Q8_0", "F32", False),
        ("deepseek2", "Q4_0", "Q8_0", True),
        ("deepseek2", "F32", "F32", True),
        ("deepseek2 by softmax", "Q4_1", "F32", False),
        ("glm4moe", "Q8_0", "F32", False),
        ("gpt-oss", "MXFP4", "Q8_0", False),
        ("gpt-oss", "F32", "F32", False),
    ],
)
def test_logits_are_those_of_the_twin(name: str, experts: str, others: str, absorbed: bool, tmp_path: Path) -> None:
    path, twin = write(make(name), tmp_path, name, experts=experts, others=others, absorbed=absorbed)
    source = ModelSource(kind="gguf", path=str(path))
    device = build(resolved(source, kv_dtype="float32", activations="float32"))
    try:
        check_prompt(twin, device, PROMPT, new_tokens=6)
        assert read_checkpoint(source)[1] == device.specs.weight_bytes
    finally:
        device.handle.shutdown()


@pytest.mark.parametrize(
    ("name", "experts", "others", "by_expert"),
    [
        pytest.param("qwen3moe", "Q8_0", "Q4_0", False, marks=pytest.mark.long),
        pytest.param("qwen3moe", "MXFP4", "F16", True, marks=pytest.mark.long),
        pytest.param("deepseek2", "Q4_0", "F32", False, marks=pytest.mark.long),
        pytest.param("glm4moe", "Q8_0", "F32", False, marks=pytest.mark.long),
        ("gpt-oss", "MXFP4", "Q8_0", False),
        pytest.param("gpt-oss", "F32", "F32", True, marks=pytest.mark.long),
    ],
)
def test_two_ranks_have_the_logits_of_the_twin(
    name: str, experts: str, others: str, by_expert: bool, tmp_path: Path
) -> None:
    path, twin = write(make(name), tmp_path, name, experts=experts, others=others, absorbed=name == "deepseek2")
    config = resolved(ModelSource(kind="gguf", path=str(path)), kv_dtype="float32", activations="float32")
    device = build_ranks(config, 2, by_expert=by_expert)
    try:
        check_prompt(twin, device, PROMPT, new_tokens=4)
    finally:
        device.handle.shutdown()


def test_what_the_metadata_say_of_experts(tmp_path: Path) -> None:
    path, _ = write(make("deepseek2"), tmp_path, "deepseek2", absorbed=True)
    config = read_model_config(ModelSource(kind="gguf", path=str(path)))
    experts, latent = config.experts, config.latent
    assert experts is not None
    assert latent is not None
    assert (config.architecture, config.num_kv_heads, config.head_dim) == ("deepseek_v3", 4, 40)
    assert (experts.layers, experts.count, experts.active, experts.intermediate) == ((1, 2), 8, 2, 64)
    assert (experts.shared_intermediate, experts.groups, experts.top_groups) == (128, 4, 2)
    assert (experts.scoring, experts.corrected, experts.renormalise, experts.scale) == ("sigmoid", True, True, 2.5)
    assert (latent.query_rank, latent.latent, latent.rotary, latent.plain, latent.value) == (32, 32, 8, 32, 16)
    assert config.rope.kind == "yarn"
    assert config.rope.parameters["mscale_all_dim"] == pytest.approx(0.7)


def test_a_split_model_is_read_from_all_its_files(tmp_path: Path) -> None:
    path, twin = write(make("qwen3moe"), tmp_path, "qwen3moe", tensors_a_file=9)
    assert path.name == "model-00001-of-00005.gguf"
    device = build(resolved(ModelSource(kind="gguf", path=str(path)), kv_dtype="float32", activations="float32"))
    try:
        check_prompt(twin, device, PROMPT, new_tokens=4)
    finally:
        device.handle.shutdown()


def test_parts_of_a_split_model_that_do_not_fit(tmp_path: Path) -> None:
    path, _ = write(make("qwen3moe"), tmp_path, "qwen3moe", tensors_a_file=9)
    second, third = (tmp_path / f"model-0000{number}-of-00005.gguf" for number in (2, 3))
    with pytest.raises(
        GgufError, match=r"00002-of-00005\.gguf: is not the first part .* give model-00001-of-00005\.gguf"
    ):
        read_gguf_header(second)
    data = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(GgufError, match=r"00002-of-00005\.gguf: is part 2, not 1; the parts are of different models"):
        read_gguf_header(path)
    second.write_bytes(path.read_bytes())
    with pytest.raises(GgufError, match=r"00002-of-00005\.gguf: has .* again"):
        read_gguf_header(path)
    second.write_bytes(data[:-1000])
    with pytest.raises(GgufError, match=r"00002-of-00005\.gguf: tensor .* cut short"):
        read_gguf_header(path)
    second.unlink()
    with pytest.raises(GgufError, match=r"00002-of-00005\.gguf: there is no such file"):
        read_gguf_header(path)
    other = path.rename(tmp_path / "model.gguf")
    with pytest.raises(GgufError, match=r"model\.gguf: is one of 5 files .* NAME-00001-of-00005\.gguf"):
        read_gguf_header(other)


def test_layers_that_draft_tokens_are_left_out(tmp_path: Path) -> None:
    """GLM's files count them among the blocks."""
    extra = {
        "glm4moe.block_count": 4,
        "glm4moe.nextn_predict_layers": 1,
        "blk.3.attn_norm.weight": np.ones(64, np.float32),
        "blk.3.nextn.eh_proj.weight": np.ones((64, 128), np.float32),
    }
    path, twin = write(make("glm4moe"), tmp_path, "glm4moe", more=extra)
    source = ModelSource(kind="gguf", path=str(path))
    device = build(resolved(source, kv_dtype="float32", activations="float32"))
    try:
        check_prompt(twin, device, PROMPT, new_tokens=2)
        assert read_checkpoint(source)[1] == device.specs.weight_bytes
    finally:
        device.handle.shutdown()


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        (
            "qwen3moe",
            {"blk.1.ffn_up_exps.weight": np.ones((64, 64), np.float32)},
            r"ffn_up_exps\.weight has shape \[64, 64\], it should be \[experts, rows, columns\]",
        ),
        (
            "qwen3moe",
            {"blk.1.ffn_up_exps.weight": np.ones((5, 64, 64), np.float32)},
            r"layers\.1\.mlp\.experts\.5\.up_proj\.weight is missing",
        ),
        (
            "qwen3moe",
            {"blk.1.ffn_up_exps.weight": np.ones((6, 64, 64), np.float16)},
            r"up_proj\.weight is stored as float16, .*gate_proj\.weight as float32; the parts of one weight",
        ),
        ("qwen3moe", {"blk.0.ffn_extra.weight": np.ones(4, np.float32)}, r"blk\.0\.ffn_extra\.weight is unknown"),
        (
            "gpt-oss",
            {"blk.1.ffn_up_exps.weight": None},
            r"blk\.1\.ffn_gate_exps\.weight has no tensor of the same shape and format",
        ),
        (
            "gpt-oss",
            {"blk.0.ffn_down_exps.weight": np.ones((3, 64, 64), np.float32)},
            r"experts\.down_proj has shape \(3, 64, 64\), the configuration says \(3, 85, 64\)",
        ),
        ("deepseek2", {"deepseek2.expert_gating_func": 3}, "expert_gating_func is 3, supported are 1"),
        ("deepseek2", {"deepseek2.attention.key_length": 8}, "a head of 8 has 8 rotated elements"),
    ],
)
def test_what_does_not_fit_is_named(name: str, more: dict[str, object], words: str, tmp_path: Path) -> None:
    path, _ = write(make(name), tmp_path, name, more=more)
    with pytest.raises(CheckpointError, match=rf"model\.gguf: .*{words}"):
        build(resolved(ModelSource(kind="gguf", path=str(path))))
