"""Quantised safetensors checkpoints: the values they stand for, exactly; the logits of those values; and the bytes that
the plan foretold."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_checks import check_prompt
from packed_checkpoints import awq, gptq, mxfp4
from quantised_checkpoints import FORMATS, floats, is_quantised, quantise_checkpoint
from safetensors.torch import load_file, save_file
from tiny_models import build, resolved, save, transformers_model

from tokenspeed.layers.loader import conversion, load_weights, open_source, stored_elements
from tokenspeed.layers.loader.source import MappedFile
from tokenspeed.layers.loader.stored_elements import StoredMatrix
from tokenspeed.layers.weights import LoadedWeights, joined
from tokenspeed.models import architecture
from tokenspeed.recipes.checkpoint_size import read_checkpoint
from tokenspeed.recipes.model_config import CheckpointError, read_model_config
from tokenspeed.recipes.quantization import read_quantization
from tokenspeed.recipes.resolved import ModelSource
from tokenspeed.recipes.weight_scheme import WeightScheme
from tokenspeed_kernel.quantized import QuantizedTensor


def load(folder: Path, rank: int = 0, world: int = 1) -> LoadedWeights:
    source = ModelSource(kind="folder", path=str(folder))
    config = read_model_config(source)
    specs = architecture(config.architecture).weights(config, rank=rank, world=world)
    return load_weights(
        open_source(source, config), specs, q_and_k_permuted=False, ignored=(), report=lambda done, total, name: None
    )


@pytest.fixture(params=FORMATS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, dict[str, torch.Tensor]]:
    """The format's name, the folder of a tiny llama in it, and the weights that it stands for."""
    folder = save(transformers_model("llama"), tmp_path)
    return request.param, folder, quantise_checkpoint(folder, FORMATS[request.param])


def test_every_weight_has_the_value_that_is_stored(checkpoint: tuple[str, Path, dict[str, torch.Tensor]]) -> None:
    name, folder, values = checkpoint
    weights = load(folder)
    for weight_name, weight in weights.matrices.items():
        found = FORMATS[name].once_loaded(weight.shape[1]) if is_quantised(weight_name) else ("float32", 0.0)
        assert weight.format == found[0]
        moved = (weight.dequantize() - values[weight_name]).abs()
        assert bool((moved <= found[1] * values[weight_name].abs()).all()), weight_name


def test_the_plan_counts_what_is_resident(checkpoint: tuple[str, Path, dict[str, torch.Tensor]]) -> None:
    _, folder, _ = checkpoint
    source = ModelSource(kind="folder", path=str(folder))
    assert read_checkpoint(source)[1] == load(folder).nbytes


def test_the_plan_counts_vectors_as_they_are_held(tmp_path: Path) -> None:
    folder = save(transformers_model("qwen3", attention_bias=True).to(torch.bfloat16), tmp_path)
    assert read_checkpoint(ModelSource(kind="folder", path=str(folder)))[1] == load(folder).nbytes


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "int4, groups of 32"),
        ("qwen3", "int4, zero points"),
        ("qwen3", "int8 W8A8"),
        ("llama", "fp8 of DeepSeek"),
        ("qwen3", "AWQ, groups of 32"),
        ("llama", "GPTQ, zero points"),
        ("llama", "GPTQ, scattered columns"),
        ("qwen3", "MXFP4"),
        ("llama", "NVFP4 of modelopt"),
    ],
)
def test_logits_are_those_of_the_values(family: str, name: str, tmp_path: Path) -> None:
    model = transformers_model(family)
    folder = save(model, tmp_path)
    model.load_state_dict(quantise_checkpoint(folder, FORMATS[name]))
    device = build(resolved(folder, kv_dtype="float32", activations="float32"))
    try:
        check_prompt(model, device, [3, 1, 4, 1, 5, 9, 2, 6], new_tokens=8)
    finally:
        device.handle.shutdown()


def test_logits_of_fp8_in_blocks(tmp_path: Path) -> None:
    model = transformers_model("llama", hidden_size=128, intermediate_size=256, head_dim=32)
    folder, chosen = save(model, tmp_path), FORMATS["fp8 of DeepSeek"]
    exact = replace(chosen, quantise=floats((128, 128), "weight_scale_inv", rounded=False))
    model.load_state_dict(quantise_checkpoint(folder, exact))
    device = build(resolved(folder, kv_dtype="float32", activations="float32"))
    try:
        check_prompt(model, device, [3, 1, 4, 1, 5, 9, 2, 6], new_tokens=8)
        # Beside the quantised matrices: embedding, head, and five norms.
        quantised = 2 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 256)
        assert device.specs.weight_bytes == quantised * 132 // 128 + 4 * (2 * 128 * 128 + 5 * 128)
    finally:
        device.handle.shutdown()


