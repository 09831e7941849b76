"""What linears may round their inputs to: the configuration's word, by weight, behind the environment's."""

import pytest
import torch

from tokenspeed.layers.kernels import KernelBinder
from tokenspeed.recipes.resolved import Activations
from tokenspeed_kernel import ops
from tokenspeed_kernel.ops.gemm import ACTIVATIONS_VARIABLE
from tokenspeed_kernel.quantized import QuantizedTensor


@pytest.mark.parametrize(
    ("activations", "dtype", "environment", "asked"),
    [
        ("auto", torch.bfloat16, "", "bfloat16"),
        ("auto", torch.float16, "", "float32"),
        ("auto", torch.float32, "", "float32"),
        ("float32", torch.bfloat16, "", "float32"),
        ("bfloat16", torch.float32, "", "bfloat16"),
        ("float32", torch.bfloat16, "bfloat16", "bfloat16"),
        ("bfloat16", torch.bfloat16, "float32", "float32"),
    ],
)
def test_each_weight_is_asked_for_with_its_rounding(
    monkeypatch: pytest.MonkeyPatch, activations: Activations, dtype: torch.dtype, environment: str, asked: str
) -> None:
    monkeypatch.setenv(ACTIVATIONS_VARIABLE, environment)
    weight = QuantizedTensor.from_dense(torch.randn(8, 64).to(dtype), "test")
    binder = KernelBinder({}, activations=activations)
    linear = binder.linear(weight, None)
    monkeypatch.delenv(ACTIVATIONS_VARIABLE)
    expected = ops.bind_linear(weight, None, activations=asked)
    assert binder.chosen["gemm.linear"] == expected.spec.name
    x, ours, theirs = torch.randn(3, 64), torch.empty(3, 8), torch.empty(3, 8)
    linear(x, ours)
    expected(x, theirs)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
