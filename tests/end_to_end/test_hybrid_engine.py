"""A model with states through the whole engine: checkpoints, junction cut, hits, retraction; tokens stay the same."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from control_plane import submit as submitted
from equal_tokens import assert_greedy_equal
from in_process_engine import Run, run_requests
from model_checks import TOLERANCE
from tiny_models import prompt_of, resolved, save, transformers_model

from tokenspeed.device.builder import POISON_VARIABLE
from tokenspeed.device.cache_arena import ArenaLayout
from tokenspeed.device.graphs.check import CHECK_VARIABLE
from tokenspeed.messages import SamplingParameters, Submit
from tokenspeed.models import architecture
from tokenspeed.recipes.model_config import read_model_config
from tokenspeed.recipes.resolved import ModelSource, ResolvedConfig
from tokenspeed_kernel.recording import Recorder, recorder_of
from tokenspeed_kernel.registry import KernelSpec

GRANULARITY, CHECKPOINT, MAX_LEN = 16, 256, 660
FAMILIES: dict[str, tuple[dict[str, object], int]] = {
    "qwen3_next": ({"linear_num_value_heads": 4, "linear_value_head_dim": 16}, 9),
    "kimi_linear": ({"linear_num_heads": 4}, 7),
}
"""With such heads a parent is few blocks of either group, so that pools can be small; how many parents hold the longest
request and not four of them."""


@dataclass(frozen=True)
class Pair:
    """transformers' model, the folder it is saved in, and the parents of a tight pool."""

    model: torch.nn.Module
    folder: Path
    tight: int


