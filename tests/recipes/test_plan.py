"""The figures of a plan: bytes a token, the pool, and what does not fit."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tokenspeed.recipes.catalogue import load_hardware
from tokenspeed.recipes.machine import Machine, described_machine
from tokenspeed.recipes.memory import cpu_pool_bytes, effective_cache_type, group_bytes_per_token
from tokenspeed.recipes.overrides import set_values
from tokenspeed.recipes.plan import Plan, human_bytes, make_plan, render_plan
from tokenspeed.recipes.resolve import resolve
from tokenspeed.recipes.resolved import GIB
from tokenspeed.recipes.schema import CacheGroup
from tokenspeed.recipes.selection import DoesNotFit

MakeMachine = Callable[..., Machine]


def plan(machine: Machine, target: str, *assignments: str, profile: str | None = None) -> Plan:
    return make_plan(resolve(target, machine, profile=profile, overrides=set_values(list(assignments))), machine)


def test_the_default_models_figures(recipes: Path, make_machine: MakeMachine) -> None:
    found = plan(make_machine(free_gib=16), "smollm2-135m")
    assert (found.cache_type, found.bytes_per_token) == ("float32", 2 * 30 * 3 * 64 * 4)
    assert found.weight_bytes == 98_362_432
    # 64 sequences of 8192 tokens would be 24 GiB: the share of what is free decides.
    assert found.pool_bytes == (16 * GIB - 98_362_432) // 4
    assert found.max_len == 8192
    assert "46,080 B a token in float32" in "\n".join(render_plan(found))


def test_a_small_world_takes_what_its_sequences_can_use(make_machine: MakeMachine) -> None:
    found = plan(make_machine(), "smollm2-135m", "scheduler.max_seqs=2", "scheduler.max_len=100", "kv.dtype=bfloat16")
    assert found.pool_bytes == 2 * 100 * 23_040


def test_what_one_request_needs_must_fit(make_machine: MakeMachine) -> None:
    found = plan(make_machine(), "smollm2-135m", "kv.bytes=10MiB", "scheduler.max_len=8000")
    with pytest.raises(DoesNotFit) as caught:
        found.refuse_misfit()
    # 10 MiB hold 227 tokens, that is three whole blocks of 64.
    assert "--max-model-len 192 fits, or --kv-cache-gb 0.343" in str(caught.value)
    plan(make_machine(), "smollm2-135m", "kv.bytes=10MiB", "scheduler.max_len=192").refuse_misfit()
    plan(make_machine(), "smollm2-135m", f"kv.bytes={int(0.344 * GIB)}", "scheduler.max_len=8000").refuse_misfit()


def test_an_undeclared_length_is_cut_and_said(make_machine: MakeMachine) -> None:
    found = plan(make_machine(), "smollm2-135m", "kv.bytes=10MiB")
    found.refuse_misfit()
    assert found.notes == ["the KV cache holds 192 tokens, less than the context of 8192: no request may be longer"]


@pytest.mark.parametrize(
    ("assignment", "message"),
    [("kv.bytes=1MiB", "does not hold one block of 64 tokens"), ("kv.bytes=64GiB", "exceed the 16.00 GiB of memory")],
)
def test_a_pool_too_small_or_too_large_does_not_fit(make_machine: MakeMachine, assignment: str, message: str) -> None:
    with pytest.raises(DoesNotFit, match=message):
        plan(make_machine(), "smollm2-135m", assignment).refuse_misfit()


def test_a_random_models_figures_come_from_its_own_dimensions(make_machine: MakeMachine) -> None:
    found = plan(make_machine(), "kimi-k2.5", profile="smoke")
    assert found.bytes_per_token == 2 * 4 * 4 * 32 * 4
    assert (found.context, found.weight_bytes) == (4096, 0)


def test_kimi_on_b200_is_the_published_arithmetic(make_machine: MakeMachine) -> None:
    machine = described_machine(load_hardware("b200"))
    found = plan(machine, "kimi-k2.5")
    assert found.resolution.profile == "b200-nvfp4"
    # The latent is replicated: tensor parallelism does not make it smaller.
    assert found.bytes_per_token == 35_136
    assert plan(machine, "kimi-k2.5", "kv.dtype=bfloat16").bytes_per_token == 70_272
    text = "\n".join(render_plan(found))
    assert "one request of 262,144 tokens: 8.58 GiB a rank" in text
    assert "missing   model family kimi_k25" in text


def test_the_tiers_are_counted_and_shown(make_machine: MakeMachine) -> None:
    tiers = "kv.bytes=64MiB kv.host_bytes=1GiB kv.storage_dir=/kv"
    found = plan(make_machine(), "smollm2-135m", tiers)
    text = "\n".join(render_plan(found))
    assert "host 1.00 GiB, behind it /kv (a tenth of its file system)" in text
    with pytest.raises(DoesNotFit, match=r"KV cache \(2000\.06 GiB\) exceed"):
        plan(make_machine(), "smollm2-135m", "kv.bytes=64MiB kv.host_bytes=2000GiB").refuse_misfit()


def test_ranks_share_what_is_not_replicated() -> None:
    group = CacheGroup(id="full", layers=2, values_per_layer=128)
    assert group_bytes_per_token(group, "bfloat16", 4) == 2 * 128 * 2 // 4
    assert group_bytes_per_token(group.model_copy(update={"replicated": True}), "bfloat16", 4) == 2 * 128 * 2


@pytest.mark.parametrize(
    ("requested", "stored", "expected"),
    [
        ("auto", "float32", "float32"),
        ("auto", "gguf", "float32"),
        ("auto", "gguf-q4_1", "float32"),
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float16", "bfloat16"),
        ("float16", "float32", "float16"),
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
