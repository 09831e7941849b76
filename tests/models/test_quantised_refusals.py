"""Quantised checkpoints whose parts do not fit, and methods that are not read: file, tensor, and what to do."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantised_checkpoints import FORMATS, Tensors, compressed, edit_config, quantise_checkpoint
from safetensors.torch import load_file, save_file
from tiny_models import build, resolved, save, transformers_model

from tokenspeed.recipes.checkpoint_size import read_checkpoint
from tokenspeed.recipes.model_config import CheckpointError
from tokenspeed.recipes.resolved import ModelSource

UP = "model.layers.0.mlp.up_proj."


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a tiny llama."""
    folder = save(transformers_model("llama"), tmp_path_factory.mktemp("llama"))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refusal(tiny: dict[str, bytes], folder: Path, name: str, change: Callable[[Tensors], object]) -> str:
    """What is said of a checkpoint in the format ``name`` once ``change`` was made to its tensors."""
    for file, data in tiny.items():
        (folder / file).write_bytes(data)
    quantise_checkpoint(folder, FORMATS[name])
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({place: tensor.contiguous() for place, tensor in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(ModelSource(kind="folder", path=str(folder)))
    return str(caught.value)


def without(part: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(UP + part)


def instead(part: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({UP + part: tensor})


CASES: dict[str, tuple[str, Callable[[Tensors], object], str]] = {
    "no scale": (
        "int4, groups of 32",
        without("weight_scale"),
        r"weight_packed has no model\.layers\.0\.mlp\.up_proj\.weight_scale beside it; .*download it again",
    ),
    "no block scale": ("fp8 of DeepSeek", without("weight_scale_inv"), "weight has no .*weight_scale_inv beside it"),
    "no zero points": ("int4, zero points", without("weight_zero_point"), "has no .*weight_zero_point beside it"),
    "no elements": ("int4, groups of 32", without("weight_packed"), r"stands alone; .*up_proj\.weight is missing"),
    "another group": (
        "int4, groups of 32",
        instead("weight_scale", torch.ones(96, 1)),
        r"weight_scale has shape \[96, 1\]; with the strategy group \(group_size 32\) .* 96 x 64 has \[96, 2\]: take",
    ),
    "another scale": (
        "int8 W8A8",
        instead("weight_scale", torch.ones(64, 1)),
        r"weight_scale has shape \[64, 1\]; with the strategy channel .* 96 x 64 has \[96, 1\]",
    ),
    "another block": (
        "fp8, blocks",
        instead("weight_scale", torch.ones(1, 1)),
        r"with the strategy block \(\[40, 48\]\) .* 96 x 64 has \[3, 2\]",
    ),
    "more than one scale": ("fp8, one scale", instead("weight_scale", torch.ones(2)), r"strategy tensor .*has \[1\]"),
    "scales of integers": (
        "int8 W8A8",
        instead("weight_scale", torch.ones(96, 1, dtype=torch.int32)),
        "weight_scale is stored as I32; scales may be F32, BF16, F16",
    ),
    "zero points of another shape": (
        "int4, zero points",
        instead("weight_zero_point", torch.zeros(96, 2, dtype=torch.int32)),
        r"weight_zero_point is I32 \[96, 2\]; .* should be I32 \[12, 2\] or I8 \[96, 2\]",
    ),
    "words that do not fit": (
        "int4, groups of 32",
        instead("weight_shape", torch.tensor([96, 96])),
        r"weight_packed of shape \[96, 8\] does not fit .*weight_shape, which says \[96, 96\] \(8 columns in a word\)",
    ),
    "no words": (
        "AWQ, groups of 32",
        instead("qweight", torch.zeros(64, 12)),
        r"qweight is stored as F32 \[64, 12\], .*quantization_config says int4; take the config\.json",
    ),
    "no zero points of words": ("GPTQ, zero points", without("qzeros"), r"qweight has no .*up_proj\.qzeros beside it"),
    "no scales of words": ("AWQ, groups of 32", without("scales"), r"qweight has no .*up_proj\.scales beside it"),
    "no order": ("GPTQ, scattered columns", without("g_idx"), r"qweight has no .*up_proj\.g_idx beside it"),
    "an order of other columns": (
        "GPTQ, zero points",
        instead("g_idx", torch.zeros(96, dtype=torch.int32)),
        r"g_idx is I32 \[96\]; it has the group of each column and should be I32 \[64\]",
    ),
    "another group of words": (
        "GPTQ, groups of 32",
        instead("scales", torch.ones(1, 96, dtype=torch.float16)),
        r"scales has shape \[1, 96\]; with the strategy group \(group_size 32\) .* 96 x 64 has \[2, 96\]: take",
    ),
    "zero points of other words": (
        "AWQ, groups of 32",
        instead("qzeros", torch.zeros(2, 8, dtype=torch.int32)),
        r"qzeros is I32 \[2, 8\]; .* it should be I32 \[2, 12\]: the file is damaged",
    ),
    "no whole groups of floats": (
        "MXFP4",
        instead("weight_packed", torch.zeros(96, 24, dtype=torch.uint8)),
        r"weight_packed has 48 columns; mxfp4 has groups of 32: the file is damaged",
    ),
    "scales of another kind": (
        "NVFP4",
        instead("weight_scale", torch.ones(96, 4)),
        r"weight_scale is stored as F32; scales may be F8_E4M3: use",
    ),
    "no scale of the whole": (
        "NVFP4",
        without("weight_global_scale"),
        r"weight_packed has no .*up_proj\.weight_global_scale beside it",
    ),
    "several scales of the whole": (
        "NVFP4 of modelopt",
        instead("weight_scale_2", torch.ones(2)),
        r"weight_scale_2 is F32 \[2\]; it has the scale of the whole matrix and should be F32 \[1\]",
    ),
    "bytes where floats should be": (
        "fp8, rows",
        instead("weight", torch.zeros(96, 64, dtype=torch.int8)),
        r"weight is stored as I8 \[96, 64\], .*quantization_config says fp8; take the config\.json",
    ),
    "scattered columns": (
        "int4, groups of 32",
        instead("weight_g_idx", torch.zeros(64, dtype=torch.int32)),
        "weight_g_idx scatters the columns of a group; use a checkpoint with actorder",
    ),
    "both versions": (
        "int4, groups of 32",
        instead("weight", torch.zeros(96, 64)),
        r"stands beside model\.layers\.0\.mlp\.up_proj\.weight, which is stored as F32 and needs none",
    ),
    "a quantised norm": (
        "int8 W8A8",
        lambda tensors: tensors.update({"model.norm.bias": torch.zeros(64, dtype=torch.int8)}),
        r"model\.norm\.bias is stored as I8; supported are F32, BF16, F16",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parts_that_do_not_fit(case: str, tiny: dict[str, bytes], tmp_path: Path) -> None:
    name, change, words = CASES[case]
    message = refusal(tiny, tmp_path, name, change)
    assert re.search(words, message), message
    assert message.startswith(str(tmp_path / "model.safetensors"))


def test_a_weight_that_no_group_names(tiny: dict[str, bytes], tmp_path: Path) -> None:
    config = compressed("pack-quantized", 4, "group", group_size=32)
    config["config_groups"]["group_0"]["targets"] = ["re:.*attn.*", "model.layers.0.mlp.gate_proj"]  # type: ignore[index]

    def change(_tensors: Tensors) -> None:
        edit_config(tmp_path, {"quantization_config": config})

    message = refusal(tiny, tmp_path, "int4, groups of 32", change)
    assert re.search(r"no group of .*config\.json: quantization_config names model\.layers\.0\.mlp\.down_proj", message)


def test_quantised_weights_without_a_word_of_it(tiny: dict[str, bytes], tmp_path: Path) -> None:
    def change(_tensors: Tensors) -> None:
        edit_config(tmp_path, {"quantization_config": None})

    message = refusal(tiny, tmp_path, "fp8, rows", change)
    assert (
        "weight is stored as F8_E4M3; supported are F32, BF16, F16, and quantised weights where config.json" in message
    )


def changed(config: dict[str, object], **weights: object) -> dict[str, object]:
    config["config_groups"]["group_0"]["weights"].update(weights)  # type: ignore[index]
    return config


INT4 = ("pack-quantized", 4, "group")
METHODS: list[tuple[dict[str, object], str]] = [
    ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv', .* use a checkpoint of version 'gemm'"),
    ({"quant_method": "awq", "bits": 3}, "bits is 3; AWQ checkpoints of 4 bits are read"),
    ({"quant_method": "awq", "zero_point": False}, "zero_point is False; AWQ checkpoints with zero points are read"),
    ({"quant_method": "awq", "group_size": 0}, "group_size is 0; it should be a number of columns, or -1"),
    ({"quant_method": "gptq", "bits": 3}, "bits is 3; GPTQ checkpoints of 4 and 8 bits are read"),
    ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; supported are 'gptq'"),
    ({"quant_method": "gptq", "dynamic": {"+:.*down.*": {"bits": 8}}}, r"dynamic gives the modules '\+:.*down.*'"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not supported; supported are"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size is 32; NVFP4 has groups of 16"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers should be an object of layers"),
    ({"quant_method": "bitsandbytes"}, "quantised by bitsandbytes .*; use the unquantised checkpoint or a GGUF"),
    ({"quant_method": "quark"}, "quantised by quark .*; use the unquantised checkpoint or a GGUF"),
    ({"bits": 4}, "quantised by an unnamed method"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"weight_block_size should be two sizes above 0"),
    ({"quant_method": "compressed-tensors"}, "config_groups should be an object of groups, it is None"),
    (compressed("nvfp4-pack-quantized", 4, "group", group_size=32), "group_size 32; nvfp4 weights have 4 bits"),
    (compressed("marlin-24", 4, "group"), "'marlin-24' are not supported; use a .* without sparsity"),
    (compressed(*INT4), "group_size is None; it should be a number of columns"),
    (compressed("pack-quantized", 4, "tensor_group"), "strategy 'tensor_group' of int4 weights is not supported; supp"),
    (compressed("pack-quantized", 3, "channel"), "int weights of 3 bits in the format 'pack-quantized' are not supp"),
    (compressed(*INT4, group_size=32, actorder="group"), "actorder 'group' scatters the columns"),
    (compressed("int-quantized", 8, "channel", symmetric=False), "int8 weights with zero points .* symmetric"),
    (compressed("float-quantized", 8, "block", type="float"), "block_structure should be two sizes above 0"),
    ({**compressed(*INT4, group_size=32), "transform_config": {"config_groups": {"a": 1}}}, "transform_config is set"),
    ({**compressed(*INT4), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is set"),
    ({**compressed(*INT4), "config_groups": {"g": {"targets": "Linear"}}}, "groups.g should be an object with"),
    (
        {**compressed(*INT4), "config_groups": {"g": {"targets": ["re:("], "weights": {"num_bits": 4}}}},
        r"target 're:\(' is no regular expression",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "words"), METHODS)
def test_what_cannot_be_read_is_refused_by_name(
    config: dict[str, object], words: str, tiny: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes(tiny["config.json"])
    edit_config(tmp_path, {"quantization_config": config})
    with pytest.raises(CheckpointError, match=rf"config\.json: quantization_config.*{words}"):
        read_checkpoint(ModelSource(kind="folder", path=str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "GPTQ, groups of 32",
            instead("qzeros", torch.zeros(2, 12, dtype=torch.int32)),
            "zero points other than 8, but sym",
        ),
        (
            "GPTQ, zero points",
            instead("g_idx", torch.arange(64, dtype=torch.int32) % 2),
            "g_idx scatters the columns of a group, but desc_act .* is not true",
        ),
        (
            "GPTQ, scattered columns",
            instead("g_idx", torch.full((64,), 4, dtype=torch.int32)),
            "g_idx names groups beyond the 4",
        ),
        ("MXFP4", instead("weight_scale", torch.full((96, 2), 255, dtype=torch.uint8)), "a scale that is not a number"),
        ("NVFP4", instead("weight_global_scale", torch.zeros(1)), "a scale that is not finite"),
        ("AWQ, rows", instead("scales", torch.full((1, 96), torch.inf).half()), "has a scale of inf, which is beyond"),
    ],
)
def test_what_only_the_elements_tell(
    name: str, change: Callable[[Tensors], object], words: str, tiny: dict[str, bytes], tmp_path: Path
) -> None:
    for file, data in tiny.items():
        (tmp_path / file).write_bytes(data)
    quantise_checkpoint(tmp_path, FORMATS[name])
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=rf"model\.safetensors: model\.layers\.0\.mlp\.up_proj\.weight: .*{words}"
    ):
        build(resolved(tmp_path))


@pytest.mark.parametrize(
    ("name", "file", "content", "kind"),
    [
        ("GPTQ, groups of 32", "quantize_config.json", {"bits": 4, "group_size": 32, "sym": True}, "gptq"),
        ("AWQ, groups of 32", "quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}, "awq"),
        (
            "NVFP4 of modelopt",
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}},
            "modelopt",
        ),
    ],
)
def test_a_file_beside_the_configuration_may_say_it(
    name: str, file: str, content: dict[str, object], kind: str, tiny: dict[str, bytes], tmp_path: Path
) -> None:
    for place, data in tiny.items():
        (tmp_path / place).write_bytes(data)
    quantise_checkpoint(tmp_path, FORMATS[name])
    edit_config(tmp_path, {"quantization_config": None})
    (tmp_path / file).write_text(json.dumps(content))
    config, size = read_checkpoint(ModelSource(kind="folder", path=str(tmp_path)))
    assert config.quantization is not None
    assert config.quantization.method == kind
    edit_config(tmp_path, {"quantization_config": FORMATS[name].config})
    assert read_checkpoint(ModelSource(kind="folder", path=str(tmp_path)))[1] == size
    edit_config(tmp_path, {"quantization_config": None})
    (tmp_path / file).write_text("{")
    with pytest.raises(CheckpointError, match=rf"{file}: cannot be read as JSON"):
        read_checkpoint(ModelSource(kind="folder", path=str(tmp_path)))
