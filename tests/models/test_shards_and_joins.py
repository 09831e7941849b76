"""Shards of ranks put together give the whole weight; weights join where that costs nothing, or little."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import save, transformers_model

from tokenspeed.layers.loader import load_weights, open_source
from tokenspeed.layers.shard import Shard
from tokenspeed.layers.weights import JOIN_COPY_LIMIT, LoadedWeights, joined, unpermuted_rows
from tokenspeed.models import architecture
from tokenspeed.recipes.model_config import read_model_config
from tokenspeed.recipes.resolved import ModelSource
from tokenspeed_kernel.quantized import QuantizedTensor


def test_ranges() -> None:
    assert Shard(kind="replicated", rank=1, world=2).row_range(6) == (0, 6)
    assert Shard(kind="rows", rank=1, world=2).row_range(6) == (3, 6)
    assert Shard(kind="rows", rank=1, world=2).column_range(6) == (0, 6)
    assert Shard(kind="columns", rank=2, world=3).column_range(6) == (4, 6)


@pytest.mark.parametrize(
    ("kind", "rank", "world", "words"),
    [("rows", 2, 2, "rank 2 of 2"), ("rows", 0, 0, "rank 0 of 0"), ("diagonal", 0, 1, "'diagonal' is unknown")],
)
def test_impossible_shards_are_refused(kind: str, rank: int, world: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Shard(kind=kind, rank=rank, world=world)  # type: ignore[arg-type]


def test_an_uneven_division_is_refused() -> None:
    with pytest.raises(ValueError, match="7 rows cannot be divided among 2 ranks"):
        Shard(kind="rows", rank=0, world=2).row_range(7)


def load(folder: Path, rank: int, world: int) -> LoadedWeights:
    source = ModelSource(kind="folder", path=str(folder))
    config = read_model_config(source)
    specs = architecture(config.architecture).weights(config, rank=rank, world=world)
    return load_weights(
        open_source(source, config), specs, q_and_k_permuted=False, ignored=(), report=lambda done, total, name: None
    )


def test_the_shards_of_two_ranks_make_the_whole(tmp_path: Path) -> None:
    model = transformers_model("llama", attention_bias=True)
    folder = save(model, tmp_path)
    ranks = [load(folder, rank, 2) for rank in range(2)]
    whole = load(folder, 0, 1)
    for name, weight in whole.matrices.items():
        dimension = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        parts = [rank.matrices[name].dequantize() for rank in ranks]
        assert torch.equal(torch.cat(parts, dim=dimension), weight.dequantize()), name
        assert parts[0].shape[dimension] * 2 == weight.shape[dimension]
    for name, vector in whole.vectors.items():
        parts = [rank.vectors[name] for rank in ranks]
        divided = name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias"))
        assert torch.equal(torch.cat(parts) if divided else parts[1], vector), name


def piece(rows: int, columns: int, start: float = 0.0) -> QuantizedTensor:
    return QuantizedTensor.from_dense(torch.arange(start, start + rows * columns).view(rows, columns), "test")


def test_neighbours_in_memory_join_as_a_view() -> None:
    whole = piece(5, 3)
    result = joined([whole.rows(0, 2), whole.rows(2, 5)])
    assert result is not None
    assert torch.equal(result.dequantize(), whole.dequantize())
    assert result.planes["data"].data_ptr() == whole.planes["data"].data_ptr()


def test_small_strangers_join_by_a_copy_and_large_ones_do_not() -> None:
    first, second = piece(2, 3), piece(1, 3, start=100.0)
    result = joined([first, second])
    assert result is not None
    assert torch.equal(result.dequantize(), torch.cat([first.dequantize(), second.dequantize()]))
    rows = JOIN_COPY_LIMIT // 4 // 1024
    large = [QuantizedTensor.from_dense(torch.zeros(rows, 1024), "large") for _ in range(2)]
    assert joined(large) is None


def test_reversed_neighbours_and_other_formats_are_not_taken_for_neighbours() -> None:
    whole = piece(4, 3)
    swapped = joined([whole.rows(2, 4), whole.rows(0, 2)])
    assert swapped is not None
    assert torch.equal(swapped.dequantize(), whole.dequantize()[[2, 3, 0, 1]])
    half = QuantizedTensor.from_dense(torch.zeros(1, 3, dtype=torch.float16), "half")
    assert joined([whole, half]) is None


def test_gate_and_up_of_a_saved_model_are_read_in_place(tmp_path: Path) -> None:
    save(transformers_model("llama"), tmp_path)
    weights = load(tmp_path, 0, 1).matrices
    parts = [weights[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    result = joined(parts)
    assert result is not None
    assert result.planes["data"].data_ptr() == parts[0].planes["data"].data_ptr()


def test_unpermuted_rows_undo_the_interleaving() -> None:
    heads, head_dim = 3, 8
    rows = torch.arange(heads * head_dim)
    stored = rows.view(heads, 2, head_dim // 2).transpose(1, 2).reshape(-1)  # as converters to GGUF store them
    assert torch.equal(stored[unpermuted_rows(heads * head_dim, heads)], rows)


def test_a_checkpoint_in_several_files(tmp_path: Path) -> None:
    model = transformers_model("qwen3")
    whole, parts = save(model, tmp_path / "whole"), tmp_path / "parts"
    model.save_pretrained(parts, max_shard_size="40KB")  # type: ignore[operator]
    assert len(list(parts.glob("*.safetensors"))) > 1
    for name, weight in load(whole, 0, 1).matrices.items():
        assert torch.equal(load(parts, 0, 1).matrices[name].dequantize(), weight.dequantize())


def test_bfloat16_is_read_in_place(tmp_path: Path) -> None:
    folder = save(transformers_model("llama").to(torch.bfloat16), tmp_path)
    weight = load(folder, 0, 1).matrices["model.embed_tokens.weight"]
    assert weight.format == "bfloat16"
    assert weight.planes["data"].untyped_storage().nbytes() == (folder / "model.safetensors").stat().st_size


def test_an_unaligned_tensor_is_copied(tmp_path: Path) -> None:
    model = transformers_model("llama")
    folder = save(model, tmp_path)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    assert torch.equal(load(folder, 0, 1).matrices["lm_head.weight"].dequantize(), model.lm_head.weight.data)
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")  # a file beside it that is not part of the model
    assert "x" not in load(folder, 0, 1).vectors
