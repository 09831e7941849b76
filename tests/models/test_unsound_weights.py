"""A weight that is no number is found when the warm-up's logits are none, and named."""

from pathlib import Path

import pytest
import torch
from quantised_checkpoints import FORMATS, quantise_checkpoint
from safetensors.torch import load_file, save_file
from tiny_models import build, resolved, save, transformers_model

from tokenspeed.device import unsound_weights
from tokenspeed.recipes.model_config import CheckpointError


def spoil(folder: Path, name: str, place: tuple[int, ...], value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name][place] = value
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "name", "place", "value", "words"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight", (5, 17), torch.nan, r"holds nan \(row 5, column 17\)"),
        ("llama", "model.layers.0.self_attn.o_proj.weight", (0, 3), torch.inf, r"holds inf \(row 0, column 3\)"),
        ("llama", "model.norm.weight", (9,), torch.nan, r"holds nan \(element 9\)"),
    ],
)
def test_the_tensor_is_named(
    family: str, name: str, place: tuple[int, ...], value: float, words: str, tmp_path: Path
) -> None:
    folder = save(transformers_model(family), tmp_path)
    spoil(folder, name, place, value)
    with pytest.raises(CheckpointError, match=rf"{name.replace('.', '[.]')} {words}; no answer .*: download it again"):
        build(resolved(folder))


def test_an_expert_is_named_by_its_own_tensor(tmp_path: Path) -> None:
    """The router has no choice: every token goes to every expert."""
    folder = save(transformers_model("qwen3_moe", num_experts=4, num_experts_per_tok=4), tmp_path)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    spoil(folder, name, (7, 1), torch.nan)
    with pytest.raises(CheckpointError, match=r"mlp\.experts\.2\.up_proj\.weight holds nan"):
        build(resolved(folder))


def test_a_scale_that_is_no_number_is_found_in_blocks(tmp_path: Path) -> None:
    folder = save(transformers_model("llama"), tmp_path)
    quantise_checkpoint(folder, FORMATS["NVFP4 of modelopt"])
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.0.mlp.up_proj.weight_scale"
    scales = tensors[name].view(torch.uint8)
    scales[3, 2] = 0x7F
    tensors[name] = scales.view(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.weight: has a scale that is not finite"):
        build(resolved(folder))


def test_a_sound_start_scans_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scan(*_arguments: object) -> None:
        raise AssertionError("a sound start scanned its weights")

    monkeypatch.setattr(unsound_weights, "_first", scan)
    build(resolved(save(transformers_model("llama"), tmp_path))).handle.shutdown()


def test_finite_weights_whose_sums_are_none_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save(transformers_model("llama"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"].fill_(3e38)
    save_file(tensors, folder / "model.safetensors")
    build(resolved(folder)).handle.shutdown()
    assert "logits are NaN, though every weight is finite" in caplog.text
