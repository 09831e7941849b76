"""A model with sliding windows through the whole engine: two cache groups, tokens equal to those of transformers."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from control_plane import submit as submitted
from equal_tokens import assert_greedy_equal
from in_process_engine import Run, run_requests
from model_checks import TOLERANCE
from tiny_models import prompt_of, resolved, save, transformers_model

from tokenspeed.device.builder import POISON_VARIABLE
from tokenspeed.messages import SamplingParameters, Submit
from tokenspeed.recipes.resolved import ResolvedConfig

GRANULARITY, WINDOW, CHUNK, MAX_LEN = 16, 24, 16, 224
PARENT_BYTES = (
    2 * 2 * 2 * GRANULARITY * 16 * 4
)  # layers of a group, keys and values, heads, tokens, dimensions, float32

Model = tuple[torch.nn.Module, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Two layers with the window and two without, so that a block of either group is one parent."""
    kinds = ["sliding_attention", "full_attention"] * 2
    model = transformers_model(
        "qwen3",
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=kinds,
        attn_implementation="eager",
        eos_token_id=None,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(POISON_VARIABLE, "1")  # what nobody wrote reads as NaN
        yield model, save(model, tmp_path_factory.mktemp("sliding"))


def config_of(folder: Path, parents: int, overlap: int, host_parents: int = 0) -> ResolvedConfig:
    return resolved(
        folder,
        granularity=GRANULARITY,
        max_seqs=4,
        chunk=CHUNK,
        max_len=MAX_LEN,
        overlap=overlap,
        kv_bytes=(parents + 1) * PARENT_BYTES,
        host_bytes=(host_parents + 1) * PARENT_BYTES if host_parents else 0,
    )


def submit(handle: int, prompt: Sequence[int], count: int, *, declared: bool = True) -> Submit:
    return submitted(handle, prompt, count, declared=declared, sampling=SamplingParameters(top_k=1))


def tokens_equal_transformers(
    model: torch.nn.Module, config: ResolvedConfig, run: Run, requests: Sequence[Submit]
) -> None:
    def generate(ids: list[int], count: int) -> list[int]:
        return run_requests(config, [submit(1, ids, count)]).tokens[1]

    for request in requests:
        prompt, ours = np.frombuffer(request.prompt, np.int32).tolist(), run.tokens[request.handle]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ours])).logits[0, len(prompt) - 1 : -1].numpy()
        if ours == logits.argmax(-1).tolist():
            continue
        whole = list(prompt)
        with torch.no_grad():
            while len(whole) < len(prompt) + len(ours):
                whole.append(int(model(torch.tensor([whole])).logits[0, -1].argmax()))
            logits = model(torch.tensor([whole])).logits[0, len(prompt) - 1 : -1].numpy()
        assert_greedy_equal(generate, prompt, whole[len(prompt) :], logits, margin=TOLERANCE)


@pytest.mark.parametrize("overlap", [0, 1])
def test_blocks_are_recycled_behind_the_window(pair: Model, overlap: int) -> None:
    """One request of 14 blocks a group in a pool of 20: without recycling it would need 28."""
    model, folder = pair
    config, requests = config_of(folder, 20, overlap), [submit(1, prompt_of(100, 0), MAX_LEN - 100)]
    run = run_requests(config, requests)
    assert len(run.tokens[1]) == MAX_LEN - 100
    assert (run.counters.retractions, run.held) == (0, 0)
    tokens_equal_transformers(model, config, run, requests)


@pytest.mark.parametrize(("parents", "host_parents"), [(80, 0), (26, 0), (26, 80)], ids=["roomy", "tight", "images"])
def test_company_and_retraction(pair: Model, parents: int, host_parents: int) -> None:
    """Four requests that want 30 blocks of full history and 16 of windows; the smaller pool retracts some of them, to
    compute again or, where there is a host pool, to be restored from images of both groups."""
    model, folder = pair
    config = config_of(folder, parents, 1, host_parents)
    requests = [submit(i, prompt_of(30 + 20 * i, i), 70, declared=False) for i in range(1, 5)]
    run = run_requests(config, requests, gaps=(2, 1, 3))
    assert (run.counters.retractions > 0) == (parents < 46)
    assert (run.counters.restores > 0) == (host_parents > 0)
    assert host_parents == 0 or run.counters.recomputed_tokens == 0
    assert run.held == 0
    tokens_equal_transformers(model, config, run, requests)


def test_a_prefix_hit_in_the_middle(pair: Model) -> None:
    """The second prompt goes on where the first one ended; what it does not find it computes."""
    model, folder = pair
    config, first = config_of(folder, 60, 0), prompt_of(90, 0)
    second = first[:72] + prompt_of(30, 5)
    requests = [submit(1, first, 20), submit(2, second, 60)]
    run = run_requests(config, requests, gaps=(60,))
    assert run.cached(2) == 64
    tokens_equal_transformers(model, config, run, requests)
