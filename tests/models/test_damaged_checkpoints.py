"""Checkpoints that cannot be used are refused with a message that names the file, the place and the way out."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save, transformers_model

from tokenspeed.layers.loader import load_weights, open_source
from tokenspeed.models import architecture
from tokenspeed.recipes.model_config import CheckpointError, read_model_config
from tokenspeed.recipes.resolved import ModelSource


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(transformers_model("llama"), tmp_path)


def load(folder: Path) -> None:
    source = ModelSource(kind="folder", path=str(folder))
    config = read_model_config(source)
    specs = architecture(config.architecture).weights(config, rank=0, world=1)
    load_weights(
        open_source(source, config),
        specs,
        q_and_k_permuted=False,
        ignored=(r"lm_head\.weight",) if config.tie_word_embeddings else (),
        report=lambda done, total, name: None,
    )


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_sound_checkpoint_loads(folder: Path) -> None:
    load(folder)


def test_a_missing_weight(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is missing"):
        load(folder)


def test_a_missing_head(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing.*embeddings.*tie_word_embeddings to true"):
        load(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    load(folder)


def test_an_unknown_weight(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.sinks": torch.zeros(4)}))
    with pytest.raises(CheckpointError, match=r"self_attn\.sinks is unknown to this architecture"):
        load(folder)


def test_another_shape(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(65)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \(65,\).*\(64,\)"):
        load(folder)


def test_an_unsupported_dtype(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.float64)}))
    with pytest.raises(CheckpointError, match="is stored as F64; supported are F32, BF16, F16"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 4, 200, 0.5])
def test_a_file_cut_short(folder: Path, keep: float) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(keep if keep >= 1 or keep == 0 else len(data) * keep)])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*"):
        load(folder)


def test_a_header_of_nonsense(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b'["what"]' + b"\0" * 64)
    with pytest.raises(CheckpointError, match="damaged safetensors header"):
        load(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors file"):
        load(folder)


def test_a_missing_part(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors named by .* is missing"):
        load(folder)


def test_a_damaged_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="damaged index"):
        load(folder)


def test_the_same_weight_twice(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    for number in (1, 2):
        (folder / f"part-{number}.safetensors").write_bytes(data)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"is in .*part-1\.safetensors too"):
        load(folder)


def test_a_stored_head_that_repeats_a_tied_embedding_is_accepted(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    load(folder)


def sharded(folder: Path, parts: int = 3) -> dict[str, str]:
    """Cuts model.safetensors into parts with an index; returns where each tensor lies."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{number % parts}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return places


def test_a_sharded_checkpoint_loads(folder: Path) -> None:
    sharded(folder)
    load(folder)


def test_a_shard_cut_short(folder: Path) -> None:
    sharded(folder)
    path = folder / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors: model\..* of shape .* cut short or damaged"):
        load(folder)


def test_a_shard_of_another_checkpoint(folder: Path) -> None:
    places = sharded(folder)
    name = next(name for name, file in places.items() if file == "model-2.safetensors")
    tensors = load_file(folder / "model-2.safetensors")
    tensors.pop(name)
    save_file(tensors, folder / "model-2.safetensors")
    with pytest.raises(CheckpointError, match=rf"model-2\.safetensors: {name} should lie here, says .*index\.json"):
        load(folder)


def test_an_index_that_leaves_a_tensor_out(folder: Path) -> None:
    """What lies in a file counts, whether the index names it or not."""
    places = sharded(folder)
    del places["model.norm.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    load(folder)


@pytest.mark.parametrize("index", ['{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[]", "{"])
def test_an_index_of_nonsense(folder: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json: damaged index .*download it again"):
        load(folder)


@pytest.mark.parametrize("name", ["pytorch_model-00001-of-00002.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_never_read(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(CheckpointError, match=rf"holds {name} and no \*\.safetensors file; such files are pickles"):
        load(folder)
