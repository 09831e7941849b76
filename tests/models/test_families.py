"""Every architecture, and what its checkpoints may have (sinks, caps, norms behind blocks, partial rotary, latents,
states), against transformers."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from model_checks import check_prompt, run_all, step
from plan_maker import PlanMaker, Request, groups_of, run
from tiny_models import REFERENCE, TINY, build, resolved, save, transformers_model

from tokenspeed.device.builder import POISON_VARIABLE, DeviceBuild
from tokenspeed.recipes.capacity import cache_shape
from tokenspeed.recipes.dimensions import dimensions_of
from tokenspeed.recipes.dimensions import groups_of as groups_of_model
from tokenspeed.recipes.memory import cpu_workspace_term
from tokenspeed.recipes.model_config import read_model_config

YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
BY_KIND = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
CASES: dict[str, tuple[str, dict[str, object]]] = {
    **{family: (family, {}) for family in TINY},
    "gpt_oss": ("gpt_oss", {"rope_parameters": YARN, "attn_implementation": "eager"}),
    "glm4_moe": ("glm4_moe", {"attention_bias": True}),
    "glm4_moe-plain-heads": ("glm4_moe", {"use_qk_norm": False, "n_group": 2, "topk_group": 1}),
    "minimax_m2": ("minimax_m2", {"rotary_dim": 8}),
    "deepseek_v2-greedy": ("deepseek_v2", {"topk_method": "greedy", "q_lora_rank": None}),
    "glm4_moe_lite": ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "gemma3": ("gemma3", {"rope_parameters": BY_KIND}),
    "gemma3-caps": ("gemma3", {"final_logit_softcapping": 2.0, "tie_word_embeddings": True}),
    "ernie4_5_moe-some": (
        "ernie4_5_moe",
        {"moe_layer_interval": 2, "moe_num_shared_experts": 0, "moe_layer_end_index": 3},
    ),
    "mixtral-windows": ("mixtral", {"sliding_window": 12}),
    "smollm3-windows": ("smollm3", {"use_sliding_window": True, "sliding_window": 12, "mlp_bias": True}),
    "qwen3_next-some-dense": (
        "qwen3_next",
        {"mlp_only_layers": [1], "norm_topk_prob": False, "linear_conv_kernel_dim": 2},
    ),
    "qwen3_5": ("qwen3_5", {"tie_word_embeddings": True}),
    "kimi_linear-compressed": ("kimi_linear", {"q_lora_rank": 24, "num_expert_group": 1, "topk_group": 1}),
}
"""Every architecture of TINY by its own name, and what else its checkpoints may have."""

CHUNK = 256
"""As much as states are kept apart."""

PROMPT = [(7 * i * i + 3 * i) % 127 + 1 for i in range(40)]
LENGTHS = (40, 3, 17)


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody wrote reads as NaN."""
    monkeypatch.setenv(POISON_VARIABLE, "1")


LONG = ("qwen3_next-some-dense", "kimi_linear-compressed")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in CASES]
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    family, changes = CASES[request.param]
    model = transformers_model(family, **changes)
    return model, save(model, tmp_path_factory.mktemp(request.param))


def outputs(device: DeviceBuild, chunk: int) -> Iterator[list[int]]:
    """Of prompts of several lengths, in company."""
    requests = [
        Request(prompt=PROMPT[:length], row=row, max_new_tokens=20, chunk=chunk)
        for row, length in enumerate(LENGTHS, start=1)
    ]
    yield from run(device.handle, requests, granularity=16, groups=groups_of(device.specs))


def alone(device: DeviceBuild) -> Iterator[list[int]]:
    for length in LENGTHS:
        request = Request(prompt=PROMPT[:length], row=1, max_new_tokens=20)
        yield run(device.handle, [request], granularity=16, groups=groups_of(device.specs))[0]


def after_a_hit(device: DeviceBuild) -> list[int]:
    """Of the whole prompt, by a request that goes on from what another has left of its first 32 tokens: of a full
    history all blocks, of a window the last ones, of a state the state."""
    groups, cached = groups_of(device.specs), 32
    maker = PlanMaker(16, groups)
    first = Request(prompt=PROMPT, row=1, max_new_tokens=20, chunk=cached)
    step(device, *maker.plan([first]), [first])
    held = []
    for blocks, group in zip(first.blocks, groups, strict=True):
        gone = max(0, cached - (group.window - 1)) // 16 if group.window else 0
        held.append(blocks[-1:] if group.is_state else [0] * gone + blocks[gone:])
    second = Request(prompt=PROMPT, row=2, max_new_tokens=20, cached=cached, blocks=held)
    run_all(device, maker, [second])
    return second.output


def test_logits_greedy_tokens_chunks_company_and_hits(
    pair: tuple[torch.nn.Module, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The kernels that are chosen, past every window; neither chunks, company nor a prefix hit change a token; steps
    are recorded."""
    model, folder = pair
    with caplog.at_level(logging.INFO, logger="tokenspeed.device.graphs"):
        device = build(resolved(folder, chunk=CHUNK, enforce="determinism"))
    try:
        assert all(name.startswith("cpu_") for name in device.specs.kernels.values())
        assert "decode steps are not captured" not in caplog.text
        for chunk in (1 << 30, 7):
            check_prompt(model, device, PROMPT, chunk=chunk)
        expected = list(alone(device))
        assert list(outputs(device, 64)) == expected
        assert list(outputs(device, 5)) == expected
        assert after_a_hit(device) == expected[0]
    finally:
        device.handle.shutdown()


def test_the_plan_counts_what_the_model_takes(pair: tuple[torch.nn.Module, Path]) -> None:
    _, folder = pair
    settings = resolved(folder, chunk=CHUNK)
    model, chunk, seqs = read_model_config(settings.model), settings.scheduler.chunk, settings.scheduler.max_seqs
    device = build(settings)
    device.handle.shutdown()
    positions = device.specs.max_model_len + settings.scheduler.overlap
    planned = cpu_workspace_term(
        dimensions_of(model), stored=model.dtype, chunk=chunk, max_seqs=seqs, positions=positions
    )
    assert planned.bytes == device.specs.workspace_bytes
    assert cache_shape(groups_of_model(model), "float32", granularity=16).facts == device.specs.groups


def test_the_references_agree(pair: tuple[torch.nn.Module, Path]) -> None:
    model, folder = pair
    device = build(resolved(folder, chunk=CHUNK, kernels=REFERENCE))
    try:
        check_prompt(model, device, PROMPT[:30], new_tokens=8, chunk=13)
    finally:
        device.handle.shutdown()
