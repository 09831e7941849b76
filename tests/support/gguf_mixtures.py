"""Tiny mixtures of experts of transformers as GGUF files, as converters write them, and their twins: the same values as
a safetensors checkpoint."""

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

_BASE: dict[str, object] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
_DEEPSEEK: dict[str, object] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 32,
    "v_head_dim": 16,
    "head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
_GPT_OSS: dict[str, object] = {
    "intermediate_size": 64,
    "num_local_experts": 4,
    "sliding_window": 8,
    "num_hidden_layers": 2,
    "rope_parameters": {**_YARN, "rope_theta": 150000.0, "truncate": False},
}
_GLM: dict[str, object] = {
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "use_qk_norm": True,
    "attention_bias": True,
}

MODELS: dict[str, tuple[str, str, dict[str, object]]] = {
    "qwen3moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"num_experts": 6, "norm_topk_prob": True}),
    "deepseek2": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**_DEEPSEEK, "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "deepseek2 by softmax": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**_DEEPSEEK, "q_lora_rank": None, "topk_method": "group_limited_greedy", "norm_topk_prob": False},
    ),
    "glm4moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM", _GLM),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", _GPT_OSS),
}
"""Name, its first word the architecture in the file, to transformers' classes and what differs from the base."""

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
}


def make(name: str) -> torch.nn.Module:
    """A random float32 model, the same for the same name, of which no weight is 0 or 1 throughout."""
    import transformers

    config_name, class_name, own = MODELS[name]
    torch.manual_seed(7)
    config = getattr(transformers, config_name)(**{**_BASE, **own})
    model = getattr(transformers, class_name)(config)
    with torch.no_grad():
        for place, value in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" in place:
                continue
            if "norm" in place or place.endswith(("bias", "sinks")):
                value.add_(torch.randn_like(value) * 0.1)
            elif "experts" in place or place.endswith(("gate.weight", "router.weight")):
                value.copy_(torch.randn_like(value) * 0.125)
    return model.eval()


def write(
    model: torch.nn.Module,
    folder: Path,
    name: str,
    *,
    experts: str = "F32",
    others: str = "F32",
    absorbed: bool = False,
    tensors_a_file: int = 0,
    more: Mapping[str, object] | None = None,
) -> tuple[Path, torch.nn.Module]:
    """Writes model.gguf with experts and other matrices in these formats, and the twin that holds what they encode.

    ``absorbed``: DeepSeek's up-projection lies in two parts, that of the keys turned. ``tensors_a_file``: the model is
    split. ``more``: numbers of the metadata, tensors by name, or None for a tensor that is left out. Returns the
    (first) file and the twin.
    """
    model.save_pretrained(folder)  # type: ignore[operator]
    tensors = load_file(folder / "model.safetensors")
    path, architecture = folder / "model.gguf", name.split()[0]
    writer = gguf.GGUFWriter(str(path), architecture, split_max_tensors=tensors_a_file)
    _metadata(writer, architecture, json.loads((folder / "config.json").read_text()), absorbed)
    twin: Tensors = {}
    for place, group in _grouped(tensors, architecture).items():
        _write_one(writer, twin, place, group, experts if ".experts." in place else others, absorbed)
    for key, value in (more or {}).items():
        if isinstance(value, int):
            writer.kv_data[0].pop(key, None)
            writer.add_uint32(key, value)
            continue
        for tensors_of_file in writer.tensors:
            tensors_of_file.pop(key, None)
        if isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(folder.glob("model-*.gguf"))
    path = parts[0] if parts else path
    save_file(twin, folder / "model.safetensors", metadata={"format": "pt"})
    return path, type(model).from_pretrained(folder).eval()  # type: ignore[attr-defined]


Group = list[tuple[str, torch.Tensor, slice | None]]
"""The tensors of a checkpoint that make one of the file: name, values, and which rows of them (None: all)."""


