"""gemm.linear and embedding.lookup: the reference's numbers, and the same bits whatever the batch."""

from collections.abc import Callable

import pytest
import torch

import tokenspeed_kernel_cpu
from tokenspeed_kernel.ops import bind_embedding, bind_linear
from tokenspeed_kernel.quantized import QuantizedTensor

MakeWeight = Callable[[str, int, int], QuantizedTensor]

DENSE = ("float32", "bfloat16", "float16")
BLOCKED = ("gguf_q4_0", "gguf_q4_1", "gguf_q5_0", "gguf_q5_1", "gguf_q8_0", "gguf_mxfp4", "nvfp4", "fp8_blocks")
COLUMNS = {"nvfp4": 64, "fp8_blocks": 128}
GROUPED = ("gguf_q2_k", "gguf_q3_k", "gguf_q4_k", "gguf_q5_k", "gguf_q6_k")
CASES = [(f, n, k) for f in DENSE + BLOCKED for n, k in ((1, 32), (37, 96), (192, 576)) if k % COLUMNS.get(f, 1) == 0]
CASES += [(f, n, k * columns) for f, columns in COLUMNS.items() for n, k in ((1, 1), (37, 3))]
CASES += [(f, n, k) for f in GROUPED for n, k in ((1, 256), (39, 768))]
CASES += [(f, n, k) for f in DENSE for n, k in ((5, 7), (33, 45), (3, 1))]


def _multiply(fn: Callable[..., None], x: torch.Tensor, rows: int) -> torch.Tensor:
    out = torch.full((x.shape[0], rows), torch.nan)
    fn(x, out)
    return out


@pytest.mark.parametrize(("weight_format", "n", "k"), CASES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_agrees_with_the_reference_and_not_with_the_batch(
    instruction_set: str, random_weight: MakeWeight, weight_format: str, n: int, k: int, with_bias: bool
) -> None:
    weight = random_weight(weight_format, n, k)
    bias = torch.randn(n) if with_bias else None
    bound = bind_linear(weight, bias)
    assert bound.spec.name == "cpu_gemm_linear"
    x = torch.randn(300, k)
    expected = x.double() @ weight.dequantize().double().T + (0 if bias is None else bias.double())
    whole = _multiply(bound.fn, x, n)
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-5 * k)
    for tokens in (0, 1, 2, 3, 4, 5, 6, 7, 17, 64):
        assert torch.equal(_multiply(bound.fn, x[:tokens], n), whole[:tokens]), f"{tokens} tokens"
    assert torch.equal(_multiply(bound.fn, x[299:], n), whole[299:])


def test_the_number_of_threads_changes_no_bit(instruction_set: str, random_weight: MakeWeight) -> None:
    weight = random_weight("gguf_q4_1", 1536, 576)
    fn = bind_linear(weight, None).fn
    x = torch.randn(33, 576)
    before = tokenspeed_kernel_cpu.num_threads()
    try:
        tokenspeed_kernel_cpu.set_num_threads(1)
        alone = [_multiply(fn, x[:tokens], 1536) for tokens in (1, 33)]
        for count in (2, 3, 7):
            tokenspeed_kernel_cpu.set_num_threads(count)
            for result in alone:
                assert torch.equal(_multiply(fn, x[: result.shape[0]], 1536), result), f"{count} threads"
    finally:
        tokenspeed_kernel_cpu.set_num_threads(before)


def test_not_a_number_stays_in_its_row(instruction_set: str, random_weight: MakeWeight) -> None:
    x = torch.randn(9, 64)
    x[4, 63] = torch.nan
    out = _multiply(bind_linear(random_weight("gguf_q8_0", 40, 64), None).fn, x, 40)
    assert out.isnan().all(dim=1).tolist() == [row == 4 for row in range(9)]


@pytest.mark.parametrize("weight_format", ["gguf_q4_0", "gguf_q6_k", "gguf_mxfp4", "nvfp4", "fp8_blocks"])
def test_weight_views_and_unaligned_addresses(
    instruction_set: str, random_weight: MakeWeight, weight_format: str
) -> None:
    columns = 256 if weight_format in ("gguf_q6_k", "fp8_blocks") else 64
    weight = random_weight(weight_format, 50, columns)
    shifted = torch.empty(weight.plane.numel() + 1, dtype=torch.uint8)[1:].view_as(weight.plane)
    shifted.copy_(weight.plane)
    odd = QuantizedTensor(weight.format, weight.shape, {"blocks": shifted}, "odd address")
    x = torch.randn(5, columns)
    whole = _multiply(bind_linear(weight, None).fn, x, 50)
    assert torch.equal(_multiply(bind_linear(odd, None).fn, x, 50), whole)
    assert torch.equal(_multiply(bind_linear(weight.rows(7, 20), None).fn, x, 13), whole[:, 7:20])


