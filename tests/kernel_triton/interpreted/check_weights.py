"""Look-ups, quantised activations and residual streams by Triton's interpreter against the references."""

import pytest
import torch

from tokenspeed_kernel.numerics.weights import random_weight
from tokenspeed_kernel.ops import hyper as references
from tokenspeed_kernel.ops.embedding import make_reference_lookup
from tokenspeed_kernel.ops.quantize import LARGEST, reference_restore, reference_rows
from tokenspeed_kernel.signature import WEIGHT_FORMATS
from tokenspeed_kernel_triton import embedding, hyper, quantize
from tokenspeed_kernel_triton.device import compiling_for


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20261130)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_a_look_up_has_the_bits_of_the_dequantised_weight(name):
    weight = random_weight(name, 9, 1280, torch.Generator().manual_seed(3)).weight
    ids = torch.tensor([3, 8, 0, 3], dtype=torch.int32)
    found, expected = torch.full((2, 4, 1280), torch.nan)
    embedding.make_lookup(weight)(ids, found)
    make_reference_lookup(weight)(ids, expected)
    assert torch.equal(found, expected)


def test_a_look_up_of_the_largest_and_the_smallest_scales_of_mxfp4():
    weight = random_weight("gguf_mxfp4", 4, 64, torch.Generator().manual_seed(3)).weight
    weight.plane[:, 0] = torch.tensor([0, 1, 254, 255], dtype=torch.uint8)
    found, expected = torch.empty(2, 4, 64)
    embedding.make_lookup(weight)(torch.arange(4, dtype=torch.int32), found)
    make_reference_lookup(weight)(torch.arange(4, dtype=torch.int32), expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", list(LARGEST))
@pytest.mark.parametrize("block", [32, 128, 290, 100])
def test_rows_are_quantised_and_restored(dtype, block):
    """Strided rows, one of zeros, last blocks that are short; an element at a middle may go to either side."""
    x = torch.randn(3, 300)[:, :290]
    x[1] = 0.0
    results = []
    for fn in (reference_rows, quantize.rows):
        out, scales = torch.empty(3, 290, dtype=dtype), torch.full((3, -(-290 // block)), torch.nan)
        fn(x, block, out, scales)
        results.append((out, scales))
    (expected, scales), (found, own_scales) = results
    assert torch.equal(own_scales, scales)
    apart = found.float() != expected.float()
    assert int(apart.sum()) <= 2 and not found[1].float().any()
    back, right = torch.empty(2, 3, 290)
    quantize.restore(found, scales, (1, block), back)
    reference_restore(found, scales, (1, block), right)
    assert torch.equal(back, right)
    assert float((back - x).abs().max()) <= float(x.abs().max()) * (0.5 / 127 if dtype is torch.int8 else 2.0**-4)


def test_bits_of_floats_of_eight_bits_are_those_of_the_type():
    """Where the architecture has none: subnormals, middles that go to the even one, the largest."""
    values = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    x = torch.cat([values, -values, (values[1:] + values[:-1]) / 2, torch.randn(200) * 3.0]).unsqueeze(0)
    x[0, 0] = 448.0
    found, scales = torch.empty_like(x, dtype=torch.float8_e4m3fn), torch.empty(1, 1)
    expected, back = x.to(torch.float8_e4m3fn), torch.empty_like(x)
    with compiling_for("sm_80"):
        quantize.rows(x, x.shape[1], found, scales)
        quantize.restore(found, scales, (1, x.shape[1]), back)
    assert scales.item() == 1.0
    assert torch.equal(found.float(), expected.float()) and torch.equal(back, expected.float())


def test_blocks_of_rows_and_columns_are_restored():
    q, scales = torch.randint(-128, 128, (131, 200), dtype=torch.int8), torch.rand(2, 2)
    found, expected = torch.empty(2, 131, 200)
    quantize.restore(q, scales, (128, 128), found)
    reference_restore(q, scales, (128, 128), expected)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("count", "width"), [(3, 70), *(pytest.param(count, 1030, marks=pytest.mark.long) for count in (1, 4))]
)
def test_streams_are_mixed_spread_and_collapsed(count, width):
    """A number of streams that is no power of two, widths beyond a stretch, a floor of 0."""
    tokens = 2
    x, streams = torch.randn(tokens, width), torch.randn(tokens, count, width)
    outputs = (2 + count) * count
    projection = torch.randn(outputs, count * width) / (count * width) ** 0.5
    base, scale = torch.randn(outputs), torch.rand(3) + 0.5
    results = []
    for module, prefix in ((references, "reference_"), (hyper, "")):
        own, out = streams.clone(), torch.full((3, tokens, width), torch.nan)
        post, comb = torch.full((tokens, count), torch.nan), torch.full((tokens, count, count), torch.nan)
        getattr(module, f"{prefix}mix")(own, projection, base, scale, 1e-6, 0.0, 3, post, comb, out[0])
        getattr(module, f"{prefix}spread")(x, post, comb, own)
        getattr(module, f"{prefix}collapse")(own, projection[:count], base[:count], scale[:1], 1e-6, 1e-3, out[1])
        begun = torch.empty(tokens, count, width)
        getattr(module, f"{prefix}begin")(x, begun)
        results.append((own, out[:2], post, comb, begun))
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_calls_without_rows_launch_nothing():
    nothing = torch.empty(0, 256)
    weight = random_weight("gguf_q4_k", 2, 256, torch.Generator()).weight
    embedding.make_lookup(weight)(torch.empty(0, dtype=torch.int32), nothing)
    quantize.rows(nothing, 32, nothing.to(torch.int8), torch.empty(0, 8))
    hyper.begin(nothing, torch.empty(0, 4, 256))
