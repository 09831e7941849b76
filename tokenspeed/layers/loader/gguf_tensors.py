"""What the tensors of a GGUF file are under the names of Hugging Face checkpoints.

Most are the same tensor under another name. Experts lie in one tensor for all of a layer, [experts, rows, columns]:
where the model wants each expert's own, they are parts of it; where it wants one weight for all (gpt-oss), or has in
one what the file has in two (DeepSeek's up-projection), the weight is put together of them.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal

from tokenspeed.recipes.gguf_file import GgufHeader, GgufTensor
from tokenspeed.recipes.model_config import CheckpointError

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_WHOLE = {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
}
"""Tensors whose names have no part behind the last point in a Hugging Face checkpoint."""

_STACKED = ("gpt-oss",)
"""Architectures whose experts are one weight for all, and whose router has another name."""

ROTARY_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, kw_only=True)
class Composite:
    """A weight that is made of several tensors, or of one of three dimensions.

    Attributes:
        kind: "gate_up": the rows of each expert of the first, then those of the second; "gate_up_bias": the same of
            vectors, their elements in turn; "rows": all rows of one; "up_projection": of each head the first, turned,
            then the second.
        parts: the tensors.
        shape: of the weight, as it would be in one tensor.
    """

    kind: Literal["gate_up", "gate_up_bias", "rows", "up_projection"]
    parts: tuple[GgufTensor, ...]
    shape: tuple[int, ...]


def named_tensors(header: GgufHeader) -> tuple[dict[str, GgufTensor], dict[str, Composite]]:
    """Every weight of the file but its rotary factors: single tensors, and those that are put together.

    A tensor that has no counterpart keeps its own name; whoever knows the model's weights refuses it then.
    """
    stacked = header.metadata.get("general.architecture") in _STACKED
    single: dict[str, GgufTensor] = {}
    composites: dict[str, Composite] = {}
    for name, tensor in header.tensors.items():
        experts = re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)", name)
        if name == ROTARY_FACTORS:
            continue
        if experts is None:
            single[_name(name, stacked)] = tensor
        elif stacked:
            _add_stacked(header, composites, tensor, int(experts[1]), experts[2], experts[3])
        else:
            single |= _each(header, tensor, int(experts[1]), experts[2])
    _join_up_projections(single, composites)
    return single, composites


def _name(name: str, stacked: bool) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if layer and layer[2] in _WHOLE:
        return f"model.layers.{layer[1]}.{_WHOLE[layer[2]]}"
    part, _, ending = (layer[2] if layer else name).rpartition(".")
    known = _LAYER if layer else _TOP
    if part not in known or ending not in ("weight", "bias"):
        return name
    ours = "mlp.router" if stacked and part == "ffn_gate_inp" else known[part]
    return f"model.layers.{layer[1]}.{ours}.{ending}" if layer else f"{ours}.{ending}"


def _each(header: GgufHeader, tensor: GgufTensor, layer: int, part: str) -> dict[str, GgufTensor]:
    """The experts' own matrices within the one ``tensor`` of a layer."""
    if len(tensor.shape) != 3 or (part == "gate_up" and tensor.shape[1] % 2):
        raise CheckpointError(
            f"{header.path}: {tensor.name} has shape {list(tensor.shape)}, it should be [experts, rows, columns]; the "
            "file is damaged, or of another version: convert the model again"
        )
    count, rows, columns = tensor.shape
    names = ("gate", "up") if part == "gate_up" else (part,)
    rows, nbytes = rows // len(names), tensor.nbytes // (count * len(names))
    return {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight": replace(
            tensor,
            shape=(rows, columns),
            offset=tensor.offset + (expert * len(names) + place) * nbytes,
            nbytes=nbytes,
        )
        for expert in range(count)
        for place, name in enumerate(names)
    }


def _add_stacked(
    header: GgufHeader, composites: dict[str, Composite], tensor: GgufTensor, layer: int, part: str, ending: str
) -> None:
    """Adds to the composites what one tensor of all experts is; gate waits for up."""
    end = "_bias" if ending == "bias" else ""
    place = f"model.layers.{layer}.mlp.experts"
    if part == "down":
        composites[f"{place}.down_proj{end}"] = Composite(kind="rows", parts=(tensor,), shape=tensor.shape)
        return
    other = header.tensors.get(f"blk.{layer}.ffn_{'up' if part == 'gate' else 'gate'}_exps.{ending}")
    if part == "gate_up" or other is None or other.shape != tensor.shape or other.type_name != tensor.type_name:
        raise CheckpointError(
            f"{header.path}: {tensor.name} has no tensor of the same shape and format for gate and up; the file is "
            "incomplete, or of another version: convert the model again"
        )
    if part == "gate":
        shape = (tensor.shape[0], 2 * tensor.shape[1], *tensor.shape[2:])
        kind: Literal["gate_up", "gate_up_bias"] = "gate_up_bias" if end else "gate_up"
        composites[f"{place}.gate_up_proj{end}"] = Composite(kind=kind, parts=(tensor, other), shape=shape)


def _join_up_projections(single: dict[str, GgufTensor], composites: dict[str, Composite]) -> None:
    """Newer files have DeepSeek's up-projection as attn_k_b [heads, latent, plain], turned for the absorbed form, and
    attn_v_b [heads, value, latent]."""
    for name in [name for name in single if name.endswith(".attn_k_b.weight")]:
        layer = name.split(".")[1]
        keys, values = single[name], single.get(f"blk.{layer}.attn_v_b.weight")
        ours = f"model.layers.{layer}.self_attn.kv_b_proj.weight"
        if values is None or len(keys.shape) != 3 or len(values.shape) != 3:
            continue
        del single[name], single[f"blk.{layer}.attn_v_b.weight"]
        if ours not in single:  # some files have both forms
            rows = keys.shape[0] * (keys.shape[2] + values.shape[1])
            composites[ours] = Composite(kind="up_projection", parts=(keys, values), shape=(rows, keys.shape[1]))
