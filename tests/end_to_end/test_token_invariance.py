"""Tokens depend on the prompt and the sampling parameters, and on nothing else that happens in the engine.

A small random model runs in this process, through scheduler, loop, handle and kernels, under drawn chunks, overlap,
pool sizes (small ones retract), host pools, orders and company; the tokens must be those of each request alone.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias

import pytest
from control_plane import submit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_process_engine import random_llama, run_requests

from tokenspeed.messages import SamplingParameters, Submit
from tokenspeed_kernel.recording import Recorder, recorder_of
from tokenspeed_kernel.registry import KernelSpec

Cache: TypeAlias = Literal["float32", "float8_e4m3"]

SHARED = [(11 * i) % 255 for i in range(40)]
REQUESTS: list[Submit] = [
    submit(1, SHARED[:5], 90, declared=False),
    submit(2, SHARED[:33], 30, declared=False),
    submit(3, [*SHARED, 9, 9], 24),
    submit(4, [7] * 17, 90, declared=False, sampling=SamplingParameters(temperature=0.8, top_p=0.9, seed=11)),
    submit(5, [*SHARED[:32], 1, 2, 3], 28, sampling=SamplingParameters(temperature=1.3, top_k=40, seed=12, choice=1)),
    submit(6, SHARED[:20], 32, sampling=SamplingParameters(top_k=1, repetition_penalty=1.3, presence_penalty=0.5)),
]
REQUESTS = [
    one
    if one.sampling != SamplingParameters()
    else submit(
        one.handle,
        memoryview(one.prompt).cast("i").tolist(),
        one.max_new_tokens,
        declared=one.declared,
        sampling=SamplingParameters(top_k=1),
    )
    for one in REQUESTS
]


def tokens_alone(cache: Cache) -> dict[int, list[int]]:
    """The tokens of each request by itself, whole prompt at once, nothing cached, recorded or in flight."""
    config = random_llama(chunk=256, overlap=0, blocks=60, prefix_cache=False, recorded=0, cache=cache)
    tokens: dict[int, list[int]] = {}
    for request in REQUESTS:
        tokens |= run_requests(config, [request]).tokens
    return tokens


@pytest.fixture(scope="module")
def alone() -> dict[int, list[int]]:
    return tokens_alone("float32")


@pytest.fixture(scope="module")
def alone_in_eight_bits(alone: dict[int, list[int]]) -> dict[int, list[int]]:
    tokens = tokens_alone("float8_e4m3")
    assert tokens != alone, "the cache was rounded"
    return tokens


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chunk=st.sampled_from([8, 9, 16, 31, 64, 256]),
    overlap=st.integers(0, 1),
    blocks=st.sampled_from([11, 13, 16, 60]),
    prefix_cache=st.booleans(),
    host_blocks=st.sampled_from([0, 3, 60]),
    recorded=st.sampled_from([0, 2, 64]),
    graphs=st.sampled_from(["auto", "off", "dispatch"]),
    cache=st.sampled_from(["float32", "float32", "float8_e4m3"]),
    order=st.permutations(REQUESTS),
    gaps=st.lists(st.integers(0, 5), min_size=len(REQUESTS), max_size=len(REQUESTS)),
)
def test_tokens_do_not_depend_on_company_chunks_overlap_or_memory(
    alone: dict[int, list[int]],
    alone_in_eight_bits: dict[int, list[int]],
    chunk: int,
    overlap: int,
    blocks: int,
    prefix_cache: bool,
    host_blocks: int,
    recorded: int,
    graphs: Literal["auto", "off", "dispatch"],
    cache: Cache,
    order: list[Submit],
    gaps: list[int],
) -> None:
    config = random_llama(
        chunk=chunk,
        overlap=overlap,
        blocks=blocks,
        prefix_cache=prefix_cache,
        host_blocks=host_blocks,
        recorded=recorded,
        graphs=graphs,
        cache=cache,
    )
    run = run_requests(config, order, gaps)
    assert run.tokens == (alone if cache == "float32" else alone_in_eight_bits)
    assert run.held == 0


def test_a_small_pool_really_retracts_and_a_shared_prefix_really_hits(alone: dict[int, list[int]]) -> None:
    tight = run_requests(random_llama(chunk=64, overlap=1, blocks=11, prefix_cache=True), REQUESTS)
    assert tight.counters.retractions > 0
    assert tight.tokens == alone
    roomy = run_requests(random_llama(chunk=64, overlap=1, blocks=60, prefix_cache=True), REQUESTS, [8] * len(REQUESTS))
    assert roomy.counters.prefix_hit_tokens > 0
    assert roomy.tokens == alone


def test_decode_steps_really_are_recorded_and_replayed(
    alone: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Counter[str]()

    def counting(specs: Iterable[KernelSpec]) -> Recorder | str:
        recorder = recorder_of(specs)
        assert not isinstance(recorder, str), recorder

        def record(body: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
            counts["recorded"] += 1
            result, replay = recorder(body)

            def counted() -> None:
                counts["replayed"] += 1
                replay()

            return result, counted

        return record

    monkeypatch.setattr("tokenspeed.device.graphs.choice.recorder_of", counting)
    run = run_requests(random_llama(chunk=64, overlap=0, blocks=60, prefix_cache=True), REQUESTS)
    assert run.tokens == alone
    assert 1 < counts["recorded"] <= len(REQUESTS) + 2  # a size each, those of the warm-up among them
    assert counts["replayed"] > 50
