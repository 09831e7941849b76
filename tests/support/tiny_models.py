"""Tiny random checkpoints made by transformers, and the device side built over one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tokenspeed.device.builder import DeviceBuild, build_device_side
from tokenspeed.layers.kernel_choice import OPERATIONS
from tokenspeed.recipes.model_config import read_model_config
from tokenspeed.recipes.resolved import KVConfig, ModelSource, ResolvedConfig, SchedulerSettings

if TYPE_CHECKING:
    import transformers

VOCABULARY = 128
REFERENCE = dict.fromkeys(OPERATIONS, "reference")
"""For ``kernels``: the PyTorch reference of every operation."""

_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


_EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
_DEEPSEEK = {
    **_EXPERTS,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "head_dim": 8,  # what transformers calls so is the rotated part
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}

_MISTRAL4 = {
    **_DEEPSEEK,
    "head_dim": 24,  # here it is the whole head
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
        "partial_rotary_factor": 8 / 24,
    },
}

_HYBRID = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
_SHARED = {**_EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 48}
_KIMI_LINEAR = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "head_dim": 8,
    "linear_head_dim": 16,
    "linear_num_heads": 3,
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "num_expert_group": 4,
    "topk_group": 2,
    "pad_token_id": 0,
}

TINY: dict[str, tuple[str, str, dict[str, object]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**_EXPERTS, "num_experts": 6, "norm_topk_prob": True}),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**_HYBRID, **_SHARED}),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _HYBRID),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**_HYBRID, **_SHARED}),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM", _KIMI_LINEAR),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", _DEEPSEEK),
    "deepseek_v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**_DEEPSEEK, "topk_method": "group_limited_greedy", "rms_norm_eps": 1e-5, "num_experts_per_tok": 3},
    ),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", {**_DEEPSEEK, "n_group": 1, "topk_group": 1}),
    "mistral4": ("Mistral4Config", "Mistral4ForCausalLM", _MISTRAL4),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {"pad_token_id": 0}),
    "glm4_moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {**_EXPERTS, "num_hidden_layers": 3, "n_routed_experts": 8, "n_shared_experts": 1, "use_qk_norm": True},
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 12,
            "swiglu_limit": 1.5,
            "pad_token_id": 0,
        },
    ),
    "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"sliding_window": 12, "attn_logit_softcapping": 1.5, "attn_implementation": "eager", "num_hidden_layers": 3},
    ),
    "smollm3": (
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        {"num_hidden_layers": 5, "no_rope_layer_interval": 2, "tie_word_embeddings": True, "pad_token_id": 0},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        {
            "num_hidden_layers": 4,
            "moe_intermediate_size": 48,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_layer_end_index": 2,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"num_hidden_layers": 3, "sliding_window": 12, "sliding_window_pattern": 3, "query_pre_attn_scalar": 24},
    ),
}
"""Of each architecture: the classes of transformers' configuration and model, and what differs from the base."""


def tiny_config(family: str, **changes: object) -> "transformers.PretrainedConfig":
    """The configuration of ``family``'s tiny model with ``changes``."""
    import transformers

    name, _, own = TINY[family]
    return getattr(transformers, name)(**{**_BASE, **own, **changes})


def transformers_model(family: str, **changes: object) -> torch.nn.Module:
    """A random float32 model of ``family``, the same for the same arguments. No weight is 0 or 1 throughout, so that
    one that is left out shows."""
    import transformers

    torch.manual_seed(7)
    model = getattr(transformers, TINY[family][1])(tiny_config(family, **changes))
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name or name.endswith("bias"):
                value.add_(torch.randn_like(value) * 0.1)
            elif name.endswith("sinks"):
                value.copy_(torch.randn_like(value) * 2.0)
            elif "experts" in name or name.endswith(("gate.weight", "router.weight")):
                value.copy_(torch.randn_like(value) * value.shape[-1] ** -0.5)
    return model.eval()


def save(model: torch.nn.Module, folder: Path) -> Path:
    """Saves as safetensors with its configuration; returns ``folder``."""
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def prompt_of(length: int, start: int = 0) -> list[int]:
    """Token ids below VOCABULARY, none of them 0; another sequence for each ``start``."""
    return [(7 * i * i + 3 * i + 11 * start) % (VOCABULARY - 1) + 1 for i in range(length)]


def random_config(**changes: object) -> str:
    """An HF-style configuration for ``random`` weights, as JSON text."""
    return json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_BASE, **changes})


def resolved(
    source: ModelSource | Path,
    *,
    kernels: Mapping[str, str] | None = None,
    granularity: int = 16,
    max_seqs: int = 4,
    chunk: int = 64,
    max_len: int = 128,
    overlap: int = 1,
    kv_dtype: str = "auto",
    kv_bytes: int = 0,
    host_bytes: int = 0,
    enforce: str = "latency",
    activations: str = "auto",
) -> ResolvedConfig:
    """A configuration of test size for a checkpoint folder or a source."""
    model = ModelSource(kind="folder", path=str(source)) if isinstance(source, Path) else source
    return ResolvedConfig(
        name="tiny",
        served_name="tiny",
        model=model,
        threads=1,
        kv=KVConfig(dtype=kv_dtype, granularity=granularity, bytes=kv_bytes, host_bytes=host_bytes),
        scheduler=SchedulerSettings(max_len=max_len, max_seqs=max_seqs, chunk=chunk, overlap=overlap),
        kernels=dict(kernels or {}),
        enforce=enforce,
        activations=activations,
    )


def build(config: ResolvedConfig) -> DeviceBuild:
    """The device side of ``config``; the caller shuts its handle down."""
    return build_device_side(config, read_model_config(config.model), report=lambda phase, done, total, detail: None)