@pytest.mark.parametrize(
    "name",
    [
        "int4, groups of 32",
        "int4, zero points of rows",
        "int8 in words, rows",
        "fp8, blocks",
        "AWQ, groups of 32",
        "GPTQ, zero points",
        "GPTQ, groups of 48",
        "GPTQ, scattered columns",
        "MXFP4",
    ],
)
def test_ranks_convert_their_own_part(name: str, tmp_path: Path) -> None:
    folder = save(transformers_model("llama", intermediate_size=128), tmp_path)
    values = quantise_checkpoint(folder, FORMATS[name])
    ranks = [load(folder, rank, 2) for rank in range(2)]
    for weight_name in filter(is_quantised, values):
        dimension = 1 if weight_name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        parts = [rank.matrices[weight_name].dequantize() for rank in ranks]
        assert torch.equal(torch.cat(parts, dim=dimension), values[weight_name]), weight_name


def test_ranks_that_would_cut_a_block_are_refused(tmp_path: Path) -> None:
    folder = save(transformers_model("llama"), tmp_path)
    quantise_checkpoint(folder, FORMATS["int4, groups of 32"])
    with pytest.raises(CheckpointError, match=r"down_proj\.weight: columns 0 to 48 would cut a block of 32; divide"):
        load(folder, 0, 2)


@pytest.mark.parametrize(
    "name",
    ["int4, zero points", "int8 W8A8", "fp8, blocks", "AWQ, rows", "GPTQ, 8 bits", "GPTQ, scattered columns", "MXFP4"],
)
def test_a_large_matrix_is_converted_piece_by_piece(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(transformers_model("llama"), tmp_path)
    values = quantise_checkpoint(folder, FORMATS[name])
    monkeypatch.setattr(conversion, "PIECE_ELEMENTS", 7 * 64)
    for weight_name, weight in load(folder).matrices.items():
        assert torch.equal(weight.dequantize(), values[weight_name]), weight_name


def test_converted_neighbours_join_as_a_view(tmp_path: Path) -> None:
    folder = save(transformers_model("llama"), tmp_path)
    quantise_checkpoint(folder, FORMATS["int4, groups of 32"])
    weights = load(folder).matrices
    for block, names in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
        parts = [weights[f"model.layers.1.{block}.{name}_proj.weight"] for name in names]
        whole = joined(parts)
        assert whole is not None
        assert whole.plane.data_ptr() == parts[0].plane.data_ptr()


def test_scales_of_activations_and_of_a_cache_are_left_aside(tmp_path: Path) -> None:
    folder = save(transformers_model("llama"), tmp_path)
    values = quantise_checkpoint(folder, FORMATS["int8 W8A8"])
    tensors = load_file(folder / "model.safetensors")
    for part in ("mlp.down_proj.input_scale", "self_attn.k_scale", "self_attn.v_scale"):
        tensors[f"model.layers.0.{part}"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(load(folder).matrices[name].dequantize(), values[name])


@pytest.mark.parametrize(
    ("scale", "refusal"),
    [
        (torch.tensor(1.0), None),
        (torch.tensor([0.25, 0.5], dtype=torch.bfloat16), None),
        (torch.tensor(1.5), "v_scale is 1.5: what it scales reaches 672, and kv.dtype float8_e4m3 holds numbers up to"),
        (torch.tensor([0.5, 2.0], dtype=torch.float16), "v_scale is 2: what it scales reaches 896"),
        (torch.tensor([1.25], dtype=torch.bfloat16), "v_scale is 1.25: .*; set kv.dtype to auto"),
        (torch.tensor([0.5, torch.nan]), "v_scale is nan"),
        (
            torch.tensor([1], dtype=torch.int32),
            r"v_scale is I32 \[1\]; a scale of a cache in 8 bits is F32, F16 or BF16",
        ),
    ],
)
def test_scales_of_a_cache_are_not_passed_over_in_silence(
    tmp_path: Path, scale: torch.Tensor, refusal: str | None
) -> None:
    """Those that say values fit 8 bits as they are change nothing; others end the start, if the cache has 8 bits."""
    folder = save(transformers_model("llama"), tmp_path)
    quantise_checkpoint(folder, FORMATS["int8 W8A8"])
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.v_scale"] = scale
    save_file(tensors, folder / "model.safetensors")
    build(resolved(folder)).handle.shutdown()
    if refusal is None:
        build(resolved(folder, kv_dtype="float8_e4m3")).handle.shutdown()
        return
    with pytest.raises(CheckpointError, match=refusal):
        build(resolved(folder, kv_dtype="float8_e4m3"))


def test_scales_that_are_no_float16_become_the_nearest(tmp_path: Path) -> None:
    """An element moves by 2^-11 of itself at most, by 2^-25 a step where the scale is a subnormal float16."""
    folder = save(transformers_model("llama"), tmp_path)
    values = quantise_checkpoint(folder, FORMATS["int8 W8A8"])
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.0.mlp.down_proj.weight"
    scale = torch.logspace(-7, 4, tensors[name].shape[0]).unsqueeze(1)
    tensors[name.replace("weight", "weight_scale")] = scale
    save_file(tensors, folder / "model.safetensors")
    steps = tensors[name].double()
    moved = (load(folder).matrices[name].dequantize().double() - steps * scale.double()).abs()
    assert bool((moved <= torch.maximum(2.0**-11 * (steps * scale).abs(), 2.0**-25 * steps.abs())).all())
    assert bool((moved > 0).any())
    assert values[name].shape == moved.shape


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("int4, groups of 32", 70000.0),
        ("int4, groups of 32", torch.nan),
        ("int8 W8A8", torch.inf),
        ("fp8, rows", torch.inf),
    ],
)
def test_a_scale_beyond_all_bounds_is_refused(name: str, value: float, tmp_path: Path) -> None:
    folder = save(transformers_model("llama"), tmp_path)
    quantise_checkpoint(folder, FORMATS[name])
    tensors, place = load_file(folder / "model.safetensors"), "model.layers.0.mlp.up_proj.weight_scale"
    tensors[place][3, 0] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*up_proj\.weight: has a scale"):
        load(folder)


