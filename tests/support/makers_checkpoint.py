"""DeepSeek-V4 as its makers publish it: their names, experts in floats of four bits, projections in fp8, both under
powers of two. Written from a model of transformers by plain arithmetic, with the values that the files then stand for.

Sources: the tensors of DeepSeek-V4-Flash as published (name, shape, type), and the makers' convert.py, which reads the
low half of a byte first.
"""

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from packed_checkpoints import mxfp4
from quantised_checkpoints import Tensors, edit_config
from safetensors.torch import load_file, save_file
from tiny_models import save

QUANTIZATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
"""quantization_config of all of them; that experts are in four bits is said beside it, by expert_dtype."""

WHOLE_BLOCKS: dict[str, object] = {
    "hidden_size": 128,
    "moe_intermediate_size": 256,
    "head_dim": 64,
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
}
"""For ``compressed_model``: columns of whole blocks of fp8, shared by two ranks too."""

_EXPERT = re.compile(r".*\.ffn\.experts\.\d+\.w[123]\.weight")
_PROJECTION = re.compile(r".*\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b)|indexer\.wq_b|shared_experts\.w[123])\.weight")
_FLOATS = re.compile(r".*(\.ape|\.attn_sink|hc_\w+|gate\.bias)")
"""float32 in the published files; what is none of these is bfloat16."""


def makers_name(name: str) -> str:
    """The published name of a tensor that transformers writes."""
    for theirs, published in (
        ("model.hc_head.hc_", "hc_head_"),
        ("model.embed_tokens.", "embed."),
        ("lm_head.", "head."),
        ("model.", ""),
    ):
        if name.startswith(theirs):
            name = published + name.removeprefix(theirs)
            break
    return name.replace(".attn.norm.", ".attn.kv_norm.")


@dataclass(frozen=True)
class Published:
    """A checkpoint in ``folder``, and what its tensors stand for by the names that transformers writes."""

    folder: Path
    values: Tensors

    def reference(self, model: torch.nn.Module, folder: Path) -> torch.nn.Module:
        """The model with those values; ``folder`` is room for it."""
        save(model, folder)
        save_file(self.values, folder / "model.safetensors", metadata={"format": "pt"})
        return type(model).from_pretrained(folder).eval()  # type: ignore[attr-defined, no-any-return]

    def tensors(self) -> Tensors:
        """What lies in the file."""
        return load_file(self.folder / "model.safetensors")

    def change(self, changes: Mapping[str, torch.Tensor | None]) -> None:
        """Puts tensors into the file, or takes them out where they are None."""
        tensors = {**self.tensors(), **changes}
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(kept, self.folder / "model.safetensors")


def publish(model: torch.nn.Module, folder: Path, experts: Literal["fp4", "fp8"] = "fp4") -> Published:
    """Writes ``model`` to ``folder`` as DeepSeek-V4-Flash has it, or, with experts in fp8, as its base model: there
    scales are float32. Layers that draft tokens come with it."""
    save(model, folder)
    stored: Tensors = {}
    values: Tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        makers = makers_name(name)
        place = makers.removesuffix("weight")
        if _EXPERT.fullmatch(makers) and experts == "fp4":
            packed = mxfp4(value)
            values[name] = packed.values
            stored[makers] = packed.parts["weight_packed"].view(torch.int8)
            stored[f"{place}scale"] = packed.parts["weight_scale"].view(torch.float8_e8m0fnu)
        elif _EXPERT.fullmatch(makers) or _PROJECTION.fullmatch(makers):
            elements, scale, values[name] = _in_blocks(value)
            stored |= {makers: elements, f"{place}scale": scale.to(torch.float8_e8m0fnu) if experts == "fp4" else scale}
        elif makers.endswith("tid2eid") or _FLOATS.fullmatch(makers):
            stored[makers] = values[name] = value
        else:
            stored[makers] = value.to(torch.bfloat16)
            values[name] = stored[makers].float()
    drafting = {
        f"mtp.0.{name.removeprefix('layers.0.')}": value for name, value in stored.items() if "layers.0." in name
    }
    # Copies: safetensors refuses tensors that share memory.
    stored |= {name: value.clone() for name, value in drafting.items()}
    stored["mtp.0.enorm.weight"] = torch.ones(8, dtype=torch.bfloat16)
    save_file({name: value.contiguous() for name, value in stored.items()}, folder / "model.safetensors")
    edit_config(folder, {"quantization_config": QUANTIZATION, "expert_dtype": experts})
    return Published(folder, values)


