"""Products of four bits by Triton's interpreter: quantised bit for bit as the reference does, and multiplied as it."""

import pytest
import torch

from tokenspeed_kernel.fp4_rows import FP4_GROUP, quantise_rows
from tokenspeed_kernel.numerics.weights import random_weight
from tokenspeed_kernel.ops.activation import GatedActivation
from tokenspeed_kernel.ops.gemm import make_reference_fp4_linear
from tokenspeed_kernel.ops.moe import make_reference_fp4_experts
from tokenspeed_kernel.quantized import QuantizedTensor, WeightError
from tokenspeed_kernel_triton import fp4
from tokenspeed_kernel_triton.device import compiling_for

FORMATS = [pytest.param("nvfp4"), pytest.param("gguf_mxfp4", marks=pytest.mark.long)]
SUMS = 2.0**-20
"""The interpreter sums float32 in another order than the reference, and nothing else."""


def weight_of(name, rows, columns):
    return random_weight(name, rows, columns, torch.Generator().manual_seed(3)).weight


def codes_of(planes):
    return torch.stack([planes.codes & 15, planes.codes >> 4], dim=-1).flatten(1)


def same_rows(x, name):
    found, expected = fp4.quantised(x, FP4_GROUP[name]), quantise_rows(x, name)
    assert torch.equal(codes_of(found), expected.codes)
    assert torch.equal(found.scales, expected.scales)
    if name == "nvfp4":
        torch.testing.assert_close(found.whole, expected.whole, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_quantised_bit_for_bit(name):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(10, 1152, generator=generator) * torch.logspace(-30, 30, 10).unsqueeze(1)
    x[1] *= torch.logspace(-6, 0, 1152)
    x[2] = torch.randint(-48, 49, (1152,), generator=generator) * 0.125
    x[3], x[4, 1100], x[5, 3], x[6] = 0.0, torch.nan, -torch.inf, 2.0**-101
    same_rows(x, name)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(FP4_GROUP))
def test_a_program_takes_a_whole_row_where_there_are_many(name, monkeypatch):
    monkeypatch.setattr(fp4, "processors_of", lambda device: 3)
    same_rows(torch.randn(5, 2240, generator=torch.Generator().manual_seed(8)), name)


def compare(weight, tokens, bias):
    x = torch.randn(tokens, weight.shape[1], generator=torch.Generator().manual_seed(4))
    found, expected = torch.full((2, tokens, weight.shape[0]), torch.nan)
    fp4.make_linear(weight, bias)(x, found)
    make_reference_fp4_linear(weight, bias)(x, expected)
    scale = (x.abs() @ weight.dequantize().abs().T).clamp(min=1e-30)
    assert float(((found - expected).abs() / scale).max()) <= SUMS


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_reference(name):
    compare(weight_of(name, 37, 320), 3, torch.randn(37))


@pytest.mark.parametrize(
    ("tiles", "tokens", "steps", "processors", "splits"),
    [
        (64, 1, 16, 148, 2),
        (148, 1, 16, 148, 1),
        (8, 32, 16, 148, 8),
        (1, 1, 3, 148, 3),
        (64, 33, 16, 148, 1),
        (0, 0, 1, 148, 1),
    ],
)
def test_few_tokens_are_cut_along_the_inputs(tiles, tokens, steps, processors, splits):
    assert fp4.splits_of(tiles, tokens, steps, processors) == splits


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(FP4_GROUP))
def test_parts_add_up_whatever_their_number(name, monkeypatch):
    """1408 inputs are six steps of 256, the last of them cut: shares of 6, 3, 2 and 1."""
    for count, launches in ((1, 1), (2, 2), (3, 2), (6, 2)):
        monkeypatch.setattr(fp4, "splits_of", lambda *_, count=count: count)
        assert (
            len(
                fp4.linear_of(
                    fp4.empty_rows(3, 1408, FP4_GROUP[name], torch.device("cpu")),
                    fp4.take_apart(weight_of(name, 37, 1408)),
                    None,
                    torch.empty(3, 37),
                )
            )
            == launches
        )
        compare(weight_of(name, 37, 1408), 3, torch.randn(37))


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["sm_100", "sm_120", "gfx950"])
@pytest.mark.parametrize("name", sorted(FP4_GROUP))
def test_tails_of_tokens_outputs_and_inputs(name, architecture):
    with compiling_for(architecture):
        compare(weight_of(name, 131, 320), 67, None)
        compare(weight_of(name, 1, 64), 1, torch.ones(1))


def test_planes_hold_every_element_and_scale():
    weight = weight_of("nvfp4", 3, 128)
    planes = fp4.take_apart(weight)
    twice = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])[codes_of(planes).long()]
    scales = planes.scales.view(torch.float8_e4m3fn).float() * planes.whole.unsqueeze(1)
    values = twice.view(3, 8, 16) * scales.unsqueeze(-1) * 0.5
    torch.testing.assert_close(values.view(3, 128), weight.dequantize())


def test_a_row_of_several_matrices_is_refused_by_name():
    whole = weight_of("nvfp4", 2, 128).plane.clone()
    whole[:, 40:44] = torch.tensor([2.0]).view(torch.uint8)
    with pytest.raises(WeightError, match="odd one: the blocks of a row have several float32 scales"):
        fp4.take_apart(QuantizedTensor("nvfp4", (2, 128), {"blocks": whole}, "odd one"))
    with pytest.raises(WeightError, match=r"random gguf_q4_0 .2, 64.: gguf_q4_0 is none of gguf_mxfp4, nvfp4"):
        fp4.take_apart(weight_of("gguf_q4_0", 2, 64))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) for n in sorted(FP4_GROUP)])
def test_experts_with_absent_ones_and_one_that_nobody_chose(name):
    """Expert 3 has no token, expert 0 has most, one pair has no expert at all."""
    experts, hidden, intermediate = 5, 128, 64
    gate_up, down = weight_of(name, experts * 2 * intermediate, hidden), weight_of(name, experts * hidden, intermediate)
    biases = torch.randn(experts, 2 * intermediate), torch.randn(experts, hidden)
    ids = torch.randint(0, 3, (20, 2), dtype=torch.int32, generator=torch.Generator().manual_seed(5))
    ids[:, 0] = 0
    ids[4] = torch.tensor([-1, 4])
    x, weights, found, expected = torch.randn(20, hidden), torch.rand(20, 2), *torch.empty(2, 20, hidden)
    activation = GatedActivation("clamped_swiglu", 1.7, 7.0)
    make_reference_fp4_experts(gate_up, down, *biases, activation)(x, ids, weights, expected)
    fp4.make_experts(gate_up, down, *biases, activation)(x, ids, weights, found)
    # what was activated differs in its last bits, and an element of it that lies at a middle goes to either side
    assert float(((found - expected).abs() <= 1e-4).float().mean()) > 0.99


def test_no_tokens_launch_nothing():
    fp4.make_linear(weight_of("nvfp4", 4, 64), None)(torch.empty(0, 64), torch.empty(0, 4))
