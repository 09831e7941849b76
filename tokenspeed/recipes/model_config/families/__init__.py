"""How each family of checkpoints describes itself: one reader an architecture, by the class name in config.json."""

from collections.abc import Callable

from tokenspeed.recipes.model_config.families import dense, latent, mixture
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
    "DeepseekV3ForCausalLM": ("deepseek_v3", latent.deepseek_v3),
    "Kimi_K25ForConditionalGeneration": ("kimi_k25", latent.kimi_k25),
    "KimiK25ForConditionalGeneration": ("kimi_k25", latent.kimi_k25),
}
"""Class name to our name of the architecture, which is transformers' model_type, and its reader."""
