"""Models that choose or compress what they attend to, through the whole engine: prompts that hit, requests that are
retracted, computed again or restored from images, all with the tokens that each request has alone."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from control_plane import submit as submitted
from in_process_engine import Run, run_requests
from sparse_models import compressed_model, sparse_model
from tiny_models import prompt_of, resolved, save

from tokenspeed.device.builder import POISON_VARIABLE
from tokenspeed.device.cache_arena import ArenaLayout
from tokenspeed.messages import SamplingParameters, Submit
from tokenspeed.models import architecture
from tokenspeed.recipes.model_config import read_model_config
from tokenspeed.recipes.resolved import ModelSource, ResolvedConfig

GRANULARITY = 16
TIGHT = {"deepseek_v32": 14, "glm_moe_dsa": 4, "deepseek_v4": 8}
"""Parents in which one request fits and four do not."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {
        "deepseek_v32": sparse_model("deepseek_v32"),
        "glm_moe_dsa": sparse_model("glm_moe_dsa-shared"),
        "deepseek_v4": compressed_model("all-kinds"),
    }
    for model in made.values():
        model.config.eos_token_id = model.generation_config.eos_token_id = None  # type: ignore[union-attr]
    return {name: save(model, tmp_path_factory.mktemp(name)) for name, model in made.items()}


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody wrote reads as NaN."""
    monkeypatch.setenv(POISON_VARIABLE, "1")


def config_of(folder: Path, parents: int, *, host_parents: int = 0, chunk: int = 16) -> ResolvedConfig:
    config = read_model_config(ModelSource(kind="folder", path=str(folder)))
    groups = architecture(config.architecture).cache_groups(config, granularity=GRANULARITY)
    size = ArenaLayout.of(groups, torch.float32).parent_bytes
    return resolved(
        folder,
        granularity=GRANULARITY,
        max_seqs=4,
        chunk=chunk,
        max_len=128,
        kv_bytes=(parents + 1) * size,
        host_bytes=(host_parents + 1) * size if host_parents else 0,
    )


def submit(handle: int, prompt: Sequence[int], count: int) -> Submit:
    return submitted(handle, prompt, count, declared=False, sampling=SamplingParameters(top_k=1))


def alone(folder: Path, requests: Sequence[Submit]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for request in requests:
        found |= run_requests(config_of(folder, 120, chunk=128), [request]).tokens
    return found


@pytest.mark.parametrize("name", TIGHT)
def test_company_retraction_and_restoring_change_no_token(folders: dict[str, Path], name: str) -> None:
    requests = [submit(i, prompt_of(17 + 13 * i, i), 40) for i in range(1, 5)]
    expected = alone(folders[name], requests)
    runs: list[Run] = []
    for host_parents in (0, 120):
        config = config_of(folders[name], TIGHT[name], host_parents=host_parents)
        runs.append(run_requests(config, requests, gaps=(2, 1, 3)))
    for run in runs:
        assert run.tokens == expected
        assert run.held == 0
        assert run.counters.retractions > 0
    assert runs[0].counters.recomputed_tokens > 0
    assert runs[1].counters.restores > 0
    assert runs[1].counters.recomputed_tokens == 0


@pytest.mark.parametrize("name", TIGHT)
def test_prompts_go_on_where_others_left(folders: dict[str, Path], name: str) -> None:
    """A conversation goes on; and of prompts that branch off it, windows are there for the second one."""
    first = prompt_of(70, 0)
    output = alone(folders[name], [submit(1, first, 20)])[1]
    requests = [
        submit(1, first, 20),
        submit(2, [*first, *output, *prompt_of(9, 3)], 10),
        submit(3, first[:50] + prompt_of(20, 5), 10),
        submit(4, first[:50] + prompt_of(11, 8), 10),
    ]
    run = run_requests(config_of(folders[name], 120), requests, gaps=(60, 60, 60))
    assert run.cached(2) == 80
    assert run.cached(3) == (0 if name == "deepseek_v4" else 48)
    assert run.cached(4) == 48
    assert run.tokens == alone(folders[name], requests)
