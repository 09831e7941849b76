"""Experts in every form that checkpoints have them in: one tensor each, or all of a layer in one; quantised or not."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf_mixtures import make
from model_checks import check_prompt
from packed_checkpoints import Packed, mxfp4
from quantised_checkpoints import FORMATS, edit_config, floats, quantise_checkpoint
from safetensors.torch import load_file, save_file
from tiny_models import build, resolved, save, transformers_model

from tokenspeed.layers.loader import load_weights
from tokenspeed.layers.loader.safetensors_source import SafetensorsSource
from tokenspeed.layers.weights import Ranks, WeightSpec
from tokenspeed.recipes.checkpoint_size import read_checkpoint
from tokenspeed.recipes.model_config import CheckpointError
from tokenspeed.recipes.quantization import read_quantization
from tokenspeed.recipes.resolved import ModelSource
from tokenspeed.recipes.stored_weights import stored_weights

SHAPE = {"moe_intermediate_size": 64, "num_experts": 5}


@pytest.mark.parametrize(
    "name",
    [
        "int4, groups of 32",
        "int8 W8A8",
        "fp8, blocks",
        "AWQ, groups of 32",
        "GPTQ, groups of 32",
        "MXFP4",
        "NVFP4 of modelopt",
    ],
)
def test_quantised_experts_give_the_logits_of_their_values(name: str, tmp_path: Path) -> None:
    model = transformers_model("qwen3_moe", **SHAPE)
    folder = save(model, tmp_path)
    values = quantise_checkpoint(folder, FORMATS[name])
    reference = save(model, tmp_path / "values")
    save_file(values, reference / "model.safetensors", metadata={"format": "pt"})
    model = type(model).from_pretrained(reference)
    device = build(resolved(folder, kv_dtype="float32", activations="float32"))
    try:
        check_prompt(model.eval(), device, [3, 1, 4, 1, 5, 9, 2, 6], new_tokens=4)
    finally:
        device.handle.shutdown()


WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "v_head_dim": 32,
}
"""Columns of whole blocks of fp8."""


def powers_of_two(weight: torch.Tensor) -> Packed:
    """fp8 in blocks, as DeepSeek has it, with scales that leave every value a bfloat16: what the keys' part of the
    up-projection becomes."""
    packed = floats((128, 128), "weight_scale_inv", rounded=False)(weight)
    scale = torch.exp2(packed.parts["weight_scale_inv"].log2().ceil())
    by_element = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    elements = (weight / by_element).to(torch.float8_e4m3fn)
    return Packed({"weight": elements, "weight_scale_inv": scale}, elements.float() * by_element)


@pytest.mark.parametrize("scales", ["F32", "F8_E8M0"])
def test_deepseek_in_fp8(scales: str, tmp_path: Path) -> None:
    """Every projection is quantised; the rows of those that are rotated are put into order on the way."""

    def quantise(weight: torch.Tensor) -> Packed:
        packed = powers_of_two(weight)
        if scales == "F32":
            return packed
        small = packed.parts["weight_scale_inv"].to(torch.float8_e8m0fnu)
        return Packed(packed.parts | {"weight_scale_inv": small}, packed.values)

    chosen = replace(FORMATS["fp8 of DeepSeek"], quantise=quantise)
    model = transformers_model("deepseek_v3", **WIDE)
    folder = save(model, tmp_path)
    values = quantise_checkpoint(folder, chosen, also=("kv_a_proj_with_mqa.weight",))
    reference = save(model, tmp_path / "values")
    save_file(values, reference / "model.safetensors", metadata={"format": "pt"})
    device = build(resolved(folder, kv_dtype="float32", activations="float32"))
    try:
        model = type(model).from_pretrained(reference).eval()
        check_prompt(model, device, [3, 1, 4, 1, 5, 9, 2, 6], new_tokens=4)
        size = read_checkpoint(ModelSource(kind="folder", path=str(folder)))[1]
        assert size == device.specs.weight_bytes
    finally:
        device.handle.shutdown()


def test_a_small_matrix_that_is_wanted_as_floats_is_scaled(tmp_path: Path) -> None:
    weight = torch.randn(6, 128, generator=torch.Generator().manual_seed(3))
    packed = powers_of_two(weight)
    save_file({f"a.{part}": value for part, value in packed.parts.items()}, tmp_path / "model.safetensors")
    quantization = read_quantization("config.json", {"quantization_config": FORMATS["fp8 of DeepSeek"].config})
    spec = Ranks(rank=0, world=1).whole("a.weight", 6, 128, is_float=True)
    loaded = load_weights(
        SafetensorsSource(tmp_path, quantization),
        [spec],
        q_and_k_permuted=False,
        ignored=(),
        report=lambda done, total, name: None,
    )
    assert torch.equal(loaded.vectors["a.weight"], packed.values)


def test_the_plan_counts_quantised_experts(tmp_path: Path) -> None:
    folder = save(transformers_model("qwen3_moe", **SHAPE), tmp_path)
    quantise_checkpoint(folder, FORMATS["AWQ, groups of 32"])
    size = read_checkpoint(ModelSource(kind="folder", path=str(folder)))[1]
    device = build(resolved(folder))
    device.handle.shutdown()
    assert size == device.specs.weight_bytes


EXPERTS, INNER, HIDDEN = 3, 48, 64
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
DOWN = "model.layers.0.mlp.experts.down_proj"


def alternating(rows: int) -> torch.Tensor:
    """Gate and up of an expert take turns in the checkpoint: all of its gate, then all of its up."""
    within = torch.cat([torch.arange(0, 2 * INNER, 2), torch.arange(1, 2 * INNER, 2)])
    return (torch.arange(rows // (2 * INNER)).unsqueeze(1) * 2 * INNER + within).reshape(rows)


def fused_specs(rank: int = 0, world: int = 1) -> list[WeightSpec]:
    ranks = Ranks(rank=rank, world=world)
    return [
        ranks.rows(GATE_UP, EXPERTS * 2 * INNER, HIDDEN, stored=(EXPERTS, HIDDEN, 2 * INNER), row_order=alternating),
        ranks.rows(DOWN, EXPERTS * HIDDEN, 2 * INNER, stored=(EXPERTS, 2 * INNER, HIDDEN)),
    ]


def fused(folder: Path) -> dict[str, torch.Tensor]:
    """Experts as gpt-oss has them, in MXFP4; returns the values [experts * rows, columns]."""
    generator = torch.Generator().manual_seed(11)
    stored, values = {}, {}
    for name, shape in ((GATE_UP, (EXPERTS, 2 * INNER, HIDDEN)), (DOWN, (EXPERTS, HIDDEN, 2 * INNER))):
        packed = mxfp4(torch.randn(*shape, generator=generator))
        values[name] = packed.values.reshape(-1, shape[-1])
        stored[f"{name}_blocks"] = packed.parts["weight_packed"].view(*shape[:2], shape[2] // 32, 16)
        stored[f"{name}_scales"] = packed.parts["weight_scale"].view(*shape[:2], -1)
    save_file(stored, folder / "model.safetensors")
    return values


MXFP4 = read_quantization("config.json", {"quantization_config": {"quant_method": "mxfp4"}})


def load(folder: Path, rank: int = 0, world: int = 1) -> dict[str, torch.Tensor]:
    weights = load_weights(
        SafetensorsSource(folder, MXFP4),
        fused_specs(rank, world),
        q_and_k_permuted=False,
        ignored=(),
        report=lambda done, total, name: None,
    )
    assert {weight.format for weight in weights.matrices.values()} == {"gguf_mxfp4"}
    return {name: weight.dequantize() for name, weight in weights.matrices.items()}


def test_the_experts_of_gpt_oss_load_unchanged_and_in_order(tmp_path: Path) -> None:
    values = fused(tmp_path)
    found = load(tmp_path)
    assert torch.equal(found[GATE_UP], values[GATE_UP][alternating(EXPERTS * 2 * INNER)])
    assert torch.equal(found[DOWN], values[DOWN])
    stored = stored_weights(tmp_path, MXFP4)
    assert stored[GATE_UP].shape == (EXPERTS, 2 * INNER, HIDDEN)
    assert stored[GATE_UP].resident_bytes == EXPERTS * 2 * INNER * 2 * 17


def test_ranks_share_whole_experts_of_gpt_oss(tmp_path: Path) -> None:
    values = fused(tmp_path)
    parts = [load(tmp_path, rank, EXPERTS) for rank in range(EXPERTS)]
    whole = torch.cat([part[GATE_UP] for part in parts])
    assert torch.equal(whole, values[GATE_UP][alternating(EXPERTS * 2 * INNER)])
    assert torch.equal(torch.cat([part[DOWN] for part in parts]), values[DOWN])


def test_fused_experts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    fused(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {f"{DOWN}_scales": tensors[f"{DOWN}_scales"][:2].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"down_proj_scales has shape \[2, 64, 3\]; .* 3 x 64 x 96 has \[3, 64, 3\]"
    ):
        load(tmp_path)
    del tensors[f"{DOWN}_scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj_blocks has no .*experts\.down_proj_scales beside it"):
        load(tmp_path)
    fused(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in (f"{DOWN}_blocks", f"{DOWN}_scales"):
        tensors[name] = tensors[name][:2].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"down_proj has shape \(2, 64, 96\), the configuration says \(2, 96, 96\)"
    ):
        load(tmp_path)


def test_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    """Experts in MXFP4, all else as it is."""
    model = make("gpt-oss")
    folder = save(model, tmp_path)
    tensors, stored = load_file(folder / "model.safetensors"), {}
    for name, value in tensors.items():
        if ".experts." not in name or name.endswith("_bias"):
            stored[name] = value
            continue
        packed = mxfp4(value.transpose(1, 2).contiguous())
        tensors[name] = packed.values.transpose(1, 2).contiguous()
        count, rows, columns = packed.values.shape
        stored[f"{name}_blocks"] = packed.parts["weight_packed"].view(count, rows, columns // 32, 16)
        stored[f"{name}_scales"] = packed.parts["weight_scale"]
    twin = save(model, tmp_path / "twin")
    save_file(tensors, twin / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, folder / "model.safetensors")
    edit_config(folder, {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}})
    device = build(resolved(folder, kv_dtype="float32", activations="float32"))
    try:
        check_prompt(type(model).from_pretrained(twin).eval(), device, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], new_tokens=6)
        assert read_checkpoint(ModelSource(kind="folder", path=str(folder)))[1] == device.specs.weight_bytes
    finally:
        device.handle.shutdown()


PEAK = """
import sys
from pathlib import Path
import torch
from tokenspeed.layers.loader import load_weights, open_source
from tokenspeed.models import architecture
from tokenspeed.recipes.model_config import read_model_config
from tokenspeed.recipes.resolved import ModelSource

