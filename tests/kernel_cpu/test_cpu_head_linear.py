"""gemm.head_linear: the reference's numbers from tensors of any stride, and the same bits whatever the batch."""

from collections.abc import Callable

import pytest
import torch

import tokenspeed_kernel_cpu
from tokenspeed_kernel.ops import bind_head_linear
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel_cpu import checks

MakeWeight = Callable[[str, int, int], QuantizedTensor]

SHAPES = [("bfloat16", 4, 64, 128), ("float32", 3, 5, 7), ("float16", 1, 33, 45), ("bfloat16", 16, 512, 32)]
SHAPES += [("gguf_q8_0", 5, 19, 96), ("gguf_q4_0", 2, 40, 64), ("gguf_q4_k", 2, 24, 256), ("float32", 2, 1, 1)]


def _multiply(fn: Callable[..., None], x: torch.Tensor, n: int) -> torch.Tensor:
    """The product among memory full of NaN, where nothing else may be written."""
    tokens, heads = x.shape[:2]
    memory = torch.full((tokens + 1, heads, n + 2), torch.nan)
    fn(x, memory[:-1, :, :n])
    assert bool(memory[-1].isnan().all())
    assert bool(memory[:, :, n:].isnan().all())
    return memory[:-1, :, :n].clone()


@pytest.mark.parametrize(("weight_format", "heads", "n", "k"), SHAPES)
def test_agrees_with_float64_and_not_with_the_batch(
    instruction_set: str, random_weight: MakeWeight, weight_format: str, heads: int, n: int, k: int
) -> None:
    weight = random_weight(weight_format, heads * n, k)
    bound = bind_head_linear(weight, heads)
    assert bound.spec.name == "cpu_gemm_head_linear"
    x = torch.randn(heads, 200, k + 3).transpose(0, 1)[:, :, :k]  # heads outermost, elements of others between
    matrices = weight.dequantize().double().view(heads, n, k)
    whole = _multiply(bound.fn, x, n)
    expected = torch.einsum("thk,hnk->thn", x.double(), matrices)
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-5 * k)
    assert torch.equal(_multiply(bound.fn, x.contiguous(), n), whole)
    for part in (slice(0, 0), slice(0, 1), slice(3, 5), slice(7, 40), slice(100, 200)):
        assert torch.equal(_multiply(bound.fn, x[part], n), whole[part])


def test_the_number_of_threads_changes_no_bit(instruction_set: str, random_weight: MakeWeight) -> None:
    fn = bind_head_linear(random_weight("bfloat16", 8 * 160, 256), 8).fn
    x = torch.randn(9, 8, 256)
    before = tokenspeed_kernel_cpu.num_threads()
    try:
        tokenspeed_kernel_cpu.set_num_threads(1)
        alone = [_multiply(fn, x[:tokens], 160) for tokens in (1, 9)]
        for count in (2, 3, 7):
            tokenspeed_kernel_cpu.set_num_threads(count)
            for result in alone:
                assert torch.equal(_multiply(fn, x[: result.shape[0]], 160), result), f"{count} threads"
    finally:
        tokenspeed_kernel_cpu.set_num_threads(before)


def test_debug_mode_checks_arguments(monkeypatch: pytest.MonkeyPatch, random_weight: MakeWeight) -> None:
    monkeypatch.setattr(checks, "DEBUG", True)
    fn, f = bind_head_linear(random_weight("float32", 2 * 8, 4), 2).fn, torch.zeros
    with pytest.raises(
        checks.KernelArgumentError, match=r"x is torch\.float32 \[3, 2, 5\]; it must be float32 \[3, 2, 4\]"
    ):
        fn(f(3, 2, 5), f(3, 2, 8))
    with pytest.raises(checks.KernelArgumentError, match=r"out is torch\.float32 \[2, 2, 8\]"):
        fn(f(3, 2, 4), f(2, 2, 8))
    with pytest.raises(checks.KernelArgumentError, match="a head of x has strides"):
        fn(f(3, 4, 2).transpose(1, 2), f(3, 2, 8))
    fn(f(3, 2, 4), f(3, 2, 8))
