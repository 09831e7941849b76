"""DeepSeek-V4 as its makers publish it: every tensor is known, the logits are those of the values that it stands for,
and experts stay in four bits."""

import math
import re
from pathlib import Path

import pytest
import torch
from makers_checkpoint import (
    FLASH,
    QUANTIZATION,
    SIZES,
    WHOLE_BLOCKS,
    Published,
    flash_tensors,
    publish,
    write_headers,
)
from model_checks import check_prompt
from quantised_checkpoints import edit_config
from safetensors.torch import save_file
from sparse_models import compressed_model
from tiny_models import build, prompt_of, resolved

from tokenspeed.layers.loader import load_weights, open_source
from tokenspeed.layers.loader.safetensors_source import SafetensorsSource
from tokenspeed.layers.weights import LoadedWeights, Ranks
from tokenspeed.models import architecture
from tokenspeed.recipes.checkpoint_size import read_checkpoint
from tokenspeed.recipes.features import CPU_GROWTH
from tokenspeed.recipes.model_config import CheckpointError, read_model_config
from tokenspeed.recipes.resolved import ModelSource
from tokenspeed.recipes.stored_weights import stored_weights
from tokenspeed.recipes.weight_scheme import Quantization, WeightScheme

EXPERT = "layers.1.ffn.experts.3.w2"
PROJECTION = "layers.1.attn.wo_b"


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return compressed_model("all-kinds", **WHOLE_BLOCKS)


@pytest.fixture
def published(model: torch.nn.Module, tmp_path: Path) -> Published:
    return publish(model, tmp_path)


def source_of(folder: Path) -> ModelSource:
    return ModelSource(kind="folder", path=str(folder))


def load(folder: Path, rank: int = 0, world: int = 1, *, by_expert: bool = False) -> LoadedWeights:
    config = read_model_config(source_of(folder))
    config = config.by_expert() if by_expert else config
    return load_weights(
        open_source(source_of(folder), config),
        architecture(config.architecture).weights(config, rank=rank, world=world),
        q_and_k_permuted=False,
        ignored=config.ignored_weights,
        report=lambda done, total, name: None,
    )


def test_every_published_tensor_of_flash_is_known(tmp_path: Path) -> None:
    """Five layers and seven experts of the real dimensions: what the model asks for is what lies there, and no more. It
    grows less than the plan of a checkpoint that is not here yet assumes."""
    layers, experts = 5, 7
    write_headers(tmp_path / "model.safetensors", flash_tensors(layers, experts))
    (tmp_path / "config.json").write_text("{}")
    edit_config(tmp_path, {**FLASH, "num_hidden_layers": layers, "n_routed_experts": experts})
    config, size = read_checkpoint(source_of(tmp_path))
    wanted = {
        tensor.name: tensor.stored or tensor.shape
        for spec in architecture("deepseek_v4").weights(config, rank=0, world=1)
        for tensor in spec.tensors
    }
    stored = stored_weights(tmp_path, config.quantization, config.ignored_weights)
    assert {name: weight.shape for name, weight in stored.items()} == wanted
    assert {weight.scheme.kind for name, weight in stored.items() if weight.scheme and ".experts." in name} == {"mxfp4"}
    on_disk = sum(part.tensor.nbytes for weight in stored.values() for part in weight.parts)
    assert 1.0 < size / on_disk < CPU_GROWTH["fp4"]


def test_the_published_sizes_of_flash() -> None:
    """The list that ``flash_tensors`` follows: 69187 tensors of 148.65 GiB."""
    tensors = list(flash_tensors(43, 256))
    total = sum(math.prod(shape) * SIZES[kind] for _, kind, shape in tensors)
    assert len(tensors) == 69187
    assert round(total / 2**30, 2) == 148.65


def test_logits_are_those_of_the_values(model: torch.nn.Module, published: Published, tmp_path: Path) -> None:
    device = build(resolved(published.folder, kv_dtype="float32", activations="float32"))
    try:
        check_prompt(published.reference(model, tmp_path / "values"), device, prompt_of(40), new_tokens=8, chunk=16)
        assert read_checkpoint(source_of(published.folder))[1] == device.specs.weight_bytes
    finally:
        device.handle.shutdown()


