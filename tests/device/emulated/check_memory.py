"""What of its weights a device holds: what its kernels use, in the form that they use, and nothing beside it."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulated_builds import built, smoke_model
from emulated_device import HELD, MEMORY
from tiny_models import REFERENCE, random_config

from tokenspeed.device import builder
from tokenspeed.device.placement import Placement
from tokenspeed.device.weight_memory import DeviceWeights
from tokenspeed.layers.kernels import KernelBinder
from tokenspeed.layers.loader import load_weights
from tokenspeed.layers.loader.random_source import RandomSource
from tokenspeed.layers.weights import LoadedWeights, WeightSpec
from tokenspeed.models import architecture
from tokenspeed.recipes.checkpoint_size import PLANES_GROWTH
from tokenspeed.recipes.model_config import read_model_config
from tokenspeed.recipes.resolved import ModelSource
from tokenspeed_kernel.numerics.weights import random_weight
from tokenspeed_kernel.plugins import load_plugins
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.signature import WEIGHT_FORMATS
from tokenspeed_kernel_triton import planes
from tokenspeed_kernel_triton.requirement import TritonRequirement

SIZES = {"hidden_size": 256, "num_hidden_layers": 2, "head_dim": 64, "num_attention_heads": 4}
LLAMA = random_config(**SIZES, intermediate_size=512)
MIXTURE = random_config(
    **SIZES,
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
)
TRITON = dict.fromkeys(("gemm.linear", "moe.experts", "embedding.lookup"), "triton")


class InFormat(RandomSource):
    """Random weights whose projections are stored in ``format``."""

    format = "bfloat16"

    def matrix(self, spec: WeightSpec) -> QuantizedTensor:
        if "_proj" not in spec.name:
            return super().matrix(spec)
        return random_weight(self.format, *spec.shape, self._generator(spec.name)).weight


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton's kernels count as those of the device."""
    monkeypatch.setattr(TritonRequirement, "_platform_refusal", lambda self, platform: None)
    load_plugins()
    yield
    gc.collect()


def cases() -> Iterator[Any]:
    for stored in sorted(WEIGHT_FORMATS):
        for text in (LLAMA, MIXTURE):
            is_short = (text, stored) in ((LLAMA, "gguf_q4_0"), (MIXTURE, "gguf_mxfp4"))
            name = f"{'llama' if text is LLAMA else 'mixture'}, {stored}"
            yield pytest.param(text, stored, id=name, marks=() if is_short else pytest.mark.long)


@pytest.mark.parametrize(("text", "stored"), list(cases()))
def test_a_bound_model_holds_its_weights_once(text: str, stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InFormat, "format", stored)
    monkeypatch.setattr(planes, "SLICE_BYTES", 4096)
    config = read_model_config(ModelSource(kind="random", random_config=text))
    family = architecture(config.architecture)
    before = HELD.start()
    weights = load_weights(
        InFormat(seed=1, dtype="bfloat16"),
        family.weights(config, rank=0, world=1),
        memory=DeviceWeights(Placement.of("npu", 0)),
        q_and_k_permuted=False,
        ignored=(),
        report=lambda *_: None,
    )
    planned, largest = weights.nbytes, max(weight.nbytes for weight in weights.matrices.values())
    model: Any = family.Model(
        config,
        weights,
        KernelBinder({**REFERENCE, **TRITON}),
        kv_dtype=torch.float32,
        max_tokens=8,
        max_logit_rows=1,
        max_positions=64,
    )
    gc.collect()
    assert not weights.matrices
    held, most = (count - before - model.workspace_bytes for count in (HELD.bytes, HELD.peak))
    growth = PLANES_GROWTH.get(stored.removeprefix("gguf_").upper(), 1.0)
    assert 0.9 * planned <= held <= growth * planned
    # Both forms of one product's weights are there at a time: gate and up, or all of a layer's experts.
    assert most <= max(held, planned) + 3 * growth * largest


def test_the_cache_takes_what_the_model_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """References hold a weight in float32 whatever it is stored in: twice what a plan counts of bfloat16."""
    before = HELD.start()
    monkeypatch.setattr(MEMORY, "total", before + (64 << 20))
    made = built(ModelSource(kind="random", random_config=random_config(**SIZES, dtype="bfloat16")), "npu", kv_bytes=0)
    try:
        taken = HELD.bytes - before
        assert made.specs.arena_bytes > 16 << 20
        assert 0.8 * 0.9 * (64 << 20) <= taken <= 0.9 * (64 << 20), "a tenth is not for this engine"
    finally:
        made.handle.shutdown()


def test_nothing_that_was_loaded_outlives_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents, whose up-projection is bound three times, once with the cache: what the references hold of weights in
    blocks is made anew, but of experts, which they take out of their blocks in each call."""
    taken: list[weakref.ref[QuantizedTensor]] = []
    take = LoadedWeights.take

    def noted(self: LoadedWeights, name: str) -> QuantizedTensor:
        weight = take(self, name)
        if weight.is_blocked and ".experts." not in name:
            taken.append(weakref.ref(weight))
        return weight

    monkeypatch.setattr(LoadedWeights, "take", noted)
    monkeypatch.setattr(InFormat, "format", "gguf_q8_0")
    monkeypatch.setattr(builder, "open_source", lambda source, config: InFormat(seed=1, dtype="float32"))
    made = built(smoke_model("kimi-k2.5"), "npu")
    try:
        gc.collect()
        assert len(taken) > 10
        assert not [ref().source for ref in taken if ref() is not None]  # type: ignore[union-attr]
    finally:
        made.handle.shutdown()
