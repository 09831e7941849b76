"""moe.experts with inputs rounded to bfloat16: only where it was asked for; the same bits whatever the batch."""

from collections.abc import Callable, Iterator

import pytest
import torch

import tokenspeed_kernel_cpu
from tokenspeed_kernel.binding import Bound
from tokenspeed_kernel.ops import bind_experts
from tokenspeed_kernel.ops.activation import GatedActivation
from tokenspeed_kernel.ops.gemm import ACTIVATIONS_VARIABLE
from tokenspeed_kernel.platform import current_platform
from tokenspeed_kernel.quantized import QuantizedTensor

NAME = "cpu_moe_experts_bf16"
SILU = GatedActivation("silu")
EXPERTS, TOP_K = 5, 3


@pytest.fixture(autouse=True)
def _rounding_set() -> Iterator[None]:
    if "avx512_bf16" not in current_platform().features:
        pytest.skip("this machine, or the set chosen for it, has no AVX-512 BF16")
    with tokenspeed_kernel_cpu.use_instruction_set("avx512_bf16"):
        yield


def _weights(hidden: int, inner: int, dtype: torch.dtype = torch.bfloat16) -> list[QuantizedTensor]:
    shapes = ((EXPERTS * 2 * inner, hidden), (EXPERTS * hidden, inner))
    return [QuantizedTensor.from_dense((torch.randn(shape) / shape[1] ** 0.5).to(dtype), "random") for shape in shapes]


def _bind(hidden: int, inner: int) -> tuple[Bound, list[QuantizedTensor]]:
    weights = _weights(hidden, inner)
    bound = bind_experts(*weights, None, None, SILU, activations="bfloat16")
    assert bound.spec.name == NAME
    return bound, weights


def _apply(fn: Callable[..., None], x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The result in memory full of NaN, with NaN behind it that must stay."""
    memory = torch.full((x.shape[0] + 1, x.shape[1]), torch.nan)
    fn(x, ids, weights, memory[:-1])
    assert bool(memory[-1].isnan().all())
    return memory[:-1]


def _call(tokens: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)]).to(torch.int32)
    return torch.randn(tokens, hidden), ids, torch.rand(tokens, TOP_K)


@pytest.mark.parametrize(("hidden", "inner"), [(256, 96), (67, 33), (40, 200), (576, 1)])
def test_inputs_are_rounded_and_nothing_else(hidden: int, inner: int) -> None:
    bound, (gate_up, down) = _bind(hidden, inner)
    x, ids, weights = _call(90, hidden)
    whole = _apply(bound.fn, x, ids, weights)
    first = gate_up.dequantize().view(EXPERTS, 2 * inner, hidden)
    second = down.dequantize().view(EXPERTS, hidden, inner)
    expected = torch.zeros(90, hidden)
    for token in range(90):
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            gate, up = (first[expert] @ x[token].bfloat16().float()).chunk(2)
            expected[token] += weight * (second[expert] @ SILU.apply(gate, up).bfloat16().float())
    # A value in the middle of two bfloat16 may go to either: one element of the activation, by 2^-8 of itself.
    error = (whole - expected).abs()
    assert float(error.mean()) < 1e-5 * float(expected.abs().mean()) + 1e-6
    for part in (slice(0, 0), slice(0, 1), slice(3, 5), slice(7, 40), slice(89, 90)):
        assert torch.equal(_apply(bound.fn, x[part], ids[part], weights[part]), whole[part])


def test_the_number_of_threads_changes_no_bit() -> None:
    fn = _bind(512, 200)[0].fn
    calls = [_call(tokens, 512) for tokens in (1, 40)]
    before = tokenspeed_kernel_cpu.num_threads()
    try:
        tokenspeed_kernel_cpu.set_num_threads(1)
        alone = [_apply(fn, *call) for call in calls]
        for count in (2, 3, 7):
            tokenspeed_kernel_cpu.set_num_threads(count)
            for call, result in zip(calls, alone, strict=True):
                assert torch.equal(_apply(fn, *call), result), f"{count} threads"
    finally:
        tokenspeed_kernel_cpu.set_num_threads(before)


def test_none_rounds_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = _weights(64, 32)
    monkeypatch.delenv(ACTIVATIONS_VARIABLE, raising=False)
    assert bind_experts(*weights, None, None, SILU).spec.name == "cpu_moe_experts"
    monkeypatch.setenv(ACTIVATIONS_VARIABLE, "bfloat16")
    assert bind_experts(*weights, None, None, SILU).spec.name == NAME
    assert bind_experts(*weights, None, None, SILU, activations="float32").spec.name == "cpu_moe_experts"
    wide = [_weights(64, 32, torch.float32)[0], weights[1]]
    assert bind_experts(*wide, None, None, SILU).spec.name == "cpu_moe_experts"


def test_another_set_put_in_force_meanwhile_is_an_error() -> None:
    fn = _bind(64, 32)[0].fn
    with (
        tokenspeed_kernel_cpu.use_instruction_set("portable"),
        pytest.raises(RuntimeError, match="portable has no product of rounded activations"),
    ):
        _apply(fn, *_call(2, 64))
