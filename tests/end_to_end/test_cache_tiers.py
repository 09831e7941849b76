"""Host pool and storage under a real model: what moved comes back byte for byte, and nothing is computed twice."""

import json
from pathlib import Path
from typing import Literal

import pytest
from control_plane import submit
from in_process_engine import Run, run_requests

from tokenspeed.messages import SamplingParameters, Submit
from tokenspeed.recipes.resolved import KVConfig, ModelSource, ResolvedConfig, SchedulerSettings

GRANULARITY = 16
BLOCK = 2 * 2 * 2 * GRANULARITY * 16  # elements: keys and values, layers, heads, tokens, dimensions
BYTES = {"float32": 4, "float8_e4m3": 1}
ROOMY = 60
GREEDY = SamplingParameters(top_k=1)
LONG_AGO = 400
"""Rounds between two requests, enough for the first to end."""


def config_of(
    *,
    blocks: int,
    host_blocks: int,
    overlap: int = 1,
    storage: Path | None = None,
    seed: int = 3,
    cache: Literal["float32", "float8_e4m3"] = "float32",
) -> ResolvedConfig:
    block = BLOCK * BYTES[cache]
    dimensions = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "bos_token_id": 256, "eos_token_id": 257,
    }  # fmt: skip
    return ResolvedConfig(
        name="random",
        served_name="random",
        model=ModelSource(kind="random", seed=seed, random_config=json.dumps(dimensions)),
        threads=1,
        kv=KVConfig(
            dtype=cache,
            granularity=GRANULARITY,
            bytes=(blocks + 1) * block,
            host_bytes=(host_blocks + 1) * block if host_blocks else 0,
            storage_dir=str(storage or ""),
            storage_bytes=1 << 24 if storage else 0,
        ),
        scheduler=SchedulerSettings(max_len=160, max_seqs=8, chunk=64, overlap=overlap),
        enforce="determinism",
    )


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(11 * position + 17 * salt) % 255 for position in range(length)]


def computed(run: Run) -> int:
    return run.counters.prefill_tokens + run.counters.decode_tokens


CROWD: list[Submit] = [
    submit(1, prompt_of(5), 90, declared=False, sampling=GREEDY),
    submit(2, prompt_of(33, 1), 40, declared=False, sampling=SamplingParameters(temperature=0.9, seed=11)),
    submit(3, prompt_of(20, 2), 60, declared=False, sampling=SamplingParameters(top_k=1, repetition_penalty=1.3)),
    submit(4, prompt_of(17, 3), 80, declared=False, sampling=SamplingParameters(temperature=0.7, seed=5, choice=1)),
]


@pytest.mark.parametrize(("overlap", "cache"), [(0, "float32"), (1, "float32"), (1, "float8_e4m3")])
def test_a_pool_that_forces_retraction_moves_images_and_computes_nothing_again(
    overlap: int, cache: Literal["float32", "float8_e4m3"]
) -> None:
    alone = run_requests(config_of(blocks=ROOMY, host_blocks=0, overlap=overlap, cache=cache), CROWD)
    assert alone.counters.retractions == 0
    tight = run_requests(config_of(blocks=11, host_blocks=ROOMY, overlap=overlap, cache=cache), CROWD)
    assert tight.tokens == alone.tokens
    counters = tight.counters
    assert min(counters.retractions, counters.restores, counters.image_blocks) > 0
    assert counters.recomputed_tokens == 0
    assert computed(tight) == computed(alone)
    assert (tight.held, counters.failed_copies) == (0, 0)


def test_without_room_for_images_it_computes_again_and_gives_the_same_tokens() -> None:
    alone = run_requests(config_of(blocks=ROOMY, host_blocks=0), CROWD)
    tight = run_requests(config_of(blocks=11, host_blocks=1), CROWD)
    assert tight.tokens == alone.tokens
    assert tight.counters.recomputed_tokens > 0


def turns(others: int = 6) -> tuple[list[Submit], list[int]]:
    """A chat's first turn, company that needs the whole pool, and its second turn with the first as its beginning."""
    first = prompt_of(70)
    company = [submit(10 + one, prompt_of(90, 5 + one), 20, sampling=GREEDY) for one in range(others)]
    second = [*first, *prompt_of(9, 4)]
    requests = [submit(1, first, 8, sampling=GREEDY), *company, submit(2, second, 8, sampling=GREEDY)]
    return requests, [LONG_AGO] * len(requests)


def test_a_second_turn_after_eviction_hits_the_host() -> None:
    requests, gaps = turns()
    without = run_requests(config_of(blocks=14, host_blocks=0), requests, gaps)
    assert without.cached(2) == 0
    behind = run_requests(config_of(blocks=14, host_blocks=ROOMY), requests, gaps)
    assert behind.tokens == without.tokens
    assert behind.cached(2) == 64
    assert behind.counters.host_hit_tokens == 64
    assert computed(without) - computed(behind) == 64


def test_a_restart_hits_the_disk_and_another_model_does_not(tmp_path: Path) -> None:
    first, again = submit(1, prompt_of(70), 8, sampling=GREEDY), submit(2, [*prompt_of(70), 1, 2], 8, sampling=GREEDY)
    settings = {"blocks": ROOMY, "host_blocks": ROOMY, "storage": tmp_path}
    expected = run_requests(config_of(blocks=ROOMY, host_blocks=0), [again])
    run_requests(config_of(**settings), [first])
    restarted = run_requests(config_of(**settings), [again])
    assert restarted.tokens == expected.tokens
    assert restarted.cached(2) == 64
    assert restarted.counters.storage_hit_tokens == 64
    other = run_requests(config_of(**settings, seed=4), [again])
    assert (other.cached(2), other.counters.storage_hit_tokens) == (0, 0)


def test_what_was_stored_in_eight_bits_is_found_by_eight_bits_only(tmp_path: Path) -> None:
    first, again = submit(1, prompt_of(70), 8, sampling=GREEDY), submit(2, [*prompt_of(70), 1, 2], 8, sampling=GREEDY)
    settings = {"blocks": ROOMY, "host_blocks": ROOMY, "storage": tmp_path}
    expected = run_requests(config_of(blocks=ROOMY, host_blocks=0, cache="float8_e4m3"), [again])
    run_requests(config_of(**settings, cache="float8_e4m3"), [first])
    wider = run_requests(config_of(**settings), [again])
    assert (wider.cached(2), wider.counters.storage_hit_tokens) == (0, 0)
    restarted = run_requests(config_of(**settings, cache="float8_e4m3"), [again])
    assert restarted.tokens == expected.tokens
    assert (restarted.cached(2), restarted.counters.storage_hit_tokens) == (64, 64)


def test_a_damaged_store_costs_time_and_changes_no_token(tmp_path: Path) -> None:
    again = submit(2, [*prompt_of(70), 1, 2], 8, sampling=GREEDY)
    settings = {"blocks": ROOMY, "host_blocks": ROOMY, "storage": tmp_path}
    expected = run_requests(config_of(blocks=ROOMY, host_blocks=0), [again])
    run_requests(config_of(**settings), [submit(1, prompt_of(70), 8, sampling=GREEDY)])
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert len(files) >= 4
    for path in files[1:]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    restarted = run_requests(config_of(**settings), [again])
    assert restarted.tokens == expected.tokens
    assert restarted.cached(2) <= 16
