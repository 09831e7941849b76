"""Embeddings of a whole engine equal those of transformers: chunked, behind cached prefixes, in company, retracted."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from control_plane import submit
from in_process_engine import BYTES_PER_BLOCK, GRANULARITY, Run, run_requests
from numpy.typing import NDArray
from sparse_models import compressed_model, sparse_model
from tiny_models import TINY, prompt_of, resolved, save, transformers_model

from tokenspeed.device.builder import POISON_VARIABLE
from tokenspeed.messages import Pooling, Submit
from tokenspeed.recipes.resolved import ResolvedConfig

POOLINGS: tuple[Pooling, ...] = ("last", "mean")
PROMPTS = [prompt_of(length, start) for start, length in enumerate((100, 1, 40, 16, 7, 33))]
TOLERANCE = 1e-4
"""Of elements of about 1: both add up the same float32 numbers in another order."""


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    **{family: partial(transformers_model, family) for family in TINY},
    "deepseek_v32": partial(sparse_model, "deepseek_v32"),
    "glm_moe_dsa": partial(sparse_model, "glm_moe_dsa-shared"),
    "deepseek_v4": partial(compressed_model, "all-kinds"),
}


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    """The decoder of transformers, and the checkpoint. That of qwen3 has the names of an embedding model's: no
    "model." in front, and no head."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "llama":
        model = transformers_model("llama")
        return model.model, save(model, folder)  # type: ignore[return-value]
    decoder = transformers_model("qwen3", tie_word_embeddings=True).model
    save(decoder, folder)  # type: ignore[arg-type]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    return decoder, folder  # type: ignore[return-value]


def expected(decoder: torch.nn.Module, prompt: Sequence[int], pooling: Pooling) -> NDArray[np.float32]:
    with torch.inference_mode():
        hidden = decoder(torch.tensor([prompt])).last_hidden_state[0]
    pooled: NDArray[np.float32] = (hidden[-1] if pooling == "last" else hidden.mean(0)).numpy()
    return pooled


def config(folder: Path, *, overlap: int, blocks: int = 60, chunk: int = 24, host_blocks: int = 0) -> ResolvedConfig:
    """In chunks that do not end with blocks, and on kernels whose sums depend on nothing else that runs."""
    return resolved(
        folder,
        granularity=GRANULARITY,
        chunk=chunk,
        overlap=overlap,
        kv_bytes=(blocks + 1) * BYTES_PER_BLOCK,
        host_bytes=(host_blocks + 1) * BYTES_PER_BLOCK if host_blocks else 0,
        enforce="determinism",
    )


def embed(handle: int, prompt: Sequence[int], pooling: Pooling) -> Submit:
    return submit(handle, prompt, 1, pooling=pooling)


def generate(handle: int, prompt: Sequence[int], count: int) -> Submit:
    return submit(handle, prompt, count, declared=False)


def embedding(run: Run, handle: int) -> NDArray[np.float32]:
    (output,) = [output for output in run.channel.outputs if output.handle == handle]
    assert (output.token_ids, output.finish_reason) == ([], "stop")
    return np.frombuffer(output.embedding, "<f4")


def assert_close(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> None:
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() < TOLERANCE
    assert found @ wanted / (np.linalg.norm(found) * np.linalg.norm(wanted)) > 1 - 1e-6


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_they_equal_transformers(pair: tuple[torch.nn.Module, Path], pooling: Pooling, overlap: int) -> None:
    """All at once beside requests that generate, then each again, when its prefix is in the cache."""
    decoder, folder = pair
    first = [embed(at, prompt, pooling) for at, prompt in enumerate(PROMPTS, start=1)]
    beside = [generate(90 + at, prompt_of(20, 50 + at), 12) for at in range(2)]
    again = [embed(20 + at, prompt, pooling) for at, prompt in enumerate(PROMPTS, start=1)]
    run = run_requests(config(folder, overlap=overlap), [*beside, *first, *again], [0] * 7 + [60])
    for at, prompt in enumerate(PROMPTS, start=1):
        wanted = expected(decoder, prompt, pooling)
        assert_close(embedding(run, at), wanted)
        assert_close(embedding(run, 20 + at), wanted)
    pages = (len(PROMPTS[0]) - 1) // GRANULARITY * GRANULARITY
    assert run.cached(21) == (pages if pooling == "last" else 0), "a mean needs every token"
    assert [len(run.tokens[request.handle]) for request in beside] == [12, 12]


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("host_blocks", [0, 40], ids=["computed again", "from an image"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_one_that_gave_way_in_mid_prompt(
    pair: tuple[torch.nn.Module, Path], pooling: Pooling, host_blocks: int, overlap: int
) -> None:
    """An answer grows into the pool, which a long prompt in small chunks has filled: the prompt gives way, and comes
    back to be computed again, or to go on where it was."""
    decoder, folder = pair
    prompt = prompt_of(110, 30)
    settings = config(folder, overlap=overlap, blocks=9, chunk=4, host_blocks=host_blocks)
    run = run_requests(settings, [generate(9, prompt_of(14, 50), 100), embed(1, prompt, pooling)])
    assert run.counters.retractions > 0 and len(run.tokens[9]) == 100
    assert (run.counters.restores > 0, run.counters.recomputed_tokens > 0) == (host_blocks > 0, host_blocks == 0)
    assert_close(embedding(run, 1), expected(decoder, prompt, pooling))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_it_depends_on_nothing_else_that_runs(pair: tuple[torch.nn.Module, Path], pooling: Pooling) -> None:
    """To the last bit where kernels promise it: alone in one step, or in a batch whose steps are as large."""
    _, folder = pair
    prompt = prompt_of(20, 3)
    alone = run_requests(config(folder, overlap=0, chunk=64), [embed(1, prompt, pooling)])
    batch = [embed(9, prompt_of(30, 8), pooling), embed(1, prompt, pooling), generate(7, [5, 6, 7], 9)]
    beside = run_requests(config(folder, overlap=1, chunk=64), batch)
    assert embedding(alone, 1).tobytes() == embedding(beside, 1).tobytes()


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_gives_its_last_hidden_states(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the last norm, and where there are several residual streams what they become; of every row of a chunk."""
    monkeypatch.setenv(POISON_VARIABLE, "1")  # what nobody wrote reads as NaN
    model = MODELS[name]()
    settings = resolved(save(model, tmp_path), granularity=GRANULARITY, chunk=24)
    settings = settings.model_copy(update={"scheduler": settings.scheduler.model_copy(update={"prefix_cache": False})})
    prompt = prompt_of(60, 1)
    run = run_requests(settings, [embed(1, prompt, "last"), embed(2, prompt, "mean")])
    for handle, pooling in ((1, "last"), (2, "mean")):
        assert_close(embedding(run, handle), expected(model.model, prompt, pooling))  # type: ignore[arg-type]
