"""A cache of 8 bits is a cache of float32 whose values were rounded to 8: the same log-probabilities, for every kind of
cache group, however prompts are cut; with the chosen kernels as with the references."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_checks import all_logprobs
from plan_maker import Request, groups_of, run
from sparse_models import compressed_model, sparse_model
from thread_ranks import build_ranks
from tiny_models import REFERENCE, build, prompt_of, resolved, save, transformers_model

from tokenspeed.device.builder import POISON_VARIABLE, DeviceBuild
from tokenspeed.layers import compressed_attention
from tokenspeed.layers.kernels import KernelBinder
from tokenspeed_kernel.ops import attention, compressed, kv_cache, mla, sparse

FAMILIES: dict[str, Callable[[], torch.nn.Module]] = {
    "llama": lambda: transformers_model("llama"),
    "gpt_oss": lambda: transformers_model("gpt_oss", attn_implementation="eager"),
    "qwen3_next": lambda: transformers_model("qwen3_next"),
    "deepseek_v3": lambda: transformers_model("deepseek_v3"),
    "kimi_linear": lambda: transformers_model("kimi_linear"),
    "deepseek_v32": lambda: sparse_model("deepseek_v32"),
    "deepseek_v4": lambda: compressed_model("all-kinds"),
}
PROMPT = prompt_of(50)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(FAMILIES[request.param](), tmp_path_factory.mktemp(request.param))


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody wrote reads as NaN."""
    monkeypatch.setenv(POISON_VARIABLE, "1")


def logprobs(folder: Path, chunk: int, **settings: Any) -> np.ndarray:
    """[50, vocabulary] after each token of the prompt."""
    device = build(resolved(folder, activations="float32", chunk=256, **settings))
    try:
        return all_logprobs(device, PROMPT, chunk)[1]
    finally:
        device.handle.shutdown()


def round_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """References that write to a float32 cache what one of 8 bits would hold, and of rows that entries are made of what
    bfloat16 would."""

    def rounded(x: torch.Tensor, _dtype: torch.dtype) -> torch.Tensor:
        return kv_cache.to_cached(x, torch.float8_e4m3fn).float()

    for module in (attention, mla, sparse, compressed):
        monkeypatch.setattr(module, "to_cached", rounded)
    made = KernelBinder.write_entries

    def write_rows(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        slots, page = slots.clamp(min=0), cache.shape[2]
        cache[slots // page, 0, slots % page] = x.bfloat16().float()

    def write_entries(self: KernelBinder, *, entry_dim: int, kv_dtype: object) -> object:
        kernel = made(self, entry_dim=entry_dim, kv_dtype=torch.float32)
        return write_rows if kv_dtype == "rows" else kernel

    monkeypatch.setattr(compressed_attention, "row_dtype", lambda _: "rows")
    monkeypatch.setattr(KernelBinder, "write_entries", write_entries)


def test_it_is_a_cache_of_rounded_values(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = logprobs(folder, 64, kernels=REFERENCE, kv_dtype="float32")
    eight = logprobs(folder, 64, kernels=REFERENCE, kv_dtype="float8_e4m3")
    with monkeypatch.context() as patch:
        round_what_is_written(patch)
        rounded = logprobs(folder, 64, kernels=REFERENCE, kv_dtype="float32")
    np.testing.assert_allclose(eight, rounded, atol=2e-5, rtol=0.0)
    assert np.abs(eight - exact).max() > 1e-3  # something was rounded


def test_the_chosen_kernels_agree_with_the_references(folder: Path) -> None:
    """Values that lie at the middle of two elements may fall on either side, and later ones follow: so on average."""
    reference = logprobs(folder, 64, kernels=REFERENCE, kv_dtype="float8_e4m3")
    exact = logprobs(folder, 64, kernels=REFERENCE, kv_dtype="float32")
    for chunk in (64, 7):
        chosen = logprobs(folder, chunk, kv_dtype="float8_e4m3")
        assert np.abs(chosen - reference).mean() < 0.1 * np.abs(exact - reference).mean()


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_ranks_hold_parts_of_it(family: str, tmp_path: Path) -> None:
    """Their sums are rounded in another order, so that values may fall on the other side of a middle: on average."""
    folder = save(FAMILIES[family](), tmp_path)
    exact, alone = (logprobs(folder, 64, kv_dtype=dtype) for dtype in ("float32", "float8_e4m3"))
    config = resolved(folder, activations="float32", chunk=256, kv_dtype="float8_e4m3")
    ranks = build_ranks(config, 2)
    try:
        shared = all_logprobs(ranks, PROMPT, 9)[1]
    finally:
        ranks.handle.shutdown()
    assert np.abs(shared - alone).mean() < 0.1 * np.abs(exact - alone).mean()


def generated(device: DeviceBuild, requests: list[Request]) -> list[list[int]]:
    try:
        return run(device.handle, requests, granularity=16, groups=groups_of(device.specs))
    finally:
        device.handle.shutdown()


def test_company_and_chunks_change_no_token_under_determinism(folder: Path) -> None:
    prompts = [prompt_of(50), prompt_of(3), prompt_of(33)]
    settings = {"kv_dtype": "float8_e4m3", "enforce": "determinism", "chunk": 256}
    asked = [Request(prompt=prompt, row=row, max_new_tokens=12) for row, prompt in enumerate(prompts, 1)]
    together = generated(build(resolved(folder, **settings)), asked)
    for prompt, tokens in zip(prompts, together, strict=True):
        alone = Request(prompt=prompt, row=1, max_new_tokens=12, chunk=7)
        assert generated(build(resolved(folder, **settings)), [alone]) == [tokens]
