"""What the plan counts of a checkpoint is what its weights take once they are loaded."""

from pathlib import Path

import pytest
import torch
from sparse_models import compressed_model
from tiny_models import save, transformers_model

from tokenspeed.layers.loader import load_weights, open_source
from tokenspeed.models import architecture
from tokenspeed.recipes.checkpoint_size import read_checkpoint
from tokenspeed.recipes.resolved import ModelSource


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "deepseek_v4", "qwen3"])
def test_small_numbers_that_become_float32(family: str, tmp_path: Path) -> None:
    """Of a checkpoint in bfloat16: norms, convolutions, what mixes residual streams, biases of positions."""
    model = compressed_model("all-kinds") if family == "deepseek_v4" else transformers_model(family)
    source = ModelSource(kind="folder", path=str(save(model.to(torch.bfloat16), tmp_path)))
    config, size = read_checkpoint(source)
    weights = load_weights(
        open_source(source, config),
        architecture(config.architecture).weights(config, rank=0, world=1),
        q_and_k_permuted=False,
        ignored=config.ignored_weights,
        report=lambda done, total, name: None,
    )
    assert size == weights.nbytes