def test_every_float8_is_widened_as_torch_does_it() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(2, 128).view(torch.float8_e4m3fn)
    torch.testing.assert_close(stored_elements.widened(values), values.float(), rtol=0, atol=0, equal_nan=True)
    finite = values[:, :127]
    assert torch.equal(stored_elements.widened(finite), finite.float())


@pytest.mark.parametrize("name", ["AWQ", "GPTQ"])
def test_a_minimum_moves_an_element_by_a_hundredth_of_a_step_at_most(name: str, tmp_path: Path) -> None:
    """Scales of eleven bits: -zero point * scale is no float16, and becomes the nearest."""
    quantise = {"AWQ": awq(64, scale_bits=11), "GPTQ": gptq(4, 64, sym=False, scale_bits=11)}[name]
    weight = torch.randn(40, 192, generator=torch.Generator().manual_seed(5))
    packed = quantise(weight)
    config = FORMATS[f"{name}, groups of 32"].config | {"group_size": 64, "sym": False}
    scheme = read_quantization("config.json", {"quantization_config": config}).scheme_of("a")
    matrix = StoredMatrix(
        scheme=scheme,
        shape=(40, 192),
        values=packed.parts["qweight"],
        scale=packed.parts["scales"],
        zero_point=packed.parts["qzeros"],
        order=packed.parts.get("g_idx"),
        whole=None,
        where="a",
    )
    plane = torch.empty(40, 6 * 20, dtype=torch.uint8)
    conversion.convert(matrix, [(0, 40)], (0, 192), plane)
    loaded = QuantizedTensor("gguf_q4_1", (40, 192), {"blocks": plane}, "a").dequantize()
    steps = packed.parts["scales"].T.float().repeat_interleave(64, dim=1)
    moved = (loaded - packed.values).abs()
    assert 0.0 < float((moved / steps).max()) < 0.01


