"""gemm.linear with activations rounded to bfloat16: only where it was asked for; the same bits whatever the batch."""

from collections.abc import Callable, Iterator

import pytest
import torch

import tokenspeed_kernel_cpu
from tokenspeed_kernel.binding import Bound
from tokenspeed_kernel.ops import bind_linear
from tokenspeed_kernel.ops.gemm import ACTIVATIONS_VARIABLE
from tokenspeed_kernel.platform import current_platform
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.selection import OverrideError

NAME = "cpu_gemm_linear_bf16"


@pytest.fixture(autouse=True)
def _rounding_set() -> Iterator[None]:
    if "avx512_bf16" not in current_platform().features:
        pytest.skip("this machine, or the set chosen for it, has no AVX-512 BF16")
    with tokenspeed_kernel_cpu.use_instruction_set("avx512_bf16"):
        yield


def _bind(weight: QuantizedTensor, bias: torch.Tensor | None = None) -> Bound:
    bound = bind_linear(weight, bias, activations="bfloat16")
    assert bound.spec.name == NAME
    return bound


def _multiply(fn: Callable[..., None], x: torch.Tensor, rows: int) -> torch.Tensor:
    """The product into memory full of NaN, with NaN behind it that must stay."""
    memory = torch.full((x.shape[0] + 1, rows), torch.nan)
    fn(x, memory[:-1])
    assert bool(memory[-1].isnan().all())
    return memory[:-1]


def _weight(n: int, k: int) -> QuantizedTensor:
    return QuantizedTensor.from_dense(torch.randn(n, k).bfloat16(), "random bfloat16")


@pytest.mark.parametrize(("n", "k"), [(1, 32), (37, 96), (192, 576), (5, 7), (33, 45), (3, 1), (70, 2080), (131, 1025)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_of_rounded_inputs_are_summed_in_float32(n: int, k: int, with_bias: bool) -> None:
    weight = _weight(n, k)
    bias = torch.randn(n) if with_bias else None
    fn = _bind(weight, bias).fn
    x = torch.randn(100, k)
    exact, size = weight.dequantize().double().T, weight.dequantize().double().T.abs()
    expected = x.bfloat16().double() @ exact + (0 if bias is None else bias.double())
    bound = 2.0**-24 * (k**0.5 + 8) * (x.bfloat16().double().abs() @ size) + 1e-6
    whole = _multiply(fn, x, n)
    assert bool(((whole.double() - expected).abs() <= bound).all())
    for tokens in (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 17, 31, 32, 33, 64):
        assert torch.equal(_multiply(fn, x[:tokens], n), whole[:tokens]), f"{tokens} tokens"
    assert torch.equal(_multiply(fn, x[99:], n), whole[99:])


def test_the_number_of_threads_changes_no_bit() -> None:
    fn = _bind(_weight(1537, 576)).fn
    x = torch.randn(40, 576)
    before = tokenspeed_kernel_cpu.num_threads()
    try:
        tokenspeed_kernel_cpu.set_num_threads(1)
        alone = [_multiply(fn, x[:tokens], 1537) for tokens in (1, 8, 40)]
        for count in (2, 3, 7):
            tokenspeed_kernel_cpu.set_num_threads(count)
            for result in alone:
                assert torch.equal(_multiply(fn, x[: result.shape[0]], 1537), result), f"{count} threads"
    finally:
        tokenspeed_kernel_cpu.set_num_threads(before)


def test_not_a_number_stays_in_its_row_and_infinity_stays_infinite() -> None:
    weight = QuantizedTensor.from_dense(torch.ones(40, 70, dtype=torch.bfloat16), "ones")
    x = torch.ones(9, 70)
    x[4, 69], x[6, 0] = torch.nan, torch.inf
    out = _multiply(_bind(weight).fn, x, 40)
    assert out.isnan().all(dim=1).tolist() == [row == 4 for row in range(9)]
    assert out.isinf().all(dim=1).tolist() == [row == 6 for row in range(9)]


def test_none_rounds_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = _weight(8, 64)
    monkeypatch.delenv(ACTIVATIONS_VARIABLE, raising=False)
    assert bind_linear(weight, None).spec.name == "cpu_gemm_linear"
    with pytest.raises(OverrideError, match="activations"):
        bind_linear(weight, None, override=NAME)
    monkeypatch.setenv(ACTIVATIONS_VARIABLE, "bfloat16")
    assert bind_linear(weight, None).spec.name == NAME
    assert bind_linear(weight, None, activations="float32").spec.name == "cpu_gemm_linear"
    wide = QuantizedTensor.from_dense(torch.randn(8, 64), "float32")
    assert bind_linear(wide, None).spec.name == "cpu_gemm_linear"
    monkeypatch.setenv(ACTIVATIONS_VARIABLE, "int3")
    with pytest.raises(
        ValueError, match=f"{ACTIVATIONS_VARIABLE} is 'int3'; use one of float32, bfloat16, int8, int16"
    ):
        bind_linear(weight, None)


def test_another_set_put_in_force_meanwhile_is_an_error() -> None:
    fn = _bind(_weight(8, 64)).fn
    with (
        tokenspeed_kernel_cpu.use_instruction_set("portable"),
        pytest.raises(RuntimeError, match="portable has no product of rounded activations"),
    ):
        fn(torch.randn(2, 64), torch.empty(2, 8))
