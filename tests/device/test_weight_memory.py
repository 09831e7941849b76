"""Weights that are copied to where they stay are those that are read in place, neighbours touch, and nothing is held
twice. Shown on the host's memory, which takes the same way where it is asked to."""

from pathlib import Path

import pytest
import torch
from quantised_checkpoints import FORMATS, quantise_checkpoint
from tiny_models import save, transformers_model

from tokenspeed.device import weight_memory
from tokenspeed.device.placement import HOST
from tokenspeed.device.weight_memory import ALIGNMENT, DeviceWeights
from tokenspeed.layers.loader import WHERE_READ, WeightMemory, load_weights, open_source
from tokenspeed.layers.loader.safetensors_source import SafetensorsSource
from tokenspeed.layers.weights import LoadedWeights, joined
from tokenspeed.models import architecture
from tokenspeed.recipes.model_config import read_model_config
from tokenspeed.recipes.resolved import ModelSource


def loaded(folder: Path, memory: WeightMemory) -> tuple[LoadedWeights, SafetensorsSource]:
    where = ModelSource(kind="folder", path=str(folder))
    config = read_model_config(where)
    specs, source = architecture(config.architecture).weights(config, rank=0, world=1), open_source(where, config)
    assert isinstance(source, SafetensorsSource)
    weights = load_weights(
        source, specs, memory=memory, q_and_k_permuted=False, ignored=(), report=lambda done, total, name: None
    )
    return weights, source


@pytest.mark.parametrize(("family", "quantised"), [("llama", ""), ("llama", "int4, groups of 32"), ("qwen3_moe", "")])
def test_copied_weights_are_those_of_the_file(
    family: str, quantised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_memory, "PIECE_BYTES", 1000)
    folder = save(transformers_model(family), tmp_path)
    if quantised:
        quantise_checkpoint(folder, FORMATS[quantised])
    there, _ = loaded(folder, WHERE_READ)
    copied, source = loaded(folder, DeviceWeights(HOST))
    assert there.matrices.keys() == copied.matrices.keys() and there.nbytes == copied.nbytes
    for name, weight in there.matrices.items():
        twin = copied.matrices[name]
        assert (twin.format, twin.shape, twin.source) == (weight.format, weight.shape, weight.source)
        assert torch.equal(twin.plane, weight.plane), name
        assert twin.plane.data_ptr() != weight.plane.data_ptr() and twin.plane.data_ptr() % ALIGNMENT == 0
    assert source._converted._used == 0, "what was converted for one layer is written over for the next"
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    together = joined([copied.matrices[name] for name in names])
    assert together is not None and together.plane.data_ptr() == copied.matrices[names[0]].plane.data_ptr()


def test_a_layer_is_read_when_the_one_before_is_where_it_stays(tmp_path: Path) -> None:
    layers: list[list[int]] = []

    class Counted(DeviceWeights):
        def keep(self, runs):  # type: ignore[no-untyped-def]
            layers.append([len(run) for run in runs])
            return super().keep(runs)

    loaded(save(transformers_model("llama"), tmp_path), Counted(HOST))
    # Embedding, two layers, the last norm, which is no matrix, and the head; in a layer what has the same inputs.
    assert layers == [[1], [6, 1], [6, 1], [], [1]]
