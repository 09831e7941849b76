"""The rotary table equals transformers' own, far out too."""

import pytest
import torch

from tokenspeed.layers.rotary import rotary_table
from tokenspeed.recipes.model_config import RopeConfig
from tokenspeed.recipes.model_config.fields import Fields
from tokenspeed.recipes.model_config.rope import read_rope

COUNT = 4096
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 32.0, "original_max_position_embeddings": 128}
KINDS: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "partial": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "linear": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
    "llama3-partial": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3, "partial_rotary_factor": 0.5},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, **YARN},
    "yarn-not-truncated": {"rope_type": "yarn", "rope_theta": 150000.0, **YARN, "truncate": False},
    "yarn-mscale": {"rope_type": "yarn", "rope_theta": 10000.0, **YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    "yarn-factor": {"rope_type": "yarn", "rope_theta": 10000.0, **YARN, "attention_factor": 1.5, "beta_fast": 16},
    "yarn-partial": {"rope_type": "yarn", "rope_theta": 10000.0, **YARN, "partial_rotary_factor": 0.5},
}


def read(parameters: dict[str, object]) -> RopeConfig:
    return read_rope(Fields("config.json", {"rope_parameters": parameters, "max_position_embeddings": COUNT}))


def close(table: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    half = table.shape[1] // 2
    torch.testing.assert_close(table[:, :half], cos[0, :, :half], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(table[:, half:], sin[0, :, :half], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers(kind: str) -> None:
    """At every position that the model was made for; glm4_moe's module knows partial heads besides all scalings."""
    from transformers import Glm4MoeConfig
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding

    config = Glm4MoeConfig(
        hidden_size=128,
        num_attention_heads=2,
        head_dim=64,
        max_position_embeddings=COUNT,
        rope_parameters={"partial_rotary_factor": 1.0, **KINDS[kind]},
    )
    cos, sin = Glm4MoeRotaryEmbedding(config)(torch.zeros(1), torch.arange(COUNT)[None])
    table = rotary_table(read(KINDS[kind]), head_dim=64, num_positions=COUNT)
    assert table.shape == (COUNT, cos.shape[2])
    close(table, cos, sin)


@pytest.mark.parametrize("kind", ["default", "mrope"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_multimodal_sections_leave_texts_to_the_plain_embedding(kind: str, interleaved: bool) -> None:
    """Of a text all axes have the same position."""
    from transformers import Qwen2_5_VLTextConfig, Qwen3_5TextConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

    make, module = (
        (Qwen3_5TextConfig, Qwen3_5TextRotaryEmbedding)
        if interleaved
        else (Qwen2_5_VLTextConfig, Qwen2_5_VLRotaryEmbedding)
    )
    share = {"partial_rotary_factor": 0.5} if interleaved else {}
    parameters = {"rope_theta": 10000.0, "mrope_section": [6, 5, 5] if interleaved else [12, 10, 10], **share}
    heads = {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64, "max_position_embeddings": 512}
    theirs = make(**heads, rope_parameters={"rope_type": "default", **parameters})
    theirs.head_dim = 64  # Qwen2.5-VL's configuration has none
    positions = torch.arange(512).expand(3, 1, 512)
    cos, sin = module(theirs)(torch.zeros(1), positions)
    ours = read({"type": kind, "mrope_interleaved": interleaved, **parameters})
    close(rotary_table(ours, head_dim=64, num_positions=512), cos, sin)


def test_factors_divide_the_frequencies() -> None:
    factors = torch.tensor([1.0, 2.0, 4.0, 8.0])
    plain = rotary_table(RopeConfig(), head_dim=8, num_positions=9)
    scaled = rotary_table(RopeConfig(), head_dim=8, num_positions=9, factors=factors)
    for column, factor in enumerate(factors.int().tolist()):
        assert torch.allclose(scaled[8, column], plain[8 // factor, column])


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'longrope' is unknown"):
        rotary_table(RopeConfig(kind="longrope"), head_dim=8, num_positions=1)
