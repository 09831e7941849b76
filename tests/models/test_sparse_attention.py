"""Models whose attention reads the tokens that an indexer chose: equal to transformers' full forward, however prompts
are cut, whatever else runs, after a prefix hit, and with recorded decode steps."""

from pathlib import Path

import pytest
import torch
from model_checks import check_prompt, run_all, step
from plan_maker import PlanMaker, Request, groups_of
from sparse_models import CASES, SPARSE, sparse_model
from tiny_models import REFERENCE, build, prompt_of, resolved, save

from tokenspeed.device import builder
from tokenspeed.device.builder import POISON_VARIABLE
from tokenspeed.device.cache_arena import ArenaLayout
from tokenspeed.device.graphs.decode import CapturedDecode
from tokenspeed.models import architecture
from tokenspeed.recipes.capacity import cache_shape
from tokenspeed.recipes.checkpoint_error import CheckpointError
from tokenspeed.recipes.dimensions import dimensions_of
from tokenspeed.recipes.dimensions import groups_of as planned_groups
from tokenspeed.recipes.memory import cpu_workspace_term
from tokenspeed.recipes.model_config import ModelConfig, read_model_config
from tokenspeed.recipes.resolved import ModelSource


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[torch.nn.Module, Path]]:
    models = {case: sparse_model(case) for case in CASES}
    return {case: (model, save(model, tmp_path_factory.mktemp(case))) for case, model in models.items()}


Pairs = dict[str, tuple[torch.nn.Module, Path]]


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody wrote reads as NaN."""
    monkeypatch.setenv(POISON_VARIABLE, "1")


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens(pairs: Pairs, case: str) -> None:
    """Prompts that see all of themselves (5 tokens) and prompts that must choose; in chunks of several sizes."""
    model, folder = pairs[case]
    device = build(resolved(folder))
    try:
        for length, chunk in ((5, 64), (40, 64), (40, 7)):
            check_prompt(model, device, prompt_of(length), new_tokens=12, chunk=chunk)
    finally:
        device.handle.shutdown()


@pytest.mark.parametrize("case", ["deepseek_v32", "glm_moe_dsa-shared"])
def test_the_reference_kernels_agree(pairs: Pairs, case: str) -> None:
    model, folder = pairs[case]
    device = build(resolved(folder, kernels=REFERENCE))
    try:
        check_prompt(model, device, prompt_of(40), new_tokens=4, chunk=16)
    finally:
        device.handle.shutdown()


@pytest.mark.parametrize("case", ["deepseek_v32", "glm_moe_dsa-shared"])
def test_company_chunks_and_prefix_hits_change_no_bit(pairs: Pairs, case: str) -> None:
    _, folder = pairs[case]
    device = build(resolved(folder, chunk=128, enforce="determinism"))
    try:

        def outputs(chunk: int, together: bool) -> list[list[int]]:
            maker = PlanMaker(16, groups_of(device.specs))
            requests = [
                Request(prompt=prompt_of(length), row=row, max_new_tokens=20, chunk=chunk)
                for row, length in enumerate((50, 3, 33), start=1)
            ]
            for batch in [requests] if together else [[request] for request in requests]:
                run_all(device, maker, batch)
            return [request.output for request in requests]

        alone = outputs(128, together=False)
        assert outputs(128, together=True) == alone
        for chunk in (1, 5, 16):
            assert outputs(chunk, together=True) == alone

        maker = PlanMaker(16, groups_of(device.specs))
        first = Request(prompt=prompt_of(50), row=1, max_new_tokens=20, chunk=32)
        step(device, *maker.plan([first]), [first])
        assert first.computed == 32
        held = [list(blocks) for blocks in first.blocks]
        second = Request(prompt=prompt_of(50), row=2, max_new_tokens=20, cached=32, blocks=held)
        run_all(device, maker, [first, second])
        assert first.output == second.output == alone[0]
    finally:
        device.handle.shutdown()


def test_decode_steps_are_recorded(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a decode is kernels: tokens selected anew in each replay, lengths that grow past what is chosen."""
    made: list[CapturedDecode] = []

    class Kept(CapturedDecode):
        def __init__(self, *arguments: object, **more: object) -> None:
            super().__init__(*arguments, **more)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(builder, "CapturedDecode", Kept)
    model, folder = pairs["deepseek_v32-dense"]
    device = build(resolved(folder))
    try:
        check_prompt(model, device, prompt_of(9), new_tokens=20)
        assert 1 in made[0].sizes
    finally:
        device.handle.shutdown()


def _config(pairs: Pairs, case: str) -> ModelConfig:
    return read_model_config(ModelSource(kind="folder", path=str(pairs[case][1])))


@pytest.mark.parametrize("case", CASES)
def test_names_shapes_and_plans_are_those_of_the_real_model(pairs: Pairs, case: str) -> None:
    model, folder = pairs[case]
    config = _config(pairs, case)
    family = architecture(config.architecture)
    stored = {tensor.name: tensor.shape for spec in family.weights(config, rank=0, world=1) for tensor in spec.tensors}
    theirs = {name for name in model.state_dict() if ".experts." not in name}
    assert {name for name in stored if ".experts." not in name} == theirs
    for granularity, dtype, name in (
        (32, torch.float32, "float32"),
        (16, torch.bfloat16, "bfloat16"),
        (32, torch.float8_e4m3fn, "float8_e4m3"),
    ):
        layout = ArenaLayout.of(family.cache_groups(config, granularity=granularity), dtype)
        shape = cache_shape(planned_groups(config), name, granularity=granularity)
        assert (shape.facts, shape.parent_bytes) == (layout.facts, layout.parent_bytes)
    settings = resolved(folder)
    device = build(settings)
    try:
        term = cpu_workspace_term(
            dimensions_of(config),
            stored=config.dtype,
            chunk=settings.scheduler.chunk,
            max_seqs=settings.scheduler.max_seqs,
            positions=device.specs.max_model_len + settings.scheduler.overlap,
        )
        assert device.specs.workspace_bytes == term.bytes
    finally:
        device.handle.shutdown()


GLM = {**SPARSE, "architectures": ["GlmMoeDsaForCausalLM"], "num_hidden_layers": 5, "n_group": 1}


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (0, 1, 2, 3, 4)),
        ({"index_topk_freq": 2}, (0, 1, 3)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 1}, (0, 4)),
        ({"index_topk_pattern": "FSSFS"}, (0, 3)),
        ({"indexer_types": ["full", "shared", "full", "shared", "shared"]}, (0, 2)),
    ],
)
def test_which_layers_have_an_indexer(changes: dict[str, object], layers: tuple[int, ...]) -> None:
    import json

    source = ModelSource(kind="random", random_config=json.dumps({**GLM, **changes}))
    index = read_model_config(source).index
    assert index is not None
    assert (index.layers, index.paired) == (layers, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_topk_pattern": "SFFFF"}, "the first layer has no indexer"),
        ({"index_topk_pattern": "FF"}, "full or shared is said for each of the 5 layers"),
        ({"index_topk_pattern": "FFXFF"}, "full or shared is said"),
        ({"index_head_dim": 4}, "check index_n_heads, index_head_dim and index_topk"),
        ({"q_lora_rank": 0}, "an indexer works on compressed queries"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave is False"),
    ],
)
def test_configurations_that_cannot_be_are_refused(changes: dict[str, object], message: str) -> None:
    import json

    with pytest.raises(CheckpointError, match=message):
        read_model_config(ModelSource(kind="random", random_config=json.dumps({**GLM, **changes})))
