"""Every architecture that caches histories through the whole engine: requests in company, in a pool that cannot hold
them, have the tokens that each has alone, whether they are computed again or come back from images. Models with states
have test_hybrid_engine, those that choose what they attend to test_sparse_models_engine."""

from pathlib import Path

import pytest
from control_plane import submit
from in_process_engine import Run, run_requests
from tiny_models import TINY, prompt_of, resolved, save, transformers_model

from tokenspeed.device.builder import POISON_VARIABLE
from tokenspeed.messages import SamplingParameters
from tokenspeed.recipes.capacity import cache_shape, parents_for
from tokenspeed.recipes.dimensions import groups_of
from tokenspeed.recipes.model_config import read_model_config
from tokenspeed.recipes.resolved import ModelSource, ResolvedConfig

GRANULARITY = 16
OUTPUT = 40
PROMPTS = {handle: prompt_of(17 + 13 * handle, handle) for handle in range(1, 5)}
MAX_LEN = 112
HISTORIES = [family for family, (_, _, own) in TINY.items() if "linear_attention" not in str(own.get("layer_types"))]


def config_of(folder: Path, *, tight: bool, host: bool = False, chunk: int = 16) -> ResolvedConfig:
    """``tight``: the pool holds one request of MAX_LEN and no more; ``host``: there is room for images."""
    model = read_model_config(ModelSource(kind="folder", path=str(folder)))
    config = resolved(folder, granularity=GRANULARITY, max_seqs=4, chunk=chunk, max_len=MAX_LEN)
    shape = cache_shape(groups_of(model), "float32", granularity=GRANULARITY)
    roomy = 40 * len(shape.facts)
    least = parents_for(config.scheduler, shape.facts, MAX_LEN + 1, granularity=GRANULARITY)
    sizes = {
        "bytes": ((least if tight else roomy) + 1) * shape.parent_bytes,
        "host_bytes": (roomy + 1) * shape.parent_bytes if host else 0,
    }
    return config.model_copy(update={"kv": config.kv.model_copy(update=sizes)})


def run(config: ResolvedConfig, *handles: int) -> Run:
    greedy = SamplingParameters(top_k=1)
    requests = [submit(handle, PROMPTS[handle], OUTPUT, declared=False, sampling=greedy) for handle in handles]
    return run_requests(config, requests, gaps=(2, 1, 3))


@pytest.mark.parametrize("family", HISTORIES)
def test_company_retraction_and_restoring_change_no_token(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(POISON_VARIABLE, "1")  # what nobody wrote reads as NaN
    folder = save(transformers_model(family), tmp_path)
    alone = config_of(folder, tight=False, chunk=128)
    expected = {handle: run(alone, handle).tokens[handle] for handle in PROMPTS}
    for host in (False, True):
        found = run(config_of(folder, tight=True, host=host), *PROMPTS)
        assert found.tokens == expected
        assert found.counters.retractions > 0 and found.held == 0
        assert (found.counters.restores > 0, found.counters.recomputed_tokens > 0) == (host, not host)