def _grouped(tensors: Tensors, architecture: str) -> dict[str, Group]:
    """By the name that one tensor of the file has here: experts' matrices of one kind are one."""
    groups: dict[str, Group] = {}
    for name in sorted(tensors, key=_by_number):
        value = tensors[name]
        if architecture == "gpt-oss" and ".experts." in name:
            turned = value.transpose(1, 2).contiguous() if value.dim() == 3 else value
            ending = ".bias" if name.endswith("_bias") else ".weight"
            plain = name.removesuffix("_bias")
            if "gate_up" in name:
                for part, rows in (("gate_proj", slice(0, None, 2)), ("up_proj", slice(1, None, 2))):
                    groups[plain.replace("gate_up_proj", part) + ending] = [(name, turned, rows)]
            else:
                groups[plain + ending] = [(name, turned, None)]
            continue
        parts = name.split(".")
        place = ".".join(
            part for number, part in enumerate(parts) if not (part.isdigit() and parts[number - 1] == "experts")
        )
        groups.setdefault(place, []).append((name, value, None))
    return groups


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _write_one(writer: gguf.GGUFWriter, twin: Tensors, place: str, group: Group, kind: str, absorbed: bool) -> None:
    names = [name for name, _, _ in group]
    value = torch.stack([tensor for _, tensor, _ in group]) if len(group) > 1 else group[0][1]
    rows = group[0][2]
    if rows is not None:
        value = value[:, rows].contiguous()
    if absorbed and "kv_b_proj" in place:
        _write_absorbed(writer, twin, place, value, kind)
        return
    decoded = _add(writer, gguf_name(writer, place), value, kind)
    for number, name in enumerate(names):
        part = decoded[number] if len(group) > 1 else decoded
        if ".experts." not in name or len(group) > 1:
            twin[name] = part.contiguous()
        elif rows is None:  # gpt-oss: down
            twin[name] = (part.transpose(1, 2) if part.dim() == 3 else part).contiguous()
        else:
            shape = group[0][1].transpose(1, 2).shape if part.dim() == 3 else group[0][1].shape
            whole = twin.setdefault(name, torch.zeros(shape))
            if part.dim() == 3:
                whole[:, :, rows] = part.transpose(1, 2)
            else:
                whole[:, rows] = part


def _write_absorbed(writer: gguf.GGUFWriter, twin: Tensors, place: str, value: torch.Tensor, kind: str) -> None:
    heads, plain = 4, 32
    both = value.view(heads, -1, value.shape[1])
    name = gguf_name(writer, place)
    keys = _add(writer, name.replace("kv_b", "k_b"), both[:, :plain].transpose(1, 2).contiguous(), kind)
    values = _add(writer, name.replace("kv_b", "v_b"), both[:, plain:].contiguous(), kind)
    whole = torch.cat([keys.transpose(1, 2), values], dim=1).reshape(value.shape)
    twin[place] = whole if kind == "F32" else whole.to(torch.bfloat16).float()


def _add(writer: gguf.GGUFWriter, name: str, value: torch.Tensor, kind: str) -> torch.Tensor:
    """Adds the tensor in the format, where it can have it, and returns the values that it then encodes."""
    vector = value.dim() == 1 or name.endswith(".bias") or "ffn_gate_inp" in name
    chosen = gguf.GGMLQuantizationType["F32" if vector or value.shape[-1] % 32 else kind]
    stored = gguf.quants.quantize(value.float().numpy(), chosen)
    writer.add_tensor(name, stored, raw_dtype=None if value.dim() == 1 else chosen)
    return torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(stored, chosen))).view(value.shape).clone()


def gguf_name(writer: gguf.GGUFWriter, name: str) -> str:
    """The name in the file of what ``_grouped`` calls so."""
    if writer.arch in ("glm4moe", "gpt-oss"):
        name = name.replace("post_attention_layernorm", "post_attention_norm")
    for ours, theirs in (*_NAMES.items(), ("post_attention_norm", "post_attention_norm")):
        if f"{ours}." in f"{name}.":
            return name.replace(ours, theirs).replace("model.layers.", "blk.")
    raise KeyError(name)


