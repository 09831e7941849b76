"""DeepSeek-V4: windows, compressed entries, residual streams and experts by a table, equal to transformers' full
forward however prompts are cut, whatever else runs, and after a prefix hit."""

import json
from pathlib import Path

import pytest
import torch
from model_checks import check_prompt, greedy, run_all, step
from plan_maker import PlanMaker, Request, groups_of
from sparse_models import COMPRESSED, COMPRESSED_CASES, compressed_model
from tiny_models import REFERENCE, build, prompt_of, resolved, save

from tokenspeed.device.builder import POISON_VARIABLE
from tokenspeed.device.cache_arena import ArenaLayout
from tokenspeed.models import architecture
from tokenspeed.recipes.capacity import cache_shape
from tokenspeed.recipes.checkpoint_error import CheckpointError
from tokenspeed.recipes.dimensions import dimensions_of
from tokenspeed.recipes.dimensions import groups_of as planned_groups
from tokenspeed.recipes.memory import cpu_workspace_term
from tokenspeed.recipes.model_config import ModelConfig, read_model_config
from tokenspeed.recipes.resolved import ModelSource
from tokenspeed.recipes.stored_weights import decoder_name

Pairs = dict[str, tuple[torch.nn.Module, Path]]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    models = {case: compressed_model(case) for case in COMPRESSED_CASES}
    return {case: (model, save(model, tmp_path_factory.mktemp(case))) for case, model in models.items()}


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody wrote reads as NaN."""
    monkeypatch.setenv(POISON_VARIABLE, "1")


@pytest.mark.parametrize("case", COMPRESSED_CASES)
def test_logits_and_greedy_tokens(pairs: Pairs, case: str) -> None:
    """A prompt shorter than any entry, and one with more entries than are chosen; chunks that end within entries."""
    model, folder = pairs[case]
    device = build(resolved(folder))
    try:
        check_prompt(model, device, prompt_of(3), new_tokens=4)
        for chunk in (64, 7) if case == "all-kinds" else (11,):
            check_prompt(model, device, prompt_of(50), new_tokens=20 if chunk == 7 else 2, chunk=chunk)
    finally:
        device.handle.shutdown()


def test_the_reference_kernels_agree(pairs: Pairs) -> None:
    model, folder = pairs["all-kinds"]
    device = build(resolved(folder, kernels=REFERENCE))
    try:
        check_prompt(model, device, prompt_of(40), new_tokens=2, chunk=16)
    finally:
        device.handle.shutdown()


def test_company_chunks_and_prefix_hits_change_no_token(pairs: Pairs) -> None:
    """Rows whose entries are complete at other steps, blocks recycled behind every window, and a hit on the last blocks
    of each window, which hold what the next entry still needs."""
    model, folder = pairs["all-kinds"]
    device = build(resolved(folder, chunk=128))
    prompts = [prompt_of(length) for length in (50, 3, 33)]
    expected = [greedy(model, prompt, 24)[0] for prompt in prompts]
    groups = groups_of(device.specs)
    try:
        for chunk in (128, 5):
            maker = PlanMaker(16, groups)
            requests = [
                Request(prompt=prompt, row=row, max_new_tokens=24, chunk=chunk) for row, prompt in enumerate(prompts, 1)
            ]
            run_all(device, maker, requests)
            assert [request.output for request in requests] == expected

        maker = PlanMaker(16, groups)
        first = Request(prompt=prompts[0], row=1, max_new_tokens=24, chunk=32)
        step(device, *maker.plan([first]), [first])
        assert first.computed == 32
        held = [list(blocks) for blocks in first.blocks]
        for blocks, group in zip(held, groups, strict=True):
            gone = (32 - (group.window - 1)) // 16 if group.window else 0
            blocks[:gone] = [0] * gone
        assert any(blocks[0] == 0 for blocks in held)
        second = Request(prompt=prompts[0], row=2, max_new_tokens=24, cached=32, blocks=held)
        run_all(device, maker, [first, second])
        assert first.output == second.output == expected[0]
    finally:
        device.handle.shutdown()


@pytest.mark.parametrize("case", COMPRESSED_CASES)
def test_plans_are_those_of_the_real_model(pairs: Pairs, case: str) -> None:
    _, folder = pairs[case]
    config = read_model_config(ModelSource(kind="folder", path=str(folder)))
    family = architecture(config.architecture)
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


def test_a_block_must_hold_whole_entries(pairs: Pairs) -> None:
    config = read_model_config(ModelSource(kind="folder", path=str(pairs["all-kinds"][1])))
    message = "kv.granularity is 8 tokens, an entry of cache group 'heavy_entries' stands for 16; set kv.granularity"
    with pytest.raises(ValueError, match=message):
        architecture("deepseek_v4").cache_groups(config, granularity=8)
    with pytest.raises(ValueError, match=message):
        cache_shape(planned_groups(config), "float32", granularity=8)


def test_makers_names_are_known() -> None:
    """Checkpoints come in the makers' names, or as transformers writes them."""
    for theirs, ours in (
        ("layers.3.attn.wq_a.weight", "model.layers.3.attn.wq_a.weight"),
        ("layers.3.attn.kv_norm.weight", "model.layers.3.attn.norm.weight"),
        ("model.layers.3.attn.norm.weight", "model.layers.3.attn.norm.weight"),
        ("embed.weight", "model.embed_tokens.weight"),
        ("norm.weight", "model.norm.weight"),
        ("head.weight", "lm_head.weight"),
        ("hc_head_fn", "model.hc_head.hc_fn"),
    ):
        assert decoder_name(theirs) == ours


