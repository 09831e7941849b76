"""What engines bind on a GPU: every operation of a bfloat16 model has a kernel there, and rounds where it may.

A model is built on the CPU, and every choice it asks for is made once more for the GPUs.
"""

import json
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import pytest
from sparse_models import compressed_config, sparse_config
from tiny_models import build, random_config, resolved, tiny_config

from tokenspeed.layers.kernel_choice import OPERATIONS
from tokenspeed.recipes.resolved import ModelSource
from tokenspeed_kernel import binding
from tokenspeed_kernel.ops import mla_expanded
from tokenspeed_kernel.platform import PlatformInfo, current_platform
from tokenspeed_kernel.plugins import load_plugins
from tokenspeed_kernel.registry import Band, active_registry
from tokenspeed_kernel.selection import Selection, SelectionError, choose
from tokenspeed_kernel.signature import BFLOAT16, FLOAT8_E4M3

GPUS = {
    "sm_90": ("nvidia", (9, 0)),
    "sm_100": ("nvidia", (10, 0)),
    "gfx942": ("amd", (9, 4)),
    "gfx950": ("amd", (9, 5)),
}

FAMILIES = ("llama", "qwen3_moe", "gpt_oss", "deepseek_v3", "deepseek_v32", "deepseek_v4", "gemma3")

WITHOUT_TRITON = {"norm.gated_rms", "recurrent.causal_conv", "recurrent.gated_delta"}
"""Of what an engine binds: what the portable layer does not do yet, at most."""

ROUNDED = {
    "gemm.linear",
    "moe.experts",
    *(f"attention.{mode}" for mode in ("decode", "extend", "mla_decode", "mla_extend", "mla_selected")),
}
"""Operations that give the tensor cores bfloat16, where the exact twin would do otherwise."""


@dataclass(frozen=True)
class Request:
    """One choice that a model asked for."""

    family: str
    mode: str
    signature: Any
    traits: dict[str, Any]

    def on(self, platform: PlatformInfo) -> Selection:
        return choose(self.family, self.mode, self.signature, self.traits, platform=platform)


def gpu(isa: str) -> PlatformInfo:
    vendor, architecture = GPUS[isa]
    return replace(current_platform(), vendor=vendor, isa=isa, architecture=architecture, features=frozenset())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Every choice that is made meanwhile."""
    found: list[Request] = []

    def noted(family: str, mode: str, signature: Any, traits: dict[str, Any], **more: Any) -> Selection:
        found.append(Request(family, mode, signature, dict(traits)))
        return choose(family, mode, signature, traits, **more)

    for module in (binding, mla_expanded):
        monkeypatch.setattr(module, "choose", noted)
    return found


def config_of(family: str) -> str:
    """The configuration of the family's tiny model, in bfloat16."""
    if family == "llama":
        return random_config(torch_dtype="bfloat16")
    if family == "deepseek_v4":
        config = compressed_config("all-kinds")
    else:
        config = sparse_config(family) if family == "deepseek_v32" else tiny_config(family)
    return json.dumps({**config.to_dict(), "torch_dtype": "bfloat16", "dtype": "bfloat16"})


@pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed")
@pytest.mark.parametrize("cache", ["auto", "float8_e4m3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_operation_of_a_bfloat16_model_has_a_kernel(family: str, cache: str, asked: list[Request]) -> None:
    source = ModelSource(kind="random", random_config=config_of(family))
    device = build(resolved(source, kv_dtype=cache, kv_bytes=1 << 20))
    device.handle.shutdown()
    assert {"gemm.linear", "embedding.lookup", "norm.rms"} <= {f"{r.family}.{r.mode}" for r in asked}
    held = FLOAT8_E4M3 if cache == "float8_e4m3" else BFLOAT16
    cached = {f"{r.family}.{r.mode}" for r in asked if dict(r.signature).get("kv") == held}
    assert len(cached) >= 3
    for isa in GPUS:
        platform = gpu(isa)
        left, rounded, exact = set(), set(), set()
        for request in asked:
            try:
                found = request.on(platform)
            except SelectionError:
                continue  # whoever asked asks again for what does not round
            if found.spec.band is Band.REFERENCE:
                left.add(found.operation)
            elif found.operation in ROUNDED:
                (rounded if "bfloat16" in str(request.traits.get("activations")) else exact).add(found.operation)
        assert not left, isa
        assert "gemm.linear" in rounded and rounded >= exact, isa
        assert rounded >= cached & ROUNDED, isa


def test_the_portable_layer_has_a_kernel_for_what_an_engine_binds() -> None:
    load_plugins()
    portable = {k.spec.operation for k in active_registry().kernels() if k.spec.solution == "triton"}
    assert set(OPERATIONS) - portable <= WITHOUT_TRITON
