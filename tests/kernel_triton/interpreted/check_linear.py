"""Products with weights by Triton's interpreter against the reference: formats, odd sizes, tails, roundings."""

import pytest
import torch

from tokenspeed_kernel.numerics.weights import random_weight
from tokenspeed_kernel.ops.gemm import make_reference_linear
from tokenspeed_kernel.quantized import QuantizedTensor, WeightError
from tokenspeed_kernel_triton import linear
from tokenspeed_kernel_triton.device import compiling_for

FORMATS = (*linear.DENSE, *linear.QUANTISED)


def weight_of(name, rows, columns):
    return random_weight(name, rows, columns, torch.Generator().manual_seed(3)).weight


def compare(weight, tokens, make, bias=None, bound=2e-6):
    x = torch.randn(tokens, weight.shape[1], generator=torch.Generator().manual_seed(4))
    found, expected = torch.full((2, tokens, weight.shape[0]), torch.nan)
    make(weight, bias)(x, found)
    make_reference_linear(weight, bias)(x, expected)
    scale = (x.abs() @ weight.dequantize().abs().T).clamp(min=1e-30)
    assert float(((found - expected).abs() / scale).max()) <= bound


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "gguf_q4_1" else pytest.mark.long) for n in FORMATS])
def test_every_format_in_both_precisions(name):
    weight = weight_of(name, 37, 256)
    compare(weight, 3, linear.make_linear, torch.randn(37))
    compare(weight, 3, linear.make_rounded_linear, torch.randn(37), bound=2.0**-8)


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["sm_86", "sm_100", "gfx942", "gfx950"])
def test_tails_of_tokens_outputs_and_inputs(architecture):
    with compiling_for(architecture):
        compare(weight_of("float32", 131, 41), 130, linear.make_linear)
        compare(weight_of("bfloat16", 131, 77), 130, linear.make_rounded_linear, bound=2.0**-8)
        compare(weight_of("float16", 1, 1), 1, linear.make_linear)


def test_planes_hold_every_element_and_scale():
    weight = weight_of("gguf_q4_1", 3, 64)
    planes = linear.take_apart(weight)
    low, high = planes.elements.view(3, 2, 16) & 15, planes.elements.view(3, 2, 16) >> 4
    values = torch.cat([low, high], dim=2).float() * planes.scales[..., None] + planes.minima[..., None]
    torch.testing.assert_close(values.view(3, 64), weight.dequantize())
    dense = weight_of("bfloat16", 4, 8)
    assert linear.take_apart(dense).elements.data_ptr() == dense.plane.data_ptr()


def test_another_format_is_refused_by_name():
    blocks = torch.zeros(1, 84, dtype=torch.uint8)
    with pytest.raises(WeightError, match="odd one: gguf_q2_k is none of float32, bfloat16"):
        linear.make_linear(QuantizedTensor("gguf_q2_k", (1, 256), {"blocks": blocks}, "odd one"), None)


def test_no_tokens_launch_nothing():
    linear.make_linear(weight_of("float32", 4, 8), None)(torch.empty(0, 8), torch.empty(0, 4))
