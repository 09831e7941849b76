"""Several ranks have the logits that one has, for every architecture and either way of sharing experts."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from model_checks import all_logprobs
from plan_maker import Request, groups_of, run
from sparse_models import compressed_model, sparse_model
from thread_ranks import build_ranks
from tiny_models import TINY, build, prompt_of, resolved, save, transformers_model

from tokenspeed.device.builder import DeviceBuild

TOLERANCE = 2e-5
DIVISIBLE: dict[str, dict[str, object]] = {
    "qwen3_next": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "qwen3_5": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "qwen3_5_moe": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "kimi_linear": {"linear_num_heads": 4},
}
"""What the tiny models of these have otherwise, so that four ranks can share them."""
MODELS = {
    **{family: partial(transformers_model, family, **DIVISIBLE.get(family, {})) for family in TINY},
    "deepseek_v32": partial(sparse_model, "deepseek_v32"),
    "glm_moe_dsa": partial(sparse_model, "glm_moe_dsa-shared"),
    "deepseek_v4": partial(compressed_model, "all-kinds"),
}
MIXTURES = ("deepseek_v3", "qwen3_moe", "gpt_oss", "mixtral", "qwen3_5_moe", "deepseek_v4")
SHORT = {
    "two": ("llama", "qwen3_5", "gpt_oss", "glm4", "deepseek_v4"),
    "whole experts": ("deepseek_v3",),
    "four": ("minimax_m2",),
}
"""Those that the short run takes; between them they have every kind of layer and of weight."""


def of(kind: str, families: Iterable[str]) -> list[object]:
    return [pytest.param(name, marks=() if name in SHORT[kind] else pytest.mark.long) for name in families]


def generated(device: DeviceBuild, prompt: list[int]) -> list[int]:
    asked = [Request(prompt=prompt, row=1, max_new_tokens=12, chunk=9)]
    return run(device.handle, asked, granularity=16, groups=groups_of(device.specs))[0]


def check(family: str, tmp_path: Path, world: int, *, by_expert: bool = False) -> None:
    folder = save(MODELS[family](), tmp_path)
    prompt, config = prompt_of(21), resolved(folder, max_seqs=2, chunk=256, max_len=200)
    alone, ranks = build(config), build_ranks(config, world, by_expert=by_expert)
    try:
        first, expected = all_logprobs(alone, prompt, 9)
        token, found = all_logprobs(ranks, prompt, 9)
        np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
        assert token == first
        assert generated(ranks, prompt) == generated(alone, prompt)
        assert ranks.specs.weight_bytes < alone.specs.weight_bytes
    finally:
        alone.handle.shutdown()
        ranks.handle.shutdown()


@pytest.mark.parametrize("family", of("two", MODELS))
def test_two_ranks_have_the_logits_of_one(family: str, tmp_path: Path) -> None:
    check(family, tmp_path, 2)


@pytest.mark.parametrize("family", of("whole experts", MIXTURES))
def test_two_ranks_with_whole_experts_have_the_logits_of_one(family: str, tmp_path: Path) -> None:
    check(family, tmp_path, 2, by_expert=True)


@pytest.mark.parametrize("family", of("four", ("minimax_m2", "llama", "deepseek_v3", "kimi_linear")))
def test_four_ranks_have_the_logits_of_one(family: str, tmp_path: Path) -> None:
    """Of the two KV heads each is on two of them."""
    check(family, tmp_path, 4)
