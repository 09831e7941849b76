"""Tiny random models whose attention chooses what it reads, made by transformers."""

import torch
from tiny_models import VOCABULARY

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
    "rms_norm_eps": 1e-5,
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


def sparse_model(case: str) -> torch.nn.Module:
    """A random float32 model of one of CASES, the same at every call."""
    import transformers

    family, changes = CASES[case]
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**{**SPARSE, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            with torch.no_grad():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.1)
    return model.eval()