@pytest.mark.parametrize("weight_format", DENSE + BLOCKED + GROUPED)
def test_lookup_rounds_nothing(instruction_set: str, random_weight: MakeWeight, weight_format: str) -> None:
    columns = 512 if weight_format in (*GROUPED, *COLUMNS) else 96
    weight = random_weight(weight_format, 29, columns)
    bound = bind_embedding(weight)
    assert bound.spec.name == "cpu_embedding_lookup"
    for tokens in (0, 1, 17, 300):
        ids = torch.randint(0, 29, (tokens,), dtype=torch.int32)
        out = torch.full((tokens, columns), torch.nan)
        bound.fn(ids, out)
        assert torch.equal(out, weight.dequantize()[ids.long()])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_is_widened_exactly(instruction_set: str, dtype: torch.dtype) -> None:
    halves = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype).reshape(64, 1024)
    out = torch.empty(64, 1024)
    bind_embedding(QuantizedTensor.from_dense(halves, "all halves")).fn(torch.arange(64, dtype=torch.int32), out)
    torch.testing.assert_close(out, halves.float(), rtol=0, atol=0, equal_nan=True)


def test_every_power_of_two_and_every_four_bits_widen_as_they_are_dequantised(instruction_set: str) -> None:
    blocks = torch.empty(256, 17, dtype=torch.uint8)
    blocks[:, 0] = torch.arange(256, dtype=torch.uint8)
    blocks[:, 1:] = torch.arange(16, dtype=torch.uint8) * 17
    weight = QuantizedTensor("gguf_mxfp4", (256, 32), {"blocks": blocks}, "every scale")
    out = torch.empty(256, 32)
    bind_embedding(weight).fn(torch.arange(256, dtype=torch.int32), out)
    torch.testing.assert_close(out, weight.dequantize(), rtol=0, atol=0, equal_nan=True)
    powers = torch.exp2(torch.arange(255, dtype=torch.float64) - 127).unsqueeze(1)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    assert torch.equal(out[:255].double(), (powers * values.repeat(2)).float().double())
    assert bool(out[255].isnan().all())


def test_every_e4m3_scale_widens_as_it_is_dequantised(instruction_set: str) -> None:
    blocks = torch.empty(64, 40, dtype=torch.uint8)
    blocks[:, :4] = torch.tensor([3.0e-4]).view(torch.uint8)
    blocks[:, 4:8] = torch.arange(256, dtype=torch.uint8).view(64, 4)
    blocks[:, 8:] = torch.arange(16, dtype=torch.uint8).repeat(2) * 17
    weight = QuantizedTensor("nvfp4", (64, 64), {"blocks": blocks}, "every scale")
    out = torch.empty(64, 64)
    bind_embedding(weight).fn(torch.arange(64, dtype=torch.int32), out)
    torch.testing.assert_close(out, weight.dequantize(), rtol=0, atol=0, equal_nan=True)
    assert out.isnan().nonzero()[:, 0].unique().tolist() == [31, 63]  # 0x7f and 0xff


@pytest.mark.parametrize("scale", [1.0, 3.0e-4, 1.0e30, 2.0**-149, -0.7])
def test_every_e4m3_widens_as_it_is_dequantised(instruction_set: str, scale: float) -> None:
    blocks = torch.empty(2, 132, dtype=torch.uint8)
    blocks[:, :4] = torch.tensor([scale]).view(torch.uint8)
    blocks[:, 4:] = torch.arange(256, dtype=torch.uint8).view(2, 128)
    blocks[:, -1] = 0  # a NaN, which no block holds
    weight = QuantizedTensor("fp8_blocks", (2, 128), {"blocks": blocks}, "every element")
    out = torch.empty(2, 128)
    bind_embedding(weight).fn(torch.arange(2, dtype=torch.int32), out)
    assert torch.equal(out, weight.dequantize())
