"""Experts that lie in one tensor: turned, gate before up, shared by ranks; and rotary pairs that lie side by side."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save, transformers_model

from tokenspeed.layers.loader import load_weights, open_source
from tokenspeed.layers.shard import Shard
from tokenspeed.layers.weights import LoadedWeights, WeightSpec, paired_rotary_rows
from tokenspeed.models import architecture
from tokenspeed.recipes.checkpoint_size import read_checkpoint
from tokenspeed.recipes.model_config import CheckpointError, read_model_config
from tokenspeed.recipes.resolved import ModelSource

EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, torch.nn.Module]:
    model = transformers_model("gpt_oss").to(request.param)
    return save(model, tmp_path_factory.mktemp("gpt_oss")), model


def load(folder: Path, rank: int = 0, world: int = 1, *, by_expert: bool = False) -> LoadedWeights:
    source = ModelSource(kind="folder", path=str(folder))
    config = read_model_config(source)
    config = config.by_expert() if by_expert else config
    specs = architecture(config.architecture).weights(config, rank=rank, world=world)
    return load_weights(
        open_source(source, config),
        specs,
        q_and_k_permuted=False,
        ignored=config.ignored_weights,
        report=lambda done, total, name: None,
    )


def test_experts_are_turned_and_gate_comes_before_up(checkpoint: tuple[Path, torch.nn.Module]) -> None:
    folder, model = checkpoint
    theirs, ours = model.state_dict(), load(folder)
    for expert in range(6):
        mixed, bias = theirs[f"{EXPERTS}.gate_up_proj"][expert].T, theirs[f"{EXPERTS}.gate_up_proj_bias"][expert]
        held = ours.matrices[f"{EXPERTS}.gate_up_proj"]
        assert held.format == str(mixed.dtype).removeprefix("torch.")
        rows = held.rows(expert * 192, (expert + 1) * 192).plane
        assert torch.equal(rows, torch.cat([mixed[::2], mixed[1::2]]))
        found = ours.vectors[f"{EXPERTS}.gate_up_proj_bias"][expert * 192 : (expert + 1) * 192]
        assert torch.equal(found, torch.cat([bias[::2], bias[1::2]]).float())
        down = ours.matrices[f"{EXPERTS}.down_proj"].rows(expert * 64, (expert + 1) * 64).plane
        assert torch.equal(down, theirs[f"{EXPERTS}.down_proj"][expert].T)


def test_ranks_share_whole_experts(checkpoint: tuple[Path, torch.nn.Module]) -> None:
    folder, _ = checkpoint
    whole, ranks = load(folder), [load(folder, rank, 2, by_expert=True) for rank in range(2)]
    for part in ("gate_up_proj", "down_proj"):
        name = f"{EXPERTS}.{part}"
        halves = [rank.matrices[name].plane for rank in ranks]
        assert torch.equal(torch.cat(halves), whole.matrices[name].plane)
        biases = [rank.vectors[f"{name}_bias"] for rank in ranks]
        assert torch.equal(torch.cat(biases), whole.vectors[f"{name}_bias"])
    with pytest.raises(CheckpointError, match=r"6 experts of .*gate_up_proj cannot be divided among 4 ranks"):
        load(folder, 0, 4, by_expert=True)


def test_ranks_share_the_columns_of_every_expert(checkpoint: tuple[Path, torch.nn.Module]) -> None:
    folder, _ = checkpoint
    whole, ranks = load(folder), [load(folder, rank, 4) for rank in range(4)]
    gate_up, down = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"
    # [ranks, experts, gate and up, a rank's columns, ...] beside [experts, gate and up, ranks, its columns, ...]
    parts = torch.stack([rank.matrices[gate_up].plane.view(6, 2, 24, 64) for rank in ranks], dim=2)
    assert torch.equal(parts.view(6 * 192, 64), whole.matrices[gate_up].plane)
    biases = torch.stack([rank.vectors[f"{gate_up}_bias"].view(6, 2, 24) for rank in ranks], dim=2)
    assert torch.equal(biases.view(-1), whole.vectors[f"{gate_up}_bias"])
    assert torch.equal(torch.cat([rank.matrices[down].plane for rank in ranks], dim=1), whole.matrices[down].plane)
    assert all(torch.equal(rank.vectors[f"{down}_bias"], whole.vectors[f"{down}_bias"]) for rank in ranks)


def test_what_is_loaded_was_planned(checkpoint: tuple[Path, torch.nn.Module]) -> None:
    folder, _ = checkpoint
    held = load(folder)
    assert read_checkpoint(ModelSource(kind="folder", path=str(folder)))[1] == held.nbytes


def test_layers_that_draft_tokens_are_neither_loaded_nor_planned(tmp_path: Path) -> None:
    experts = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    folder = save(transformers_model("glm4_moe", **experts), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    drafts = {f"model.layers.2.{name}": torch.ones(5, 7) for name in ("eh_proj.weight", "shared_head.head.weight")}
    save_file({**tensors, **drafts}, folder / "model.safetensors", metadata={"format": "pt"})
    source = ModelSource(kind="folder", path=str(folder))
    _, size = read_checkpoint(source)
    held = load(folder)
    assert size == held.nbytes
    assert not any(name.startswith("model.layers.2.") for name in (*held.matrices, *held.vectors))


def test_a_transpose_that_is_none_is_refused() -> None:
    shard = Shard(kind="rows", rank=0, world=1)
    with pytest.raises(ValueError, match=r"stored as \(2, 3, 4\) it is no transpose of \(6, 4\)"):
        WeightSpec(name="w", shape=(6, 4), stored=(2, 3, 4), shard=shard, transposed=True)


def test_pairs_that_lie_side_by_side_at_either_end_of_each_head() -> None:
    order = paired_rotary_rows(6, 4)
    assert order(12).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
    behind = paired_rotary_rows(6, 4, start=2)
    assert behind(12).tolist() == [0, 1, 2, 4, 3, 5, 6, 7, 8, 10, 9, 11]
