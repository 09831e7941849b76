"""Whole models over the stand-in's operators, with the execution plane's own arena, tables and batches: what they give
is near what the references make of the same weights."""

from pathlib import Path

import numpy as np
import pytest
from check_numerics import NPU
from model_checks import all_logprobs
from plan_maker import Request, groups_of, run
from tiny_models import REFERENCE, build, prompt_of, resolved, save, transformers_model

from tokenspeed.device.builder import DeviceBuild
from tokenspeed_kernel.platform import override_platform

GRANULARITY = 16
TOLERANCE = 0.15
"""Of a log-probability, for products, attention and its result rounded to bfloat16 in two layers or three."""

LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "head_dim": 64}
MODELS: dict[str, tuple[dict[str, object], set[str]]] = {
    "qwen3": (
        {"head_dim": 128},
        {"attention.decode", "attention.extend", "attention.gqa_prologue", "norm.rms", "gemm.linear"},
    ),
    "qwen3_moe": ({}, {"attention.decode", "attention.extend", "moe.route", "moe.experts"}),
    "gpt_oss": ({}, {"attention.decode", "attention.extend", "moe.route"}),
    "deepseek_v3": (LATENT, {"attention.mla_prologue", "attention.mla_decode", "attention.mla_extend", "moe.experts"}),
}
"""Family to what differs from its tiny model, and to the operations that must have been ours."""


def batch() -> list[Request]:
    prompts = [prompt_of(45), prompt_of(3, 1), prompt_of(1, 2)]
    return [Request(prompt=p, row=row, max_new_tokens=6, chunk=20) for row, p in enumerate(prompts, start=1)]


def tokens_of(device: DeviceBuild) -> list[list[int]]:
    return run(device.handle, batch(), granularity=GRANULARITY, groups=groups_of(device.specs))


@pytest.mark.long
@pytest.mark.parametrize("family", MODELS)
def test_a_model_of_our_kernels_is_near_the_references(family: str, tmp_path: Path) -> None:
    changes, operations = MODELS[family]
    folder = save(transformers_model(family, **changes).bfloat16(), tmp_path)
    exact = build(resolved(folder, kernels=REFERENCE, kv_dtype="bfloat16", activations="float32"))
    with override_platform(NPU):
        ours = build(resolved(folder, kv_dtype="bfloat16", activations="bfloat16"))
    try:
        chosen = ours.specs.kernels
        assert operations <= {operation for operation, name in chosen.items() if name.startswith("npu_")}
        (_, expected), (_, found) = (all_logprobs(device, prompt_of(40), 17) for device in (exact, ours))
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)
        assert all(len(tokens) == 6 for tokens in tokens_of(ours))
    finally:
        exact.handle.shutdown()
        ours.handle.shutdown()