source = ModelSource(kind="folder", path=sys.argv[1])
config = read_model_config(source)
specs = architecture(config.architecture).weights(config, rank=0, world=1)

def resident(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024

torch.ones(1 << 16).bfloat16().float().sum()
before = resident("VmRSS:")
open("/proc/self/clear_refs", "w").write("5")
weights = load_weights(
    open_source(source, config), specs, q_and_k_permuted=False, ignored=(), report=lambda *_: None
)
touched = sum(int(weight.plane.view(torch.uint8)[:, ::64].sum()) for weight in weights.matrices.values())
print(resident("VmHWM:") - before, weights.nbytes)
"""


def large_mixture(folder: Path) -> int:
    """A mixture of about 50 MB in four files, of which nearly all is experts; returns the bytes of the largest."""
    model = transformers_model("qwen3_moe", num_hidden_layers=1, num_experts=2).to(torch.bfloat16)
    save(model, folder)
    count, inner, hidden = 64, 256, 512
    sizes = {"hidden_size": hidden, "moe_intermediate_size": inner, "num_experts": count}
    edit_config(folder, sizes | {"head_dim": 16})
    tensors = load_file(folder / "model.safetensors")
    widened = {
        name: torch.ones([hidden if extent == 64 and axis == value.dim() - 1 else extent for axis, extent in
                          enumerate(value.shape)], dtype=torch.bfloat16)
        for name, value in tensors.items() if "experts" not in name
    }  # fmt: skip
    widened["model.layers.0.self_attn.o_proj.weight"] = torch.ones(hidden, 64, dtype=torch.bfloat16)
    widened["model.layers.0.mlp.gate.weight"] = torch.ones(count, hidden, dtype=torch.bfloat16)
    (folder / "model.safetensors").unlink()
    for expert in range(count):
        place = f"model.layers.0.mlp.experts.{expert}"
        for part, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            widened[f"{place}.{part}_proj.weight"] = torch.full(shape, 0.5, dtype=torch.bfloat16)
    names = sorted(widened)
    for number in range(4):
        save_file({name: widened[name] for name in names[number::4]}, folder / f"model-{number}.safetensors")
    return max(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_experts_load_within_what_lies_on_the_disk_and_one_file(tmp_path: Path) -> None:
    """Four million bytes are left to the loader itself; experts held twice would take fifty more."""
    largest = large_mixture(tmp_path)
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    done = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    grown, held = map(int, done.stdout.split())
    assert held > 48 << 20
    assert grown <= on_disk + largest + (4 << 20), f"{grown} bytes for {on_disk} on the disk"
