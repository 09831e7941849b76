"""The figures of a plan on the CPU: bytes a token, the pool, the terms, and what does not fit."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from tokenspeed.recipes.byte_counts import human_bytes
from tokenspeed.recipes.capacity import group_bytes
from tokenspeed.recipes.checkpoint_size import read_checkpoint
from tokenspeed.recipes.dimensions import CacheGroup
from tokenspeed.recipes.machine import Machine
from tokenspeed.recipes.memory import cpu_pool_bytes, effective_cache_type
from tokenspeed.recipes.model_config import CheckpointError
from tokenspeed.recipes.overrides import set_values
from tokenspeed.recipes.parameters import count_parameters
from tokenspeed.recipes.plan import Plan, make_plan
from tokenspeed.recipes.plan_text import render_plan
from tokenspeed.recipes.resolve import resolve
from tokenspeed.recipes.resolved import GIB, ModelSource
from tokenspeed.recipes.selection import DoesNotFit

MakeMachine = Callable[..., Machine]

PARENT = 64 * 23_040
"""Bytes of a block of the default model: 64 tokens of 30 layers, 3 KV heads of 64, keys and values, float16."""


def plan(machine: Machine, target: str, *assignments: str, profile: str | None = None) -> Plan:
    return make_plan(resolve(target, machine, profile=profile, overrides=set_values(list(assignments))), machine)


def test_the_default_models_figures(recipes: Path, make_machine: MakeMachine) -> None:
    found = plan(make_machine(free_gib=16), "smollm2-135m")
    assert (found.cache_type, found.bytes_per_token) == ("float16", 2 * 30 * 3 * 64 * 2)
    assert found.facts.weight_bytes == 98_362_432
    # 64 sequences of 8192 tokens would be 12 GiB: the share of what is free decides, in whole blocks.
    assert found.pool is not None
    assert found.pool.bytes == (16 * GIB - 98_362_432) // 4 // PARENT * PARENT
    assert found.pool.requests == found.pool.parents // 128
    assert found.max_len == 8192
    assert "23,040 B a token in float16" in "\n".join(render_plan(found))


def test_a_small_world_takes_what_its_sequences_can_use(make_machine: MakeMachine) -> None:
    found = plan(make_machine(), "smollm2-135m", "scheduler.max_seqs=2", "scheduler.max_len=100", "kv.dtype=bfloat16")
    # Two blocks each, and the null block.
    assert found.pool_bytes == (2 * 2 + 1) * PARENT
    assert found.pool is not None
    assert (found.pool.requests, found.pool.holds) == (2, 4 * 64)


def test_eight_bits_are_half_the_bytes_and_twice_the_tokens(make_machine: MakeMachine) -> None:
    half, full = (
        plan(make_machine(), "smollm2-135m", f"kv.dtype={dtype}", "kv.bytes=1GiB")
        for dtype in ("float8_e4m3", "bfloat16")
    )
    assert half.resolution.missing == []
    assert (half.bytes_per_token, full.bytes_per_token) == (2 * 30 * 3 * 64, 2 * 2 * 30 * 3 * 64)
    assert half.pool is not None and full.pool is not None
    assert half.pool.parents + 1 == 2 * (full.pool.parents + 1)
    assert "11,520 B a token in float8_e4m3" in "\n".join(render_plan(half))


def test_the_terms_of_a_cpu_engine(recipes: Path, make_machine: MakeMachine) -> None:
    terms = {term.name: term for term in plan(make_machine(), "smollm2-135m", "kv.host_bytes=1GiB").terms}
    assert list(terms) == ["weights", "workspace", "host pool", "libraries", "processes"]
    assert terms["weights"].bytes == 98_362_432
    assert terms["host pool"].bytes == GIB
    # Residual, hidden and normed; the heads twice; keys and values; gate, up and their product: of 256 + 64 tokens.
    buffers = 320 * (3 * 576 + 2 * 576 + 2 * 192 + 3 * 1536)
    assert terms["workspace"].bytes == 4 * (buffers + 64 * (576 + 49_152) + 8192 * 64 + 576)


def test_what_one_request_needs_must_fit(make_machine: MakeMachine) -> None:
    found = plan(make_machine(), "smollm2-135m", "kv.bytes=6MiB", "scheduler.max_len=8000")
    with pytest.raises(DoesNotFit) as caught:
        found.refuse_misfit()
    # 6 MiB are four blocks of 64 tokens, one of them null.
    assert "--max-model-len 192 fits, or --kv-cache-gb 0.174" in str(caught.value)
    plan(make_machine(), "smollm2-135m", "kv.bytes=6MiB", "scheduler.max_len=192").refuse_misfit()
    plan(make_machine(), "smollm2-135m", f"kv.bytes={int(0.174 * GIB)}", "scheduler.max_len=8000").refuse_misfit()
    with pytest.raises(DoesNotFit):
        plan(make_machine(), "smollm2-135m", "kv.bytes=6MiB", "scheduler.max_len=193").refuse_misfit()


def test_steps_ahead_take_room_too(make_machine: MakeMachine) -> None:
    overlapped = ("kv.bytes=6MiB", "scheduler.overlap=1")
    with pytest.raises(DoesNotFit, match="--max-model-len 191 fits"):
        plan(make_machine(), "smollm2-135m", *overlapped, "scheduler.max_len=192").refuse_misfit()
    plan(make_machine(), "smollm2-135m", *overlapped, "scheduler.max_len=191").refuse_misfit()


def test_an_undeclared_length_is_cut_and_said(make_machine: MakeMachine) -> None:
    found = plan(make_machine(), "smollm2-135m", "kv.bytes=6MiB")
    found.refuse_misfit()
    assert found.notes == ["the KV cache holds 192 tokens, less than the context of 8192: no request may be longer"]


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("kv.bytes=1MiB", "does not hold one request"),
        ("kv.bytes=64GiB", r"exceed the 16\.00 GiB of memory that are free"),
        ("scheduler.chunk=20000000", "short before any KV cache"),
    ],
)
def test_a_pool_too_small_or_too_large_does_not_fit(make_machine: MakeMachine, assignment: str, message: str) -> None:
    with pytest.raises(DoesNotFit, match=message):
        plan(make_machine(), "smollm2-135m", assignment).refuse_misfit()


def test_a_random_models_figures_come_from_its_own_dimensions(make_machine: MakeMachine) -> None:
    found = plan(make_machine(), "kimi-k2.5", profile="smoke")
    assert found.bytes_per_token == 4 * (64 + 16) * 4  # layers, latent and rotated key, float32
    assert found.facts.context == 4096
    assert found.facts.dimensions is not None
    assert found.facts.weight_bytes == 4 * count_parameters(found.facts.dimensions).total


def test_the_tiers_are_counted_and_shown(make_machine: MakeMachine) -> None:
    tiers = "kv.bytes=64MiB kv.host_bytes=1GiB kv.storage_dir=/kv"
    found = plan(make_machine(), "smollm2-135m", tiers)
    text = "\n".join(render_plan(found))
    assert "host 1.00 GiB, behind it /kv (a tenth of its file system)" in text
    with pytest.raises(DoesNotFit, match="short before any KV cache"):
        plan(make_machine(), "smollm2-135m", "kv.bytes=64MiB kv.host_bytes=2000GiB").refuse_misfit()


def test_ranks_share_what_is_not_replicated() -> None:
    group = CacheGroup(id="attention", layers=2, values_per_layer=128)
    assert group_bytes(group, "bfloat16", 4) == 2 * 128 * 2 // 4
    assert group_bytes(group.model_copy(update={"replicated": True}), "bfloat16", 4) == 2 * 128 * 2
    assert group_bytes(group.model_copy(update={"dtype": "float32"}), "bfloat16", 4) == 2 * 128 * 4 // 4


@pytest.mark.parametrize(
    ("requested", "stored", "expected"),
    [
        ("auto", "float32", "float32"),
        ("auto", "gguf", "float16"),
        ("auto", "gguf-q4_1", "float16"),
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float16", "bfloat16"),
        ("auto", "int4", "bfloat16"),
        ("float16", "float32", "float16"),
        ("float8_e4m3", "gguf", "float8_e4m3"),
    ],
)
def test_the_cache_type(requested: str, stored: str, expected: str) -> None:
    assert effective_cache_type(requested, stored) == expected


def test_a_requested_pool_is_taken_as_it_is() -> None:
    assert cpu_pool_bytes(requested=7, wanted=4000, free_bytes=1000) == 7
    assert cpu_pool_bytes(requested=0, wanted=4000, free_bytes=1000) == 250
    assert cpu_pool_bytes(requested=0, wanted=100, free_bytes=1000) == 100
    assert cpu_pool_bytes(requested=0, wanted=100, free_bytes=-5) == 0


@pytest.mark.parametrize(
    ("count", "text"), [(12, "12 B"), (2048, "2.00 KiB"), (98_362_432, "93.81 MiB"), (GIB, "1.00 GiB")]
)
def test_bytes_for_a_person(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("stored", "growth"),
    [
        ("bfloat16", 1.0),
        ("int4", 1.125),
        ("int8", 1.0625),
        ("fp8", 2.0),
        ("mxfp4", 1.0),
        ("fp4", 1.03125),
        ("awq", 1.25),
    ],
)
def test_weights_that_the_cpu_converts_count_as_what_they_become(
    recipes: Path, make_machine: MakeMachine, stored: str, growth: float
) -> None:
    path = recipes / "small.yaml"
    path.write_text(path.read_text().replace("format: bfloat16", f"format: {stored}"))
    found = plan(make_machine(), "small", profile="cpu")
    assert not found.resolution.missing
    assert found.facts.weight_bytes == int(100_000_000 * growth)


def test_of_a_folder_the_engines_files_count(tmp_path: Path) -> None:
    """A second copy under another name, as some vendors ship it, is neither mapped nor counted; a tied head is not."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "vocab_size": 128,
                "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
                "max_position_embeddings": 256, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
            }
        )
    )  # fmt: skip
    embedding = numpy.zeros((128, 64), dtype=numpy.float32)
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding}
    for name in ("model.safetensors", "consolidated.safetensors"):
        save_file(weights, folder / name)
    source = ModelSource(kind="folder", path=str(folder))
    assert read_checkpoint(source)[1] == embedding.nbytes
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cut short or damaged"):
        read_checkpoint(source)
