"""How each family of checkpoints describes itself: one reader an architecture, by the class name in config.json."""

from collections.abc import Callable

from tokenspeed.recipes.model_config.families import (
    compressed,
    dense,
    gemma,
    glm,
    gpt_oss,
    hybrid,
    latent,
    mixtral,
    mixture,
    sparse,
)
from tokenspeed.recipes.model_config.fields import Fields
from tokenspeed.recipes.model_config.huggingface import Generation
from tokenspeed.recipes.model_config.types import ModelConfig

Reader = Callable[[Fields, Generation], ModelConfig]

FAMILIES: dict[str, tuple[str, Reader]] = {
    "LlamaForCausalLM": ("llama", dense.llama),
    "MistralForCausalLM": ("mistral", dense.mistral),
    "Qwen2ForCausalLM": ("qwen2", dense.qwen2),
    "Qwen3ForCausalLM": ("qwen3", dense.qwen3),
    "Qwen3MoeForCausalLM": ("qwen3_moe", mixture.qwen3_moe),
    "Qwen3NextForCausalLM": ("qwen3_next", hybrid.qwen3_next),
    "Qwen3_5ForCausalLM": ("qwen3_5", hybrid.qwen3_5),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", hybrid.qwen3_5),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe", hybrid.qwen3_5_moe),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", hybrid.qwen3_5_moe),
    "KimiLinearForCausalLM": ("kimi_linear", hybrid.kimi_linear),
    "DeepseekV3ForCausalLM": ("deepseek_v3", latent.deepseek_v3),
    "GptOssForCausalLM": ("gpt_oss", gpt_oss.gpt_oss),
    "Glm4ForCausalLM": ("glm4", glm.glm4),
    "Glm4MoeForCausalLM": ("glm4_moe", glm.glm4_moe),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite", latent.glm4_moe_lite),
    "MiniMaxM2ForCausalLM": ("minimax_m2", mixtral.minimax_m2),
    "MixtralForCausalLM": ("mixtral", mixtral.mixtral),
    "Gemma2ForCausalLM": ("gemma2", gemma.gemma2),
    "Gemma3ForCausalLM": ("gemma3", gemma.gemma3),
    "Gemma3ForConditionalGeneration": ("gemma3", gemma.gemma3_with_vision),
    "DeepseekV2ForCausalLM": ("deepseek_v2", latent.deepseek_v2),
    "Mistral4ForCausalLM": ("mistral4", latent.mistral4),
    "DeepseekV32ForCausalLM": ("deepseek_v32", sparse.deepseek_v32),
    "DeepseekV4ForCausalLM": ("deepseek_v4", compressed.deepseek_v4),
    "GlmMoeDsaForCausalLM": ("glm_moe_dsa", sparse.glm_moe_dsa),
    "Kimi_K25ForConditionalGeneration": ("kimi_k25", latent.kimi_k25),
    "KimiK25ForConditionalGeneration": ("kimi_k25", latent.kimi_k25),
    "SmolLM3ForCausalLM": ("smollm3", dense.smollm3),
    "Ernie4_5_MoeForCausalLM": ("ernie4_5_moe", mixture.ernie4_5_moe),
}
"""Class name to our name of the architecture, which is transformers' model_type, and its reader."""
