"""What linears may round their inputs to: the configuration's word, by weight, behind the environment's."""

from typing import Any

import pytest
import torch

from tokenspeed.layers.kernels import KernelBinder
from tokenspeed.recipes import activation_type
from tokenspeed.recipes.model_config import CheckpointError
from tokenspeed.recipes.resolved import Activations
from tokenspeed_kernel import ops
from tokenspeed_kernel.binding import Bound
from tokenspeed_kernel.numerics.weights import random_weight
from tokenspeed_kernel.ops.activation import GatedActivation
from tokenspeed_kernel.ops.gemm import ACTIVATIONS_VARIABLE, allowed_activations
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.signature import WEIGHT_FORMATS


@pytest.mark.parametrize(
    ("activations", "device", "stored", "environment", "asked"),
    [
        ("auto", "cpu", "bfloat16", "", "bfloat16"),
        ("auto", "cpu", "float16", "", "float32"),
        ("auto", "cpu", "float32", "", "float32"),
        ("auto", "cpu", "gguf_q4_0", "", "float32"),
        ("auto", "cpu", "nvfp4", "", "float32"),
        *(("auto", "cuda", stored, "", "bfloat16") for stored in sorted(WEIGHT_FORMATS) if stored != "float32"),
        ("auto", "cuda", "float32", "", "float32"),
        ("auto", "npu", "fp8_blocks", "", "bfloat16"),
        ("float32", "cpu", "bfloat16", "", "float32"),
        ("float32", "cuda", "gguf_q8_0", "", "float32"),
        ("bfloat16", "cpu", "float32", "", "bfloat16"),
        ("float32", "cpu", "bfloat16", "bfloat16", "bfloat16"),
        ("auto", "cuda", "gguf_q8_0", "float32", "float32"),
        ("bfloat16", "cpu", "bfloat16", "float32", "float32"),
    ],
)
def test_each_weight_is_asked_for_with_its_rounding(
    monkeypatch: pytest.MonkeyPatch, activations: Activations, device: str, stored: str, environment: str, asked: str
) -> None:
    monkeypatch.setenv(ACTIVATIONS_VARIABLE, environment)
    weight = random_weight(stored, 8, 256, torch.Generator().manual_seed(1)).weight
    binder = KernelBinder({}, activations=activations, device=device)
    bind, given = ops.bind_linear, []

    def noted(*arguments: Any, activations: str | None, **more: Any) -> Bound:
        given.append(allowed_activations(activations))
        return bind(*arguments, activations=activations, **more)

    monkeypatch.setattr(ops, "bind_linear", noted)
    linear = binder.linear(weight, None)
    assert given == [asked]
    monkeypatch.delenv(ACTIVATIONS_VARIABLE)
    expected = bind(weight, None, activations=asked)
    assert binder.chosen["gemm.linear"] == expected.spec.name
    x, ours, theirs = torch.randn(3, 256), torch.empty(3, 8), torch.empty(3, 8)
    linear(x, ours)
    expected(x, theirs)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("activations", "cache", "asked"),
    [
        ("auto", torch.bfloat16, "bfloat16"),
        ("auto", torch.float8_e4m3fn, "bfloat16"),
        ("auto", torch.float16, "float32"),
        ("float32", torch.float8_e4m3fn, "float32"),
        ("int8", torch.float8_e4m3fn, "float32"),
    ],
)
def test_attention_may_round_over_caches_that_hold_nothing_finer(
    monkeypatch: pytest.MonkeyPatch, activations: Activations, cache: torch.dtype, asked: str
) -> None:
    monkeypatch.setenv(ACTIVATIONS_VARIABLE, "")
    heads = {"head_dim": 64, "q_per_kv": 3, "windowed": False, "sinks": False, "soft_cap": False, "kv_dtype": cache}
    binder = KernelBinder({}, activations=activations)
    binder.attention_read("decode", page=16, **heads)
    expected = ops.bind_attention_decode(kernel_page_size=16, activations=asked, **heads)
    assert binder.chosen["attention.decode"] == expected.spec.name


@pytest.mark.parametrize("environment", ["", "fp4"])
def test_four_bits_meet_weights_of_four_bits_and_no_others(monkeypatch: pytest.MonkeyPatch, environment: str) -> None:
    monkeypatch.setenv(ACTIVATIONS_VARIABLE, environment)
    generator = torch.Generator().manual_seed(0)
    binder = KernelBinder({}, activations="auto" if environment else "fp4")
    binder.linear(QuantizedTensor.from_dense(torch.randn(8, 64), "dense"), None)
    binder.linear(random_weight("nvfp4", 8, 64, generator).weight, None, exact=True)
    with pytest.raises(
        CheckpointError, match=r"m\.gguf: activations are fp4, but no weight in it is stored as gguf_mxfp4"
    ):
        binder.refuse_unused_activations("m.gguf")
    binder.linear(random_weight("nvfp4", 8, 64, generator).weight, None)
    assert binder.chosen["gemm.linear"].endswith(" + reference_gemm_linear_fp4")
    binder.refuse_unused_activations("m.gguf")


def test_experts_of_two_formats_keep_their_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ACTIVATIONS_VARIABLE, raising=False)
    generator = torch.Generator().manual_seed(0)
    mixed = [
        random_weight("nvfp4", 2 * 2 * 64, 64, generator).weight,
        random_weight("float32", 2 * 64, 64, generator).weight,
    ]
    alike = [mixed[0], random_weight("nvfp4", 2 * 64, 64, generator).weight]
    binder = KernelBinder({}, activations="fp4")
    binder.experts(*mixed, None, None, GatedActivation("silu"))
    assert "fp4" not in binder.chosen["moe.experts"]
    binder.experts(*alike, None, None, GatedActivation("silu"))
    assert "reference_moe_experts_fp4" in binder.chosen["moe.experts"]


def test_the_plan_knows_the_variable_by_its_name() -> None:
    assert activation_type.ACTIVATIONS_VARIABLE == ACTIVATIONS_VARIABLE