def _in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(elements float8_e4m3fn, scales float32 that are powers of two, values) in blocks of 128 x 128."""
    rows, columns = weight.shape
    grid = (-(-rows // 128), -(-columns // 128))
    spread = torch.zeros(grid[0] * 128, grid[1] * 128)
    spread[:rows, :columns] = weight.abs()
    scale = torch.exp2((spread.view(grid[0], 128, grid[1], 128).amax(dim=(1, 3)) / 448.0).log2().ceil())
    by_element = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    elements = (weight / by_element).to(torch.float8_e4m3fn)
    return elements, scale, elements.float() * by_element


SIZES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "I64": 8}
"""Bytes of the published types."""


def flash_tensors(layers: int, experts: int) -> Iterator[tuple[str, str, list[int]]]:
    """(name, type, shape) of every tensor of DeepSeek-V4-Flash as it is published, of fewer layers and experts."""
    yield "embed.weight", "BF16", [129280, 4096]
    yield "head.weight", "BF16", [129280, 4096]
    yield "norm.weight", "BF16", [4096]
    yield from _streams("hc_head_", 4, 1)
    for layer in range(layers):
        place = f"layers.{layer}."
        yield from _flash_layer(place, experts)
        hashed = layer < 3
        yield (
            f"{place}ffn.gate.{'tid2eid' if hashed else 'bias'}",
            *(("I64", [129280, 6]) if hashed else ("F32", [experts])),
        )
        if layer >= 2:
            yield from _flash_compressor(
                f"{place}attn.compressor.", *((4, 1024) if layer % 2 == 0 else (128, 512)), 512
            )
        if layer >= 2 and layer % 2 == 0:
            yield from _flash_compressor(f"{place}attn.indexer.compressor.", 4, 256, 128)
            yield f"{place}attn.indexer.weights_proj.weight", "BF16", [64, 4096]
            yield from _flash_blocks(f"{place}attn.indexer.wq_b.", 8192, 1024)
    yield from _flash_layer("mtp.0.", experts)
    yield "mtp.0.ffn.gate.bias", "F32", [experts]
    yield from _streams("mtp.0.hc_head_", 4, 1)
    for name in ("e_proj", "h_proj"):
        yield from _flash_blocks(f"mtp.0.{name}.", 4096, 4096)
    for name in ("enorm", "hnorm", "norm"):
        yield f"mtp.0.{name}.weight", "BF16", [4096]


def _flash_layer(place: str, experts: int) -> Iterator[tuple[str, str, list[int]]]:
    """What every layer has, those that draft tokens too."""
    for name, rows, columns in (
        ("wq_a", 1024, 4096), ("wq_b", 32768, 1024), ("wkv", 512, 4096), ("wo_a", 8192, 4096), ("wo_b", 4096, 8192),
    ):  # fmt: skip
        yield from _flash_blocks(f"{place}attn.{name}.", rows, columns)
    yield f"{place}attn.attn_sink", "F32", [64]
    for name, length in (("attn.kv_norm", 512), ("attn.q_norm", 1024), ("attn_norm", 4096), ("ffn_norm", 4096)):
        yield f"{place}{name}.weight", "BF16", [length]
    yield f"{place}ffn.gate.weight", "BF16", [experts, 4096]
    for name, rows, columns in (("w1", 2048, 4096), ("w2", 4096, 2048), ("w3", 2048, 4096)):
        yield from _flash_blocks(f"{place}ffn.shared_experts.{name}.", rows, columns)
        for expert in range(experts):
            yield f"{place}ffn.experts.{expert}.{name}.weight", "I8", [rows, columns // 2]
            yield f"{place}ffn.experts.{expert}.{name}.scale", "F8_E8M0", [rows, columns // 32]
    for block in ("attn", "ffn"):
        yield from _streams(f"{place}hc_{block}_", 24, 3)


def _flash_blocks(place: str, rows: int, columns: int) -> Iterator[tuple[str, str, list[int]]]:
    yield f"{place}weight", "F8_E4M3", [rows, columns]
    yield f"{place}scale", "F8_E8M0", [rows // 128, columns // 128]


def _flash_compressor(place: str, rate: int, columns: int, width: int) -> Iterator[tuple[str, str, list[int]]]:
    yield f"{place}ape", "F32", [rate, columns]
    yield f"{place}norm.weight", "BF16", [width]
    for name in ("wgate", "wkv"):
        yield f"{place}{name}.weight", "BF16", [columns, 4096]


def _streams(place: str, rows: int, scales: int) -> Iterator[tuple[str, str, list[int]]]:
    yield f"{place}base", "F32", [rows]
    yield f"{place}fn", "F32", [rows, 16384]
    yield f"{place}scale", "F32", [scales]


def write_headers(path: Path, tensors: Iterator[tuple[str, str, list[int]]]) -> None:
    """A safetensors file of those (name, type, shape) that is one hole behind its header."""
    header, end = {}, 0
    for name, kind, shape in tensors:
        start, end = end, end + math.prod(shape) * SIZES[kind]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


FLASH: dict[str, object] = {
    "architectures": ["DeepseekV4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 1, "expert_dtype": "fp4", "hc_eps": 1e-06, "hc_mult": 4, "hc_sinkhorn_iters": 20, "head_dim": 512,
    "hidden_act": "silu", "hidden_size": 4096, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 512,
    "initializer_range": 0.02, "max_position_embeddings": 1048576, "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts_per_tok": 6, "num_hidden_layers": 43, "num_hash_layers": 3,
    "num_key_value_heads": 1, "num_nextn_predict_layers": 1, "o_groups": 8, "o_lora_rank": 1024, "q_lora_rank": 1024,
    "qk_rope_head_dim": 64, "quantization_config": QUANTIZATION, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "sliding_window": 128,
    "swiglu_limit": 10.0, "tie_word_embeddings": False, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "use_cache": True, "vocab_size": 129280, "compress_rope_theta": 160000,
    "compress_ratios": [0, 0, *(4 if layer % 2 == 0 else 128 for layer in range(2, 43)), 0],
}  # fmt: skip
"""config.json of DeepSeek-V4-Flash."""
