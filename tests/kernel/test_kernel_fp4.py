"""Activations of four bits: each rounding by hand, against float64, and what is refused."""

import pytest
import torch

from tokenspeed_kernel.fp4_rows import FP4_GROUP, quantise_rows
from tokenspeed_kernel.numerics.fp4_inputs import fp4_inputs
from tokenspeed_kernel.numerics.weights import random_weight
from tokenspeed_kernel.ops.activation import GatedActivation
from tokenspeed_kernel.ops.gemm import bind_linear
from tokenspeed_kernel.ops.moe import bind_experts

FORMATS = sorted(FP4_GROUP)


def rows_of_every_size() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(64, 128, generator=generator) * torch.logspace(-20, 20, 64).unsqueeze(1)
    x[:16] *= torch.logspace(-8, 3, 128)
    x[40:50] = torch.randint(-48, 49, (10, 128), generator=generator) * 0.125
    return x


@pytest.mark.parametrize("name", FORMATS)
def test_every_element_is_the_nearest_that_its_scale_allows(name: str) -> None:
    x = rows_of_every_size()
    expected, slack = fp4_inputs(x.double(), FP4_GROUP[name])
    assert torch.equal(quantise_rows(x, name).values().double(), expected)
    assert not bool(slack.any())


def test_scales_and_elements_of_a_row_by_hand() -> None:
    """Of 16: the largest is 6, so 6 / 6 under a whole of 2^-8 is the scale 256. Ties go to the even code."""
    x = torch.tensor([[6.0, 0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5.0, 0.26, -0.2, 0.0, 1.0, 4.9, 5.1, -6.0, 3.0]])
    rows = quantise_rows(x, "nvfp4")
    assert rows.whole.tolist() == [2.0**-8]
    assert rows.scales.view(torch.float8_e4m3fn).float().tolist() == [[256.0]]
    assert rows.codes.tolist() == [[7, 0, 2, 10, 4, 4, 14, 6, 1, 0, 0, 2, 6, 7, 15, 5]]


@pytest.mark.parametrize(("largest", "byte"), [(1.0, 125), (1.7499999, 125), (1.75, 126), (2.0, 126), (7.0, 128)])
def test_the_power_of_two_of_a_block_rounds_up_from_seven_quarters(largest: float, byte: int) -> None:
    x = torch.zeros(1, 32)
    x[0, 9] = -largest
    rows = quantise_rows(x, "gguf_mxfp4")
    assert rows.scales.tolist() == [[byte]]
    assert rows.values()[0, 9].item() == pytest.approx(-largest, rel=1 / 6)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_finite_spoils_its_row_alone_and_what_is_tiny_is_zero(name: str) -> None:
    x = torch.full((5, 64), 6.0)
    x[1, 3], x[2, 40], x[3] = torch.nan, torch.inf, 2.0**-101
    result = quantise_rows(x, name).values() @ torch.ones(64, 1)
    assert torch.isnan(result[1:3]).all()
    assert result[[0, 3, 4], 0].tolist() == [384.0, 0.0, 384.0]


def test_large_rows_keep_their_size() -> None:
    large = torch.full((1, 64), 1.5 * 2.0**126)
    for name in FORMATS:
        assert quantise_rows(large, name).values()[0, 0].item() == pytest.approx(large[0, 0].item(), rel=0.1)


def test_rows_that_groups_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 40 elements do not divide into the groups of 32 that gguf_mxfp4 has"):
        quantise_rows(torch.zeros(1, 40), "gguf_mxfp4")


def test_other_weights_are_refused_by_name() -> None:
    generator = torch.Generator().manual_seed(0)
    dense = random_weight("bfloat16", 8, 64, generator).weight
    told = (
        "random bfloat16 .8, 64.: activations are fp4, but the weight is bfloat16; only weights in gguf_mxfp4 or nvfp4"
    )
    with pytest.raises(ValueError, match=told):
        bind_linear(dense, None, activations="fp4")
    gate_up = random_weight("nvfp4", 2 * 2 * 64, 64, generator).weight
    down = random_weight("float32", 2 * 64, 64, generator).weight
    with pytest.raises(ValueError, match="activations are fp4, but the weight is float32"):
        bind_experts(gate_up, down, None, None, GatedActivation("silu"), activations="fp4")


@pytest.mark.parametrize("name", FORMATS)
def test_who_asks_for_four_bits_gets_them_and_nobody_else_does(name: str) -> None:
    weight = random_weight(name, 24, 128, torch.Generator().manual_seed(1)).weight
    x, found, plain = torch.randn(3, 128), torch.empty(3, 24), torch.empty(3, 24)
    bound = bind_linear(weight, None, activations="fp4")
    assert bound.spec.name == "reference_gemm_linear_fp4"
    bound(x, found)
    torch.testing.assert_close(found, quantise_rows(x, name).values() @ weight.dequantize().T)
    other = bind_linear(weight, None)
    assert "fp4" not in other.spec.name
    other(x, plain)
    assert float((found - plain).abs().max()) > 1e-2