def test_the_base_model_has_experts_in_fp8(model: torch.nn.Module, tmp_path: Path) -> None:
    published = publish(model, tmp_path, "fp8")
    device = build(resolved(published.folder, kv_dtype="float32", activations="float32"))
    try:
        check_prompt(published.reference(model, tmp_path / "values"), device, prompt_of(20), new_tokens=2)
    finally:
        device.handle.shutdown()


def test_experts_stay_in_four_bits_and_ranks_share_them(published: Published) -> None:
    """Each expert's rows are those of its own bytes; projections keep their eight bits."""
    whole, ranks = load(published.folder), [load(published.folder, rank, 2, by_expert=True) for rank in range(2)]
    columns = {"wo_b": 1, "w2": 1}
    for name, weight in whole.matrices.items():
        part = name.removesuffix(".weight").rpartition(".")[2]
        if ".experts." in name:
            assert (weight.format, weight.nbytes) == ("gguf_mxfp4", weight.shape[0] * weight.shape[1] * 17 // 32), name
        elif part in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3"):
            quantised = ".compressor." not in name
            assert weight.format == ("fp8_blocks" if quantised else "bfloat16"), name
        shared = [rank.matrices[name].dequantize() for rank in ranks]
        if shared[0].shape != weight.shape:
            assert torch.equal(torch.cat(shared, dim=columns.get(part, 0)), weight.dequantize()), name
    values = published.values
    each = [values[f"model.layers.1.ffn.experts.{expert}.w2.weight"] for expert in range(8)]
    assert torch.equal(whole.matrices["model.layers.1.ffn.experts.down"].dequantize(), torch.cat(each))
    assert torch.equal(ranks[1].matrices["model.layers.1.ffn.experts.down"].dequantize(), torch.cat(each[4:]))


def test_ranks_share_the_columns_of_experts_in_whole_blocks(published: Published) -> None:
    whole, ranks = load(published.folder), [load(published.folder, rank, 2) for rank in range(2)]
    place = "model.layers.1.ffn.experts"
    gate_up, down = whole.matrices[f"{place}.gate_up"], whole.matrices[f"{place}.down"]
    inner = gate_up.shape[0] // 16
    parts = [rank.matrices[f"{place}.gate_up"].dequantize().view(16, inner // 2, -1) for rank in ranks]
    assert torch.equal(torch.cat(parts, dim=1).view(gate_up.shape), gate_up.dequantize())
    columns = [rank.matrices[f"{place}.down"].dequantize() for rank in ranks]
    assert torch.equal(torch.cat(columns, dim=1), down.dequantize())


def test_the_low_half_of_a_byte_comes_first(tmp_path: Path) -> None:
    """By hand: bytes that are negative as int8 too, and a scale of 2^(125 - 127)."""
    elements = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE, *[0x0F] * 8]
    packed = torch.tensor(elements, dtype=torch.uint8).view(1, 16).view(torch.int8)
    scale = torch.tensor([[125]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    save_file({"layers.0.ffn.experts.0.w1.weight": packed, "layers.0.ffn.experts.0.w1.scale": scale},
              tmp_path / "model.safetensors")  # fmt: skip
    mxfp4 = WeightScheme(kind="mxfp4", strategy="group", group=32, scale="scale")
    quantization = Quantization(where="config.json", method="fp8", rules=(), of_bytes=mxfp4)
    name = "model.layers.0.ffn.experts.0.w1.weight"
    loaded = load_weights(
        SafetensorsSource(tmp_path, quantization),
        [Ranks(rank=0, world=1).whole(name, 1, 32)],
        q_and_k_permuted=False,
        ignored=(),
        report=lambda done, total, name: None,
    )
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = [*magnitudes, *(-value for value in magnitudes), *[-6.0, 0.0] * 8]
    assert loaded.matrices[name].dequantize().tolist() == [[value / 4 for value in expected]]


@pytest.mark.parametrize(("prefix", "scale"), [("model.", "scale"), ("", "weight_scale_inv")])
def test_names_that_are_known_too(prefix: str, scale: str, published: Published) -> None:
    """The makers' convert.py takes "model." away where it stands; transformers has another name for scales."""
    expected = load(published.folder)
    tensors = published.tensors()
    renamed = {f"{prefix}{re.sub('[.]scale$', f'.{scale}', name)}": value for name, value in tensors.items()}
    assert renamed.keys() != tensors.keys()
    published.change({**dict.fromkeys(tensors), **renamed})
    found = load(published.folder)
    assert found.matrices.keys() == expected.matrices.keys()
    for name, weight in found.matrices.items():
        assert torch.equal(weight.dequantize(), expected.matrices[name].dequantize()), name


@pytest.mark.parametrize(
    "said",
    [
        {"expert_dtype": "fp4"},
        {"expert_dtype": None},
        {"expert_dtype": None, "quantization_config": {**QUANTIZATION, "expert_dtype": "fp4"}},
    ],
)
def test_where_it_is_said_that_experts_have_four_bits(said: dict[str, object], published: Published) -> None:
    """Beside quantization_config, in it as transformers puts it, or nowhere, as in the first copies."""
    edit_config(published.folder, said)
    config = read_model_config(source_of(published.folder))
    weight = stored_weights(published.folder, config.quantization)[f"model.{EXPERT}.weight"]
    assert weight.scheme is not None
    assert weight.scheme.kind == "mxfp4"
    assert weight.shape == (128, 256)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"expert_dtype": "fp8"}, r"w\d\.weight is stored as I8 .*quantization_config says fp8; take the config\.json"),
        ({"expert_dtype": "int2"}, r"config\.json: expert_dtype is 'int2', supported is 'fp4' or 'fp8'"),
    ],
)
def test_what_does_not_belong_to_the_weights_is_refused(
    said: dict[str, object], message: str, published: Published
) -> None:
    edit_config(published.folder, said)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(source_of(published.folder))


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.full(shape, 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{EXPERT}.scale": None}, rf"{EXPERT}\.weight has no {EXPERT}\.scale beside it"),
        ({f"{PROJECTION}.scale": None}, rf"{PROJECTION}\.weight has no {PROJECTION}\.scale beside it"),
        ({f"{EXPERT}.weight": None}, rf"{EXPERT}\.scale stands alone; {EXPERT}\.weight is missing"),
        (
            {f"{EXPERT}.scale": bytes_of(128, 2)},
            rf"{EXPERT}\.scale has shape \[128, 2\]; with the strategy group \(group_size 32\) .* 128 x 256 has "
            r"\[128, 8\]",
        ),
        (
            {f"{PROJECTION}.scale": bytes_of(1, 1)},
            rf"{PROJECTION}\.scale has shape \[1, 1\]; with the strategy block \(\[128, 128\]\) .* 128 x 256 has "
            r"\[1, 2\]",
        ),
        ({f"{EXPERT}.scale": torch.ones(128, 8)}, rf"{EXPERT}\.scale is stored as F32; scales may be U8, F8_E8M0"),
        ({"norm.scale": bytes_of(1, 1)}, r"norm\.scale stands beside norm\.weight, which is stored as BF16"),
    ],
)
def test_scales_that_are_missing_or_do_not_fit(
    changes: dict[str, torch.Tensor | None], message: str, published: Published
) -> None:
    published.change(changes)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(source_of(published.folder))