def test_experts_beyond_the_last_are_refused(pairs: Pairs, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = pairs["all-kinds"][1]
    tensors = load_file(folder / "model.safetensors")
    (name,) = (name for name in tensors if name.endswith("tid2eid"))
    tensors[name][5, 1] = 8
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text("utf-8"), "utf-8")
    with pytest.raises(CheckpointError, match="tid2eid has numbers from 0 to 8, they should lie below 8"):
        build(resolved(tmp_path))


def test_random_weights_serve(pairs: Pairs) -> None:
    """As the smoke profile of a recipe has them."""
    text = (pairs["all-kinds"][1] / "config.json").read_text("utf-8")
    device = build(resolved(ModelSource(kind="random", random_config=text)))
    try:
        request = Request(prompt=prompt_of(20), row=1, max_new_tokens=3)
        run_all(device, PlanMaker(16, groups_of(device.specs)), [request])
        assert len(request.output) == 3
    finally:
        device.handle.shutdown()


def _read(**changes: object) -> ModelConfig:
    values = {**COMPRESSED, "architectures": ["DeepseekV4ForCausalLM"], **changes}
    return read_model_config(
        ModelSource(kind="random", random_config=json.dumps({k: v for k, v in values.items() if v is not None}))
    )


def test_older_fields_are_read() -> None:
    """As the first checkpoints have them: numbers for the layers, one flat rotary scaling that only entries take."""
    scaling = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
    config = _read(
        layer_types=None,
        compress_ratios=[0, 4, 128, 4, 0],
        compress_rates=None,
        mlp_layer_types=None,
        num_hash_layers=2,
        partial_rotary_factor=None,
        qk_rope_head_dim=8,
        rope_scaling=scaling,
        rope_theta=10000,
        compress_rope_theta=40000,
    )
    compression, experts = config.compression, config.experts
    assert compression is not None
    assert experts is not None
    assert (compression.sparse_layers, compression.heavy_layers) == ((1, 3), (2,))
    assert (compression.sparse_rate, compression.heavy_rate, compression.rotary) == (4, 128, 8)
    assert experts.table_layers == (0, 1)
    assert (config.rope.kind, config.rope.theta, config.rope.share) == ("default", 10000.0, 0.25)
    rope = compression.rope
    assert (rope.kind, rope.theta, rope.parameters["factor"], rope.share) == ("yarn", 40000.0, 16.0, 0.25)
    assert rope.parameters["attention_factor"] == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 4}, "the 4 layers attend by full_attention; supported is one of"),
        ({"layer_types": None, "compress_ratios": [0, 4]}, "the 4 layers attend by 2 kinds"),
        ({"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types has dense; supported are hash_moe and moe"),
        ({"o_groups": 3}, "4 attention heads do not divide into o_groups 3"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"hc_mult": 0}, "hc_mult is 0"),
    ],
)
def test_configurations_that_cannot_be_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        _read(**changes)