def _metadata(writer: gguf.GGUFWriter, architecture: str, config: Mapping[str, object], absorbed: bool) -> None:
    def integer(key: str, name: str, default: int = 0) -> None:
        value = config.get(name)
        writer.add_uint32(f"{architecture}.{key}", default if value is None else int(str(value)))

    for key, name in (
        ("context_length", "max_position_embeddings"),
        ("embedding_length", "hidden_size"),
        ("block_count", "num_hidden_layers"),
        ("feed_forward_length", "intermediate_size"),
        ("attention.head_count", "num_attention_heads"),
        ("expert_used_count", "num_experts_per_tok"),
    ):
        integer(key, name)
    counts = [config.get(name) for name in ("n_routed_experts", "num_experts", "num_local_experts")]
    writer.add_uint32(f"{architecture}.expert_count", next(int(str(count)) for count in counts if count))
    inner = "intermediate_size" if architecture == "gpt-oss" else "moe_intermediate_size"
    integer("expert_feed_forward_length", inner)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", float(str(config["rms_norm_eps"])))
    rope = config["rope_parameters"]
    assert isinstance(rope, Mapping)
    writer.add_float32(f"{architecture}.rope.freq_base", float(rope["rope_theta"]))
    if rope["rope_type"] == "yarn":
        writer.add_string(f"{architecture}.rope.scaling.type", "yarn")
        writer.add_float32(f"{architecture}.rope.scaling.factor", float(rope["factor"]))
        writer.add_uint32(
            f"{architecture}.rope.scaling.original_context_length", int(rope["original_max_position_embeddings"])
        )
    writer.add_eos_token_id(2)
    writer.add_token_list(["<a>"])
    if architecture == "deepseek2":
        _deepseek_metadata(writer, config, rope, absorbed)
        return
    head = int(str(config["head_dim"]))
    integer("attention.head_count_kv", "num_key_value_heads")
    writer.add_uint32(f"{architecture}.attention.key_length", head)
    writer.add_uint32(f"{architecture}.attention.value_length", head)
    if architecture == "gpt-oss":
        integer("attention.sliding_window", "sliding_window")
    if architecture == "glm4moe":
        writer.add_uint32(f"{architecture}.rope.dimension_count", head // 2)
        _scoring_metadata(writer, architecture, config, sigmoid=True)


def _deepseek_metadata(
    writer: gguf.GGUFWriter, config: Mapping[str, object], rope: Mapping[str, object], absorbed: bool
) -> None:
    sizes = {
        name: int(str(config[name])) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    }
    key, value = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"], sizes["v_head_dim"]
    ending = "_mla" if absorbed else ""
    writer.add_uint32(f"deepseek2.attention.key_length{ending}", key)
    writer.add_uint32(f"deepseek2.attention.value_length{ending}", value)
    if absorbed:
        writer.add_uint32("deepseek2.attention.key_length", sizes["kv_lora_rank"] + sizes["qk_rope_head_dim"])
        writer.add_uint32("deepseek2.attention.value_length", sizes["kv_lora_rank"])
    writer.add_uint32("deepseek2.attention.head_count_kv", 1 if absorbed else 4)
    writer.add_uint32("deepseek2.attention.kv_lora_rank", sizes["kv_lora_rank"])
    writer.add_uint32("deepseek2.rope.dimension_count", sizes["qk_rope_head_dim"])
    if config.get("q_lora_rank"):
        writer.add_uint32("deepseek2.attention.q_lora_rank", int(str(config["q_lora_rank"])))
    if rope.get("mscale_all_dim"):
        writer.add_float32("deepseek2.rope.scaling.yarn_log_multiplier", 0.1 * float(str(rope["mscale_all_dim"])))
    _scoring_metadata(writer, "deepseek2", config, sigmoid=config["model_type"] == "deepseek_v3")


def _scoring_metadata(
    writer: gguf.GGUFWriter, architecture: str, config: Mapping[str, object], *, sigmoid: bool
) -> None:
    for key, name in (
        ("expert_shared_count", "n_shared_experts"),
        ("expert_group_count", "n_group"),
        ("expert_group_used_count", "topk_group"),
        ("leading_dense_block_count", "first_k_dense_replace"),
    ):
        writer.add_uint32(f"{architecture}.{key}", int(str(config[name])))
    writer.add_float32(f"{architecture}.expert_weights_scale", float(str(config["routed_scaling_factor"])))
    if sigmoid:
        writer.add_uint32(f"{architecture}.expert_gating_func", 2)
        writer.add_bool(f"{architecture}.expert_weights_norm", bool(config.get("norm_topk_prob", True)))