@pytest.mark.parametrize(
    "name", ["fp8, one scale", "fp8, rows", "fp8 of DeepSeek", "fp8 of modelopt", "fp8 without blocks"]
)
def test_fp8_keeps_its_elements_where_the_columns_are_whole_blocks(name: str) -> None:
    weight = torch.randn(200, 384, generator=torch.Generator().manual_seed(5))
    packed = FORMATS[name].quantise(weight)
    quantization = read_quantization("config.json", {"quantization_config": FORMATS[name].config})
    assert quantization is not None
    scheme = quantization.scheme_of("a")
    assert scheme is not None
    scale = packed.parts[scheme.scale]
    matrix = stored_matrix(scheme, packed.parts["weight"], scale)
    plane = torch.empty(200, 3 * 132, dtype=torch.uint8)
    conversion.convert(matrix, [(0, 200)], (0, 384), plane)
    loaded = QuantizedTensor("fp8_blocks", (200, 384), {"blocks": plane}, "a").dequantize()
    by_element = scale.reshape(1, 1) if scale.numel() == 1 else scale
    if scheme.strategy == "block":
        by_element = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :384]
    assert torch.equal(loaded, packed.parts["weight"].float() * by_element)


def test_a_rank_s_part_of_fp8_has_the_scales_of_its_own_rows_and_columns() -> None:
    packed = FORMATS["fp8 of DeepSeek"].quantise(torch.randn(384, 512, generator=torch.Generator().manual_seed(5)))
    scheme = WeightScheme(kind="fp8", strategy="block", block=(128, 128), scale="weight_scale_inv")
    matrix = stored_matrix(scheme, packed.parts["weight"], packed.parts["weight_scale_inv"])
    whole, part = torch.empty(384, 4 * 132, dtype=torch.uint8), torch.empty(200, 2 * 132, dtype=torch.uint8)
    conversion.convert(matrix, [(0, 384)], (0, 512), whole)
    conversion.convert(matrix, [(100, 300)], (256, 512), part)
    assert torch.equal(part, whole[100:300, 2 * 132 :])


def stored_matrix(scheme: WeightScheme, values: torch.Tensor, scale: torch.Tensor) -> StoredMatrix:
    return StoredMatrix(
        scheme=scheme,
        shape=(values.shape[0], values.shape[1]),
        values=values,
        scale=scale,
        zero_point=None,
        order=None,
        whole=None,
        where="a",
    )


def test_a_name_counts_before_a_pattern_and_a_pattern_before_a_class() -> None:
    """Whatever the order of the groups, as compressed-tensors has it: one group for all, others for some of them."""
    groups = {}
    for number, (target, bits) in enumerate([("Linear", 8), ("re:.*experts.*", 4), ("model.layers.0.experts.1", 8)]):
        weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32 << number}
        groups[f"group_{number}"] = {"targets": [target], "weights": weights}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    quantization = read_quantization("config.json", {"quantization_config": config})
    assert quantization is not None
    for module, bits, group in (("attn", 8, 32), ("experts.0", 4, 64), ("experts.1", 8, 128)):
        scheme = quantization.scheme_of(f"model.layers.0.{module}")
        assert scheme is not None
        assert (scheme.bits, scheme.group) == (bits, group), module


def test_rows_are_put_into_order_while_they_are_converted(tmp_path: Path) -> None:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(5))
    packed, order = mxfp4(weight), torch.randperm(96, generator=torch.Generator().manual_seed(6))
    matrix = StoredMatrix(
        scheme=WeightScheme(kind="mxfp4", strategy="group", group=32),
        shape=(96, 64),
        values=packed.parts["weight_packed"],
        scale=packed.parts["weight_scale"],
        zero_point=None,
        order=None,
        whole=None,
        where="a",
    )
    plane = torch.empty(96, 34, dtype=torch.uint8)
    conversion.convert(matrix, [(0, 96)], (0, 64), plane, order)
    loaded = QuantizedTensor("gguf_mxfp4", (96, 64), {"blocks": plane}, "a").dequantize()
    assert torch.equal(loaded, packed.values[order])


def resident_bytes(path: Path) -> int:
    """Bytes of the mapping of ``path`` that this process has in memory."""
    found, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            found = line.endswith(str(path))
        elif found and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_what_was_converted_is_given_back(tmp_path: Path) -> None:
    path, size = tmp_path / "weights", 8 << 20
    path.write_bytes(bytes(range(256)) * (size // 256))
    file = MappedFile(path)
    before = file.bytes.sum().item()
    assert resident_bytes(path) == size
    file.forget(4096 + 1, size - 2 * 4096)
    assert resident_bytes(path) < size // 4
    assert file.bytes.sum().item() == before
