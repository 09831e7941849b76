"""Which kernels a binder takes for decodes that graphs of a device will hold."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tokenspeed.layers.kernels import KernelBinder
from tokenspeed_kernel.plugins import load_plugins
from tokenspeed_kernel.recording import PLANS_ON_HOST
from tokenspeed_kernel.registry import active_registry, use_registry
from tokenspeed_kernel.selection import OverrideError

ATTENTION: dict[str, Any] = {"head_dim": 64, "q_per_kv": 2, "windowed": False, "sinks": False, "soft_cap": False}
LATENT_MODES = ("mla_decode", "mla_extend")


def read(binder: KernelBinder, mode: str) -> Any:
    """Binds the kernel of ``mode`` for blocks of 64 tokens in float32."""
    if mode in LATENT_MODES:
        return binder.mla_read(mode, latent_dim=512, rotary_dim=64, page=64, kv_dtype=torch.float32)
    return binder.attention_read(mode, **ATTENTION, page=64, kv_dtype=torch.float32)


@pytest.mark.parametrize("mode", ["decode", "extend", *LATENT_MODES])
def test_none_that_plans_on_the_host_decodes(mode: str) -> None:
    load_plugins()
    with use_registry(active_registry().copy()) as registry:
        native = next(k for k in registry.kernels("attention", mode) if k.spec.solution == "cpu_native")
        spec = replace(native.spec, name="planning", solution="planning", tags=frozenset({PLANS_ON_HOST}))
        registry.register(spec, native.fn, "test")
        asked = {f"attention.{mode}": "planning"}
        read(KernelBinder(asked), mode)
        if mode.endswith("decode"):
            with pytest.raises(OverrideError, match=r"plans each forward on the host.*scheduler\.graphs: off"):
                read(KernelBinder(asked, captured=True), mode)
        else:
            read(KernelBinder(asked, captured=True), mode)  # prefills are captured around it