def test_a_scale_that_is_no_number_is_refused(published: Published) -> None:
    for place, shape in ((EXPERT, (128, 8)), (PROJECTION, (1, 2))):
        kept = published.tensors()[f"{place}.scale"]
        scale = torch.full(shape, 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        published.change({f"{place}.scale": scale})
        with pytest.raises(CheckpointError, match=rf"{place}\.weight: has a scale that is not"):
            load(published.folder)
        published.change({f"{place}.scale": kept})


def test_layers_that_draft_tokens_are_left_out_whatever_they_are(published: Published) -> None:
    expected = read_checkpoint(source_of(published.folder))[1]
    drafting = [name for name in published.tensors() if name.startswith("mtp.")]
    assert any("experts" in name for name in drafting)
    published.change({"mtp.0.attn.wo_b.scale": None, "mtp.2.confidence_head.proj.weight": torch.ones(1, 8).int()})
    assert read_checkpoint(source_of(published.folder))[1] == expected
    assert not any("mtp" in name for name in load(published.folder).matrices)
    published.change({"layers.9.attn.wo_b.weight": torch.ones(2, 2)})
    with pytest.raises(CheckpointError, match=r"layers\.9\.attn\.wo_b\.weight is unknown to this architecture"):
        load(published.folder)


def test_one_weight_under_two_names_is_refused(published: Published) -> None:
    """Else one of them would be left out without a word."""
    published.change({"model.norm.weight": torch.ones(128)})
    with pytest.raises(CheckpointError, match=r"model\.safetensors: (model\.)?norm\.weight is the weight .* is too"):
        read_checkpoint(source_of(published.folder))
