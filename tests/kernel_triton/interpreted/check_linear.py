"""Products with weights by Triton's interpreter against the reference: formats, odd sizes, tails, roundings."""

import weakref

import pytest
import torch

from tokenspeed_kernel.numerics.weights import random_weight
from tokenspeed_kernel.ops.gemm import make_reference_head_linear, make_reference_linear
from tokenspeed_kernel.signature import WEIGHT_FORMATS
from tokenspeed_kernel_triton import linear, planes
from tokenspeed_kernel_triton.device import compiling_for
from tokenspeed_kernel_triton.planes import take_apart

SHORT = ("gguf_q4_1", "gguf_q6_k")
"""A format whose groups have minima, and one with high bits and several groups a step."""


def weight_of(name, rows, columns):
    return random_weight(name, rows, columns, torch.Generator().manual_seed(3)).weight


def compare(weight, tokens, make, bias=None, bound=2e-6):
    x = torch.randn(tokens, weight.shape[1], generator=torch.Generator().manual_seed(4))
    found, expected = torch.full((2, tokens, weight.shape[0]), torch.nan)
    make(weight, bias)(x, found)
    make_reference_linear(weight, bias)(x, expected)
    scale = (x.abs() @ weight.dequantize().abs().T).clamp(min=1e-30)
    assert float(((found - expected).abs() / scale).max()) <= bound


def formats():
    for name in WEIGHT_FORMATS:
        yield pytest.param(name, marks=() if name in SHORT else pytest.mark.long)


@pytest.mark.parametrize("name", formats())
def test_every_format_in_both_precisions(name):
    weight = weight_of(name, 37, 256)
    compare(weight, 3, linear.make_linear, torch.randn(37))
    compare(weight, 3, linear.make_rounded_linear, torch.randn(37), bound=2.0**-8)


@pytest.mark.parametrize(
    ("name", "splits"),
    [("float32", 64), *(pytest.param(*case, marks=pytest.mark.long) for case in (("gguf_q5_0", 3), ("gguf_q4_k", 2)))],
)
def test_inputs_are_split_and_the_parts_added(name, splits):
    """Splits that end within a byte of high bits, and more of them than there are inputs for."""
    weight, bias = weight_of(name, 35, 512), torch.randn(35)
    x = torch.randn(2, 512, generator=torch.Generator().manual_seed(4))
    found, expected = torch.full((2, 2, 35), torch.nan)
    linear.multiply(x, take_apart(weight), bias, found, rounded=False, splits=splits)
    make_reference_linear(weight, bias)(x, expected)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def heads():
    for name in WEIGHT_FORMATS:
        yield pytest.param(name, marks=() if name == "bfloat16" else pytest.mark.long)


@pytest.mark.parametrize("name", heads())
def test_each_head_has_a_matrix_of_its_own(name):
    """Strided rows and heads of both sides, the first rows of each head left out."""
    weight = weight_of(name, 3 * 40, 256)
    x = torch.randn(3, 5, 300, generator=torch.Generator().manual_seed(4))[..., :256].transpose(0, 1)
    found, expected = torch.full((2, 3, 5, 37), torch.nan).transpose(1, 2)
    linear.make_head_linear(weight, 3, 3)(x, found)
    make_reference_head_linear(weight, 3, 3)(x, expected)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["sm_86", "sm_100", "gfx942", "gfx950"])
def test_tails_of_tokens_outputs_and_inputs(architecture):
    with compiling_for(architecture):
        compare(weight_of("float32", 131, 41), 130, linear.make_linear)
        compare(weight_of("bfloat16", 131, 77), 130, linear.make_rounded_linear, bound=2.0**-8)
        compare(weight_of("float16", 1, 1), 1, linear.make_linear)


def test_planes_hold_every_element_and_scale():
    weight = weight_of("gguf_q4_1", 3, 64)
    taken = take_apart(weight)
    low, high = taken.elements.view(3, 2, 16) & 15, taken.elements.view(3, 2, 16) >> 4
    values = torch.cat([low, high], dim=2).float() * taken.scales[..., None] + taken.minima[..., None]
    torch.testing.assert_close(values.view(3, 64), weight.dequantize())
    dense = weight_of("bfloat16", 4, 8)
    assert take_apart(dense).elements.data_ptr() == dense.plane.data_ptr()


@pytest.mark.parametrize("name", [name for name in WEIGHT_FORMATS if name not in ("gguf_q2_k", "gguf_q3_k")])
def test_planes_take_a_thirtieth_more_memory_at_most(name):
    weight = weight_of(name, 8, 2048)
    assert take_apart(weight).nbytes <= 1.03 * weight.nbytes


def test_a_weight_is_taken_apart_once_and_not_kept():
    weight = weight_of("gguf_q4_0", 4, 64)
    first, second = linear.make_linear(weight, None), linear.make_head_linear(weight, 2, 0)
    assert take_apart(weight) is take_apart(weight)
    original = weakref.ref(weight.plane)
    del weight
    assert original() is None, "a kernel holds the blocks besides what it reads"
    first(torch.ones(1, 64), torch.empty(1, 4))
    second(torch.ones(1, 2, 64), torch.empty(1, 2, 2))


@pytest.mark.parametrize("name", ["gguf_q5_1", "gguf_q6_k"])
def test_a_weight_is_taken_apart_some_rows_at_a_time(monkeypatch, name):
    weight = weight_of(name, 7, 512)
    whole = take_apart(weight)
    monkeypatch.setattr(planes, "SLICE_BYTES", 3 * weight.plane.shape[1])
    parts = take_apart(weight)
    assert parts.shape == whole.shape == (7, 512)
    for found, expected in zip(parts.arguments(weight.plane), whole.arguments(weight.plane), strict=True):
        assert torch.equal(found, expected)


def test_nvfp4_rows_under_different_scales_keep_them():
    """Joined along the inputs, blocks of a row do not agree on the scale of their matrix."""
    weight = weight_of("nvfp4", 6, 256)
    weight.plane[:, 40:44] = torch.tensor([0.75]).view(torch.uint8)
    assert take_apart(weight_of("nvfp4", 6, 256)).units.shape == (6, 1)
    assert take_apart(weight).units is None and take_apart(weight).scales.shape == (6, 16)
    compare(weight, 2, linear.make_linear)


@pytest.mark.long
@pytest.mark.parametrize("name", ["fp8_blocks", "nvfp4"])
@pytest.mark.parametrize("architecture", ["sm_80", "gfx942"])
def test_architectures_without_e4m3_take_its_bits(architecture, name):
    with compiling_for(architecture):
        compare(weight_of(name, 37, 256), 3, linear.make_linear)
        compare(weight_of(name, 37, 256), 3, linear.make_rounded_linear, bound=2.0**-8)


def test_no_tokens_launch_nothing():
    linear.make_linear(weight_of("float32", 4, 8), None)(torch.empty(0, 8), torch.empty(0, 4))
    linear.make_head_linear(weight_of("float32", 4, 8), 2, 0)(torch.empty(0, 2, 8), torch.empty(0, 2, 2))
