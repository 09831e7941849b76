"""Predicted against observed: what a start was planned to take, and what it took."""

from pathlib import Path

import pytest
from running_server import RunningServer

from tokenspeed.recipes.observed import Observation, last_observation
from tokenspeed.recipes.resolve import settings
from tokenspeed.recipes.schema import RunKeys

ABSOLUTE = 32 << 20
RELATIVE = 0.05


def agrees(observation: Observation) -> bool:
    """Counted terms to the byte, the sum within the bar."""
    predicted, observed = observation.predicted, observation.observed
    for term in ("weights", "workspace", "KV cache"):
        assert observed[term] == predicted[term], term
    return abs(observed["sum"] - predicted["sum"]) <= max(ABSOLUTE, RELATIVE * predicted["sum"])


def test_the_default_model_takes_what_was_planned(server: RunningServer) -> None:
    observation = last_observation("smollm2-135m", "cpu")
    assert observation is not None
    assert agrees(observation), observation
    state = server.state()
    assert (state["vendor"], state["device"], state["devices"]) == ("cpu", "cpu", 1)
    facts = state["facts"]["memory"]
    assert facts["weights"] == observation.observed["weights"] > 90 << 20
    lines = server.output.splitlines()
    start = next(index for index, line in enumerate(lines) if line.split() == ["memory", "predicted", "observed"])
    assert [line.split()[0] for line in lines[start + 1 : start + 4]] == ["weights", "workspace", "libraries"]


@pytest.mark.parametrize("flags", [("--kv-cache-gb", "0.25"), ("--kv-cache-gb", "0.01", "--host-cache-gb", "0.05")])
def test_a_start_keeps_what_it_took_with_its_settings(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path))
    with RunningServer("qwen3-0.6b", "--profile", "smoke", "--max-num-seqs", "5", *flags) as running:
        assert running.model == "qwen3-0.6b-smoke"
    observation = last_observation("qwen3-0.6b", "smoke")
    assert observation is not None
    assert agrees(observation), observation
    assert set(observation.settings) >= set(settings(RunKeys())) - {"speculative", "kernels", "env"}
    assert observation.settings["scheduler.max_seqs"] == 5
    assert observation.sources["scheduler.max_seqs"] == "--max-num-seqs"