@pytest.fixture(scope="module", params=["qwen3_next", pytest.param("kimi_linear", marks=pytest.mark.long)])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    changes, tight = FAMILIES[request.param]
    changes = {"max_position_embeddings": 1024, "eos_token_id": None, "attn_implementation": "eager", **changes}
    model = transformers_model(request.param, **changes)
    return Pair(model, save(model, tmp_path_factory.mktemp(request.param)), tight)


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody wrote reads as NaN."""
    monkeypatch.setenv(POISON_VARIABLE, "1")


def parent_bytes(folder: Path) -> int:
    config = read_model_config(ModelSource(kind="folder", path=str(folder)))
    groups = architecture(config.architecture).cache_groups(config, granularity=GRANULARITY)
    return ArenaLayout.of(groups, torch.float32).parent_bytes


def config_of(
    folder: Path, parents: int, *, overlap: int = 0, host_parents: int = 0, chunk: int = CHECKPOINT, prefix: bool = True
) -> ResolvedConfig:
    each = parent_bytes(folder)
    config = resolved(
        folder,
        granularity=GRANULARITY,
        max_seqs=4,
        chunk=chunk,
        max_len=MAX_LEN,
        overlap=overlap,
        kv_bytes=(parents + 1) * each,
        host_bytes=(host_parents + 1) * each if host_parents else 0,
        enforce="determinism",
    )
    return config.model_copy(update={"scheduler": config.scheduler.model_copy(update={"prefix_cache": prefix})})


def submit(handle: int, prompt: Sequence[int], count: int, *, declared: bool = True) -> Submit:
    return submitted(handle, prompt, count, declared=declared, sampling=SamplingParameters(top_k=1))


def alone(folder: Path, requests: Sequence[Submit]) -> dict[int, list[int]]:
    """Each request by itself in an engine that keeps nothing: no prefix is found, no step overlaps another."""
    config, tokens = config_of(folder, 60, chunk=MAX_LEN, prefix=False), {}
    for request in requests:
        tokens |= run_requests(config, [request]).tokens
    return tokens


def assert_transformers_tokens(pair: Pair, request: Submit, ours: list[int]) -> None:
    prompt = np.frombuffer(request.prompt, np.int32).tolist()
    with torch.no_grad():
        logits = pair.model(torch.tensor([prompt + ours])).logits[0, len(prompt) - 1 : -1].numpy()
    greedy = logits.argmax(-1).tolist()

    def generate(ids: list[int], count: int) -> list[int]:
        return run_requests(config_of(pair.folder, 60), [submit(1, ids, count)]).tokens[1]

    if ours != greedy:
        assert_greedy_equal(generate, prompt, greedy, logits, margin=TOLERANCE)


def test_hits_go_by_checkpoints_and_the_junction_becomes_one(pair: Pair) -> None:
    """The first prompt leaves states at 256 and 512; in longer chunks at 256 alone, for its second chunk is its last.
    The second shares 560 tokens: it starts at the last of them, is cut at 560, where the full histories part, and
    leaves a state there, at which the third starts."""
    folder = pair.folder
    first = prompt_of(610, 0)
    shared = first[:560]
    requests = [
        submit(1, first, 12),
        submit(2, shared + prompt_of(37, 5), 12),
        submit(3, shared + prompt_of(41, 9), 12),
        submit(4, first[:300], 12),
    ]
    expected = alone(folder, requests)
    for overlap, chunk, last in ((0, CHECKPOINT, 512), (1, 400, 256)):
        run = run_requests(config_of(folder, 60, overlap=overlap, chunk=chunk), requests, gaps=(40, 40, 40))
        assert [run.cached(handle) for handle in (2, 3, 4)] == [last, 560, 256]
        assert run.tokens == expected
        assert run.held == 0
    for request in requests:
        assert_transformers_tokens(pair, request, expected[request.handle])


def test_a_decode_leaves_checkpoints_too(pair: Pair) -> None:
    """A conversation goes on: the second prompt is the first one, its answer past a multiple of 256, and more."""
    folder = pair.folder
    first = submit(1, prompt_of(240, 3), 40)
    answer = alone(folder, [first])[1]
    second = submit(2, [*prompt_of(240, 3), *answer, 5, 6, 7], 12)
    run = run_requests(config_of(folder, 60), [first, second], gaps=(60,))
    assert run.cached(2) == 256
    assert run.tokens[2] == alone(folder, [second])[2]


def test_a_checkpoint_comes_back_from_the_host(pair: Pair) -> None:
    """Other prompts take the whole small pool; what the first one left is loaded from the host, its states too."""
    folder, first = pair.folder, prompt_of(600, 0)
    requests = [
        submit(1, first, 8),
        submit(2, prompt_of(620, 7), 8),
        submit(3, prompt_of(620, 9), 8),
        submit(4, first[:560] + prompt_of(37, 5), 8),
    ]
    run = run_requests(config_of(folder, pair.tight, host_parents=60), requests, gaps=(40, 40, 40))
    assert run.cached(4) == 512
    assert run.counters.host_hit_tokens == 512
    assert run.tokens == alone(folder, requests)


@pytest.mark.parametrize("memory", ["roomy", "tight", "images"])
def test_company_and_retraction(pair: Pair, memory: str) -> None:
    """Four requests whose outputs are not declared; the smaller pool retracts some of them, to compute
    again or, where there is a host pool, to be restored from images of both groups."""
    folder = pair.folder
    requests = [submit(i, prompt_of(100 + 50 * i, i), 170, declared=False) for i in range(1, 5)]
    parents, host_parents = 60 if memory == "roomy" else pair.tight, 60 if memory == "images" else 0
    run = run_requests(config_of(folder, parents, overlap=1, host_parents=host_parents), requests, gaps=(2, 1, 3))
    assert (run.counters.retractions > 0) == (memory != "roomy")
    assert (run.counters.restores > 0) == (memory == "images")
    assert memory != "images" or run.counters.recomputed_tokens == 0
    assert run.held == 0
    assert run.tokens == alone(folder, requests)


def test_graphs_change_no_token_where_requests_are_retracted(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes as graphs and prefills in pieces, each replay compared with its twin, which must not take a state
    further than the replay did."""
    monkeypatch.setenv(CHECK_VARIABLE, "1")
    folder = pair.folder
    requests = [submit(i, prompt_of(100 + 50 * i, i), 120, declared=False) for i in range(1, 5)]
    config = config_of(folder, pair.tight, overlap=1)
    captured = {"graphs": "dispatch", "capture_sizes": [1, 2, 4], "capture_prefill_tokens": [64, 256]}
    config = config.model_copy(update={"scheduler": config.scheduler.model_copy(update=captured)})
    run = run_requests(config, requests, gaps=(2, 1, 3))
    assert run.counters.retractions > 0
    assert run.held == 0
    assert run.tokens == alone(folder, requests)


def test_decode_steps_are_recorded_and_made_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pair.folder
    replays = 0

    def counting(specs: Iterable[KernelSpec]) -> Recorder | str:
        recorder = recorder_of(specs)
        assert not isinstance(recorder, str), recorder

        def record(body: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
            result, replay = recorder(body)

            def counted() -> None:
                nonlocal replays
                replays += 1
                replay()

            return result, counted

        return record

    requests = [submit(i, prompt_of(30 * i, i), 30) for i in range(1, 4)]
    expected = alone(folder, requests)
    monkeypatch.setattr("tokenspeed.device.graphs.choice.recorder_of", counting)
    run: Run = run_requests(config_of(folder, 60), requests)
    assert run.tokens == expected
    assert replays > 25
