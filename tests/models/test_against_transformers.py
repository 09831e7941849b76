"""Logits and greedy tokens of variants of tiny random models equal those of transformers, in float32 at 1e-4; what
every architecture is tested with is in test_families.py."""

from pathlib import Path

import pytest
import torch
from model_checks import check_prompt
from tiny_models import REFERENCE, build, resolved, save, transformers_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.8,
    "mscale_all_dim": 0.7,
}
CASES = {
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-rope-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}),
    "llama-rope-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 4}),
    "qwen3-tied-bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "mistral-windows": ("mistral", {"sliding_window": 12}),
    "qwen3_moe-some-dense": ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": False}),
    "deepseek_v3-yarn": ("deepseek_v3", {"rope_parameters": YARN}),
    "deepseek_v3-plain-queries": ("deepseek_v3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "llama-rope-yarn": ("llama", {"rope_parameters": {**YARN, "mscale": None, "mscale_all_dim": None}}),
}
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [100], list(range(40)))


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    family, changes = CASES[request.param]
    model = transformers_model(family, **changes)
    return model, save(model, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("kernels", [{}, REFERENCE], ids=["chosen", "reference"])
def test_logits_and_greedy_tokens(pair: tuple[torch.nn.Module, Path], kernels: dict[str, str]) -> None:
    model, folder = pair
    device = build(resolved(folder, kernels=kernels))
    try:
        for prompt in PROMPTS:
            check_prompt(model, device, list(prompt))
    finally:
        device.handle.shutdown()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_read_as_they_are(dtype: torch.dtype, tmp_path: Path) -> None:
    """The reference computes in float32 on the same rounded weights; the cache is float32 too."""
    reference = transformers_model("qwen3")
    with torch.no_grad():  # the parameters only: Module.to would round the table of rotary frequencies too
        for parameter in reference.parameters():
            parameter.copy_(parameter.to(dtype))
    folder = save(transformers_model("qwen3").to(dtype), tmp_path)
    device = build(resolved(folder, kv_dtype="float32", activations="float32"))
    try:
        check_prompt(reference, device, list(PROMPTS[0]))
    finally:
        device.handle.shutdown()
