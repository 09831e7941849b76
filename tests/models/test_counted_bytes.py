"""What the plan counts of a checkpoint is what its weights take once they are loaded."""

from pathlib import Path

import gguf
import numpy
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


@pytest.mark.parametrize("tied", [True, False])
def test_blocks_of_a_gpu_are_planes(tied: bool, tmp_path: Path) -> None:
    """256 rows of 256: of Q2_K, whose elements take four bits there, and of an embedding, which is looked up in its
    blocks and multiplied by in planes."""
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    for key, value in (("context_length", 64), ("embedding_length", 256), ("block_count", 1), ("head_count", 4)):
        getattr(writer, f"add_{key}")(value)
    writer.add_feed_forward_length(256)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([str(number) for number in range(256)])
    kinds = {"token_embd.weight": ("Q4_K", 144), "blk.0.attn_q.weight": ("Q2_K", 84)}
    if not tied:
        kinds["output.weight"] = ("Q6_K", 210)
    for name, (kind, size) in kinds.items():
        writer.add_tensor(name, numpy.zeros((256, size), numpy.uint8), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = ModelSource(kind="gguf", path=str(tmp_path / "small.gguf"))
    config, size = read_checkpoint(source)
    assert config.tie_word_embeddings is tied
    assert size == 256 * (144 + 84 + (0 if tied else 210))
    assert read_checkpoint(source, planes=True)[1] == 256 * (144 + 164 + (148 if tied else 210))
