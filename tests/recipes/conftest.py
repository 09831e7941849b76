"""Machines and recipe folders for the tests of the recipes room."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stand_in_hub import StandInHub, stand_in_hub

from tokenspeed.recipes.machine import Accelerator, Machine
from tokenspeed.recipes.resolved import GIB

MakeMachine = Callable[..., Machine]

SMALL_RECIPE = """\
name: small
family: llama
repository: someone/small
licence: MIT
context: 2048
weights: {kind: huggingface, repository: someone/small, bytes: 100 MB, format: bfloat16}
cache_groups:
  - {id: full, layers: 2, values_per_layer: 64}
defaults:
  scheduler: {max_seqs: 16}
profiles:
  cpu:
    when: {vendor: cpu}
    status: functional
    scheduler: {chunk: 128}
  smoke:
    when: {vendor: cpu}
    status: functional
    weights:
      kind: random
      config: {architectures: [LlamaForCausalLM], model_type: llama, hidden_size: 64, intermediate_size: 128,
        num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, vocab_size: 512,
        max_position_embeddings: 512, rms_norm_eps: 1.0e-5, rope_theta: 10000.0, torch_dtype: float32}
"""


@pytest.fixture
def make_machine() -> MakeMachine:
    """Makes a machine with so many GiB free and these accelerators."""

    def make(*accelerators: Accelerator, free_gib: float = 16.0) -> Machine:
        return Machine(
            cores=4,
            memory_bytes=32 * GIB,
            free_bytes=int(free_gib * GIB),
            isa=("avx2",),
            accelerators=accelerators,
        )

    return make


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the operator's own recipes, with ``small`` in it; downloads go to a folder of their own too."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "small.yaml").write_text(SMALL_RECIPE)
    monkeypatch.setenv("TOKENSPEED_RECIPES", str(folder))
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return folder


HUB_VARIABLES = (
    *("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"),
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH"),
)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """A hub on a loopback port, an empty cache, nobody's token, and no waiting between tries."""
    for name in HUB_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # read when some test before imported it
    monkeypatch.setattr("tokenspeed.recipes.weights.hub.SECRET_FILE", tmp_path / "no-secret")
    monkeypatch.setattr("tokenspeed.recipes.weights.transfer.FIRST_WAIT_S", 0.001)
    with stand_in_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        yield server
