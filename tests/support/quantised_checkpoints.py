"""Quantises a saved checkpoint into each format of safetensors that is read, by plain arithmetic, and keeps the weights
that it then stands for: the reference's."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from packed_checkpoints import Packed, awq, gptq, mxfp4, nvfp4
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


Quantised = Packed
"""One weight: the tensors it is stored as, by the last part of their names, and the values that they stand for."""


@dataclass(frozen=True)
class Format:
    """One format: quantization_config, what a weight is stored as, and the format that it has once loaded.

    ``tolerance``: how far, of itself, a loaded element may lie from the value; ``odd``: format and tolerance where the
    columns are no whole blocks of 64.
    """

    config: dict[str, object]
    quantise: Callable[[torch.Tensor], Quantised]
    resident: str
    tolerance: float = 0.0
    odd: tuple[str, float] | None = None

    def once_loaded(self, columns: int) -> tuple[str, float]:
        """(format, tolerance) of a matrix with so many columns."""
        return self.odd if self.odd and columns % 64 else (self.resident, self.tolerance)


def packed_words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned integers [rows, columns] in int32 words [rows, words], the first in the lowest bits."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(values.long(), (0, -values.shape[1] % per_word))
    shifts = torch.arange(per_word) * bits
    words = (padded.view(values.shape[0], -1, per_word) << shifts).sum(dim=-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _few_bits(scale: torch.Tensor, bits: int) -> torch.Tensor:
    """Rounded to so many significant bits."""
    fraction, exponent = torch.frexp(scale)
    return torch.ldexp(torch.round(fraction * 2**bits), exponent - bits)


def _groups(weight: torch.Tensor, group: int) -> torch.Tensor:
    """[rows, groups, columns of one]; ``group`` 0: a row, -1: everything."""
    if group == -1:
        return weight.reshape(1, 1, -1)
    return weight.reshape(weight.shape[0], -1, group or weight.shape[1])


def integers(
    bits: int, group: int, *, packed: bool, zero_points: bool = False, rounded: bool = False
) -> Callable[[torch.Tensor], Quantised]:
    """Integers under scales; in words or as bytes. ``rounded``: the values are those in bfloat16."""
    half = 1 << (bits - 1)

    def quantise(weight: torch.Tensor) -> Quantised:
        parts = _groups(weight, group)
        if zero_points:
            low, high = parts.amin(dim=-1).clamp(max=0.0), parts.amax(dim=-1).clamp(min=0.0)
            scale = _few_bits((high - low) / (2 * half - 1), 7)
            zero = torch.round(-low / scale).clamp(0, 2 * half - 1)
        else:
            scale = parts.abs().amax(dim=-1).div(half - 1).to(torch.bfloat16).float()
            zero = torch.full_like(scale, half)
        quants = (torch.round(parts / scale.unsqueeze(-1)) + zero.unsqueeze(-1)).clamp(0, 2 * half - 1)
        values = ((quants - zero.unsqueeze(-1)) * scale.unsqueeze(-1)).reshape(weight.shape)
        quants = quants.reshape(weight.shape)
        stored: Tensors = {"weight_scale": scale.reshape(-1) if group == -1 else scale}
        if packed:
            stored["weight_packed"] = packed_words(quants, bits)
            stored["weight_shape"] = torch.tensor(weight.shape)
        else:
            stored["weight"] = (quants - half).to(torch.int8)
        if zero_points:
            stored["weight_zero_point"] = packed_words(zero.T, bits).T.contiguous()
        return Quantised(stored, values.to(torch.bfloat16).float() if rounded else values)

    return quantise


def floats(
    block: tuple[int, int], scale_name: str = "weight_scale", *, rounded: bool = True
) -> Callable[[torch.Tensor], Quantised]:
    """float8_e4m3 under a scale for each ``block``; a size of 0: the whole extent. ``rounded``: the values are those in
    bfloat16."""

    def quantise(weight: torch.Tensor) -> Quantised:
        rows, columns = weight.shape
        height, width = block[0] or rows, block[1] or columns
        grid = (-(-rows // height), -(-columns // width))
        spread = torch.zeros(grid[0] * height, grid[1] * width)
        spread[:rows, :columns] = weight.abs()
        scale = spread.view(grid[0], height, grid[1], width).amax(dim=(1, 3)).div(448.0)
        by_element = scale.repeat_interleave(height, 0).repeat_interleave(width, 1)[:rows, :columns]
        stored = (weight / by_element).to(torch.float8_e4m3fn)
        values = stored.float() * by_element
        if rounded:
            values = values.to(torch.bfloat16).float()
        return Quantised({"weight": stored, scale_name: scale.reshape(-1) if block == (0, 0) else scale}, values)

    return quantise


def compressed(stored_as: str, bits: int, strategy: str, **weights: object) -> dict[str, object]:
    """A quantization_config of compressed-tensors with one group of all linears."""
    arguments = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": stored_as,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _packed(bits: int, group: int, **options: bool) -> Format:
    strategy: dict[str, object] = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    symmetric = not options.get("zero_points", False)
    config = compressed("pack-quantized", bits, **strategy, symmetric=symmetric)  # type: ignore[arg-type]
    resident = "gguf_q8_0" if bits == 8 else "gguf_q4_0" if symmetric else "gguf_q4_1"
    return Format(config, integers(bits, group, packed=True, **options), resident)


def _fp8(config: dict[str, object], block: tuple[int, int], scale_name: str = "weight_scale") -> Format:
    return Format(config, floats(block, scale_name), "bfloat16")


def _gptq(resident: str, bits: int, group: int, **options: bool | int) -> Format:
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": options.get("sym", True),
        "desc_act": options.get("desc_act", False),
        "checkpoint_format": "gptq_v2" if options.get("version") == 2 else "gptq",
    }
    quantise = gptq(bits, group, **options, to_bfloat16=resident == "bfloat16")  # type: ignore[arg-type]
    return Format(config, quantise, resident)


def _awq(group: int) -> Format:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Format(config, awq(group), "gguf_q4_1")


def _nvfp4(config: dict[str, object], *, modelopt: bool) -> Format:
    return Format(config, nvfp4(modelopt=modelopt), "nvfp4", tolerance=2.0**-22, odd=("bfloat16", 2.0**-8))


FORMATS: dict[str, Format] = {
    "int4, groups of 32": _packed(4, 32),
    "int4, rows": _packed(4, 0),
    "int4, zero points": _packed(4, 32, zero_points=True),
    "int4, zero points of rows": _packed(4, 0, zero_points=True),
    "int8 in words, groups": _packed(8, 32),
    "int8 in words, rows": _packed(8, 0),
    "int8 W8A8": Format(compressed("int-quantized", 8, "channel"), integers(8, 0, packed=False), "gguf_q8_0"),
    "int8, one scale": Format(compressed("int-quantized", 8, "tensor"), integers(8, -1, packed=False), "gguf_q8_0"),
    "fp8, one scale": _fp8(compressed("float-quantized", 8, "tensor", type="float"), (0, 0)),
    "fp8, rows": _fp8(compressed("float-quantized", 8, "channel", type="float"), (1, 0)),
    "fp8, blocks": _fp8(
        compressed("float-quantized", 8, "block", type="float", block_structure=[40, 48]), (40, 48)
    ),
    "fp8 of DeepSeek": _fp8(
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        (128, 128),
        "weight_scale_inv",
    ),
    "int4, groups of 16": Format(
        compressed("pack-quantized", 4, "group", group_size=16), integers(4, 16, packed=True, rounded=True), "bfloat16"
    ),
    "AWQ, groups of 32": _awq(32),
    "AWQ, rows": _awq(-1),
    "GPTQ, groups of 32": _gptq("gguf_q4_0", 4, 32),
    "GPTQ, rows": _gptq("gguf_q4_0", 4, -1),
    "GPTQ, groups of 48": _gptq("bfloat16", 4, 48),
    "GPTQ, zero points": _gptq("gguf_q4_1", 4, 32, sym=False),
    "GPTQ, zero points of version 2": _gptq("gguf_q4_1", 4, 32, sym=False, version=2),
    "GPTQ, 8 bits": _gptq("gguf_q8_0", 8, 32),
    "GPTQ, 8 bits, zero points": _gptq("bfloat16", 8, 32, sym=False),
    "GPTQ, scattered columns": _gptq("bfloat16", 4, 16, sym=False, desc_act=True),
    "MXFP4": Format(compressed("mxfp4-pack-quantized", 4, "group", type="float", group_size=32), mxfp4, "gguf_mxfp4"),
    "NVFP4": _nvfp4(
        compressed("nvfp4-pack-quantized", 4, "tensor_group", type="float", group_size=16), modelopt=False
    ),
    "NVFP4 of modelopt": _nvfp4(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}, modelopt=True
    ),
    "fp8 of modelopt": _fp8({"quant_method": "modelopt", "quant_algo": "FP8"}, (0, 0)),
    "fp8 without blocks": _fp8({"quant_method": "fp8", "weight_block_size": None}, (0, 0), "weight_scale_inv"),
}  # fmt: skip


def is_quantised(name: str) -> bool:
    """Whether the tensor is a weight that ``quantise_checkpoint`` quantises: the layers' linears."""
    return name.endswith("_proj.weight")


def quantise_checkpoint(folder: Path, chosen: Format, *, also: tuple[str, ...] = ()) -> Tensors:
    """Rewrites the float32 checkpoint in ``folder`` in the format; returns the weights that it then stands for.

    ``also``: endings of further names that are quantised.
    """
    tensors, values = load_file(folder / "model.safetensors"), {}
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if not is_quantised(name) and not name.endswith(also):
            stored[name] = values[name] = tensor
            continue
        quantised = chosen.quantise(tensor)
        values[name] = quantised.values
        module = name.removesuffix("weight")
        stored |= {module + part: data.contiguous() for part, data in quantised.parts.items()}
    save_file(stored, folder / "model.safetensors")
    edit_config(folder, {"quantization_config": chosen.config})
    return values


def edit_config(folder: Path, changes: Mapping[str, object]) -> None:
    """Sets keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
