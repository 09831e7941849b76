"""Tiny random models whose attention chooses what it reads, made by transformers."""

from typing import TYPE_CHECKING

import torch
from tiny_models import VOCABULARY

if TYPE_CHECKING:
    import transformers

SPARSE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "index_n_heads": 32,
    "index_head_dim": 16,
    "index_topk": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}
"""With so many index heads the scores of two tokens are hardly ever equal."""

CASES = {
    "deepseek_v32": ("DeepseekV32", {}),
    "deepseek_v32-dense": ("DeepseekV32", {"first_k_dense_replace": 3}),
    "glm_moe_dsa": ("GlmMoeDsa", {"n_group": 1}),
    "glm_moe_dsa-shared": ("GlmMoeDsa", {"n_group": 1, "indexer_types": ["full", "shared", "full"]}),
}
"""By name, the prefix of transformers' classes and what differs from SPARSE."""


def sparse_config(case: str) -> "transformers.PretrainedConfig":
    """The configuration of one of CASES."""
    import transformers

    family, changes = CASES[case]
    return getattr(transformers, f"{family}Config")(**{**SPARSE, **changes})


def sparse_model(case: str) -> torch.nn.Module:
    """A random float32 model of one of CASES, the same at every call."""
    import transformers

    torch.manual_seed(7)
    model = getattr(transformers, f"{CASES[case][0]}ForCausalLM")(sparse_config(case))
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            with torch.no_grad():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.1)
    return model.eval()


COMPRESSED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "q_lora_rank": 32,
    "partial_rotary_factor": 0.25,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "sliding_window": 16,
    "o_groups": 2,
    "o_lora_rank": 16,
    "hc_mult": 2,
    "index_n_heads": 32,
    "index_head_dim": 16,
    "index_topk": 5,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}

_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
COMPRESSED_CASES: dict[str, dict[str, object]] = {
    "all-kinds": {},
    "sparse-alone": {"layer_types": ["compressed_sparse_attention"] * 4, "hc_mult": 3, "index_topk": 3},
    "heavy-and-window": {"layer_types": ["heavily_compressed_attention", "sliding_attention"] * 2},
    "scaled-rotary": {"rope_parameters": _YARN},
}
"""By name, what differs from COMPRESSED."""


def compressed_config(case: str, **changes: object) -> "transformers.PretrainedConfig":
    """The configuration of one of COMPRESSED_CASES with ``changes``."""
    import transformers

    return transformers.DeepseekV4Config(**{**COMPRESSED, **COMPRESSED_CASES[case], **changes})


def compressed_model(case: str, **changes: object) -> torch.nn.Module:
    """A random float32 DeepseekV4ForCausalLM of one of COMPRESSED_CASES, the same at every call."""
    import transformers

    torch.manual_seed(7)
    model = transformers.DeepseekV4ForCausalLM(compressed_config(case, **changes))
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("norm", "sinks", "position_bias", "base", "scale")):
            with torch.no_grad():
                parameter.add_(torch.randn_like(parameter) * 0.3)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.1)
        if name.endswith("tid2eid"):
            buffer.copy_(torch.rand(VOCABULARY, 8).argsort(dim=1)[:, : buffer.shape[1]])
    return model.eval()
