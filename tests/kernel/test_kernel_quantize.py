"""quantize.rows and quantize.restore: nearest values, edges of the dtypes, there and back."""

import pytest
import torch

from tokenspeed_kernel.ops.quantize import LARGEST, bind_quantize_rows, bind_restore, quantized_format
from tokenspeed_kernel.signature import FormatError

DTYPES = sorted(LARGEST, key=str)


def quantise(x, dtype, block=None):
    out = torch.empty(x.shape, dtype=dtype)
    size = block or x.shape[1]
    scales = torch.full((x.shape[0], -(-x.shape[1] // size)), torch.nan)
    bind_quantize_rows(dtype=dtype, block=block, override="reference")(x, size, out, scales)
    return out, scales


def restore(q, scales, block):
    out = torch.full(q.shape, torch.nan)
    name = None if block == (1, q.shape[1]) else block
    bind_restore(dtype=q.dtype, block=name, override="reference")(q, scales, block, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [None, 32, 128])
def test_there_and_back_is_as_near_as_the_dtype_allows(dtype, block):
    x = torch.randn(9, 200, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 9).unsqueeze(1)
    q, scales = quantise(x, dtype, block)
    size = block or 200
    back = restore(q, scales, (1, size))
    spread = scales.repeat_interleave(size, dim=1)[:, :200]
    step = spread / 2 if dtype is torch.int8 else torch.maximum(x.abs() * 2.0**-4, spread * 2.0**-10)
    assert bool(((back - x).abs() <= step * 1.00001).all())
    assert bool((q.float().abs().amax(dim=1) == LARGEST[dtype]).all())  # the largest of a row uses the whole range


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_of_the_dtype_is_nearest_to_itself_and_to_its_surroundings(dtype):
    """Exhaustive: what lies a little within half a step of a value becomes that value."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = values[torch.isfinite(values) & (values.abs() <= LARGEST[dtype])].unique()
    middle = (values[1:] + values[:-1]) / 2
    for inside, expected in (
        (values, values),
        (middle - 1e-6 * middle.abs(), values[:-1]),
        (middle + 1e-6 * middle.abs(), values[1:]),
    ):
        x = torch.cat([inside, torch.tensor([LARGEST[dtype]])])[None]  # so that the scale is 1
        q, scales = quantise(x, dtype)
        assert scales.tolist() == [[1.0]]
        assert torch.equal(q[0].float(), torch.cat([expected, x[0, -1:]]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_have_the_scale_zero_and_tiny_rows_a_tiny_one(dtype):
    q, scales = quantise(torch.zeros(2, 40), dtype, 32)
    assert bool((q.float() == 0).all())
    assert scales.tolist() == [[0.0, 0.0]] * 2
    q, scales = quantise(torch.full((1, 3), 1e-30), dtype)
    assert q.float().tolist() == [[LARGEST[dtype]] * 3]
    assert scales[0, 0] == pytest.approx(1e-30 / LARGEST[dtype], rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_so_small_that_their_scale_is_rounded_hard_do_not_wrap_around(dtype):
    """Of 1.49 M least float32s the scale is 1.49 of it, which is rounded down, and the quotient leaves the range."""
    least = 2.0**-149
    q, scales = quantise(torch.tensor([[1.49 * LARGEST[dtype] * least, -1.49 * LARGEST[dtype] * least]]), dtype)
    assert scales.tolist() == [[least]]
    assert q.float().tolist() == [[LARGEST[dtype], -LARGEST[dtype]]]


def test_blocks_of_rows_and_columns_as_in_deepseeks_checkpoints():
    weight = torch.randint(-127, 128, (200, 300)).to(torch.int8)
    scales = torch.rand(2, 3)
    found = restore(weight, scales, (128, 128))
    for row, column in ((0, 0), (127, 127), (128, 127), (127, 128), (199, 299)):
        assert found[row, column] == weight[row, column] * scales[row // 128, column // 128]


def test_formats_are_named_by_their_scale():
    assert str(quantized_format(torch.int8)) == "int8(int8, float32/token)"
    assert str(quantized_format(torch.float8_e4m3fn, (1, 128))) == "fp8(float8_e4m3fn, float32/dynamic1x128)"
    assert str(quantized_format(torch.float8_e4m3fn, (128, 128))) == "fp8(float8_e4m3fn, float32/block128x128)"
    with pytest.raises(FormatError, match=r"torch.float16 is no quantised dtype; use one of torch.int8, torch.float8"):
        quantized_format(torch.float16)
