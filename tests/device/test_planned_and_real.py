"""What the plan counts is what the device side allocates: blocks, workspace, weights, and what of it is in memory."""

from pathlib import Path

import pytest
import torch
from thread_ranks import build_ranks
from tiny_models import random_config

from tokenspeed.device.builder import build_device_side
from tokenspeed.device.cache_arena import ArenaLayout, CacheArena
from tokenspeed.device.placement import HOST
from tokenspeed.models import architecture
from tokenspeed.recipes.capacity import cache_shape
from tokenspeed.recipes.catalogue import recipe_names
from tokenspeed.recipes.dimensions import groups_of
from tokenspeed.recipes.machine import detect_machine
from tokenspeed.recipes.model_config import read_model_config
from tokenspeed.recipes.overrides import set_values
from tokenspeed.recipes.plan import make_plan
from tokenspeed.recipes.prepare import planned
from tokenspeed.recipes.resolve import model_source, resolve
from tokenspeed.recipes.resolved import ModelSource

WINDOWED = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "use_sliding_window": True,
    "sliding_window": 64,
    "max_window_layers": 1,
}


@pytest.mark.parametrize("changes", [{}, WINDOWED], ids=["dense", "windowed"])
@pytest.mark.parametrize(
    ("cache_type", "dtype"),
    [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float8_e4m3", torch.float8_e4m3fn)],
)
def test_the_planned_groups_are_the_arenas(changes: dict[str, object], cache_type: str, dtype: torch.dtype) -> None:
    config = read_model_config(ModelSource(kind="random", random_config=random_config(**changes)))
    layout = ArenaLayout.of(architecture(config.architecture).cache_groups(config, granularity=32), dtype)
    shape = cache_shape(groups_of(config), cache_type, granularity=32)
    assert (shape.facts, shape.parent_bytes) == (layout.facts, layout.parent_bytes)


@pytest.mark.parametrize(
    "assignments",
    [
        "kv.bytes=4MiB",
        "scheduler.max_seqs=3 scheduler.max_len=300 scheduler.chunk=48 scheduler.overlap=1 kv.dtype=bfloat16",
        "scheduler.max_seqs=20 kv.bytes=2MiB kv.host_bytes=1MiB kv.granularity=16",
    ],
)
def test_a_built_engine_takes_what_was_planned(assignments: str) -> None:
    machine = detect_machine()
    resolution = resolve("qwen3-0.6b", machine, profile="smoke", overrides=set_values([assignments]))
    plan = make_plan(resolution, machine)
    source = model_source(resolution)
    assert source is not None
    assert plan.pool is not None
    config = planned(resolution.config(source), plan)
    build = build_device_side(config, read_model_config(source), report=lambda *_: None)
    try:
        specs, terms = build.specs, {term.name: term.bytes for term in plan.terms}
        assert specs.weight_bytes == terms["weights"]
        assert specs.workspace_bytes == terms["workspace"]
        assert specs.arena_bytes == plan.pool.bytes
        assert (specs.num_parents, specs.kv_tokens) == (plan.pool.parents, plan.pool.holds)
        assert specs.max_model_len == plan.pool.max_len
        assert terms.get("host pool", 0) - specs.host_bytes < plan.shape.parent_bytes
        # Warming up writes to the null parent alone; the rest is reserved and not in memory.
        assert 0 <= specs.untouched_bytes <= specs.arena_bytes + specs.host_bytes
        if specs.arena_bytes >= 4 << 20:
            assert specs.untouched_bytes >= specs.arena_bytes // 4
    finally:
        build.handle.shutdown()


@pytest.mark.parametrize("name", recipe_names())
def test_every_smoke_profile_takes_what_was_planned(name: str) -> None:
    machine = detect_machine()
    resolution = resolve(name, machine, profile="smoke", overrides=set_values(["kv.bytes=8MiB"]))
    plan, source = make_plan(resolution, machine), model_source(resolution)
    assert source is not None and plan.pool is not None
    config = read_model_config(source)
    granularity = plan.shape.facts[0].block_granularity or 64
    groups = architecture(config.architecture).cache_groups(config, granularity=granularity)
    layout = ArenaLayout.of(groups, torch.float32)
    assert (plan.shape.facts, plan.shape.parent_bytes) == (layout.facts, layout.parent_bytes)
    build = build_device_side(planned(resolution.config(source), plan), config, report=lambda *_: None)
    try:
        specs, terms = build.specs, {term.name: term.bytes for term in plan.terms}
        found = (specs.weight_bytes, specs.workspace_bytes, specs.arena_bytes)
        assert found == (terms["weights"], terms["workspace"], plan.pool.bytes)
    finally:
        build.handle.shutdown()


def test_what_was_written_to_counts_as_in_memory(tmp_path: Path) -> None:
    config = read_model_config(ModelSource(kind="random", random_config=random_config()))
    layout = ArenaLayout.of(architecture("llama").cache_groups(config, granularity=32), torch.float32)
    arena = CacheArena(HOST, layout, (32 << 20) // layout.parent_bytes)
    before = arena.untouched_bytes
    assert before > arena.nbytes - (4 << 20)
    arena.blocks(0)[: arena.num_blocks(0) // 2] = 1
    assert before - arena.untouched_bytes >= (arena.nbytes // 2) - (4 << 20)


@pytest.mark.parametrize(
    ("recipe", "assignments", "world"),
    [
        pytest.param("smollm2-135m", "parallel.tp=2", 2, marks=pytest.mark.long),
        ("inkling", "parallel.tp=4", 4),  # of the two KV heads each is on two ranks
        ("kimi-k2.5", "parallel.tp=2 parallel.ep=2", 2),
        pytest.param("qwen3.8-27b", "parallel.tp=2", 2, marks=pytest.mark.long),
    ],
)
def test_each_of_several_ranks_takes_what_was_planned(recipe: str, assignments: str, world: int) -> None:
    machine = detect_machine()
    overrides = set_values([f"{assignments} kv.bytes=4MiB scheduler.max_seqs=3 scheduler.max_len=300 threads=1"])
    resolution = resolve(recipe, machine, profile="smoke", overrides=overrides)
    plan = make_plan(resolution, machine)
    source = model_source(resolution)
    assert source is not None and plan.pool is not None
    config = planned(resolution.config(source), plan)
    build = build_ranks(config, world, by_expert=config.parallel.ep > 1)
    try:
        specs, terms = build.specs, {term.name: term.bytes for term in plan.terms}
        assert specs.workspace_bytes == terms["workspace"]
        assert specs.arena_bytes == plan.pool.bytes
        assert (specs.groups, specs.num_parents) == (plan.shape.facts, plan.pool.parents)
        assert specs.weight_bytes == pytest.approx(terms["weights"], rel=0.1)
    finally:
        build.handle.shutdown()
